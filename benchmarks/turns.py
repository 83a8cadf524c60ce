"""What a turn costs the host as its episode grows, and what an episode keeps: everything but the model.

    python benchmarks/turns.py --json
    python benchmarks/turns.py --case episodes --model smollm2 --json

The case `episodes` plays batches of short episodes through the rollout of a run; see `rollout_host.py`. The case
`turns` is about one long conversation.

A conversation is brought to about so many tokens; then further turns of the same size are timed one by one: messages
rendered and tokenised, the engine's door and bookkeeping (pages of 64 tokens, as on a GPU), the call recorded. Behind
the engine stands no model: tokens are there at once. The last line is of one whole episode: what it keeps, what it took
while it ran, and what making its tree and its line in the episode file costs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import torch
from rollout_host import many_turns, one_turn
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.chat.renderer import Renderer
from arborl.engines import Engine
from arborl.engines.local import LocalEngine
from arborl.engines.local.model_runner import FinishedOutput, ModelStep
from arborl.models.attention import ATTENTION_NAME
from arborl.models.model_files import resolve
from arborl.rollout.episode_store import episode_to_json, json_line
from arborl.rollout.recorder import EpisodeLimits, Recorder
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Completion, Episode, Group, Message, Sampling, Task, ToolSpec

WORDS = ("the", "lake", "is", "frozen", "and", "goal", "lies", "to", "right", "of", "a", "hole;", "go", "down,", "look")
TOOL = ToolSpec("look", "Look around.", {"type": "object", "properties": {"where": {"type": "string"}}})
PAGE = 64


class Instant:
    """An executor that has every token at once: a reply of `length` tokens, the last of which ends it."""

    runs_ahead = False

    def __init__(self, executor: object, ids: list[int], stop: int, length: int):
        self.cache = executor.cache  # type: ignore[attr-defined]
        self.ids, self.stop, self.length, self.count = ids, stop, length, 0

    def launch(self, step: ModelStep) -> FinishedOutput:
        self.count += len(step.sampled)
        ends = self.count % self.length == 0
        token = self.stop if ends else self.ids[self.count % len(self.ids)]
        return FinishedOutput(np.full(len(step.sampled), token), np.full(len(step.sampled), -1.0))

    def token_budget(self, tokens: int) -> int:
        return tokens

    def weights_changed(self) -> None: ...

    def warm_up(self, truncates: bool) -> None: ...


@dataclass
class Timed(Engine):
    """The engine, and what it was asked and took."""

    engine: LocalEngine
    seconds: list[float] = field(default_factory=list)

    async def generate(self, prompt: object, sampling: Sampling, *, session: str) -> Completion:
        began = time.thread_time()
        try:
            return await self.engine.generate(prompt, sampling, session=session)  # type: ignore[arg-type]
        finally:
            self.seconds.append(time.thread_time() - began)


def engine_for(renderer: Renderer, context: int, reply: int) -> LocalEngine:
    """One without a model to speak of; its replies have `reply` tokens."""
    config = LlamaConfig(
        vocab_size=renderer.tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=context,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    made = LocalEngine(model, context, max_requests=1, kv_tokens=2 * context, block_size=PAGE)
    ids = renderer.tokenizer.encode(" ".join(WORDS))
    made.runner = Instant(made.runner, ids, renderer.stop[0], reply)  # type: ignore[assignment]
    return made


class Talk:
    """A conversation that is recorded, turn by turn."""

    def __init__(self, renderer: Renderer, engine: Timed, context: int, chance: np.random.Generator):
        self.chance, self.engine = chance, engine
        self.a_word = len(renderer.tokenizer.encode(" ".join(WORDS * 20))) / (len(WORDS) * 20)
        self.episode = Episode("episode", Task("task"))
        limits = EpisodeLimits(max_turns=10**6, max_context=context)
        self.recorder = Recorder(engine, renderer, Sampling(max_tokens=64), limits, self.episode)  # type: ignore[arg-type]
        self.messages = [Message("system", "Play."), Message("user", self.text(32))]

    def text(self, tokens: int) -> str:
        return " ".join(self.chance.choice(WORDS, max(1, round(tokens / self.a_word))).tolist())

    async def turn(self, observed: int) -> None:
        """The model speaks, and is told about so many tokens."""
        reply = await self.recorder.chat(self.messages, [TOOL])
        self.messages += [reply, Message("tool", self.text(observed))]

    @property
    def length(self) -> int:
        return len(self.episode.calls[-1].prompt) if self.episode.calls else 0

    async def grow(self, tokens: int, observed: int) -> None:
        """Until the next prompt has about so many tokens."""
        while self.length + observed < tokens:
            await self.turn(observed)


async def at(length: int, args: argparse.Namespace, renderer: Renderer, about: dict[str, object]) -> None:
    """Turns of a conversation of this length."""
    context = length + (args.turns + 4) * (2 * args.observed + 64) + 4096
    engine = Timed(engine_for(renderer, context, args.reply))
    talk = Talk(renderer, engine, context, np.random.default_rng(0))
    await talk.grow(length, min(args.step, length // 2))
    await talk.turn(args.observed)
    turns, inside = [], []
    for _ in range(args.turns):
        said = len(engine.seconds)
        began = time.thread_time()
        await talk.turn(args.observed)
        turns.append(time.thread_time() - began)
        inside.append(sum(engine.seconds[said:]))
    whole, within = statistics.median(turns), statistics.median(inside)
    row = {
        "case": "turn", "context": length, "tokens": talk.length, "observed": args.observed, "reply": args.reply,
        "turn_ms": round(1e3 * whole, 3), "chat_ms": round(1e3 * (whole - within), 3),
        "engine_ms": round(1e3 * within, 3), "branches": len(set(talk.episode.branches)),
    }  # fmt: skip
    say(row | about, args.json)


async def kept(length: int, args: argparse.Namespace, renderer: Renderer, about: dict[str, object]) -> None:
    """One episode of this length, from its first turn."""
    context = length + 4096
    engine = Timed(engine_for(renderer, context, args.reply))
    talk = Talk(renderer, engine, context, np.random.default_rng(0))
    began = time.thread_time()
    await talk.grow(length, args.step)
    seconds = time.thread_time() - began
    talk = Talk(renderer, engine, context, np.random.default_rng(1))
    gc.collect()
    tracemalloc.start()
    await talk.grow(length, args.step)
    gc.collect()
    running = tracemalloc.get_traced_memory()[0]
    episode, talk.messages = talk.episode, []
    talk.recorder = None  # type: ignore[assignment]
    gc.collect()
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    took = {}
    for name, work in (
        ("tree_ms", lambda: build_token_trees([Group(episode.task, [episode])])),
        ("line_ms", lambda: json_line(episode_to_json(episode))),
        ("branches_ms", lambda: episode.branches),
    ):
        began = time.thread_time()
        work()
        took[name] = round(1e3 * (time.thread_time() - began), 1)
    row = {
        "case": "episode", "context": length, "calls": len(episode.calls), "seconds": round(seconds, 3),
        "kept_mb": round(left / 1e6, 2), "running_mb": round(running / 1e6, 2), **took,
    }  # fmt: skip
    say(row | about, args.json)


def say(row: dict[str, object], as_json: bool) -> None:
    print(json.dumps(row) if as_json else "  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 16384, 131072])
    parser.add_argument("--model", default="seedling", help="whose tokenizer and chat template")
    parser.add_argument("--template", help="another chat template: a built-in name or a file")
    parser.add_argument("--turns", type=int, default=15, help="timed turns at each length")
    parser.add_argument("--observed", type=int, default=64, help="tokens the model is told in a timed turn")
    parser.add_argument("--reply", type=int, default=8, help="tokens it says")
    parser.add_argument("--step", type=int, default=1600, help="tokens it is told in each turn before that")
    parser.add_argument("--case", choices=["turns", "episodes", "all"], default="all")
    parser.add_argument("--episodes", type=int, default=512, help="of several turns, played at once")
    parser.add_argument("--rows", type=int, default=1024, help="episodes of one turn, played at once")
    parser.add_argument("--group", type=int, default=16, help="episodes of one task")
    parser.add_argument(
        "--episode-turns", type=int, nargs="+", default=[2, 4, 6, 8], help="turns of an episode, by batch"
    )
    parser.add_argument("--requests", type=int, default=1024, help="requests that the engine samples at once")
    parser.add_argument("--concurrency", default="auto", help="rollout.concurrency")
    parser.add_argument("--repeats", type=int, default=3, help="batches of which the quickest counts")
    parser.add_argument("--profile", type=int, default=0, help="print so many of the most expensive functions")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    renderer = Renderer.from_folder(Path(resolve(args.model)), chat_template=args.template)
    about: dict[str, object] = {
        "model": args.model, "template": args.template or "own", "machine": platform.machine(),
        "cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__,
        "tokenizers": tokenizers.__version__, "jinja2": jinja2.__version__,
    }  # fmt: skip
    if args.case != "turns":
        say(many_turns(args, renderer) | about, args.json)
        say(one_turn(args, renderer) | about, args.json)
    if args.case != "episodes":
        for length in args.contexts:
            asyncio.run(at(length, args, renderer, about))
        asyncio.run(kept(max(args.contexts), args, renderer, about))


if __name__ == "__main__":
    main()
