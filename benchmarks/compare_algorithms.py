"""Compare algorithms over several environments and seeds, with the statistics of rliable.

    python benchmarks/compare_algorithms.py algorithms --workers 16 --out runs/compare
    python benchmarks/compare_algorithms.py repeated-states --workers 16 --out runs/compare --time-limit 240
    python benchmarks/compare_algorithms.py algorithms --set trainer.steps=40 sokoban:rollout.tasks_per_step=16
    python benchmarks/compare_algorithms.py --from runs/compare/algorithms/results.json

A suite is an entry of `SUITES`. A run uses one CPU core; `--workers` runs are trained at the same time, seed by seed,
the longest first, so that an interrupted comparison has the same number of runs of each algorithm. REPORT (default:
`OUT/SUITE`) gets `results.json` (one row per run, written after each run), `tables.md` and `compare-SUITE.png`. Repeat
the command to continue: runs in `results.json` and finished run folders are not trained again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison_report import Comparison, Row, plot_comparison, tables
from learning import COMMON_SETTINGS, ROOT, Job, locked, run_jobs

import arborl.seedling
from arborl.config.algorithm_config import PRESETS
from arborl.track.folder_files import replace_file
from arborl.track.jsonl import read_metrics

SETTINGS = (
    *COMMON_SETTINGS, "model=seedling", "evaluation.tasks=200", "evaluation.greedy=false", "track.episodes=false",
    "track.terms=0", "track.timeline=0", "trainer.save_every=1000000", "trainer.keep=1",
)  # fmt: skip
"""Settings of all runs: what is not needed for the comparison is not written."""
STEP_AGENT = ("agent=step", "agent.args.history_length=0", "rollout.tasks_per_step=4", "rollout.group_size=16")
"""The prompt is the current state only, so equal states have equal prompts; few tasks with many episodes each."""
SOKOBAN = ("env=sokoban", "env.args.preset=6x6", "sampling.max_tokens=12", "sampling.max_context=768")
"""The environment of recipes/sokoban, without its settings of the algorithm."""
SLOWER = {"ppo": 1.4}
"""Duration relative to `grpo`."""
DATA = ROOT / "recipes/calculator/data/arithmetic.json"
Key = tuple[str, str, int]
"""Environment, algorithm, seed."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A task: a recipe (the demo if empty) with settings."""

    title: str
    recipe: str
    settings: tuple[str, ...]
    cost: float
    """Relative duration of a run."""


@dataclass(frozen=True, slots=True)
class ComparisonSuite:
    """Environments and algorithms that are compared; the first algorithm is the baseline."""

    title: str
    environments: dict[str, Environment]
    algorithms: tuple[str, ...]
    settings: tuple[str, ...] = ()


SUITES = {
    "algorithms": ComparisonSuite(
        "Six algorithms with seedling, 95 % intervals",
        {
            "frozen_lake": Environment("FrozenLake", "", ("trainer.steps=20", "evaluation.every=10"), 2),
            "sokoban": Environment(
                "Sokoban", "", (*SOKOBAN, "trainer.steps=16", "evaluation.every=8", "rollout.tasks_per_step=8"), 3
            ),
            "calculator": Environment("Calculator", "calculator", ("trainer.steps=30", "evaluation.every=15"), 1),
        },
        ("grpo", "rloo", "reinforce_plus_plus", "ppo", "gspo", "gigpo"),
    ),
    "repeated-states": ComparisonSuite(
        "GiGPO and GRPO where states repeat, 95 % intervals",
        {
            "lake_6x6": Environment(
                "FrozenLake 6×6", "", ("env.args.size=6", "env.args.max_steps=20", "trainer.steps=30"), 3
            ),
            "lake_slippery": Environment(
                "FrozenLake, slippery", "", ("env.args.slippery=true", "env.args.max_steps=20", "trainer.steps=40"), 2
            ),
            "sokoban_sparse": Environment(
                "Sokoban, sparse",
                "",
                (*SOKOBAN, "env.args.step_reward=0", "env.args.box_reward=0", "env.args.done_reward=1",
                 "env.args.format_penalty=-0.01", "env.args.max_steps=20", "trainer.steps=20"),
                4,
            ),
            "rooms": Environment(
                "Rooms",
                "rooms",
                ("env.args.rooms=8", "env.args.doors=2", "env.args.max_steps=30", "trainer.steps=16"),
                4,
            ),
        },
        ("grpo", "gigpo"),
        (*STEP_AGENT, "algorithm.std=none", "evaluation.tasks=100", "evaluation.every=0"),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ runs


def make_jobs(suite_name: str, keys: Iterable[Key], out: Path, extra: Sequence[str]) -> dict[Key, Job]:
    """The runs in the order in which they start: seed by seed, the longest first."""
    suite, weights = SUITES[suite_name], weights_version()

    def duration(key: Key) -> float:
        return suite.environments[key[0]].cost * SLOWER.get(key[1], 1.0)

    jobs = {}
    for key in sorted(keys, key=lambda key: (key[2], -duration(key))):
        name, algorithm, seed = key
        environment = suite.environments[name]
        settings = (*SETTINGS, *environment.settings, *suite.settings, *settings_for(name, extra))
        folder = out / name / f"{algorithm}-{seed}"
        settings = (*own_settings(algorithm, seed), *settings)
        jobs[key] = Job(folder, environment.recipe, settings, (f"weights={weights}",))
    return jobs


def own_settings(algorithm: str, seed: int) -> tuple[str, ...]:
    """The settings in which the runs of an environment differ."""
    return f"algorithm.name={algorithm}", f"seed={seed}"


def shared_settings(key: Key, job: Job) -> list[str]:
    """What all runs of an environment have in common: recipe, settings, model."""
    return [setting for setting in job.recorded() if setting not in own_settings(*key[1:])]


def settings_for(environment: str, extra: Sequence[str]) -> list[str]:
    """The settings of `--set` for an environment: `a.b=c`, and `ENVIRONMENT:a.b=c` without the prefix."""
    found = []
    for setting in extra:
        name, colon, rest = setting.partition(":")
        is_prefixed = bool(colon) and "=" not in name
        if not is_prefixed or name == environment:
            found.append(rest if is_prefixed else setting)
    return found


def weights_version() -> str:
    """Hash of the embedded model: runs with another model are not comparable."""
    file = Path(arborl.seedling.__file__).parent / "weights" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def make_data() -> None:
    """Generate the problems of the calculator recipe unless they exist."""
    if not DATA.exists():
        command = [sys.executable, "-m", "arborl", "data", "make", "arithmetic", "--out", str(DATA.parent)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def make_row(key: Key, job: Job, ended: Mapping[str, Any]) -> Row:
    """The row of a run in `results.json`; of a failed run with `error`."""
    environment, algorithm, seed = key
    settings = shared_settings(key, job)
    row: Row = {"environment": environment, "algorithm": algorithm, "seed": seed, "settings": settings}
    if "error" in ended:
        return row | {"error": ended["error"]}
    metrics = list(read_metrics(job.folder / "metrics.jsonl"))
    training = [one for one in metrics if one.get("episode/success") is not None]
    summary = ended["summary"]
    if not training or summary["after"].get("success") is None:
        return row | {"error": [f"{job.folder}: success was not measured"]}
    return row | {
        "before": summary["before"].get("success"),
        "after": summary["after"]["success"],
        "area": fmean(one["episode/success"] for one in training),
        "steps": summary["steps"],
        "tasks": summary["after"]["tasks"],
        "sampled_tokens": int(sum(one.get("engine/sampled") or 0 for one in metrics)),
        "train_seconds": summary["train_seconds"],
        "failed_episodes": int(sum(one.get("episode/failed") or 0 for one in metrics)),
        "shared_states": mean_of(training, "group/shared_states"),
        "zero_variance": mean_of(training, "group/zero_variance"),
        "turns": mean_of(training, "episode/turns"),
        "training": [round(one["episode/success"], 4) for one in training],
        "evaluations": [[one["step"], one["evaluation/success"]] for one in metrics if "evaluation/success" in one],
        "machine": machine(),
    }


def mean_of(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [one[name] for one in metrics if one.get(name) is not None]
    return fmean(values) if values else None


@cache
def machine() -> dict[str, str]:
    """Versions and hardware of the measurement."""
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = git.stdout.strip()
    except FileNotFoundError:
        commit = ""
    return {
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
    }


# ------------------------------------------------------------------------------------------------ results


def read_results(files: Sequence[Path]) -> tuple[str, dict[Key, Row]]:
    """Suite and rows of files of results; of equal runs the last one that succeeded counts."""
    suites, rows = set(), {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            suites.add(content["suite"])
            for row in content["rows"]:
                key = (row["environment"], row["algorithm"], row["seed"])
                if "error" not in row or key not in rows:
                    rows[key] = row
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"{file}: no results of this benchmark ({type(error).__name__}: {error})")
    if len(suites) != 1 or not suites <= SUITES.keys():
        sys.exit(f"the files have results of the suites {', '.join(sorted(map(str, suites)))}; give files of one suite")
    return suites.pop(), rows


def check_settings(rows: Iterable[Row], jobs: Mapping[Key, Job] | None = None) -> None:
    """Exit with a message if runs of one environment have different settings: they are not comparable. Failed runs are
    not compared."""
    given = [(row["environment"], row["settings"]) for row in rows if "error" not in row]
    given += [(key[0], shared_settings(key, job)) for key, job in (jobs or {}).items()]
    known: dict[str, list[str]] = {}
    for environment, settings in given:
        first = known.setdefault(environment, settings)
        if settings != first:
            differing = ", ".join(sorted(set(first) ^ set(settings))) or "their order"
            sys.exit(
                f"{environment}: runs with different settings are not comparable: {differing}. Write another --out and "
                "--report."
            )


def write_results(suite: str, rows: Iterable[Row], report: Path) -> None:
    content = {"suite": suite, "rows": list(rows)}
    replace_file(report / "results.json", (json.dumps(content, indent=1) + "\n").encode("utf-8"))


def write_report(suite_name: str, rows: Iterable[Row], report: Path) -> int:
    """Print and write tables and figure; the exit code is 1 if runs failed or nothing can be compared."""
    rows = list(rows)
    failed, done = [row for row in rows if "error" in row], [row for row in rows if "error" not in row]
    for row in failed:
        print(f"failed, not counted: {row['environment']} {row['algorithm']} {row['seed']}: {row['error'][-1]}")
    if not done:
        print("No run has finished: there is nothing to compare.")
        return 1
    suite = SUITES[suite_name]
    names = [name for name in suite.environments if any(row["environment"] == name for row in done)]
    trained = [row["algorithm"] for row in done]
    algorithms = tuple(dict.fromkeys([*(name for name in suite.algorithms if name in trained), *sorted(trained)]))
    comparison = Comparison(
        suite.title, {name: suite.environments[name].title for name in names}, algorithms, suite.algorithms[0], done
    )
    results = {name: comparison.result(name) for name in algorithms}
    text = tables(comparison, results)
    replace_file(report / "tables.md", text.encode("utf-8"))
    figure = plot_comparison(comparison, results, report / f"compare-{suite_name}.png")
    machines = sorted({", ".join(f"{key} {value}" for key, value in row["machine"].items()) for row in done})
    print(text, *machines, f"Figure: {figure}", sep="\n")
    return int(bool(failed))


def run_suite(args: argparse.Namespace) -> int:
    """Train the runs that are missing, and report all."""
    suite_name, out = args.suite, (args.out / args.suite).resolve()
    report = out if args.report is None else args.report
    report.mkdir(parents=True, exist_ok=True)
    suite = SUITES[suite_name]
    keys = [(name, algorithm, seed) for name in args.environments or suite.environments
            for algorithm in args.algorithms or suite.algorithms for seed in dict.fromkeys(args.seeds)]  # fmt: skip
    with locked(out):
        rows: dict[Key, Row] = {}
        if (report / "results.json").exists():
            known_suite, rows = read_results([report / "results.json"])
            if known_suite != suite_name:
                sys.exit(f"{report / 'results.json'} has results of the suite {known_suite}. Write another --report.")
        jobs = make_jobs(suite_name, keys, out, args.set)
        check_settings(rows.values(), jobs)
        missing = {job: key for key, job in jobs.items() if "error" in rows.get(key, {"error": []})}
        if any(job.recipe == "calculator" for job in missing):
            make_data()

        def add(job: Job, ended: Mapping[str, Any]) -> None:
            key = missing[job]
            if "skipped" in ended:
                return
            rows[key] = make_row(key, job, ended)
            write_results(suite_name, rows.values(), report)
            outcome = rows[key].get("error") or f"{rows[key]['before']} -> {rows[key]['after']}"
            print(f"{len(rows)} of {len(jobs.keys() | rows.keys())}", *key, outcome, f"{ended.get('seconds', 0)} s",
                  flush=True)  # fmt: skip

        ended = run_jobs(list(missing), args.workers, time_limit=args.time_limit, on_end=add)
    if skipped := sum("skipped" in one for one in ended):
        print(f"{skipped} runs did not start within the time limit. Repeat the command to train them.")
    return write_report(suite_name, rows.values(), report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=list(SUITES))
    parser.add_argument("--environments", nargs="+", metavar="NAME", help="default: all of the suite")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="default: all of the suite")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="number of concurrent runs")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="run folders")
    parser.add_argument("--report", type=Path, help="folder of results, tables and figure; default: OUT/SUITE")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="after this time no further run starts")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c",
                        help="settings of all runs, or of one environment: ENVIRONMENT:a.b=c")  # fmt: skip
    parser.add_argument("--from", dest="files", nargs="+", type=Path, metavar="results.json",
                        help="train nothing; report the runs of these files")  # fmt: skip
    args = parser.parse_args()
    if (args.suite is None) == (args.files is None):
        parser.error("give a suite, or --from with files of results")
    if args.workers < 1 or min(args.seeds) < 0:
        parser.error("--workers must be at least 1, seeds at least 0")
    if args.suite is not None:
        suite = SUITES[args.suite]
        for option, given, known in (("--environments", args.environments, suite.environments),
                                     ("--algorithms", args.algorithms, PRESETS)):  # fmt: skip
            if unknown := [name for name in given or () if name not in known]:
                parser.error(f"{option}: unknown {', '.join(unknown)}; give some of {', '.join(known)}")
        check_extra(parser, args.set, suite)
    return args


def check_extra(parser: argparse.ArgumentParser, extra: Sequence[str], suite: ComparisonSuite) -> None:
    """Refuse settings that would make all runs the same, and settings of unknown environments."""
    for setting in extra:
        name, colon, rest = setting.partition(":")
        is_prefixed = bool(colon) and "=" not in name
        if is_prefixed and name not in suite.environments:
            parser.error(f"--set {setting}: unknown environment; give one of {', '.join(suite.environments)}")
        key = (rest if is_prefixed else setting).partition("=")[0]
        if key in ("seed", "algorithm", "algorithm.name", "output_dir", "threads"):
            parser.error(f"--set {setting}: runs differ in it. Write --seeds, --algorithms or --out.")


def main() -> int:
    args = parse_arguments()
    if args.files is None:
        try:
            return run_suite(args)
        except KeyboardInterrupt:
            print("Interrupted. Repeat the command to continue.")
            return 130
    suite, rows = read_results(args.files)
    check_settings(rows.values())
    report = args.files[0].parent if args.report is None else args.report
    report.mkdir(parents=True, exist_ok=True)
    return write_report(suite, rows.values(), report)


if __name__ == "__main__":
    sys.exit(main())
