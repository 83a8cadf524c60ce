"""Does a search find a setting that is better, and not only luckier? `arborl tune`, then both settings on other seeds.

    python benchmarks/tune.py --jobs 8 --seeds 0 1 2 --out runs/tune

A study of the demo, shortened: learning rate and group size, every trial with as many episodes. The best of several
trials is lucky too, so the best setting and the configuration's are trained again, on seeds that the search never saw.
Prints one JSON line a study. The same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from arborl.tune.run_objective import RunObjective

PARAMS = ("learner.lr=log:1e-4:1e-2", "rollout.group_size=4,8,16")
METRIC = "success"
FRESH = 1000
"""Seeds from here on are for confirming."""


def run(arguments: list[str], threads: int) -> None:
    """A verb of ours as a process; what it says goes to standard error."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "arborl", *arguments], env=env, stdout=sys.stderr, check=True)


def confirm(name: str, settings: list[str], seed: int, out: Path, threads: int) -> float:
    """The setting's number on a seed of its own."""
    folder = out / f"{name}-{seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        quiet = ["evaluation.before=false", "evaluation.greedy=false", "track.gifs=0", "track.tensorboard=false"]
        run(["train", *settings, *quiet, f"seed={seed}", f"output_dir={folder}"], threads)
    return float(json.loads((folder / "summary.json").read_text())["after"][METRIC])


def study(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Search with one seed, confirm with others."""
    began, out = time.perf_counter(), args.out / f"seed-{seed}"
    base = ["model.device=cpu", f"trainer.steps={args.steps}", f"evaluation.tasks={args.tasks}", *args.set]
    asked = [word for param in PARAMS for word in ("--param", param)]
    options = [
        "--trials",
        str(args.trials),
        "--jobs",
        str(args.jobs),
        "--metric",
        METRIC,
        "--study",
        str(out / "study"),
    ]
    cores = len(os.sched_getaffinity(0))
    run(["tune", *options, *asked, *base, f"seed={seed}"], cores)
    found = json.loads((out / "study" / "summary.json").read_text())
    best = next(trial for trial in found["trials"] if trial["number"] == found["best_trial"])
    chosen = [] if best["default"] else RunObjective.of(None, base, METRIC).overrides(found["best_params"])
    seeds = [FRESH + 10 * seed + number for number in range(args.confirm)]
    jobs = [(name, extra, fresh) for name, extra in (("default", []), ("best", chosen)) for fresh in seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        threads = max(1, cores // min(args.jobs, len(jobs)))
        values = list(pool.map(lambda job: confirm(job[0], [*base, *job[1]], job[2], out, threads), jobs))
    states = [trial["state"] for trial in found["trials"]]
    return {
        "seed": seed,
        "searched": {"default": found["default_reward"], "best": found["best_reward"], "params": found["best_params"]},
        "confirmed": {name: values[at : at + len(seeds)] for name, at in (("default", 0), ("best", len(seeds)))},
        "means": {"default": fmean(values[: len(seeds)]), "best": fmean(values[len(seeds) :])},
        "seeds": seeds,
        "trials": {state: states.count(state) for state in dict.fromkeys(states)},
        "trial_seconds": sum(trial["seconds"] for trial in found["trials"]),
        "seconds": round(time.perf_counter() - began, 1),
        "setting": {"steps": args.steps, "tasks": args.tasks, "jobs": args.jobs, "settings": args.set},
        "machine": {"cores": cores, "processor": platform.processor() or platform.machine()},
        "versions": {name: version(name) for name in ("arborl", "torch", "optuna")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a study for each")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--steps", type=int, default=10, help="updates of a run")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--confirm", type=int, default=3, help="seeds on which both settings are trained again")
    parser.add_argument("--out", type=Path, default=Path("runs/tune"))
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings for all runs")
    args = parser.parse_args()
    for seed in args.seeds:
        print(json.dumps(study(seed, args)), flush=True)


if __name__ == "__main__":
    main()
