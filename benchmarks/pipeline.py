"""Steps an hour with learning beside playing (`rollout.max_lag`), over one after the other, on the same work.

    python benchmarks/pipeline.py --json

seedling learns to ask a calculator (recipes/calculator: 16 problems x 8 episodes a step) whose answers are late:
log-normal, with a median of 0.5 s and a 99th percentile of 8 s. Every run makes as many updates, of as many groups and
episodes, the two ways in turn for each seed. `ratio` is how many times the steps an hour of the synchronous run the
other has, the mean over seeds; `ratio_without_latency` is the same of a calculator that answers at once. The held-out
problems are answered at the end with a calculator that is quick: `success_gap` is how much more of them the runs
ahead solve than the synchronous ones, both with the late calculator, and `success_noise` twice the standard error of
that. One line of JSON, or one line a run.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from arborl.config.load_config import load
from arborl.data.generated.problems import problems
from arborl.tools import tool
from arborl.tools.library.calculator import calculator as at_once
from arborl.track.jsonl import read_metrics
from arborl.training_run import train

RECIPE = Path(__file__).parents[1] / "recipes" / "calculator" / "run.yaml"


def late(median: float, p99: float, seed: int, still: Callable[[], bool]) -> Any:
    """The calculator, late while training still goes on; at once where the median is 0."""
    chance, spread = np.random.default_rng(seed), math.log(p99 / median) / 2.3263 if median else 0.0

    @tool(name="calculator", description=at_once.spec.description)
    async def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example (2 + 3) * 4 or sqrt(2) ** 2.
        """
        if median and still():
            await asyncio.sleep(median * math.exp(spread * chance.standard_normal()))
        return str(at_once.function(expression))

    return calculator


class Clock:
    """A hook: when each step was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def after(self, trainer: Any, groups: Any, metrics: Any) -> None:
        self.times.append(time.perf_counter())


def run(folder: Path, asked: argparse.Namespace, max_lag: int, seed: int, median: float) -> dict[str, Any]:
    steps, p99, tasks = asked.steps, asked.p99, asked.tasks
    home, clock = folder / f"lag-{max_lag}-seed-{seed}-{median:g}", Clock()
    slow = late(median, p99, seed, lambda: len(clock.times) < steps)
    settings = [
        f"data.path={folder / 'arithmetic.json'}", f"rollout.max_lag={max_lag}", f"seed={seed}", f"output_dir={home}",
        f"trainer.steps={steps}", f"evaluation.tasks={tasks}", f"rollout.tasks_per_step={asked.groups}",
        f"rollout.group_size={asked.size}", "evaluation.before=false", "evaluation.greedy=false",
        "tools=[late]", "rollout.concurrency=512", "rollout.episode_seconds=600", "rollout.step_seconds=300",
        "track.gifs=0", "track.tensorboard=false", f"trainer.save_every={steps}", "model.device=cpu",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        summary = train(load(RECIPE, settings), objects={"late": slow}, hooks=[clock]).summary
    rows = [row for row in read_metrics(home / "metrics.jsonl") if "time/step" in row]
    took = rows[0]["time/step"] + clock.times[-1] - clock.times[0]
    mean = {name: statistics.mean(row[name] for row in rows) for name in (
        "time/idle_engine", "time/idle_learner", "time/learn", "batch/lag_mean", "rollout/dropped_stale",
        "episode/count",
        "learner/terms",
    )}  # fmt: skip
    return {
        "max_lag": max_lag, "seed": seed, "median_seconds": median, "steps": steps, "seconds": took,
        "steps_an_hour": 3600 * steps / took, "success": summary["after"].get("success"),
        "load": os.getloadavg()[0],
        "lag_max": max(row["batch/lag_max"] for row in rows), **mean,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="One line for all.")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16, help="Problems of a step.")
    parser.add_argument("--size", type=int, default=8, help="Episodes of each.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=200, help="Held-out ones, at the end.")
    parser.add_argument("--median", type=float, default=0.5)
    parser.add_argument("--p99", type=float, default=8.0)
    parser.add_argument("--keep", type=Path, help="A folder for the runs; without one they are thrown away.")
    parser.add_argument("--picture", type=Path, help="Draw the timelines of the first seed here.")
    arguments = parser.parse_args()
    if min(arguments.tasks, arguments.steps, arguments.max_lag) < 1:
        parser.error("--tasks, --steps and --max-lag are at least 1")
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "arithmetic.json").write_text(json.dumps(problems(2000)))
        rows = []
        for median in (arguments.median, 0.0):
            for seed in arguments.seeds:
                for max_lag in (0, arguments.max_lag):
                    rows.append(run(folder, arguments, max_lag, seed, median))
                    if not arguments.json:
                        print(json.dumps(rows[-1]), flush=True)
        print(json.dumps(said(rows, arguments.tasks)))
        if arguments.picture:
            picture(folder, arguments.max_lag, arguments.seeds[0], arguments.median, arguments.picture)


def picture(folder: Path, max_lag: int, seed: int, median: float, out: Path) -> None:
    """The timelines of the first seed, one above the other: who worked when."""
    from matplotlib.figure import Figure

    colors = {"learner": "#b5651d", "engine": "#2f6f8f", "model calls": "#8fb8cc", "tools": "#9aa36b"}
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, lag in zip(figure.subplots(2, 1, sharex=True), (0, max_lag), strict=True):
        slices = json.loads((folder / f"lag-{lag}-seed-{seed}-{median:g}" / "timeline.json").read_text())
        kinds = {one["pid"]: one["args"]["name"] for one in slices if one["name"] == "process_name"}
        drawn = [one for one in slices if one["ph"] == "X" and one["name"] not in ("arborl.wait", "arborl.step")]
        began = min(one["ts"] for one in drawn)
        for place, (kind, color) in enumerate(colors.items()):
            mine = [one for one in drawn if kinds[one["pid"]] == kind]
            most = max((one["tid"] for one in mine), default=1)
            for one in mine:
                span = ((one["ts"] - began) / 1e6, one["dur"] / 1e6)
                axes.broken_barh([span], (-place - 0.9 * one["tid"] / most, 0.9 / most), color=color, linewidth=0)
        axes.set_yticks([-place - 0.45 for place in range(len(colors))], [*colors])
        axes.set_title(f"max_lag={lag}", loc="left")
        axes.set_xlim(0, 60)
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("seconds")
    figure.savefig(out, dpi=110)


def said(rows: list[dict[str, Any]], tasks: int) -> dict[str, Any]:
    def ratio(slow: bool) -> list[float]:
        rates: dict[int, dict[bool, float]] = {}
        for row in rows:
            if bool(row["median_seconds"]) is slow:
                rates.setdefault(row["seed"], {})[row["max_lag"] > 0] = row["steps_an_hour"]
        return [found[True] / found[False] for found in rates.values()]

    def success(ahead: bool) -> list[float]:
        return [row["success"] for row in rows if (row["max_lag"] > 0) is ahead and row["median_seconds"]]

    one, other = (statistics.mean(success(ahead)) for ahead in (False, True))
    asked = tasks * len(success(True))
    return {
        "benchmark": "pipeline", "ratio": statistics.mean(ratio(True)), "ratios": ratio(True),
        "ratio_without_latency": statistics.mean(ratio(False)), "ratios_without_latency": ratio(False),
        "success_synchronous": success(False), "success": success(True), "success_gap": other - one,
        "success_noise": 2 * math.sqrt((one * (1 - one) + other * (1 - other)) / asked), "rows": rows,
        "load": max(row["load"] for row in rows), "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "machine": platform.processor() or platform.machine(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
