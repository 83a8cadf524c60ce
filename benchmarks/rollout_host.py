"""Host time of whole episodes in the `Rollout` that `arborl train` builds, without a forward pass.

Called by `turns.py`. Replies are fixed texts, selected by the seed of the request, and sampled token by token through
the scheduler of `LocalEngine`; only the forward pass of the model is skipped. CPU time of the process is split into
engine steps and everything else (`host`), threads of environments included. A linear fit over runs with different
numbers of turns gives the cost per episode (intercept) and per turn (slope).
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
from typing import Any

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

MAX_CONTEXT, BLOCK_SIZE = 1024, 64
THOUGHT_TEXTS = ("", "I go on. ", "The goal is near. ", "There is a hole, so I go this way. ", "Let me see. ", "Now ")


class FixedReplyRunner:
    """A model runner without a model: returns the next token of the reply that the seed of each request selects."""

    runs_ahead = False
    copies_weights = False

    def __init__(self, engine: LocalEngine, replies: Sequence[Sequence[int]]):
        self.cache = engine.runner.cache
        self.replies = np.zeros((len(replies), max(map(len, replies))), dtype=np.int64)
        for row, reply in enumerate(replies):
            self.replies[row, : len(reply)] = reply
        self.batch, self.sampling = engine.batch, engine.batch.sampling
        engine.batch.sampling = self._select_tokens  # type: ignore[method-assign]

    def _select_tokens(self, rows: np.ndarray, *more: Any) -> object:
        """Selects the next tokens of these rows, immediately before `launch`."""
        seed, position = self.batch.seed[rows], self.batch.length[rows] - self.batch.prompt[rows]
        self.tokens = self.replies[(seed % len(self.replies)).astype(np.int64), position]
        return self.sampling(rows, *more)

    def launch(self, step: ModelStep) -> FinishedOutput:
        return FinishedOutput(self.tokens, np.full(len(step.sampled), -1.0))

    def token_budget(self, tokens: int) -> int:
        return 4096

    def weights_changed(self) -> None: ...

    def warm_up(self, truncates: bool) -> None: ...


class TimedEngine(LocalEngine):
    """Measures the CPU time of its steps and counts the requests of the first step."""

    spent, first = 0.0, 0

    def _step(self) -> None:
        began = time.process_time()
        super()._step()
        self.first = self.first or len(self.scheduler.running) + len(self.scheduler.waiting)
        self.spent += time.process_time() - began


@dataclass
class RolloutTimes:
    """CPU seconds and episode counts of one rollout."""

    episodes: int
    turns: int
    host: float
    """Outside of engine steps: rollout, environments, rewards, episode files."""
    engine: float
    score: float
    store: float
    first: int
    """Requests in the engine at its first step."""


def make_engine(renderer: Renderer, replies: Sequence[str], requests: int) -> TimedEngine:
    config = LlamaConfig(
        vocab_size=renderer.tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=MAX_CONTEXT,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    engine = TimedEngine(model, MAX_CONTEXT, requests, kv_tokens=requests * MAX_CONTEXT, block_size=BLOCK_SIZE)
    ids = [[*renderer.encode(renderer.escape_reply(text)), renderer.stop[0]] for text in replies]
    engine.runner = FixedReplyRunner(engine, ids)
    return engine


def make_rollout(config: RunConfig, engine: LocalEngine, renderer: Renderer) -> tuple[Rollout, Rewards]:
    """Rollout and rewards as `arborl.training_run.build` creates them."""
    parts = RunPartFactory(config, {})
    factories, rewards, rollout_config = parts.episode_factories(), parts.rewards(), config.rollout
    limits = EpisodeLimits(
        rollout_config.max_turns,
        config.sampling.max_context,
        rollout_config.episode_seconds,
        rollout_config.step_seconds,
    )
    offline = OfflineEpisodes.of(config, renderer)
    return parts.rollout(engine, factories, training_sampling(config, renderer), limits, rewards, offline), rewards


# ------------------------------------------------------------------------------------------------ tasks and replies


def lake_tasks(count: int, turns: int) -> list[Task]:
    """Maps on which Left and Right never end an episode, so that every episode has exactly `turns` turns."""
    found: list[Task] = []
    seed = 0
    while len(found) < count:
        grid, player = draw_map(seed, "train", 4, 0.8, turns)
        if set(grid[player[0]]) == {"_"}:
            found.append(Task(f"lake-{seed}", seed=seed))
        seed += 1
    return found


def sum_tasks(count: int) -> list[Task]:
    return [
        Task(f"row-{n}", (Message("user", f"What is {n} + {3 * n}? Answer briefly."),), {"answer": str(4 * n)})
        for n in range(count)
    ]


LAKE_REPLIES = [f"{thought}<answer>{move}</answer>" for thought in THOUGHT_TEXTS for move in ("Left", "Right")]
SUM_REPLIES = [f"The sum is <answer>{4 * n}</answer>" for n in range(0, 64)]


def make_config(args: argparse.Namespace, episodes: int, more: Sequence[str]) -> RunConfig:
    common_settings = [
        f"rollout.tasks_per_step={episodes // args.group}", f"rollout.group_size={args.group}",
        f"rollout.concurrency={args.concurrency}", f"sampling.max_context={MAX_CONTEXT}", "trainer.steps=1",
    ]  # fmt: skip
    return load(None, [*common_settings, *more])


# ------------------------------------------------------------------------------------------------ timing


async def run_batch(rollout: Rollout, rewards: Rewards, tasks: Sequence[Task], group: int, seed: int) -> RolloutTimes:
    """Collect one batch, compute its rewards and write its episode file."""
    engine = rollout.engine
    assert isinstance(engine, TimedEngine)
    engine.spent, engine.first = 0.0, 0
    engine.scheduler.clear_cache()
    clock = [time.process_time()]
    groups = await rollout.train(tasks, seed, group, len(tasks))
    clock.append(time.process_time())
    await rewards.score(groups)
    clock.append(time.process_time())
    with tempfile.TemporaryDirectory() as folder:
        EpisodeStore(Path(folder)).write(1, groups)
    clock.append(time.process_time())
    episodes = [episode for group in groups for episode in group.episodes]
    failed = [episode.failure for episode in episodes if episode.failure is not None]
    assert not failed, failed[0]
    whole, score, store = clock[3] - clock[0], clock[2] - clock[1], clock[3] - clock[2]
    turns = sum(len(episode.turns) for episode in episodes)
    return RolloutTimes(len(episodes), turns, whole - engine.spent, engine.spent, score, store, engine.first)


def best_of(args: argparse.Namespace, rollout: Rollout, rewards: Rewards, tasks: Sequence[Task]) -> RolloutTimes:
    """Times of the fastest of several batches, after one warm-up batch."""

    async def run_batches() -> list[RolloutTimes]:
        gc.freeze()  # as `Trainer.fit` does
        return [await run_batch(rollout, rewards, tasks, args.group, seed) for seed in range(args.repeats + 1)]

    return min(asyncio.run(run_batches())[1:], key=lambda one: one.host)


def measure_single_turn_episodes(args: argparse.Namespace, renderer: Renderer) -> dict[str, object]:
    """Single-turn episodes: rows with a question and an answer."""
    config = make_config(args, args.rows, ["env=question", "rewards=[exact]", "data.path=rows.jsonl"])
    rollout, rewards = make_rollout(config, make_engine(renderer, SUM_REPLIES, args.requests), renderer)
    with Profiler(args):
        one = best_of(args, rollout, rewards, sum_tasks(args.rows // args.group))
    return {
        "case": "one-turn episodes", "episodes": one.episodes, "group": args.group, "requests": args.requests,
        "episode_ms": round(1e3 * one.host / one.episodes, 3), "score_ms": round(1e3 * one.score / one.episodes, 3),
        "store_ms": round(1e3 * one.store / one.episodes, 3), "engine_ms": round(1e3 * one.engine / one.episodes, 3),
        "first_step_requests": one.first,
    }  # fmt: skip


def measure_lake_episodes(args: argparse.Namespace, renderer: Renderer) -> dict[str, object]:
    """Multi-turn episodes: FrozenLake 4x4."""
    engine = make_engine(renderer, LAKE_REPLIES, args.requests)
    found = []
    for turns in args.episode_turns:
        settings = ["env=frozen_lake", f"env.args.max_steps={turns}", f"rollout.workers={args.workers}"]
        config = make_config(args, args.episodes, settings)
        rollout, rewards = make_rollout(config, engine, renderer)
        with Profiler(args) if turns == max(args.episode_turns) else nullcontext():
            found.append(best_of(args, rollout, rewards, lake_tasks(args.episodes // args.group, turns)))
    turns_per_episode = [one.turns / one.episodes for one in found]
    slope, fixed = np.polyfit(turns_per_episode, [one.host / one.episodes for one in found], 1)
    engine_slope, _ = np.polyfit(turns_per_episode, [one.engine / one.episodes for one in found], 1)
    last = found[-1]
    return {
        "case": "FrozenLake episodes", "episodes": last.episodes, "group": args.group, "requests": args.requests,
        "turns": turns_per_episode, "host_s": [round(one.host, 3) for one in found],
        "episode_ms": round(1e3 * float(fixed), 3),
        "turn_ms": round(1e3 * float(slope), 3), "engine_turn_ms": round(1e3 * float(engine_slope), 3),
        "score_ms": round(1e3 * last.score / last.episodes, 3), "store_ms": round(1e3 * last.store / last.episodes, 3),
        "first_step_requests": last.first,
    }  # fmt: skip


class Profiler:
    """Context manager that profiles and prints the `--profile` most expensive functions; inactive at 0."""

    def __init__(self, args: argparse.Namespace):
        self.count, self.profile = args.profile, cProfile.Profile(time.process_time)

    def __enter__(self) -> None:
        if self.count:
            self.profile.enable()

    def __exit__(self, *_: object) -> None:
        if self.count:
            self.profile.disable()
            pstats.Stats(self.profile).sort_stats("tottime").print_stats(self.count)
