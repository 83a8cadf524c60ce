"""Rollouts under load: many concurrent environments, blocking environments, and groups with redundant episodes.

    python benchmarks/environments.py --case all
    python benchmarks/environments.py --case suite --env scienceworld --episodes 200 --player random
    python benchmarks/environments.py --case suite --recipe recipes/smollm2-textworld/run.yaml --player oracle

Cases: `throughput` (environment steps per second with 1,000 concurrent FrozenLakes), `slow` (the same, where one
environment in fifty blocks for 2 s in each step), `redundancy` (log-normal latency, groups with and without redundant
episodes). Replies are scripted, so everything but the model is measured: rendering, tokenization, recording,
environments, scheduling. `suite` plays episodes of one environment in environment processes, with its random player or
its oracle, and reports success, lost episodes, and the memory and open files of all processes; with `--recipe` it plays
the held-out tasks on which that recipe is evaluated. Prints one JSON line per measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from arborl.agents.chat_agents import ChatAgent
from arborl.algorithms import make_algorithm
from arborl.chat import Renderer
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.load_config import load
from arborl.data.task_source import EnvTasks
from arborl.engines.scripted import ScriptedEngine
from arborl.envs import ENVS
from arborl.envs.env import Env, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.models.model_loading import resolve
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
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
    """Yields to the event loop before each completion, as a real engine does, so that all episodes run concurrently."""

    async def generate(self, prompt, sampling, *, session):
        await asyncio.sleep(0)
        return await super().generate(prompt, sampling, session=session)


class BlockingLake(FrozenLake):
    """Synchronous methods and a blocking sleep in every step, like a simple wrapper of a slow program."""

    seconds = 2.0

    def reset(self, task, seed):  # type: ignore[override]
        return asyncio.run(super().reset(task, seed))

    def step(self, action):  # type: ignore[override]
        time.sleep(self.seconds)
        return asyncio.run(super().step(action))


class RandomLatencyLake(FrozenLake):
    """Every step waits for a latency that is drawn once per episode from a log-normal distribution."""

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


def make_rollout(env: Callable[[Task], Env], concurrency: int, workers: str = "auto") -> Rollout:
    renderer = Renderer.from_folder(resolve("seedling"))
    engine = YieldingEngine(replies(renderer, MOVES))
    factories = EpisodeFactories(lambda task: ChatAgent(), env)
    return Rollout(engine, renderer, factories, Sampling(16), EpisodeLimits(), concurrency, Workers(workers))


def make_tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task(f"{prefix}{i}", env="frozen_lake", seed=i, fields={"split": "train"}) for i in range(count)]


def count_steps(groups: list[Group]) -> int:
    failed = [episode.failure for group in groups for episode in group.episodes if episode.failure]
    assert not failed, failed[0]
    return sum(len(episode.turns) for group in groups for episode in group.episodes)


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_throughput(args: argparse.Namespace) -> dict[str, object]:
    before = peak_rss_mb()
    rollout = make_rollout(lambda task: FrozenLake(), args.concurrency)
    asyncio.run(rollout.collect(make_tasks(64), 0, 8))
    best: dict[str, object] = {}
    for trial in range(args.repeat):
        began, used = time.perf_counter(), time.process_time()
        done = count_steps(asyncio.run(rollout.collect(make_tasks(args.episodes // 8), trial, 8)))
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        if not best or done / wall > float(str(best["steps_per_second"])):
            best = {"steps": done, "steps_per_second": done / wall, "steps_per_cpu_second": done / cpu, "wall_s": wall}
    return best | {
        "in_flight": args.concurrency,
        "peak_mb": peak_rss_mb(),
        "peak_mb_above_start": peak_rss_mb() - before,
    }


def measure_blocking(args: argparse.Namespace) -> dict[str, object]:
    """Step rate of the non-blocking environments, until the last of them ends, with and without blocking ones."""
    size, num_blocking = 4, args.concurrency // 50

    def measure_rate(num_blocking: int) -> float:
        end_times: list[float] = []

        class TimedLake(FrozenLake):
            blocking = False

            async def close(self) -> None:
                end_times.append(time.perf_counter())

        rollout = make_rollout(
            lambda task: BlockingLake() if task.id.startswith("z") else TimedLake(), args.concurrency
        )
        # Blocking environments start first.
        batch = [*make_tasks(num_blocking // size, "z"), *make_tasks(args.episodes // size)]

        async def collect_batch() -> float:
            began = time.perf_counter()
            groups = await rollout.collect(batch, 0, size)
            num_steps = count_steps([group for group in groups if not group.task.id.startswith("z")])
            return num_steps / (max(end_times) - began)

        return asyncio.run(collect_batch())

    measure_rate(0)
    pairs = [(measure_rate(0), measure_rate(num_blocking)) for _ in range(args.repeat)]
    baseline_rate, rate_with_blocking = max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
    return {
        "in_flight": args.concurrency,
        "asleep": num_blocking,
        "steps_per_second_alone": baseline_rate,
        "steps_per_second_beside_sleepers": rate_with_blocking,
        "kept": rate_with_blocking / baseline_rate,
        "kept_each": [round(b / a, 3) for a, b in pairs],
    }


def measure_redundancy(args: argparse.Namespace) -> dict[str, object]:
    """16 groups of 8 with random latency: seconds until the batch is complete, and mean advantages of its groups."""
    result: dict[str, object] = {"groups": 16, "group_size": 8, "median_step_s": args.median, "sigma": args.sigma}
    algorithm = make_algorithm(AlgorithmConfig())
    for num_redundant in (0, 2, 4):
        seconds, means, num_groups = [], [], 0
        for trial in range(args.repeat):
            rollout = make_rollout(lambda task: RandomLatencyLake(args.median, args.sigma), 1000)
            began = time.perf_counter()
            groups = asyncio.run(
                rollout.collect(make_tasks(16), trial, 8, options=GroupOptions(redundancy=num_redundant))
            )
            seconds.append(time.perf_counter() - began)
            assert all(len(group.valid_episodes) == 8 for group in groups)
            group_means = _mean_advantages(algorithm, groups)
            means, num_groups = [*means, *group_means], num_groups + len(group_means)
        result |= {
            f"seconds_with_{num_redundant}": float(np.median(seconds)),
            f"groups_compared_with_{num_redundant}": num_groups,
            f"mean_advantage_with_{num_redundant}": float(np.abs(means).max()),
        }
        result[f"ratio_with_{num_redundant}"] = float(str(result["seconds_with_0"])) / float(np.median(seconds))
    return result


def _mean_advantages(algorithm: object, groups: list[Group]) -> list[float]:
    """Mean advantage over the episodes of each trained group; it must be 0 whichever episodes were cancelled."""
    for group in groups:
        for episode in group.episodes:
            episode.rewards["env"] = sum(turn.reward for turn in episode.turns)
    kept = algorithm.keep(groups)  # type: ignore[attr-defined]
    terms = algorithm.credit(kept, build_token_trees(kept).terms)  # type: ignore[attr-defined]
    first = np.unique(terms.episode, return_index=True)[1]
    trees = terms.tree[first]
    return [float(terms.advantage[first][trees == tree].mean()) for tree in np.unique(trees)]


def tree_usage() -> tuple[float, int]:
    """MiB and open files of this process and of all below it, with those that the environments start (Java)."""
    parents, resident = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], resident[int(folder.name)] = int(fields[1]), int(fields[21])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    files = 0
    for pid in ours:
        with contextlib.suppress(OSError):
            files += len(os.listdir(f"/proc/{pid}/fd"))
    return sum(resident.get(pid, 0) for pid in ours) * resource.getpagesize() / 2**20, files


def suite_tasks(args: argparse.Namespace) -> tuple[str, dict[str, object], list[Task]]:
    """Name and arguments of the environment, and the tasks: those of `--env`, or the held-out ones of `--recipe`."""
    settings = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in args.args)}
    if args.recipe is None:
        return args.env, settings, [Task(f"{args.env}/{seed}", seed=seed) for seed in range(args.tasks)]
    config = load(args.recipe)
    name = config.env.name
    return name, {**config.env.args, **settings}, EnvTasks(name, 0).evaluation(config.evaluation.tasks)


async def play_suite(args: argparse.Namespace) -> dict[str, object]:
    """Episodes of one environment in processes, `--concurrency` at once."""
    name, arguments, tasks = suite_tasks(args)
    pool, numbers = ProcessPool(most=args.concurrency), iter(range(args.episodes))
    outcomes: list[dict[str, float]] = []
    failures: list[str] = []
    memory: list[float] = []
    files: list[int] = []

    async def worker() -> None:
        for number in numbers:
            env = ProcessEnv(ENVS.build(name, arguments, "--args"), pool, name, args.seconds)
            rng, step = generator(number, "player"), None
            try:
                await env.reset(tasks[number % len(tasks)], number)
                while step is None or not step.over:
                    text = env.oracle() if args.player == "oracle" else env.random(rng)
                    if text is None:
                        break
                    step = await env.step(Message("assistant", text))
                outcomes.append(dict(env.metrics()))
            except Exception as error:  # a lost episode is a result
                failures.append(f"{number}: {type(error).__name__}: {error}")
            finally:
                await env.close()
            for values, value in zip((memory, files), tree_usage(), strict=True):
                values.append(value)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(args.concurrency)))
    seconds = time.perf_counter() - start
    replaced = pool.metrics()["rollout/processes_replaced"]
    pool.close()
    quarter = len(memory) // 4
    return {
        "env": name, "player": args.player, "episodes": len(outcomes), "lost": len(failures),
        "failures": failures[:3], "processes_replaced": replaced, "tasks": len(tasks),
        "success": round(float(np.mean([one["success"] for one in outcomes])), 3) if outcomes else None,
        "memory_mib_at_quarter": round(float(np.median(memory[quarter : quarter + 10]))),
        "memory_mib_at_end": round(float(np.median(memory[-10:]))),
        "files_at_quarter": round(float(np.median(files[quarter : quarter + 10]))),
        "files_at_end": round(float(np.median(files[-10:]))), "seconds": round(seconds, 1),
    }  # fmt: skip


def measure_suite(args: argparse.Namespace) -> dict[str, object]:
    return asyncio.run(play_suite(args))


CASES = {"throughput": measure_throughput, "slow": measure_blocking, "redundancy": measure_redundancy}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "suite", "all"], default="all")
    parser.add_argument("--env", default="chess", help="environment of the case suite")
    parser.add_argument("--recipe", type=Path, help="instead of --env: the held-out tasks of this configuration")
    parser.add_argument("--args", nargs="*", default=[], help="arguments of the environment: name=JSON")
    parser.add_argument("--player", choices=["random", "oracle"], default="random")
    parser.add_argument("--tasks", type=int, default=200, help="different tasks of the case suite")
    parser.add_argument("--seconds", type=float, default=60.0, help="deadline of a call in the case suite")
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--median", type=float, default=0.05, help="median latency of a step in seconds")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of the latency")
    args = parser.parse_args()
    machine_info = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "command": " ".join(sys.argv[1:]),
    }
    for name in CASES if args.case == "all" else [args.case]:
        measure = measure_suite if name == "suite" else CASES[name]
        print(json.dumps({"case": name} | measure(args) | machine_info), flush=True)


if __name__ == "__main__":
    main()
