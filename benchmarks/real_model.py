"""Train recipes with a pretrained model, several seeds each, in concurrent processes, and collect their results.

    python benchmarks/real_model.py smollm2-frozen-lake smollm2-sums --seeds 0 1 2 --parallel 3 --out runs/real-model
    python benchmarks/real_model.py smollm2-sums --minutes 9 --set trainer.steps=100
    python benchmarks/real_model.py smollm2-sums --out runs/real-model --collect

A recipe is a folder of `recipes/`, or `FOLDER/FILE` for another file than `run.yaml`. Each run is a separate process;
its run folder is `OUT/RECIPE-SEED`, its console output `OUT/RECIPE-SEED.log`. Runs that have not finished after
`--minutes` get SIGTERM: they write a checkpoint, and their last held-out evaluation is reported. If the folder contains
a stopped run, the run is resumed. Prints one JSON line per run and writes `OUT/curves.json`, `OUT/curves.png` and
`OUT/table.md`, a Markdown table of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from arborl.track.jsonl import read_metrics
from arborl.trainer.evaluation import wilson

ROOT = Path(__file__).parents[1]
KILL_GRACE_SECONDS = 60.0
"""Seconds between SIGTERM and SIGKILL, for the last checkpoint."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One training run."""

    recipe: str
    seed: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.recipe.replace('/', '-')}-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def file(self) -> Path:
        """Configuration file of the recipe."""
        path = ROOT / "recipes" / self.recipe
        return path / "run.yaml" if path.is_dir() else path.with_suffix(".yaml")

    def command(self, settings: Sequence[str]) -> list[str]:
        """The command that starts the run, or resumes it if its folder exists."""
        base = [sys.executable, "-m", "arborl", "train"]
        if (self.folder / "config.yaml").exists():
            return [*base, "--resume", "latest", f"output_dir={self.folder}", *settings]
        return [*base, str(self.file), f"seed={self.seed}", f"output_dir={self.folder}", *settings]


# ------------------------------------------------------------------------------------------------ training


def train(job: Job, settings: Sequence[str], deadline: float) -> Row:
    """Run one job until it finishes or the deadline passes; returns exit code and seconds."""
    left = deadline - time.monotonic()
    if left <= 0:
        return {"exit": None}
    job.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (job.out / f"{job.name}.log").open("a") as log:
        process = subprocess.Popen(job.command(settings), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        timer = threading.Timer(min(left, threading.TIMEOUT_MAX), process.send_signal, [signal.SIGTERM])
        timer.start()
        try:
            process.wait(None if left > threading.TIMEOUT_MAX else left + KILL_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            timer.cancel()
    return {"exit": process.returncode, "process_s": round(time.monotonic() - began, 1)}


# ------------------------------------------------------------------------------------------------ results


def collect_results(job: Job) -> Row:
    """Results of a run, read from its run folder."""
    rows = list(read_metrics(job.folder / "metrics.jsonl")) if (job.folder / "metrics.jsonl").exists() else []
    if not rows:
        return {"recipe": job.recipe, "seed": job.seed, "error": "the run wrote no metrics"}
    evaluations = [row for row in rows if "evaluation/success" in row]
    last_imitation_step = max(
        (row["step"] for row in rows if "sft/loss" in row and "reward/mean" not in row), default=0
    )
    after_imitation = next(
        (row for row in evaluations if last_imitation_step and row["step"] == last_imitation_step), None
    )
    summary = job.folder / "summary.json"
    return {
        "recipe": job.recipe,
        "seed": job.seed,
        "steps": rows[-1]["step"],
        "imitation_steps": last_imitation_step,
        "ended": summary.exists(),
        "device": json.loads(summary.read_text())["execution"]["device"] if summary.exists() else None,
        "train_s": round(sum(row.get("time/step", 0.0) for row in rows), 1),
        "imitation_s": round(sum(row.get("time/step", 0.0) for row in rows if row["step"] <= last_imitation_step), 1),
        "sampled_tokens": int(sum(row.get("engine/sampled", 0.0) for row in rows)),
        "episodes": int(sum(row.get("episode/count", 0.0) for row in rows if "reward/mean" in row)),
        "held_out": {
            "before": held_out(job, evaluations[0]) if evaluations and evaluations[0]["step"] == 0 else None,
            "after_imitation": held_out(job, after_imitation) if after_imitation else None,
            "after": held_out(job, evaluations[-1]) if evaluations else None,
        },
    }


def held_out(job: Job, row: Mapping[str, float]) -> Row:
    """Success rates on held-out tasks at one step with 95 % intervals, by source, and the share that used a tool."""
    names = [name.removeprefix("evaluation/") for name in row if name.startswith("evaluation/")]
    found: Row = {"step": int(row["step"]), "tasks": int(row["evaluation/tasks"])}
    for name in names:
        metric, slash, source = name.partition("/")
        if metric in ("success", "greedy_success"):
            ends = [row.get(f"evaluation/{metric}_{end}{slash}{source}") for end in ("low", "high")]
            found[name] = [None if value is None else round(value, 4) for value in (row[f"evaluation/{name}"], *ends)]
    used = tool_use(job.folder / "episodes" / "evaluation" / f"step-{found['step']:06d}.jsonl")
    return found | ({"tool_used": used} if used else {})


def tool_use(file: Path) -> list[float] | None:
    """Share of held-out episodes with tools that called one, and its 95 % interval; None without tools."""
    if not file.exists():
        return None
    with file.open(encoding="utf-8") as lines:
        metrics = [json.loads(line)["metrics"] for line in lines]
    used = [one.get("tool/used", 0.0) for one in metrics if one.get("tool/offered")]
    return [round(value, 4) for value in (fmean(used), *wilson(fmean(used), len(used)))] if used else None


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with one row for each run: held-out success, training time, sampled tokens."""
    lines = [
        "| recipe, seed | before | after imitation | after rewards | greedy | time | sampled tokens | device |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, found = f"{row['recipe']}, {row['seed']}", row.get("held_out")
        if found is None:
            lines.append(f"| {name} | {row['error']} |||||||")
            continue
        before, imitated, after = (found[when] or {} for when in ("before", "after_imitation", "after"))
        cells = [_share(before), _share(imitated), _share(after, bounds=True), _share(after, "greedy_success")]
        if not row["ended"]:
            cells[2] += f" (stopped at step {row['steps']})"
        cells += [f"{row['train_s']:.0f} s", f"{row['sampled_tokens'] / 1e6:.2g} M", row["device"] or ""]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


def _share(found: Row, name: str = "success", bounds: bool = False) -> str:
    """A success rate, with its interval if requested; a dash where it was not measured."""
    value, low, high = found.get(name) or (None, None, None)
    if value is None:
        return "–"
    return f"**{value:.2f}** [{low:.2f}, {high:.2f}]" if bounds and low is not None else f"{value:.2f}"


def curve(job: Job) -> dict[str, list[list[float]]]:
    """Success rates of training episodes and held-out tasks by step."""
    rows = list(read_metrics(job.folder / "metrics.jsonl"))
    names = {
        "training": "episode/success", "held_out": "evaluation/success", "held_out_greedy": "evaluation/greedy_success"
    }  # fmt: skip
    return {
        short: [[row["step"], round(row[name], 4)] for row in rows if row.get(name) is not None]
        for short, name in names.items()
    }


def plot_curves(curves: Mapping[str, Mapping[str, dict[str, list[list[float]]]]], out: Path) -> None:
    """Plot one figure per recipe: success rates of each seed on held-out tasks and, lighter, in training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_columns = min(len(curves), 3)
    num_rows = -(-len(curves) // num_columns)
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=(5 * num_columns, 3.6 * num_rows),
                                   squeeze=False, layout="constrained")  # fmt: skip
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (recipe, seeds) in zip(axes.flat, curves.items(), strict=False):
        for number, (seed, lines) in enumerate(seeds.items()):
            colour = f"C{number}"
            for name, style in (("training", {"alpha": 0.3, "lw": 0.8}), ("held_out", {"marker": "o", "ms": 3})):
                if lines[name]:
                    label = f"seed {seed}" if name == "held_out" else None
                    axis.plot(*zip(*lines[name], strict=True), color=colour, label=label, **style)
        axis.set(title=recipe, xlabel="step", ylabel="success", ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="folders of recipes/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--out", type=Path, default=Path("runs/real-model"))
    parser.add_argument("--minutes", type=float, help="time limit; later runs are not started")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings of all runs")
    parser.add_argument("--collect", action="store_true", help="train nothing, only read existing run folders")
    args = parser.parse_args()
    out = args.out.resolve()
    jobs = [Job(recipe, seed, out) for recipe in args.recipes for seed in args.seeds]
    if missing := [str(job.file) for job in jobs if not job.file.exists()]:
        parser.error(f"no such recipe: {missing[0]}")
    deadline = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes

    def run_job(job: Job) -> Row:
        ended = {} if args.collect else train(job, args.set, deadline)
        row = collect_results(job) | ended
        sys.stdout.write(json.dumps(row) + "\n")  # one write: runs end in several threads
        return row

    with ThreadPoolExecutor(args.parallel) as pool:
        rows = list(pool.map(run_job, jobs))
    done = [job for job, row in zip(jobs, rows, strict=True) if "error" not in row]
    curves: dict[str, dict[str, Any]] = {}
    for job in done:
        curves.setdefault(job.recipe, {})[str(job.seed)] = curve(job)
    if curves:
        (out / "curves.json").write_text(json.dumps({"runs": rows, "curves": curves}) + "\n")
        plot_curves(curves, out / "curves.png")
        (out / "table.md").write_text(table(rows))
    return int(any("error" in row or row.get("exit") not in (0, 143, -signal.SIGTERM, None) for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
