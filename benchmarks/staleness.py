"""Learning with stale tokens: `rollout.max_lag` with and without importance correction, at equal tokens and equal time.

    python benchmarks/staleness.py --out runs/staleness --time-limit 330
    python benchmarks/staleness.py --out runs/staleness --max-lags 0 1 --corrections ratio --seeds 0 1 2 3 4 5 6 7
    python benchmarks/staleness.py --from runs/staleness/results.json --figure staleness.png

seedling learns FrozenLake (`--task lake`, the demo, with log-normal latency of each move) or to use a calculator
(`--task calculator`, recipes/calculator, with latency of each call). All runs have the same number of updates, groups
and episodes and a constant learning rate, so a point of a curve is also the end of a shorter run. Each run is a process
on CPU cores of its own. Runs are not interrupted by evaluations, during which tools and batches in progress would
continue: the weights of every N-th step are copied, and evaluated without latency after the last step.

`CORRECTIONS` are compared. An update is one optimizer step here. With A the advantage of a token, p its probability
under the current weights and r = p / (its probability when it was sampled), the gradient of a token's loss is:

    none        -A d log p: stale tokens are treated as if the current policy had sampled them
    ratio       -r A d log p, and 0 where PPO's clip applies (A > 0 and r > 1.2, A < 0 and r < 0.8); GRPO's default
    tis         -min(r, 2) A d log p (truncated importance sampling); costs one more forward pass
    decoupled   -r A d log p, and 0 where r > 5 (decoupled PPO)

A finished run has a `result.json` in `OUT/NAME` and is not repeated; an interrupted one starts again. After
`--time-limit` no further run starts. `OUT/results.json` has all finished runs of the folder, from which `--from` makes
the tables and the figure again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from learning import Job, locked, run_jobs
from pipeline import RECIPE, make_latency, make_slow_calculator
from staleness_report import Row, draw_curves, make_report, print_tables

from arborl.config.load_config import load
from arborl.data.generated.problems import problems
from arborl.envs.env import Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.trainer.evaluation import Evaluator
from arborl.trainer.trainer import Trainer
from arborl.training_run import train
from arborl.types import Message, Metrics

CORRECTIONS = {
    "none": ["algorithm.anchor=proximal"],
    "ratio": ["algorithm.anchor=rollout"],
    "tis": ["algorithm.importance_weights=tis"],
    "decoupled": ["algorithm=decoupled_ppo"],
}
"""Settings of each correction; the advantage is GRPO's in all of them."""
LATENCIES = {"lake": (0.03, 0.48), "calculator": (0.1, 1.6)}
"""Median and 99th percentile in seconds, of a move or of a call of the calculator."""
NUM_TRAINING_PROBLEMS = 2000
MEAN_METRICS = (
    "batch/lag_mean", "rollout/dropped_stale", "rollout/cancelled", "rollout/retried", "policy/clipped",
    "policy/logprob_diff", "policy/entropy", "importance_weight/mean", "importance_weight/clipped",
)  # fmt: skip
MAX_METRICS = ("batch/lag_max", "policy/logprob_diff_max")


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a folder have in common."""

    task: str
    steps: int
    groups: int
    size: int
    every: int
    tasks: int
    final_tasks: int
    attempts: int
    median: float
    p99: float
    level: int
    threads: int
    extra: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StalenessRun:
    """One combination of lag, correction and seed."""

    max_lag: int
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"lag-{self.max_lag}-{self.correction}-seed-{self.seed}"


# ------------------------------------------------------------------------------------------------ one run


class CurveRecorder:
    """Hook that records every step, copies the weights of some, and evaluates the copies after the last step."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.is_training = True
        self.began = 0.0
        self.rows: list[Metrics] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.success: dict[int, float] = {}
        self.final = math.nan

    async def after(self, trainer: Trainer, groups: Any, metrics: Metrics) -> None:
        now = time.perf_counter()
        self.began = self.began or now - trainer.train_seconds  # the first step has just ended
        num_finished = metrics["episode/count"] - metrics["episode/failed"]
        row = {name: metrics[name] for name in (*MEAN_METRICS, *MAX_METRICS) if name in metrics}
        row |= {"seconds": now - self.began, "cpu_seconds": time.process_time(), "sampled": metrics["engine/sampled"]}
        self.rows.append(row | {"tokens": metrics.get("episode/sampled", 0.0) * num_finished})
        if trainer.step == trainer.num_steps:
            await self._evaluate(trainer)
        elif trainer.step % self.settings.every == 0:
            self.weights[trainer.step] = copy_weights(trainer)

    async def _evaluate(self, trainer: Trainer) -> None:
        """Evaluate all copies, then the last weights with more tasks and attempts. No training episode is running."""
        self.is_training, last, settings = False, copy_weights(trainer), self.settings
        for step, weights in self.weights.items():
            self.success[step] = await measure_success(trainer, weights, settings.tasks, 1)
        self.success[trainer.step] = await measure_success(trainer, last, settings.tasks, 1)
        self.final = await measure_success(trainer, last, settings.final_tasks, settings.attempts)

    def curve(self, before: float) -> list[dict[str, float]]:
        """Step, tokens of the trained episodes so far, seconds without evaluations, held-out success."""
        points = [{"step": 0, "tokens": 0.0, "seconds": 0.0, "success": before}]
        for step, success in self.success.items():
            tokens = sum(row["tokens"] for row in self.rows[:step])
            seconds = self.rows[step - 1]["seconds"]
            points.append({"step": step, "tokens": tokens, "seconds": round(seconds, 3), "success": success})
        return points


def copy_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.learner.weights().items()}


async def measure_success(trainer: Trainer, weights: dict[str, torch.Tensor], tasks: int, attempts: int) -> float:
    """Held-out success of these weights, which become the learner's."""
    with torch.no_grad():
        for name, tensor in trainer.learner.weights().items():
            tensor.copy_(weights[name])
    await trainer.publish()
    config = trainer.config.evaluation.model_copy(update={"tasks": tasks, "group_size": attempts})
    evaluator = Evaluator(trainer.source, trainer.rollout, trainer.rewards, config, trainer.config.seed)
    return float((await evaluator.measure()).metrics["success"])


def make_slow_lake(wait: Callable[[], Awaitable[None]]) -> type[FrozenLake]:
    class SlowLake(FrozenLake):
        async def step(self, action: Message) -> Step:
            await wait()
            return await super().step(action)

    return SlowLake


def data_settings(out: Path) -> list[str]:
    return [f"data.path={out / 'training.json'}", f"data.evaluation_path={out / 'held-out.json'}"]


def train_one(job: StalenessRun, settings: Settings, folder: Path) -> Row:
    recorder = CurveRecorder(settings)
    wait = make_latency(settings.median, settings.p99, job.seed, lambda: recorder.is_training)
    is_lake = settings.task == "lake"
    slow = make_slow_lake(wait) if is_lake else make_slow_calculator(wait)
    overrides = [
        *(["env.name=slow"] if is_lake else ["tools=[slow]", *data_settings(folder.parent)]),
        f"rollout.max_lag={job.max_lag}", f"seed={job.seed}", f"trainer.steps={settings.steps}",
        f"rollout.tasks_per_step={settings.groups}", f"rollout.group_size={settings.size}",
        f"evaluation.tasks={settings.tasks}", "evaluation.greedy=false",
        f"rollout.concurrency={2 * (job.max_lag + 1) * settings.groups * settings.size}",
        "rollout.episode_seconds=600", "rollout.step_seconds=300", "learner.decay=none",
        "track.gifs=0", "track.tensorboard=false", "track.episodes=false", "track.timeline=0",
        f"trainer.save_every={settings.steps}", "model.device=cpu", f"threads={settings.threads}",
        f"output_dir={folder / 'run'}", *CORRECTIONS[job.correction], *settings.extra,
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        summary = train(load(None if is_lake else RECIPE, overrides), objects={"slow": slow}, hooks=[recorder]).summary
    rows, trained_tokens = recorder.rows, sum(row["tokens"] for row in recorder.rows)
    known = {name: [row[name] for row in rows if name in row] for name in (*MEAN_METRICS, *MAX_METRICS)}
    combined = {
        name: max(each) if name in MAX_METRICS else statistics.fmean(each) for name, each in known.items() if each
    }
    return {
        **asdict(job), "curve": recorder.curve(summary["before"]["success"]), "final": recorder.final,
        "seconds": rows[-1]["seconds"], "load": os.getloadavg()[0],
        "cpu_share": (rows[-1]["cpu_seconds"] - rows[0]["cpu_seconds"])
        / max(rows[-1]["seconds"] - rows[0]["seconds"], 1e-9),
        "sampled_per_trained": sum(row["sampled"] for row in rows) / max(trained_tokens, 1.0),
        "without_gradient": sum("policy/logprob_diff" not in row for row in rows), **combined,
    }  # fmt: skip


def run_job(text: str) -> None:
    """The process of one run: train, evaluate, write the result."""
    given = json.loads(text)
    job, settings, folder = StalenessRun(**given["job"]), Settings(**given["settings"]), Path(given["folder"])
    row = train_one(job, settings, folder)
    write_json(folder / "result.json", {"settings": asdict(settings), "row": row})


# ------------------------------------------------------------------------------------------------ all runs


def write_json(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value) + "\n")
    part.replace(path)


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("lag-*/result.json"))}


@dataclass(frozen=True, slots=True)
class StalenessJob(Job):
    """The process of one run; `result.json` in its folder is written at the end."""

    run: StalenessRun = StalenessRun(0, "none", 0)

    def command(self, threads: int) -> list[str]:
        given = {"job": asdict(self.run), "settings": json.loads(self.inputs[0]), "folder": str(self.folder)}
        return [sys.executable, __file__, "--run", json.dumps(given)]

    def summary(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


def run_all(runs: Sequence[StalenessRun], settings: Settings, out: Path, args: argparse.Namespace) -> list[str]:
    """Run each on cores of its own; returns the names of those without a result."""
    jobs = [StalenessJob(out / run.name, "", (), (json.dumps(asdict(settings)),), run) for run in runs]

    def report(job: Job, row: dict[str, Any]) -> None:
        state = "not started" if "skipped" in row else f"failed: {row['error']}" if "error" in row else "finished"
        print(f"{job.folder.name}: {state}", file=sys.stderr, flush=True)

    num_parallel = min(args.parallel, len(os.sched_getaffinity(0)) // settings.threads)
    rows = run_jobs(jobs, num_parallel, settings.threads, args.time_limit, report)
    return [job.folder.name for job, row in zip(jobs, rows, strict=True) if "summary" not in row]


def make_jobs(seeds: Sequence[int], max_lags: Sequence[int], corrections: Sequence[str]) -> list[StalenessRun]:
    """Each combination once, by seed, so that runs at the same time have all lags: cores may not be independent. The
    slowest are first: without lag, a step waits for all episodes."""
    combinations = (
        StalenessRun(lag, correction, seed) for seed in seeds for lag in sorted(max_lags) for correction in corrections
    )
    return list(dict.fromkeys(combinations))


def write_problems(settings: Settings, out: Path) -> None:
    rows = problems(NUM_TRAINING_PROBLEMS + settings.final_tasks, level=settings.level)
    write_json(out / "training.json", rows[:NUM_TRAINING_PROBLEMS])
    write_json(out / "held-out.json", rows[NUM_TRAINING_PROBLEMS:])


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Run what has no result yet and write `OUT/results.json`; returns the names of runs without a result."""
    names = ("task", "steps", "groups", "size", "every", "tasks", "final_tasks", "attempts", "median", "p99", "level")
    settings = Settings(**{name: getattr(args, name) for name in names}, threads=args.threads, extra=args.set)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        results = read_results(out)
        if other := [name for name, result in results.items() if result["settings"] != asdict(settings)]:
            parser.error(f"{out / other[0]} has a result with other settings. Write another --out.")
        if settings.task == "calculator":
            write_problems(settings, out)
        jobs = [job for job in make_jobs(args.seeds, args.max_lags, args.corrections) if job.name not in results]
        left = run_all(jobs, settings, out, args)
        versions = {
            "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)),
        }  # fmt: skip
        rows = [result["row"] for result in read_results(out).values()]
        found = {"settings": asdict(settings), "versions": versions, "parallel": args.parallel, "rows": rows}
        write_json(out / "results.json", found)
    return left


def parse_arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run, as JSON: how the benchmark starts its processes
    parser.add_argument("--from", dest="source", type=Path, help="Read this results.json and run nothing.")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"), help="Folder of the runs.")
    parser.add_argument("--max-lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--corrections", nargs="+", choices=list(CORRECTIONS), default=["none", "ratio", "tis"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=list(LATENCIES), default="lake")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=16, help="Tasks per step.")
    parser.add_argument("--size", type=int, default=8, help="Episodes per task.")
    parser.add_argument("--every", type=int, default=3, help="Steps between evaluated weights.")
    parser.add_argument("--tasks", type=int, default=200, help="Held-out tasks of each point of a curve.")
    parser.add_argument("--final-tasks", type=int, default=600, help="Held-out tasks of the last evaluation.")
    parser.add_argument("--attempts", type=int, default=2, help="Episodes per task of the last evaluation.")
    parser.add_argument("--median", type=float, help="Median latency in seconds; default: see LATENCIES.")
    parser.add_argument("--p99", type=float, help="99th percentile of the latency in seconds.")
    parser.add_argument("--level", type=int, choices=[1, 2, 3], default=1, help="Difficulty of calculator problems.")
    parser.add_argument("--parallel", type=int, default=len(os.sched_getaffinity(0)), help="Concurrent runs at most.")
    parser.add_argument("--threads", type=int, default=1, help="CPU cores per run.")
    parser.add_argument("--time-limit", type=float, help="Seconds after which no further run starts.")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="Settings of all runs.")
    parser.add_argument("--target", type=float, default=0.8, help="Success rate for the tokens and seconds to reach.")
    parser.add_argument("--figure", type=Path, help="Image file for the curves.")
    parser.add_argument("--shown", choices=list(CORRECTIONS), default="ratio", help="Correction in the figure.")
    parser.add_argument("--json", action="store_true", help="Print the report as one JSON line instead of tables.")
    args = parser.parse_args()
    args.median, args.p99 = (
        value if given is None else given
        for value, given in zip(LATENCIES[args.task], (args.median, args.p99), strict=True)
    )
    if args.median < 0 or args.p99 < args.median:
        parser.error("--median is at least 0 and at most --p99")
    numbers = (args.steps, args.groups, args.every, args.tasks, args.final_tasks, args.attempts, args.threads)
    if min(*numbers, args.parallel) < 1 or args.size < 2 or min(args.max_lags) < 0:
        parser.error("counts are at least 1, --size at least 2 and --max-lags at least 0")
    if args.tasks > args.final_tasks:
        parser.error("--tasks is at most --final-tasks, the number of held-out problems")
    if args.threads > len(os.sched_getaffinity(0)):
        parser.error("--threads is at most the number of cores")
    return args, parser


def main() -> int:
    args, parser = parse_arguments()
    if args.run:
        run_job(args.run)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the runs are ended too
    left = [] if args.source else measure(args, parser)
    try:
        found = json.loads((args.source or args.out / "results.json").read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--from: {error}")
    if not (isinstance(found, dict) and found.get("rows")):
        parser.error("no run is finished; the console output of a run is OUT/NAME.log")
    report = make_report(found["rows"], args.target)
    if args.json:
        print(json.dumps({"benchmark": "staleness", "unfinished": left, **report}))
    else:
        print_tables(report, args.target)
        if left:
            print(f"\nwithout a result: {', '.join(left)}; the same command continues")
    if args.figure:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        draw_curves(found["rows"], args.shown).savefig(args.figure, dpi=200)
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
