"""Learning runs beside one another: one process each, on cores of its own, alike but for what is compared.

    python benchmarks/learning.py algorithms --out runs/learning --workers 2
    python benchmarks/learning.py sokoban shop --workers 1 --threads 2 --json

A suite is a row of `SUITES`. Prints a line for each run with held-out success before and after; `OUT/SUITE` holds the
runs' folders, and `curves.png` all their curves.
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
READING = "agent.args.toolset=[searchEngine,readChunk,finish]"


@dataclass(frozen=True, slots=True)
class Suite:
    """Runs that belong in one picture: a recipe (the demo where there is none), and what each changes of it."""

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
            "no management": ("agent.args.policy=none", READING),
            "window": ("agent.args.policy=window", "agent.args.window=4", READING),
            "summaries": ("agent.args.policy=summary", READING),
            "summaries masked": ("agent.args.policy=summary", "agent.args.train_summaries=false", READING),
        },
    ),
    "mixed": Suite("Three agents in one run", "mixed", {"mixed": ()}),
}
QUIET = ("model.device=cpu", "track.gifs=0", "track.tensorboard=false")


def train(suite: str, name: str, out: Path, extra: Sequence[str], cores: SimpleQueue[list[int]]) -> dict[str, Any]:
    """One run in a process of its own, on cores that nobody else has."""
    chosen, folder, own = SUITES[suite], out / suite / name.replace(" ", "-"), cores.get()
    recipe = [str(ROOT / "recipes" / chosen.recipe / "run.yaml")] if chosen.recipe else []
    given = [*chosen.runs[name], *QUIET, f"threads={len(own)}", f"output_dir={folder}", *extra]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "arborl", "train", *recipe, *given], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(len(own))}, preexec_fn=lambda: os.sched_setaffinity(0, own),
        )  # fmt: skip
    finally:
        cores.put(own)
    row = {"suite": suite, "run": name, "seconds": round(time.perf_counter() - began, 1)}
    if done.returncode:
        return row | {"error": (done.stderr or done.stdout).strip().splitlines()[-5:]}
    return row | {"summary": json.loads((folder / "summary.json").read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--only", nargs="*", help="of the runs, only these")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--workers", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="cores a run has")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings for all runs")
    parser.add_argument("--json", action="store_true", help="one JSON line a run, nothing else")
    args = parser.parse_args()
    cores: SimpleQueue[list[int]] = SimpleQueue()
    mine = sorted(os.sched_getaffinity(0))
    for worker in range(args.workers):
        cores.put([mine[(worker * args.threads + i) % len(mine)] for i in range(args.threads)])
    asked = [
        (suite, name) for suite in args.suites for name in SUITES[suite].runs if not args.only or name in args.only
    ]

    def one(job: tuple[str, str]) -> dict[str, Any]:
        row = train(*job, args.out.resolve(), args.set, cores) | {"machine": platform.machine()}
        print(json.dumps(row) if args.json else row, flush=True)
        return row

    with ThreadPoolExecutor(args.workers) as pool:
        rows = list(pool.map(one, asked))
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
