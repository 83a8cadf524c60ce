"""Host time of a turn by context length, and memory of an episode, without the model.

    python benchmarks/turns.py --json
    python benchmarks/turns.py --case episodes --model smollm2 --json

The case `episodes` runs batches of short episodes through the rollout of a training run; see `rollout_host.py`. The
case `turns` measures one long conversation.

A conversation is extended to about the given context length; then further turns of constant size are measured one by
one: rendering and tokenization of messages, scheduling and KV cache management of the engine (blocks of 64 tokens, as
on a GPU), recording of the model call. The engine has no model; tokens are available immediately. The last line is
about one complete episode: memory after and during its run, and the time to build its token tree and its line in the
episode file.
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
from rollout_host import measure_lake_episodes, measure_single_turn_episodes
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
BLOCK_SIZE = 64


class FixedLengthRunner:
    """A model runner without a model: every reply has `length` tokens, of which the last is the stop token."""

    runs_ahead = False

    def __init__(self, runner: object, ids: list[int], stop: int, length: int):
        self.cache = runner.cache  # type: ignore[attr-defined]
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
class TimedEngine(Engine):
    """An engine that measures the CPU time of each request."""

    engine: LocalEngine
    seconds: list[float] = field(default_factory=list)

    async def generate(self, prompt: object, sampling: Sampling, *, session: str) -> Completion:
        began = time.thread_time()
        try:
            return await self.engine.generate(prompt, sampling, session=session)  # type: ignore[arg-type]
        finally:
            self.seconds.append(time.thread_time() - began)


def engine_for(renderer: Renderer, context: int, reply: int) -> LocalEngine:
    """An engine without a forward pass; its replies have `reply` tokens."""
    config = LlamaConfig(
        vocab_size=renderer.tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=context,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    engine = LocalEngine(model, context, max_requests=1, kv_tokens=2 * context, block_size=BLOCK_SIZE)
    ids = renderer.tokenizer.encode(" ".join(WORDS))
    engine.runner = FixedLengthRunner(engine.runner, ids, renderer.stop[0], reply)  # type: ignore[assignment]
    return engine


class RecordedConversation:
    """A conversation that is extended turn by turn through a recorder."""

    def __init__(self, renderer: Renderer, engine: TimedEngine, context: int, rng: np.random.Generator):
        self.rng, self.engine = rng, engine
        self.tokens_per_word = len(renderer.tokenizer.encode(" ".join(WORDS * 20))) / (len(WORDS) * 20)
        self.episode = Episode("episode", Task("task"))
        limits = EpisodeLimits(max_turns=10**6, max_context=context)
        self.recorder = Recorder(engine, renderer, Sampling(max_tokens=64), limits, self.episode)  # type: ignore[arg-type]
        self.messages = [Message("system", "Play."), Message("user", self.text(32))]

    def text(self, tokens: int) -> str:
        return " ".join(self.rng.choice(WORDS, max(1, round(tokens / self.tokens_per_word))).tolist())

    async def turn(self, observed: int) -> None:
        """One reply of the model, followed by a tool result of about `observed` tokens."""
        reply = await self.recorder.chat(self.messages, [TOOL])
        self.messages += [reply, Message("tool", self.text(observed))]

    @property
    def length(self) -> int:
        return len(self.episode.calls[-1].prompt) if self.episode.calls else 0

    async def grow(self, tokens: int, observed: int) -> None:
        """Add turns until the next prompt has about `tokens` tokens."""
        while self.length + observed < tokens:
            await self.turn(observed)


async def measure_turns(
    length: int, args: argparse.Namespace, renderer: Renderer, machine_info: dict[str, object]
) -> None:
    """Measure turns of a conversation of this length."""
    context = length + (args.turns + 4) * (2 * args.observed + 64) + 4096
    engine = TimedEngine(engine_for(renderer, context, args.reply))
    conversation = RecordedConversation(renderer, engine, context, np.random.default_rng(0))
    await conversation.grow(length, min(args.step, length // 2))
    await conversation.turn(args.observed)
    turns, engine_seconds = [], []
    for _ in range(args.turns):
        num_requests = len(engine.seconds)
        began = time.thread_time()
        await conversation.turn(args.observed)
        turns.append(time.thread_time() - began)
        engine_seconds.append(sum(engine.seconds[num_requests:]))
    turn_seconds, engine_share = statistics.median(turns), statistics.median(engine_seconds)
    row = {
        "case": "turn", "context": length, "tokens": conversation.length, "observed": args.observed,
        "reply": args.reply, "turn_ms": round(1e3 * turn_seconds, 3),
        "chat_ms": round(1e3 * (turn_seconds - engine_share), 3), "engine_ms": round(1e3 * engine_share, 3),
        "branches": len(set(conversation.episode.branches)),
    }  # fmt: skip
    print_row(row | machine_info, args.json)


async def measure_episode(
    length: int, args: argparse.Namespace, renderer: Renderer, machine_info: dict[str, object]
) -> None:
    """Measure one complete episode of this length."""
    context = length + 4096
    engine = TimedEngine(engine_for(renderer, context, args.reply))
    conversation = RecordedConversation(renderer, engine, context, np.random.default_rng(0))
    began = time.thread_time()
    await conversation.grow(length, args.step)
    seconds = time.thread_time() - began
    conversation = RecordedConversation(renderer, engine, context, np.random.default_rng(1))
    gc.collect()
    tracemalloc.start()
    await conversation.grow(length, args.step)
    gc.collect()
    running_bytes = tracemalloc.get_traced_memory()[0]
    episode, conversation.messages = conversation.episode, []
    conversation.recorder = None  # type: ignore[assignment]
    gc.collect()
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    milliseconds = {}
    for name, work in (
        ("tree_ms", lambda: build_token_trees([Group(episode.task, [episode])])),
        ("line_ms", lambda: json_line(episode_to_json(episode))),
        ("branches_ms", lambda: episode.branches),
    ):
        began = time.thread_time()
        work()
        milliseconds[name] = round(1e3 * (time.thread_time() - began), 1)
    row = {
        "case": "episode", "context": length, "calls": len(episode.calls), "seconds": round(seconds, 3),
        "kept_mb": round(kept_bytes / 1e6, 2), "running_mb": round(running_bytes / 1e6, 2), **milliseconds,
    }  # fmt: skip
    print_row(row | machine_info, args.json)


def print_row(row: dict[str, object], as_json: bool) -> None:
    print(json.dumps(row) if as_json else "  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 16384, 131072], help="context lengths in tokens"
    )
    parser.add_argument("--model", default="seedling", help="model whose tokenizer and chat template are used")
    parser.add_argument("--template", help="chat template: a built-in name or a file; default: the model's")
    parser.add_argument("--turns", type=int, default=15, help="measured turns per context length")
    parser.add_argument("--observed", type=int, default=64, help="tokens of the observation in a measured turn")
    parser.add_argument("--reply", type=int, default=8, help="tokens per reply")
    parser.add_argument("--step", type=int, default=1600, help="tokens of the observations before the measured turns")
    parser.add_argument("--case", choices=["turns", "episodes", "all"], default="all")
    parser.add_argument("--episodes", type=int, default=512, help="number of concurrent multi-turn episodes")
    parser.add_argument("--rows", type=int, default=1024, help="number of concurrent single-turn episodes")
    parser.add_argument("--group", type=int, default=16, help="episodes per task")
    parser.add_argument(
        "--episode-turns", type=int, nargs="+", default=[2, 4, 6, 8], help="turns per episode of each batch"
    )
    parser.add_argument(
        "--requests", type=int, default=1024, help="maximum number of concurrent requests in the engine"
    )
    parser.add_argument("--concurrency", default="auto", help="value of rollout.concurrency")
    parser.add_argument("--workers", default="auto", help="value of rollout.workers for the multi-turn episodes")
    parser.add_argument("--repeats", type=int, default=3, help="batches; the fastest is reported")
    parser.add_argument("--profile", type=int, default=0, help="number of functions in a printed profile; 0: none")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    renderer = Renderer.from_folder(Path(resolve(args.model)), chat_template=args.template)
    machine_info: dict[str, object] = {
        "model": args.model, "template": args.template or "own", "machine": platform.machine(),
        "cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__,
        "tokenizers": tokenizers.__version__, "jinja2": jinja2.__version__,
    }  # fmt: skip
    if args.case != "turns":
        print_row(measure_lake_episodes(args, renderer) | machine_info, args.json)
        print_row(measure_single_turn_episodes(args, renderer) | machine_info, args.json)
    if args.case != "episodes":
        for length in args.contexts:
            asyncio.run(measure_turns(length, args, renderer, machine_info))
        asyncio.run(measure_episode(max(args.contexts), args, renderer, machine_info))


if __name__ == "__main__":
    main()
