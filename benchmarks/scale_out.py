"""Weak scaling of sampling over the engines of a Ray cluster: the number of conversations per engine is constant.

    python benchmarks/scale_out.py --json
    python benchmarks/scale_out.py --driver

Every engine is a process with one thread and gets `--conversations` conversations of `--turns` turns. In each turn
seedling samples 8 to 40 tokens and a tool returns 4 to 24 tokens after a log-normal latency (median `--median` seconds,
99th percentile sixteen times that). Lengths and latencies depend only on the seed and are the same for every engine.
`efficiency` is the throughput per engine divided by the throughput of a single engine. It can reach 1 only if the
machine has enough cores for engines and driver: `engine_busy` is the share of time in which an engine computes,
`driver_busy` the driver's CPU utilization, `cores` the number of cores, `load` the load average. Prints one JSON line,
or without `--json` one line per number of engines and median, and each measurement to stderr when it is done.

`--driver` measures the cost of a call for the driver instead: conversations of `--turns` calls of actors that answer
after 20 ms with 24 tokens, as plain Ray calls and as the batched calls of the engines. `cpu_ms` is the CPU time of the
driver per call, its Ray threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import time
from typing import Any

import numpy as np
import torch

from arborl.cluster.placement.batched_calls import ActorCalls, BatchedActor
from arborl.config.load_config import load
from arborl.training_run.build import build
from arborl.types import Sampling

SETTINGS = [
    "placement=ray", "threads=1", "model.device=cpu", "sampling.max_context=1024", "placement.seconds=600",
]  # fmt: skip


async def conversation(engine: Any, number: int, args: argparse.Namespace) -> int:
    """Run one conversation; returns the number of sampled tokens. Its random numbers depend on its index per engine."""
    rng = np.random.default_rng((args.seed, number % args.conversations))
    spread, sampled = math.log(16) / 2.3263, 0
    tokens = [1, *map(int, rng.integers(10, 2000, 60))]
    for turn in range(args.turns):
        sampling = Sampling(max_tokens=int(rng.integers(8, 41)), stop=(), seed=1000 * number + turn)
        completion = await engine.generate(tokens, sampling, session=f"conversation {number}")
        sampled += len(completion.tokens)
        await asyncio.sleep(args.median * math.exp(spread * rng.standard_normal()))
        tokens += [*completion.tokens, *map(int, rng.integers(10, 2000, int(rng.integers(4, 25))))]
    return sampled


async def measure(engine: Any, engines: int, args: argparse.Namespace, **overrides: float) -> dict[str, Any]:
    args = argparse.Namespace(**vars(args) | overrides)
    engine.metrics()
    began, cpu_seconds = time.perf_counter(), time.process_time()
    results = await asyncio.gather(*(conversation(engine, i, args) for i in range(engines * args.conversations)))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_seconds
    return {
        "tokens_per_second": round(sum(results) / seconds, 1),
        "seconds": round(seconds, 2),
        "engine_busy": round(engine.metrics()["engine/seconds"] / seconds / engines, 3),
        "driver_busy": round(cpu_seconds / seconds, 3),
    }


def run(engines: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per median: the fastest of `--repeats` measurements."""
    parts = build(load(None, [*SETTINGS, f"placement.engines={engines}"]), training=False)
    rows = []

    async def measure_all() -> None:
        try:
            await measure(parts.engine, engines, args, turns=1, median=0.0)
            for median in args.median:
                results = [await measure(parts.engine, engines, args, median=median) for _ in range(args.repeats)]
                best = max(results, key=lambda row: row["tokens_per_second"])
                rows.append({"engines": engines, "median": median, **best, "load": round(os.getloadavg()[0], 1)})
                print(rows[-1], file=sys.stderr, flush=True)
        finally:
            await parts.close()

    asyncio.run(measure_all())
    return rows


class EchoActor(BatchedActor):
    """Answers each call after 20 ms, as an engine does between others."""

    async def answer(self, prompt: Any) -> Any:
        await asyncio.sleep(0.02)
        return list(range(24)), [0.1] * 24


def measure_driver(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cost of a call for the driver, plain and batched."""
    import ray

    ray.init(num_cpus=len(args.engines), include_dashboard=False, logging_level="ERROR")
    actors = [ray.remote(EchoActor).options(max_concurrency=1000, num_cpus=0).remote() for _ in args.engines]
    batched, prompt = [ActorCalls(actor) for actor in actors], np.arange(300)
    num_conversations = args.conversations * len(actors)

    async def converse(number: int, is_batched: bool) -> None:
        one = number % len(actors)
        for _ in range(args.turns):
            call = batched[one].call("answer", prompt) if is_batched else actors[one].answer.remote(prompt).future()
            await asyncio.wrap_future(call)

    async def run_all(is_batched: bool) -> dict[str, Any]:
        began, cpu_seconds = time.perf_counter(), time.process_time()
        await asyncio.gather(*(converse(number, is_batched) for number in range(num_conversations)))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_seconds
        count = num_conversations * args.turns
        return {"calls_per_second": round(count / seconds), "cpu_ms": round(1000 * cpu_seconds / count, 3)}

    rows = []
    for name, is_batched in (("plain", False), ("batched", True)):
        results = [asyncio.run(run_all(is_batched)) for _ in range(args.repeats + 1)][1:]  # the first is a warm-up
        rows.append({"calls": name, "actors": len(actors), **min(results, key=lambda row: row["cpu_ms"])})
    ray.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--conversations", type=int, default=32, help="conversations per engine")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--median", type=float, nargs="+", default=[0.25], help="median latency of the tool in seconds")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the best is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", action="store_true", help="measure the cost of a call for the driver")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.driver:
        print(*map(json.dumps, measure_driver(args)), sep="\n")
        return
    rows = [row for engines in args.engines for row in run(engines, args)]
    single_engine_rate = {row["median"]: row["tokens_per_second"] / row["engines"] for row in reversed(rows)}
    for row in rows:
        row["efficiency"] = round(row["tokens_per_second"] / row["engines"] / single_engine_rate[row["median"]], 3)
        if not args.json:
            print(row)
    if args.json:
        machine_info = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        print(json.dumps({"benchmark": "scale_out", **machine_info, "rows": rows}))


if __name__ == "__main__":
    main()
