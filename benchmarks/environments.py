"""Rollouts under load: many environments at once, some that block, and groups that do not wait for stragglers.

    python benchmarks/environments.py --case all

Cases: `throughput` (environment steps a second, a thousand FrozenLakes in flight), `slow` (the same with one
environment in fifty asleep for 2 s a step), `redundancy` (log-normal latency, groups with and without redundant
members). Replies are scripted, so what is measured is everything but the model: rendering, tokenising, recording,
environments, scheduling. One JSON line a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import resource
import sys
import time
from collections.abc import Callable

import numpy as np

from arborl.agents.chat_agents import ChatAgent
from arborl.algorithms import make_algorithm
from arborl.chat import Renderer
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.models.model_loading import resolve
from arborl.rollout.env_workers import Workers
from arborl.rollout.groups import GroupOptions
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.seeds import generator
from arborl.training_run.part_factory import replies
from arborl.types import Group, Message, Sampling, Task

MOVES = [f"<answer>{move}</answer>" for move in ("Left", "Down", "Right", "Up")]


class YieldingEngine(ScriptedEngine):
    """Lets everybody else run before it answers, as an engine that computes does: all episodes are then in flight."""

    async def generate(self, prompt, sampling, *, session):
        await asyncio.sleep(0)
        return await super().generate(prompt, sampling, session=session)


class Sleeper(FrozenLake):
    """Plain functions, and every step takes its time: what a naive wrapper of a slow program looks like."""

    seconds = 2.0

    def reset(self, task, seed):  # type: ignore[override]
        return asyncio.run(super().reset(task, seed))

    def step(self, action):  # type: ignore[override]
        time.sleep(self.seconds)
        return asyncio.run(super().step(action))


class Straggler(FrozenLake):
    """Every step waits; how long is drawn for the episode from a log-normal distribution."""

    blocking = False

    def __init__(self, median: float, sigma: float):
        super().__init__()
        self.median, self.sigma = median, sigma

    async def reset(self, task, seed):
        self.wait = self.median * float(np.exp(self.sigma * generator(seed, "latency").standard_normal()))
        return await super().reset(task, seed)

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(self.wait)
        return await super().step(action)


def rollout(env: Callable[[Task], Env], concurrency: int, workers: str = "auto") -> Rollout:
    renderer = Renderer.from_folder(resolve("seedling"))
    engine = YieldingEngine(replies(renderer, MOVES))
    cast = EpisodeFactories(lambda task: ChatAgent(), env)
    return Rollout(engine, renderer, cast, Sampling(16), EpisodeLimits(), concurrency, Workers(workers))


def tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task(f"{prefix}{i}", env="frozen_lake", seed=i, fields={"split": "train"}) for i in range(count)]


def steps(groups: list[Group]) -> int:
    failed = [episode.failure for group in groups for episode in group.episodes if episode.failure]
    assert not failed, failed[0]
    return sum(len(episode.turns) for group in groups for episode in group.episodes)


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def throughput(args: argparse.Namespace) -> dict[str, object]:
    before = megabytes()
    one = rollout(lambda task: FrozenLake(), args.concurrency)
    asyncio.run(one.collect(tasks(64), 0, 8))
    best: dict[str, object] = {}
    for trial in range(args.repeat):
        began, used = time.perf_counter(), time.process_time()
        done = steps(asyncio.run(one.collect(tasks(args.episodes // 8), trial, 8)))
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        if not best or done / wall > float(str(best["steps_per_second"])):
            best = {"steps": done, "steps_per_second": done / wall, "steps_per_cpu_second": done / cpu, "wall_s": wall}
    return best | {"in_flight": args.concurrency, "peak_mb": megabytes(), "peak_mb_above_start": megabytes() - before}


def slow(args: argparse.Namespace) -> dict[str, object]:
    """The rate of the others, from the beginning until the last of them is done, beside what it is without sleepers."""
    size, asleep = 4, args.concurrency // 50

    def rate(sleepers: int) -> float:
        ends: list[float] = []

        class Quick(FrozenLake):
            blocking = False

            async def close(self) -> None:
                ends.append(time.perf_counter())

        one = rollout(lambda task: Sleeper() if task.id.startswith("z") else Quick(), args.concurrency)
        chosen = [*tasks(sleepers // size, "z"), *tasks(args.episodes // size)]  # the sleepers come first and stay

        async def play() -> float:
            began = time.perf_counter()
            groups = await one.collect(chosen, 0, size)
            others = steps([group for group in groups if not group.task.id.startswith("z")])
            return others / (max(ends) - began)

        return asyncio.run(play())

    rate(0)
    pairs = [(rate(0), rate(asleep)) for _ in range(args.repeat)]
    alone, beside = max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
    return {
        "in_flight": args.concurrency,
        "asleep": asleep,
        "steps_per_second_alone": alone,
        "steps_per_second_beside_sleepers": beside,
        "kept": beside / alone,
        "kept_each": [round(b / a, 3) for a, b in pairs],
    }


def redundancy(args: argparse.Namespace) -> dict[str, object]:
    """16 groups of 8 with stragglers: seconds until the batch is complete, and what the algorithm makes of it."""
    result: dict[str, object] = {"groups": 16, "group_size": 8, "median_step_s": args.median, "sigma": args.sigma}
    algorithm = make_algorithm(AlgorithmConfig())
    for extra in (0, 2, 4):
        seconds, means, compared = [], [], 0
        for trial in range(args.repeat):
            one = rollout(lambda task: Straggler(args.median, args.sigma), 1000)
            began = time.perf_counter()
            groups = asyncio.run(one.collect(tasks(16), trial, 8, options=GroupOptions(redundancy=extra)))
            seconds.append(time.perf_counter() - began)
            assert all(len(group.valid_episodes) == 8 for group in groups)
            found = _mean_advantages(algorithm, groups)
            means, compared = [*means, *found], compared + len(found)
        result |= {
            f"seconds_with_{extra}": float(np.median(seconds)),
            f"groups_compared_with_{extra}": compared,
            f"mean_advantage_with_{extra}": float(np.abs(means).max()),
        }
        result[f"ratio_with_{extra}"] = float(str(result["seconds_with_0"])) / float(np.median(seconds))
    return result


def _mean_advantages(algorithm: object, groups: list[Group]) -> list[float]:
    """Mean advantage of each group that is trained on, one vote an episode: 0 whatever was cancelled."""
    for group in groups:
        for episode in group.episodes:
            episode.rewards["env"] = sum(turn.reward for turn in episode.turns)
    kept = algorithm.keep(groups)  # type: ignore[attr-defined]
    terms = algorithm.credit(kept, build_token_trees(kept).terms)  # type: ignore[attr-defined]
    first = np.unique(terms.episode, return_index=True)[1]
    trees = terms.tree[first]
    return [float(terms.advantage[first][trees == tree].mean()) for tree in np.unique(trees)]


CASES = {"throughput": throughput, "slow": slow, "redundancy": redundancy}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--median", type=float, default=0.05, help="seconds a step of the median straggler")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of that")
    args = parser.parse_args()
    about = {"python": platform.python_version(), "machine": platform.machine(), "command": " ".join(sys.argv[1:])}
    for name in CASES if args.case == "all" else [args.case]:
        print(json.dumps({"case": name} | CASES[name](args) | about), flush=True)


if __name__ == "__main__":
    main()
