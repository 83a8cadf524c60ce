"""`arborl tune`, followed by a comparison of the best and the default settings on new seeds.

    python benchmarks/tune.py --jobs 8 --seeds 0 1 2 --out runs/tune

A study of the shortened demo over learning rate and group size; all trials have the same number of episodes. The score
of the best of several trials is biased upwards, so the best and the default settings are trained again with seeds that
the search did not use. Prints one JSON line per study. The same command continues an interrupted study.
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
FIRST_CONFIRMATION_SEED = 1000
"""First seed of the confirmation runs."""


def run_arborl(arguments: list[str], threads: int) -> None:
    """Run an `arborl` command in a process; its output goes to standard error."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "arborl", *arguments], env=env, stdout=sys.stderr, check=True)


def confirmation_score(name: str, settings: list[str], seed: int, out: Path, threads: int) -> float:
    """Train with these settings and this seed; returns the metric on held-out tasks."""
    folder = out / f"{name}-{seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # remains of a killed run
        common_settings = [
            "evaluation.before=false",
            "evaluation.greedy=false",
            "track.gifs=0",
            "track.tensorboard=false",
        ]
        run_arborl(["train", *settings, *common_settings, f"seed={seed}", f"output_dir={folder}"], threads)
    return float(json.loads((folder / "summary.json").read_text())["after"][METRIC])


def run_study(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Search with one seed and confirm with other seeds."""
    began, out = time.perf_counter(), args.out / f"seed-{seed}"
    base = ["model.device=cpu", f"trainer.steps={args.steps}", f"evaluation.tasks={args.tasks}", *args.set]
    param_options = [word for param in PARAMS for word in ("--param", param)]
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
    run_arborl(["tune", *options, *param_options, *base, f"seed={seed}"], cores)
    summary = json.loads((out / "study" / "summary.json").read_text())
    best = next(trial for trial in summary["trials"] if trial["number"] == summary["best_trial"])
    best_settings = [] if best["default"] else RunObjective.of(None, base, METRIC).overrides(summary["best_params"])
    seeds = [FIRST_CONFIRMATION_SEED + 10 * seed + number for number in range(args.confirm)]
    jobs = [(name, extra, new_seed) for name, extra in (("default", []), ("best", best_settings)) for new_seed in seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        threads = max(1, cores // min(args.jobs, len(jobs)))
        values = list(pool.map(lambda job: confirmation_score(job[0], [*base, *job[1]], job[2], out, threads), jobs))
    states = [trial["state"] for trial in summary["trials"]]
    return {
        "seed": seed,
        "searched": {
            "default": summary["default_reward"],
            "best": summary["best_reward"],
            "params": summary["best_params"],
        },
        "confirmed": {name: values[at : at + len(seeds)] for name, at in (("default", 0), ("best", len(seeds)))},
        "means": {"default": fmean(values[: len(seeds)]), "best": fmean(values[len(seeds) :])},
        "seeds": seeds,
        "trials": {state: states.count(state) for state in dict.fromkeys(states)},
        "trial_seconds": sum(trial["seconds"] for trial in summary["trials"]),
        "seconds": round(time.perf_counter() - began, 1),
        "setting": {"steps": args.steps, "tasks": args.tasks, "jobs": args.jobs, "settings": args.set},
        "machine": {"cores": cores, "processor": platform.processor() or platform.machine()},
        "versions": {name: version(name) for name in ("arborl", "torch", "optuna")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one study per seed")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--steps", type=int, default=10, help="updates per run")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--confirm", type=int, default=3, help="number of seeds of the confirmation runs")
    parser.add_argument("--out", type=Path, default=Path("runs/tune"))
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings of all runs")
    args = parser.parse_args()
    for seed in args.seeds:
        print(json.dumps(run_study(seed, args)), flush=True)


if __name__ == "__main__":
    main()
