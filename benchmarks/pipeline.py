"""Steps an hour with learning beside playing (`rollout.max_lag`), over one after the other, on the same work.

    python benchmarks/pipeline.py --json

seedling learns to ask a calculator (recipes/calculator: 16 problems x 8 episodes a step) whose answers are late:
log-normal, with a median of 0.5 s and a 99th percentile of 8 s. Every run makes as many updates, of as many groups and episodes.
`ratio` is how many times the steps an hour of the synchronous run the other has, the mean over seeds;
`ratio_without_latency` is the same of a calculator that answers at once. One line of JSON, or one line a run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from arborl.api import train
from arborl.config.load import load
from arborl.data.made.arithmetic import problems
from arborl.tools import tool
from arborl.tools.library.calculator import calculator as at_once
from arborl.track.jsonl import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "calculator" / "run.yaml"


def late(median: float, p99: float, seed: int) -> Any:
    """The calculator, late; at once where the median is 0."""
    chance, spread = np.random.default_rng(seed), math.log(p99 / median) / 2.3263 if median else 0.0

    @tool(name="calculator", description=at_once.spec.description)
    async def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example (2 + 3) * 4 or sqrt(2) ** 2.
        """
        if median:
            await asyncio.sleep(median * math.exp(spread * chance.standard_normal()))
        return str(at_once.function(expression))

    return calculator


class Clock:
    """A hook: when each step was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def after(self, trainer: Any, groups: Any, metrics: Any) -> None:
        self.times.append(time.perf_counter())


def run(folder: Path, max_lag: int, seed: int, steps: int, median: float, p99: float, tasks: int) -> dict[str, Any]:
    home, clock = folder / f"lag-{max_lag}-seed-{seed}-{median:g}", Clock()
    settings = [
        f"data.path={folder / 'arithmetic.json'}", f"rollout.max_lag={max_lag}", f"seed={seed}", f"output_dir={home}",
        f"trainer.steps={steps}", f"evaluation.tasks={tasks}", "evaluation.before=false", "evaluation.greedy=false",
        "tools=[late]", "rollout.concurrency=512", "rollout.episode_seconds=600", "rollout.step_seconds=300",
        "track.gifs=0", "track.tensorboard=false", f"trainer.save_every={steps}", "model.device=cpu",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        summary = train(load(RECIPE, settings), objects={"late": late(median, p99, seed)}, hooks=[clock]).summary
    rows = [row for row in read_metrics(home / "metrics.jsonl") if "time/step" in row]
    took = rows[0]["time/step"] + clock.times[-1] - clock.times[0]
    mean = {name: statistics.mean(row[name] for row in rows) for name in (
        "time/idle_engine", "time/idle_learner", "time/learn", "batch/lag_mean", "dropped/stale", "episode/count",
        "learner/terms",
    )}  # fmt: skip
    return {
        "max_lag": max_lag, "seed": seed, "median_seconds": median, "steps": steps, "seconds": took,
        "steps_an_hour": 3600 * steps / took, "success": summary["after"].get("success"),
        "lag_max": max(row["batch/lag_max"] for row in rows), **mean,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="One line for all.")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=100, help="Held-out ones, at the end.")
    parser.add_argument("--median", type=float, default=0.5)
    parser.add_argument("--p99", type=float, default=8.0)
    parser.add_argument("--keep", type=Path, help="A folder for the runs; without one they are thrown away.")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "arithmetic.json").write_text(json.dumps(problems(2000)))
        rows = []
        for median, seeds in ((arguments.median, arguments.seeds), (0.0, 1)):
            for seed in range(seeds):
                for max_lag in (0, arguments.max_lag):
                    rows.append(run(folder, max_lag, seed, arguments.steps, median, arguments.p99, arguments.tasks))
                    if not arguments.json:
                        print(json.dumps(rows[-1]), flush=True)
        print(json.dumps(said(rows)))


def said(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def ratio(slow: bool) -> list[float]:
        rates: dict[int, dict[bool, float]] = {}
        for row in rows:
            if bool(row["median_seconds"]) is slow:
                rates.setdefault(row["seed"], {})[row["max_lag"] > 0] = row["steps_an_hour"]
        return [found[True] / found[False] for found in rates.values()]

    def success(ahead: bool) -> list[float]:
        return [row["success"] for row in rows if (row["max_lag"] > 0) is ahead and row["median_seconds"]]

    return {
        "benchmark": "pipeline", "ratio": statistics.mean(ratio(True)), "ratios": ratio(True),
        "ratio_without_latency": statistics.mean(ratio(False)), "success_synchronous": success(False),
        "success": success(True), "rows": rows, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
