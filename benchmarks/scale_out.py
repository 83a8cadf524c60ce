"""Weak scaling of sampling over engines of a Ray cluster: twice the engines, twice the conversations.

    python benchmarks/scale_out.py --json

Every engine is a process with one thread. Each is given `--conversations` conversations of `--turns` turns: seedling
says 8 to 40 tokens, a tool answers 4 to 24 after a while (log-normal, median `--median` seconds, 99th percentile
sixteen times that), and so on; lengths and delays follow from the seed alone, and are alike for every engine.
`efficiency` is tokens a second and engine over those of one engine alone. It can be 1 only where the machine has cores
for what engines and driver compute: `engine_busy` is the share of the time in which an engine computes, `driver_busy`
the driver's share of a core, `cores` how many there are, `load` what else was running. One line of JSON, or one for
each number of engines and each median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import time
from typing import Any

import numpy as np
import torch

from arborl.config.load_config import load
from arborl.training_run.build import build
from arborl.types import Sampling

SETTINGS = [
    "placement=ray", "threads=1", "model.device=cpu", "sampling.max_context=1024", "placement.seconds=600",
]  # fmt: skip


async def conversation(engine: Any, number: int, asked: argparse.Namespace) -> int:
    """Tokens sampled in one; who goes through it depends on its number within an engine's share alone."""
    chance = np.random.default_rng((asked.seed, number % asked.conversations))
    spread, sampled = math.log(16) / 2.3263, 0
    tokens = [1, *map(int, chance.integers(10, 2000, 60))]
    for turn in range(asked.turns):
        how = Sampling(max_tokens=int(chance.integers(8, 41)), stop=(), seed=1000 * number + turn)
        said = await engine.generate(tokens, how, session=f"conversation {number}")
        sampled += len(said.tokens)
        await asyncio.sleep(asked.median * math.exp(spread * chance.standard_normal()))
        tokens += [*said.tokens, *map(int, chance.integers(10, 2000, int(chance.integers(4, 25))))]
    return sampled


async def measure(engine: Any, engines: int, asked: argparse.Namespace, **other: float) -> dict[str, Any]:
    asked = argparse.Namespace(**vars(asked) | other)
    engine.metrics()
    began, computed = time.perf_counter(), time.process_time()
    found = await asyncio.gather(*(conversation(engine, i, asked) for i in range(engines * asked.conversations)))
    took, computed = time.perf_counter() - began, time.process_time() - computed
    return {
        "tokens_per_second": round(sum(found) / took, 1),
        "seconds": round(took, 2),
        "engine_busy": round(engine.metrics()["engine/seconds"] / took / engines, 3),
        "driver_busy": round(computed / took, 3),
    }


def run(engines: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each median; of several repeats the fastest."""
    parts = build(load(None, [*SETTINGS, f"placement.engines={engines}"]), training=False)
    rows = []

    async def all() -> None:
        try:
            await measure(parts.engine, engines, asked, turns=1, median=0.0)
            for median in asked.median:
                found = [await measure(parts.engine, engines, asked, median=median) for _ in range(asked.repeats)]
                best = max(found, key=lambda row: row["tokens_per_second"])
                rows.append({"engines": engines, "median": median, **best, "load": round(os.getloadavg()[0], 1)})
        finally:
            await parts.close()

    asyncio.run(all())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--conversations", type=int, default=32, help="for each engine")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--median", type=float, nargs="+", default=[0.25], help="seconds that the tool takes")
    parser.add_argument("--repeats", type=int, default=3, help="the best counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [row for engines in asked.engines for row in run(engines, asked)]
    each = {row["median"]: row["tokens_per_second"] / row["engines"] for row in reversed(rows)}
    for row in rows:
        row["efficiency"] = round(row["tokens_per_second"] / row["engines"] / each[row["median"]], 3)
        if not asked.json:
            print(row)
    if asked.json:
        about = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        print(json.dumps({"benchmark": "scale_out", **about, "rows": rows}))


if __name__ == "__main__":
    main()
