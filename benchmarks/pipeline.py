"""Steps per hour of asynchronous training (`rollout.max_lag`) relative to synchronous training, on the same work.

    python benchmarks/pipeline.py --json

seedling learns to use a calculator (recipes/calculator: 16 tasks x 8 episodes per step) with log-normal latency of
median 0.5 s and 99th percentile 8 s. All runs have the same number of updates, groups and episodes; synchronous and
asynchronous runs alternate for each seed. `ratio` is the steps per hour of the asynchronous run divided by those of the
synchronous run, averaged over seeds; `ratio_without_latency` is the same with a calculator without latency. The final
evaluation on held-out tasks uses the calculator without latency: `success_gap` is the success rate of the asynchronous
runs minus that of the synchronous runs, both trained with latency, and `success_noise` twice its standard error. Prints
one JSON line, or without `--json` also one line per run.
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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from arborl.config.load_config import load
from arborl.data.generated.problems import problems
from arborl.tools import tool
from arborl.tools.library.calculator import calculator as instant_calculator
from arborl.track.jsonl import read_metrics
from arborl.training_run import train

RECIPE = Path(__file__).parents[1] / "recipes" / "calculator" / "run.yaml"


def make_latency(
    median: float, p99: float, seed: int, is_training: Callable[[], bool]
) -> Callable[[], Awaitable[None]]:
    """A function that waits for a log-normal time during training; without latency if the median is 0."""
    rng, spread = np.random.default_rng(seed), math.log(p99 / median) / 2.3263 if median else 0.0

    async def wait() -> None:
        if median and is_training():
            await asyncio.sleep(median * math.exp(spread * rng.standard_normal()))

    return wait


def make_slow_calculator(wait: Callable[[], Awaitable[None]]) -> Any:
    """The calculator, which waits before it answers."""

    @tool(name="calculator", description=instant_calculator.spec.description)
    async def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example (2 + 3) * 4 or sqrt(2) ** 2.
        """
        await wait()
        return str(instant_calculator.function(expression))

    return calculator


class StepTimes:
    """Hook that records the end time of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def after(self, trainer: Any, groups: Any, metrics: Any) -> None:
        self.times.append(time.perf_counter())


def run(folder: Path, args: argparse.Namespace, max_lag: int, seed: int, median: float) -> dict[str, Any]:
    steps, p99, tasks = args.steps, args.p99, args.tasks
    run_dir, step_times = folder / f"lag-{max_lag}-seed-{seed}-{median:g}", StepTimes()
    slow = make_slow_calculator(make_latency(median, p99, seed, lambda: len(step_times.times) < steps))
    settings = [
        f"data.path={folder / 'arithmetic.json'}", f"rollout.max_lag={max_lag}", f"seed={seed}",
        f"output_dir={run_dir}", f"trainer.steps={steps}", f"evaluation.tasks={tasks}",
        f"rollout.tasks_per_step={args.groups}", f"rollout.group_size={args.size}",
        "evaluation.before=false", "evaluation.greedy=false", "tools=[late]", "rollout.concurrency=512",
        "rollout.episode_seconds=600", "rollout.step_seconds=300",
        "track.gifs=0", "track.tensorboard=false", f"trainer.save_every={steps}", "model.device=cpu",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        summary = train(load(RECIPE, settings), objects={"late": slow}, hooks=[step_times]).summary
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/step" in row]
    total_seconds = rows[0]["time/step"] + step_times.times[-1] - step_times.times[0]
    mean = {name: statistics.mean(row[name] for row in rows) for name in (
        "time/idle_engine", "time/idle_learner", "time/learn", "batch/lag_mean", "rollout/dropped_stale",
        "episode/count",
        "learner/terms",
    )}  # fmt: skip
    return {
        "max_lag": max_lag, "seed": seed, "median_seconds": median, "steps": steps, "seconds": total_seconds,
        "steps_an_hour": 3600 * steps / total_seconds, "success": summary["after"].get("success"),
        "load": os.getloadavg()[0],
        "lag_max": max(row["batch/lag_max"] for row in rows), **mean,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print one JSON line only.")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16, help="Tasks per step.")
    parser.add_argument("--size", type=int, default=8, help="Episodes per task.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=200, help="Held-out tasks of the final evaluation.")
    parser.add_argument("--median", type=float, default=0.5, help="Median latency in seconds.")
    parser.add_argument("--p99", type=float, default=8.0, help="99th percentile of the latency in seconds.")
    parser.add_argument("--keep", type=Path, help="Folder for the runs; default: a temporary folder.")
    parser.add_argument("--picture", type=Path, help="Image file for the timelines of the first seed.")
    args = parser.parse_args()
    if min(args.tasks, args.steps, args.max_lag) < 1:
        parser.error("--tasks, --steps and --max-lag are at least 1")
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "arithmetic.json").write_text(json.dumps(problems(2000)))
        rows = []
        for median in (args.median, 0.0):
            for seed in args.seeds:
                for max_lag in (0, args.max_lag):
                    rows.append(run(folder, args, max_lag, seed, median))
                    if not args.json:
                        print(json.dumps(rows[-1]), flush=True)
        print(json.dumps(summarize(rows, args.tasks)))
        if args.picture:
            plot_timelines(folder, args.max_lag, args.seeds[0], args.median, args.picture)


def plot_timelines(folder: Path, max_lag: int, seed: int, median: float, out: Path) -> None:
    """Plot the timelines of the first seed: when learner, engine, model calls and tools were busy."""
    from matplotlib.figure import Figure

    colors = {"learner": "#b5651d", "engine": "#2f6f8f", "model calls": "#8fb8cc", "tools": "#9aa36b"}
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, lag in zip(figure.subplots(2, 1, sharex=True), (0, max_lag), strict=True):
        slices = json.loads((folder / f"lag-{lag}-seed-{seed}-{median:g}" / "timeline.json").read_text())
        process_names = {one["pid"]: one["args"]["name"] for one in slices if one["name"] == "process_name"}
        shown_slices = [one for one in slices if one["ph"] == "X" and one["name"] not in ("arborl.wait", "arborl.step")]
        began = min(one["ts"] for one in shown_slices)
        for row_number, (kind, color) in enumerate(colors.items()):
            selected = [one for one in shown_slices if process_names[one["pid"]] == kind]
            num_lanes = max((one["tid"] for one in selected), default=1)
            for one in selected:
                span = ((one["ts"] - began) / 1e6, one["dur"] / 1e6)
                axes.broken_barh(
                    [span], (-row_number - 0.9 * one["tid"] / num_lanes, 0.9 / num_lanes), color=color, linewidth=0
                )
        axes.set_yticks([-row_number - 0.45 for row_number in range(len(colors))], [*colors])
        axes.set_title(f"max_lag={lag}", loc="left")
        axes.set_xlim(0, 60)
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("seconds")
    figure.savefig(out, dpi=110)


def summarize(rows: list[dict[str, Any]], tasks: int) -> dict[str, Any]:
    def ratio(slow: bool) -> list[float]:
        rates: dict[int, dict[bool, float]] = {}
        for row in rows:
            if bool(row["median_seconds"]) is slow:
                rates.setdefault(row["seed"], {})[row["max_lag"] > 0] = row["steps_an_hour"]
        return [found[True] / found[False] for found in rates.values()]

    def success(is_async: bool) -> list[float]:
        return [row["success"] for row in rows if (row["max_lag"] > 0) is is_async and row["median_seconds"]]

    sync_success, async_success = (statistics.mean(success(is_async)) for is_async in (False, True))
    num_episodes = tasks * len(success(True))
    variance = sync_success * (1 - sync_success) + async_success * (1 - async_success)
    return {
        "benchmark": "pipeline", "ratio": statistics.mean(ratio(True)), "ratios": ratio(True),
        "ratio_without_latency": statistics.mean(ratio(False)), "ratios_without_latency": ratio(False),
        "success_synchronous": success(False), "success": success(True), "success_gap": async_success - sync_success,
        "success_noise": 2 * math.sqrt(variance / num_episodes), "rows": rows,
        "load": max(row["load"] for row in rows), "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "machine": platform.processor() or platform.machine(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
