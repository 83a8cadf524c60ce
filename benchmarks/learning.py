"""Training runs that are compared with each other: one process per run, each on its own CPU cores.

    python benchmarks/learning.py algorithms --out runs/learning --workers 2
    python benchmarks/learning.py sokoban shop --workers 1 --threads 2 --json

A suite is an entry of `SUITES`. Prints one line per run with the success rate on held-out tasks before and after
training; `OUT/SUITE` contains the run folders and `curves.png` with the curves of all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
ALGORITHMS = ("grpo", "rloo", "reinforce_plus_plus", "ppo", "gspo", "gigpo", "a2c", "dpo")
STD = {f"{std} {seed}": (f"algorithm.std={std}", f"seed={seed}") for std in ("none", "group") for seed in range(3)}
READING_TOOLS = "agent.args.toolset=[searchEngine,readChunk,finish]"


@dataclass(frozen=True, slots=True)
class Suite:
    """Runs of one figure: a recipe (the demo if empty) and the settings that each run overrides."""

    title: str
    recipe: str
    runs: dict[str, tuple[str, ...]]


SUITES = {
    "algorithms": Suite("FrozenLake with seedling", "", {name: (f"algorithm={name}",) for name in ALGORITHMS}),
    "std": Suite("FrozenLake, GRPO with and without the group's deviation", "", STD),
    "sokoban-std": Suite("Sokoban 6x6, GRPO with and without the group's deviation", "sokoban", STD),
    "calculator-std": Suite("Arithmetic, GRPO with and without the group's deviation", "calculator", STD),
    "calculator": Suite(
        "Arithmetic with seedling",
        "calculator",
        {"calculator": (), "no calculator": ("agent=chat", "tools=[]")},
    ),
    "sokoban": Suite(
        "Sokoban 6x6 with seedling",
        "sokoban",
        {f"{name} {seed}": (f"algorithm={name}", f"seed={seed}") for name in ("grpo", "gigpo") for seed in range(3)},
    ),
    "shop": Suite("Shop, 1,000 products, with seedling", "shop", {"grpo": ()}),
    "rooms": Suite("Rooms with seedling", "rooms", {"grpo": ()}),
    "statelm": Suite(
        "Documents of 4,000 to 16,000 tokens, a window of 1,024",
        "statelm",
        {
            "statelm": (),
            "no management": ("agent.args.policy=none", READING_TOOLS),
            "window": ("agent.args.policy=window", "agent.args.window=4", READING_TOOLS),
            "summaries": ("agent.args.policy=summary", READING_TOOLS),
            "summaries masked": ("agent.args.policy=summary", "agent.args.train_summaries=false", READING_TOOLS),
        },
    ),
    "mixed": Suite("Three agents in one run", "mixed", {"mixed": ()}),
}
COMMON_SETTINGS = ("model.device=cpu", "track.gifs=0", "track.tensorboard=false")


def train(suite: str, name: str, out: Path, extra: Sequence[str], core_pool: SimpleQueue[list[int]]) -> dict[str, Any]:
    """Train one run in its own process, on CPU cores that no other run uses."""
    selected, folder, cores = SUITES[suite], out / suite / name.replace(" ", "-"), core_pool.get()
    recipe = [str(ROOT / "recipes" / selected.recipe / "run.yaml")] if selected.recipe else []
    overrides = [*selected.runs[name], *COMMON_SETTINGS, f"threads={len(cores)}", f"output_dir={folder}", *extra]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "arborl", "train", *recipe, *overrides], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(len(cores))}, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    finally:
        core_pool.put(cores)
    row = {"suite": suite, "run": name, "seconds": round(time.perf_counter() - began, 1)}
    if done.returncode:
        return row | {"error": (done.stderr or done.stdout).strip().splitlines()[-5:]}
    return row | {"summary": json.loads((folder / "summary.json").read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--only", nargs="*", help="names of the runs to train; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--workers", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--threads", type=int, default=1, help="CPU cores per run")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings of all runs")
    parser.add_argument("--json", action="store_true", help="print only one JSON line per run")
    args = parser.parse_args()
    core_pool: SimpleQueue[list[int]] = SimpleQueue()
    available_cores = sorted(os.sched_getaffinity(0))
    for worker in range(args.workers):
        core_pool.put(
            [available_cores[(worker * args.threads + i) % len(available_cores)] for i in range(args.threads)]
        )
    jobs = [(suite, name) for suite in args.suites for name in SUITES[suite].runs if not args.only or name in args.only]

    def run_job(job: tuple[str, str]) -> dict[str, Any]:
        row = train(*job, args.out.resolve(), args.set, core_pool) | {"machine": platform.machine()}
        print(json.dumps(row) if args.json else row, flush=True)
        return row

    with ThreadPoolExecutor(args.workers) as pool:
        rows = list(pool.map(run_job, jobs))
    from arborl.view import plot_runs

    for suite in args.suites:
        folders = [
            args.out / suite / row["run"].replace(" ", "-")
            for row in rows
            if row["suite"] == suite and "error" not in row
        ]
        if folders:
            plot_runs(folders, args.out / suite / "curves.png", SUITES[suite].title)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
