"""Training runs that are compared with each other: one process per run, each on its own CPU cores.

    python benchmarks/learning.py algorithms --out runs/learning --workers 2
    python benchmarks/learning.py sokoban shop --workers 1 --threads 2 --json

A suite is an entry of `SUITES`. Prints one line per run with the success rate on held-out tasks before and after
training; `OUT/SUITE` contains the run folders and `curves.png` with the curves of all runs. A finished run is not
trained again; the folder of an unfinished one is removed and the run starts again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from filelock import FileLock, Timeout

from arborl.child_process import supervised_command

ROOT = Path(__file__).parents[1]
ALGORITHMS = ("grpo", "rloo", "reinforce_plus_plus", "ppo", "gspo", "gigpo", "a2c", "dpo")
SEEDS = {f"seed {seed}": (f"seed={seed}",) for seed in range(3)}
STD = {f"{std} {seed}": (f"algorithm.std={std}", f"seed={seed}") for std in ("none", "group") for seed in range(3)}
LAKE = ("rollout.tasks_per_step=32", "evaluation.tasks=200", "evaluation.every=20")
READING_TOOLS = "agent.args.toolset=[searchEngine,readChunk,finish]"


@dataclass(frozen=True, slots=True)
class Suite:
    """Runs of one figure: a recipe (the demo if empty) and the settings that each run overrides."""

    title: str
    recipe: str
    runs: dict[str, tuple[str, ...]]


def _seeds(*settings: str) -> dict[str, tuple[str, ...]]:
    return {name: (*seed, *settings) for name, seed in SEEDS.items()}


SUITES = {
    "algorithms": Suite("FrozenLake with seedling", "", {name: (f"algorithm={name}",) for name in ALGORITHMS}),
    "std": Suite("FrozenLake, GRPO with and without the group's deviation", "", STD),
    "sokoban-std": Suite("Sokoban 6x6, GRPO with and without the group's deviation", "sokoban", STD),
    "calculator-std": Suite("Arithmetic, GRPO with and without the group's deviation", "calculator", STD),
    "calculator": Suite(
        "Arithmetic with seedling",
        "calculator",
        {**SEEDS, "no calculator": ("agent=chat", "tools=[]")},
    ),
    "sokoban": Suite("Sokoban 6x6 with seedling", "sokoban", SEEDS),
    "shop": Suite("Shop, 1,000 products, with seedling", "shop", SEEDS),
    "lake": Suite("FrozenLake 4x4 with seedling", "", SEEDS),
    "large-lake": Suite(
        "FrozenLake 6x6 with seedling",
        "",
        _seeds(
            "env.args.size=6",
            "rollout.tasks_per_step=64",
            "algorithm.entropy_coef=0.01",
            "trainer.steps=250",
            "evaluation.tasks=200",
            "evaluation.every=50",
        ),
    ),
    "slippery-lake": Suite(
        "Slippery FrozenLake, 20 steps, with seedling",
        "",
        _seeds(*LAKE, "env.args.slippery=true", "env.args.max_steps=20", "trainer.steps=60"),
    ),
    "rooms": Suite("Rooms with seedling", "rooms", {"grpo": ()}),
    "statelm": Suite(
        "Documents of 4,000 to 16,000 tokens, a window of 1,024",
        "statelm",
        {
            **SEEDS,
            "no management": ("agent.args.policy=none", READING_TOOLS),
            "window": ("agent.args.policy=window", "agent.args.window=4", READING_TOOLS),
            "summaries": ("agent.args.policy=summary", READING_TOOLS),
            "summaries masked": ("agent.args.policy=summary", "agent.args.train_summaries=false", READING_TOOLS),
        },
    ),
    "mixed": Suite("Three agents in one run", "mixed", {"mixed": ()}),
}
COMMON_SETTINGS = ("model.device=cpu", "track.gifs=0", "track.tensorboard=false")
ERROR_LINES = 5
"""Last lines of the console output of a failed run that are reported."""


# ------------------------------------------------------------------------------------------------ runs in processes


@dataclass(frozen=True, slots=True)
class Job:
    """One training run. Beside its folder are `NAME.settings.json` and the console output, `NAME.log`."""

    folder: Path
    recipe: str
    """A folder of `recipes/`; empty for the demo."""
    settings: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    """What else the result depends on, such as the version of the model."""

    def command(self, threads: int) -> list[str]:
        recipe = [str(ROOT / "recipes" / self.recipe / "run.yaml")] if self.recipe else []
        more = [*self.settings, f"threads={threads}", f"output_dir={self.folder}"]
        return [sys.executable, "-m", "arborl", "train", *recipe, *more]

    @property
    def settings_file(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.settings.json"

    @property
    def log_file(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def summary(self) -> dict[str, Any] | None:
        """The summary of the finished run; None if it has not finished."""
        try:
            found = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it was being written
            return None
        return found if isinstance(found, dict) and not found.get("stopped") else None

    def recorded(self) -> list[str]:
        """What is written to the file of the settings."""
        return [self.recipe, *self.settings, *self.inputs]

    def has_other_settings(self) -> bool:
        """Whether the run folder was trained with other settings than those of the job."""
        if not self.folder.exists():
            return False
        try:
            return bool(json.loads(self.settings_file.read_text(encoding="utf-8")) != self.recorded())
        except (FileNotFoundError, ValueError):
            return True


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the folder: two benchmarks in one folder would remove each other's runs."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        sys.exit(f"{out} is in use by another benchmark. Wait for it, or write another --out.")


def train(job: Job, threads: int, running: set[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Train one run in its own process, unless it has finished. The process is in `running` while it runs, and ends
    with this one."""
    began = time.perf_counter()
    if job.has_other_settings():
        return {"error": [f"{job.folder} was trained with other settings. Write another --out."]}
    if (summary := job.summary()) is not None:
        return {"seconds": 0.0, "summary": summary}
    shutil.rmtree(job.folder, ignore_errors=True)  # a run that was killed
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    job.settings_file.write_text(json.dumps(job.recorded()) + "\n", encoding="utf-8")
    with job.log_file.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            supervised_command(job.command(threads), keep_stderr=True), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        running.add(process)
        code = process.wait()
        running.discard(process)
    row = {"seconds": round(time.perf_counter() - began, 1)}
    summary = job.summary()
    if code or summary is None:
        lines = job.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-ERROR_LINES:]
        return row | {"error": lines or [f"the process ended with code {code}"]}
    return row | {"summary": summary}


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    threads: int = 1,
    time_limit: float | None = None,
    on_end: Callable[[Job, dict[str, Any]], None] = lambda job, row: None,
) -> list[dict[str, Any]]:
    """Train the jobs in the given order, `workers` at a time, each on `threads` CPU cores of its own.

    After `time_limit` seconds no further run starts; the rows of those that did not start or were interrupted have
    `skipped`. `on_end` is called with each row, by one thread at a time.
    """
    deadline = float("inf") if time_limit is None else time.monotonic() + time_limit
    free_cores: SimpleQueue[list[int]] = SimpleQueue()
    available = sorted(os.sched_getaffinity(0))
    for worker in range(workers):
        free_cores.put([available[(worker * threads + i) % len(available)] for i in range(threads)])
    reporting, stopped = threading.Lock(), threading.Event()
    running: set[subprocess.Popen[bytes]] = set()

    def run_job(job: Job) -> dict[str, Any]:
        can_start = not stopped.is_set() and (time.monotonic() < deadline or job.summary() is not None)
        row = train(job, threads, running) if can_start else {"skipped": True}
        if stopped.is_set():  # it was ended
            row = {"skipped": True}
        with reporting:
            on_end(job, row)
        return row

    pool = ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, free_cores.get()))
    try:  # processes inherit the cores of the thread that starts them
        return list(pool.map(run_job, jobs))
    finally:  # after an interrupt the running processes are ended, with all that they started
        stopped.set()
        for process in list(running):
            process.terminate()
        pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------ suites


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
    out = args.out.resolve()
    names = {
        Job(
            out / suite / name.replace(" ", "-"), SUITES[suite].recipe,
            (*SUITES[suite].runs[name], *COMMON_SETTINGS, *args.set),
        ): (suite, name)
        for suite in args.suites
        for name in SUITES[suite].runs
        if not args.only or name in args.only
    }  # fmt: skip

    def report(job: Job, row: dict[str, Any]) -> None:
        suite, name = names[job]
        full = {"suite": suite, "run": name, **row, "machine": platform.machine()}
        print(json.dumps(full) if args.json else full, flush=True)

    with locked(out):
        rows = run_jobs(list(names), args.workers, args.threads, on_end=report)
    from arborl.view import plot_runs

    for suite in args.suites:
        folders = [
            job.folder for job, row in zip(names, rows, strict=True) if names[job][0] == suite and "error" not in row
        ]
        if folders:
            plot_runs(folders, out / suite / "curves.png", SUITES[suite].title)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
