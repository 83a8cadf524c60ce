"""Host time of whole episodes, played by the `Rollout` that `arborl train` builds, with a model that answers at once.

Called by `turns.py`. Replies are fixed texts, chosen by the seed of the request, and sampled token by token through the
scheduler of `LocalEngine`; only the forward pass of the model is left out. Processor time of the event loop's thread is
divided into the engine's steps and everything else (the host). Runs with different numbers of turns give the cost of an
episode (the intercept) and that of a turn (the slope).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.chat.renderer import Renderer
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.engines.local import LocalEngine
from arborl.engines.local.model_runner import FinishedOutput, ModelStep
from arborl.envs.games.frozen_lake import draw_map
from arborl.models.attention import ATTENTION_NAME
from arborl.rewards import Rewards
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.offline_episodes import OfflineEpisodes
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import Rollout
from arborl.training_run.build import training_sampling
from arborl.training_run.part_factory import RunPartFactory
from arborl.types import Message, Task

CONTEXT, PAGE = 1024, 64
THOUGHTS = ("", "I go on. ", "The goal is near. ", "There is a hole, so I go this way. ", "Let me see. ", "Now ")


class ReplyExecutor:
    """An executor without a model: row by row, the next token of the reply that the request's seed chooses."""

    runs_ahead = False
    copies_weights = False

    def __init__(self, engine: LocalEngine, replies: Sequence[Sequence[int]]):
        self.cache = engine.runner.cache
        self.replies = np.zeros((len(replies), max(map(len, replies))), dtype=np.int64)
        for row, reply in enumerate(replies):
            self.replies[row, : len(reply)] = reply
        self.batch, self.sampling = engine.batch, engine.batch.sampling
        engine.batch.sampling = self._note  # type: ignore[method-assign]

    def _note(self, rows: np.ndarray) -> object:
        """Called with the rows that get a token, just before they are launched."""
        seed, position = self.batch.seed[rows], self.batch.length[rows] - self.batch.prompt[rows]
        self.tokens = self.replies[(seed % len(self.replies)).astype(np.int64), position]
        return self.sampling(rows)

    def launch(self, step: ModelStep) -> FinishedOutput:
        return FinishedOutput(self.tokens, np.full(len(step.sampled), -1.0))

    def token_budget(self, tokens: int) -> int:
        return 4096

    def weights_changed(self) -> None: ...

    def warm_up(self, truncates: bool) -> None: ...


class TimedEngine(LocalEngine):
    """Counts the processor time of its steps, and the requests of the first one."""

    spent, first = 0.0, 0

    def _step(self) -> None:
        began = time.thread_time()
        super()._step()
        self.first = self.first or len(self.scheduler.running) + len(self.scheduler.waiting)
        self.spent += time.thread_time() - began


@dataclass
class Timed:
    """Seconds of one rollout, and what was played."""

    episodes: int
    turns: int
    host: float
    """Of the event loop's thread outside of the engine's steps: playing, scoring, storing."""
    engine: float
    score: float
    store: float
    first: int
    """Requests that the engine had before its first step."""


def engine_of(renderer: Renderer, replies: Sequence[str], requests: int) -> TimedEngine:
    config = LlamaConfig(
        vocab_size=renderer.tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    made = TimedEngine(model, CONTEXT, requests, kv_tokens=requests * CONTEXT, block_size=PAGE)
    ids = [[*renderer.encode(renderer.escape_reply(text)), renderer.stop[0]] for text in replies]
    made.runner = ReplyExecutor(made, ids)
    return made


def rollout_of(config: RunConfig, engine: LocalEngine, renderer: Renderer) -> tuple[Rollout, Rewards]:
    """As `arborl.training_run.build` makes it."""
    workshop = RunPartFactory(config, {})
    cast, rewards, asked = workshop.cast(), workshop.rewards(), config.rollout
    limits = EpisodeLimits(asked.max_turns, config.sampling.max_context, asked.episode_seconds, asked.step_seconds)
    given = OfflineEpisodes.of(config, renderer)
    return workshop.rollout(engine, cast, training_sampling(config, renderer), limits, rewards, given), rewards


# ------------------------------------------------------------------------------------------------ what is played


def lakes(count: int, turns: int) -> list[Task]:
    """Lakes on which neither Left nor Right ever ends an episode, so that it has exactly `turns` turns."""
    found: list[Task] = []
    seed = 0
    while len(found) < count:
        grid, player = draw_map(seed, "train", 4, 0.8, turns)
        if set(grid[player[0]]) == {"_"}:
            found.append(Task(f"lake-{seed}", seed=seed))
        seed += 1
    return found


def questions(count: int) -> list[Task]:
    return [
        Task(f"row-{n}", (Message("user", f"What is {n} + {3 * n}? Answer briefly."),), {"answer": str(4 * n)})
        for n in range(count)
    ]


LAKE_REPLIES = [f"{thought}<answer>{move}</answer>" for thought in THOUGHTS for move in ("Left", "Right")]
SUM_REPLIES = [f"The sum is <answer>{4 * n}</answer>" for n in range(0, 64)]


def settings(args: argparse.Namespace, episodes: int, more: Sequence[str]) -> RunConfig:
    own = [
        f"rollout.tasks_per_step={episodes // args.group}", f"rollout.group_size={args.group}",
        f"rollout.concurrency={args.concurrency}", f"sampling.max_context={CONTEXT}", "trainer.steps=1",
    ]  # fmt: skip
    return load(None, [*own, *more])


# ------------------------------------------------------------------------------------------------ timing


async def played(rollout: Rollout, rewards: Rewards, tasks: Sequence[Task], group: int, seed: int) -> Timed:
    """One batch: played, scored and written to an episode file."""
    engine = rollout.engine
    assert isinstance(engine, TimedEngine)
    engine.spent, engine.first = 0.0, 0
    engine.scheduler.clear_cache()
    clock = [time.thread_time()]
    groups = await rollout.train(tasks, seed, group, len(tasks))
    clock.append(time.thread_time())
    await rewards.score(groups)
    clock.append(time.thread_time())
    with tempfile.TemporaryDirectory() as folder:
        EpisodeStore(Path(folder)).write(1, groups)
    clock.append(time.thread_time())
    episodes = [episode for group in groups for episode in group.episodes]
    failed = [episode.failure for episode in episodes if episode.failure is not None]
    assert not failed, failed[0]
    whole, score, store = clock[3] - clock[0], clock[2] - clock[1], clock[3] - clock[2]
    turns = sum(len(episode.turns) for episode in episodes)
    return Timed(len(episodes), turns, whole - engine.spent, engine.spent, score, store, engine.first)


def best_of(args: argparse.Namespace, rollout: Rollout, rewards: Rewards, tasks: Sequence[Task]) -> Timed:
    """The quickest of several batches, after one that is not counted."""

    async def all_of_them() -> list[Timed]:
        gc.freeze()  # as `Trainer.fit` does
        return [await played(rollout, rewards, tasks, args.group, seed) for seed in range(args.repeats + 1)]

    return min(asyncio.run(all_of_them())[1:], key=lambda one: one.host)


def one_turn(args: argparse.Namespace, renderer: Renderer) -> dict[str, object]:
    """Rows with a question and an answer."""
    config = settings(args, args.rows, ["env=question", "rewards=[exact]", "data.path=rows.jsonl"])
    rollout, rewards = rollout_of(config, engine_of(renderer, SUM_REPLIES, args.requests), renderer)
    with profiled(args):
        one = best_of(args, rollout, rewards, questions(args.rows // args.group))
    return {
        "case": "one-turn episodes", "episodes": one.episodes, "group": args.group, "requests": args.requests,
        "episode_ms": round(1e3 * one.host / one.episodes, 3), "score_ms": round(1e3 * one.score / one.episodes, 3),
        "store_ms": round(1e3 * one.store / one.episodes, 3), "engine_ms": round(1e3 * one.engine / one.episodes, 3),
        "first_step_requests": one.first,
    }  # fmt: skip


def many_turns(args: argparse.Namespace, renderer: Renderer) -> dict[str, object]:
    """FrozenLake 4x4."""
    engine = engine_of(renderer, LAKE_REPLIES, args.requests)
    found = []
    for turns in args.episode_turns:
        config = settings(args, args.episodes, ["env=frozen_lake", f"env.args.max_steps={turns}"])
        rollout, rewards = rollout_of(config, engine, renderer)
        with profiled(args) if turns == max(args.episode_turns) else nullcontext():
            found.append(best_of(args, rollout, rewards, lakes(args.episodes // args.group, turns)))
    of = [one.turns / one.episodes for one in found]
    slope, fixed = np.polyfit(of, [one.host / one.episodes for one in found], 1)
    engine_slope, _ = np.polyfit(of, [one.engine / one.episodes for one in found], 1)
    last = found[-1]
    return {
        "case": "FrozenLake episodes", "episodes": last.episodes, "group": args.group, "requests": args.requests,
        "turns": of, "host_s": [round(one.host, 3) for one in found], "episode_ms": round(1e3 * float(fixed), 3),
        "turn_ms": round(1e3 * float(slope), 3), "engine_turn_ms": round(1e3 * float(engine_slope), 3),
        "score_ms": round(1e3 * last.score / last.episodes, 3), "store_ms": round(1e3 * last.store / last.episodes, 3),
        "first_step_requests": last.first,
    }  # fmt: skip


class profiled:
    """Prints the functions that take most, where asked."""

    def __init__(self, args: argparse.Namespace):
        self.count, self.profile = args.profile, cProfile.Profile(time.thread_time)

    def __enter__(self) -> None:
        if self.count:
            self.profile.enable()

    def __exit__(self, *_: object) -> None:
        if self.count:
            self.profile.disable()
            pstats.Stats(self.profile).sort_stats("tottime").print_stats(self.count)
