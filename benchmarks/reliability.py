"""Runs with faults, runs that are killed, and long runs.

    python benchmarks/reliability.py faults --out runs/faults --seeds 0 1 2 --workers 3
    python benchmarks/reliability.py kills --out runs/kills --mode sync async ray
    python benchmarks/reliability.py memory --out runs/memory --minutes 60

All runs train seedling on a CPU with `RUN`: half FrozenLake, half sums with a calculator. `memory --run FILE` trains
another run.

`faults` compares runs in one process with runs on a private Ray cluster with two engines and the faults `FAULTS`.
Held-out success is measured after the run, without faults. Each injected fault is compared with what the run reports.

`kills` kills a run with SIGKILL at random moments (start, rollout, update, checkpoint), starts it again with
`--resume auto`, and compares it with a run that was not disturbed: weights and metrics of a synchronous run bit for
bit, the accounting of all. A run on Ray is compared with the same reference as the synchronous one.

`memory` samples memory, file descriptors and threads of a run and its child processes, and the time of its steps.
`cpu_seconds_per_step` is their processor time. `probe_ms` is the processor time of a fixed loop at the same moments: on
a shared machine the speed of a core changes, and a step that takes longer need not do more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
import yaml
from safetensors.torch import load_file

import arborl
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.training_run.entry_points import evaluate

RUN: dict[str, Any] = {
    "name": "reliability",
    "model": {"name": "seedling", "device": "cpu"},
    "data": {
        "sources": {
            "lake": {"env": "frozen_lake", "ratio": 0.5, "agent": "chat", "rewards": ["env"]},
            "calculator": {
                "rows": {
                    "name": "arborl.data.generated.problems:problems",
                    "args": {"count": 4000, "seed": 0, "level": 1},
                },
                "ratio": 0.5,
                "agent": {"name": "tool", "args": {"max_tool_rounds": 2}},
                "tools": ["calculator"],
                "rewards": ["equal"],
            },
        }
    },
    "sampling": {"max_tokens": 48, "max_context": 768},
    "rollout": {"tasks_per_step": 8, "group_size": 8},
    "algorithm": "grpo",
    "learner": {"lr": 2e-4},
    "threads": 1,
    "evaluation": {"tasks": 0},
    "track": {"timeline": 0, "gifs": 0, "tensorboard": False},
}
FAULTS: list[dict[str, Any]] = [
    {"part": "environment", "kind": "raise", "rate": 0.05},
    {"part": "environment", "kind": "hang", "rate": 0.02},
    {"part": "tool", "kind": "late", "rate": 0.02, "seconds": 3},
    {"part": "engine", "kind": "die", "at": {"step": 90}, "once": True},
    {"part": "disk", "name": "checkpoint", "kind": "full", "at": {"step": 100}, "once": True},
]
RAY = ("placement=ray", "placement.engines=2")
HANG_SECONDS = 4
"""`rollout.step_seconds` of the runs with faults."""
MODES = {
    "sync": ("deterministic=true",),
    "async": ("rollout.max_lag=1",),
    "ray": ("deterministic=true", *RAY),
}
NUM_EVALUATION_TASKS = 400
STEP_METRICS = ("engine/sampled", "learner/tokens", "system/gpu_memory_gib", "system/gpu_allocated_gib")
"""The work and the GPU memory of a step, shown by `memory`."""
USAGE = ("rss_mib", "descriptors", "threads")
"""Of the process and its children: the least and the most of each part of a run are shown."""


def describe_machine() -> str:
    chip = f"{os.cpu_count()} cores, {platform.machine()}"
    return (
        f"{chip}, Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, arborl {arborl.__version__}"
    )


def start(folder: Path, *words: str, file: Path | None = None) -> subprocess.Popen[bytes]:
    """`arborl train` of `file` (default: `RUN`) in a process group of its own; its output is appended to
    `FOLDER.log`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if file is None:
        file = folder.parent / "run.yaml"
        file.write_text(yaml.safe_dump(RUN), encoding="utf-8")
    command = [sys.executable, "-m", "arborl", "train", str(file), *words, f"output_dir={folder}"]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def step_rows(folder: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        return [row for row in read_metrics(folder / "metrics.jsonl") if "time/step" in row]
    return []


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------------------------------ faults


def run_faults(args: argparse.Namespace) -> dict[str, Any]:
    file = args.out / "faults.yaml"
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(FAULTS), encoding="utf-8")
    steps = [f"trainer.steps={args.steps}", "trainer.save_every=10"]
    jobs: list[tuple[str, int, list[str]]] = []
    for seed in args.seeds:
        faulty = ["--faults", str(file), *RAY, f"rollout.step_seconds={HANG_SECONDS}"]
        jobs.append(("faults", seed, [*steps, f"seed={seed}", *faulty]))
        jobs.append(("clean", seed, [*steps, f"seed={seed}"]))
    with ThreadPoolExecutor(args.workers) as pool:
        rows = list(pool.map(lambda job: _fault_run(args.out, *job), jobs))
    return {"rows": rows}


def _fault_run(out: Path, kind: str, seed: int, words: list[str]) -> dict[str, Any]:
    folder = out / f"{kind}-{seed}"
    if not (folder / "summary.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        code = start(folder, *words).wait()
        if code:
            return {"kind": kind, "seed": seed, "exit_code": code}
    after = evaluate(str(folder), [f"evaluation.tasks={NUM_EVALUATION_TASKS}", "~placement", "threads=1"])
    summary, rows = summary_of(folder), step_rows(folder)
    episodes = [e for path in EpisodeStore(folder / "episodes").paths() for e in EpisodeStore.read(path)]
    failures = Counter(f"{e.failure.where}: {e.failure.kind}" for e in episodes if e.failure is not None)
    row = {
        "kind": kind, "seed": seed, "exit_code": 0, "steps": summary["steps"],
        "success": {name: metrics["success"] for name, metrics in after.items()},
        "seconds_per_step": statistics.median(row["time/step"] for row in rows),
        "episodes": len(episodes), "failures": dict(failures), "faults": summary.get("faults", {}),
        "accounting": summary["accounting"], "lost_engines": sum(row.get("engine/lost", 0) for row in rows),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


# ------------------------------------------------------------------------------------------------ kills


def run_kills(args: argparse.Namespace) -> dict[str, Any]:
    rows = [_killed(args, mode) for mode in args.mode]
    return {"rows": rows}


def _killed(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    words = [f"trainer.steps={args.steps}", "trainer.save_every=3", "trainer.keep=2", "rollout.tasks_per_step=2"]
    reference = "sync" if mode == "ray" else mode
    whole = args.out / f"{reference}-whole"
    if not (whole / "summary.json").is_file():
        shutil.rmtree(whole, ignore_errors=True)
        if start(whole, *words, *MODES[reference]).wait():
            raise SystemExit(f"the undisturbed run failed: {whole.with_suffix('.log')}")
    cut, rng = args.out / f"{mode}-killed", random.Random(args.seed)
    shutil.rmtree(cut, ignore_errors=True)
    moments: list[str] = []
    while len(moments) < args.kills:
        left = (args.steps - len(step_rows(cut))) / (args.kills - len(moments) + 1)
        moments.append(_kill_once(cut, [*words, *MODES[mode]], rng, left))
    code = start(cut, *words, *MODES[mode], "--resume", "auto").wait()
    row = {"mode": mode, "exit_code": code, "kills": len(moments), "moments": moments} | _compare(cut, whole)
    print(json.dumps(row), flush=True)
    return row


def _kill_once(folder: Path, words: Sequence[str], rng: random.Random, steps: float) -> str:
    """Start or resume the run, kill it, and say where it was. Every fourth time it is killed during the start, else
    about `steps` steps later, at a random moment of a step."""
    before = len(step_rows(folder))
    process = start(folder, *words, "--resume", "auto")
    start_seconds = rng.uniform(0, 12)
    target, delay = before + rng.uniform(0, 1.8 * steps), rng.random()
    began = time.monotonic()
    is_early = rng.random() < 0.25
    while process.poll() is None:
        done = len(step_rows(folder))
        if is_early and time.monotonic() - began > start_seconds:
            break
        if not is_early and done >= target:
            time.sleep(delay * _step_seconds(folder))
            break
        time.sleep(0.05)
    writing = any((folder / "checkpoints").glob(".*tmp*"))
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = len(step_rows(folder))
    return (
        f"after {time.monotonic() - began:.1f} s, {done} steps{', while a checkpoint was written' if writing else ''}"
    )


def _step_seconds(folder: Path) -> float:
    rows = step_rows(folder)
    return float(rows[-1]["time/step"]) if rows else 1.0


def _compare(cut: Path, whole: Path) -> dict[str, Any]:
    ours, theirs = (_metrics(folder) for folder in (cut, whole))
    mine, other = (_weights(folder) for folder in (cut, whole))
    seen = Counter(
        (episode.id, episode.seed, step)
        for step, path in enumerate(EpisodeStore(cut / "episodes").paths())
        for episode in EpisodeStore.read(path)
    )
    places = Counter((name, seed) for name, seed, _ in seen)
    accounting = summary_of(cut)["accounting"]
    sums = accounting["trained"] + sum(accounting["dropped"].values()) + accounting.get("pending", 0)
    return {
        "weights_equal": mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine),
        "metrics_equal": ours == theirs,
        "different_metrics": sorted(
            {name for a, b in zip(ours, theirs, strict=True) for name in a | b if a.get(name) != b.get(name)}
        ),
        "episodes_in_two_steps": sum(count > 1 for count in places.values()),
        "accounting": accounting,
        "accounting_is_exact": sums == accounting["started"],
    }


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Without times and measurements of the machine."""
    return [
        {k: v for k, v in row.items() if not (k.startswith(("time/", "system/")) or "second" in k)}
        for row in step_rows(folder)
    ]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((folder / "checkpoints").glob("step-*/model/model.safetensors"))[-1])


# ------------------------------------------------------------------------------------------------ memory


def run_memory(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["trainer.steps=1000000", "trainer.save_every=50", "trainer.keep=2", f"threads={args.threads}", *args.set]
    process = start(folder, *words, file=args.run)
    root, began, samples = psutil.Process(process.pid), time.monotonic(), []
    try:
        while process.poll() is None and time.monotonic() - began < 60 * args.minutes:
            time.sleep(10)
            with suppress(psutil.Error):
                minutes = (time.monotonic() - began) / 60
                samples.append({"minutes": minutes, "probe_ms": _probe_ms()} | _usage(root))
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait(120)
    rows = step_rows(folder)
    ends = accumulate(row["time/step"] for row in rows)
    steps = [
        {"at": at, "seconds_per_step": row["time/step"]} | {name: row[name] for name in STEP_METRICS if name in row}
        for row, at in zip(rows, ends, strict=True)
    ]
    return {"exit_code": process.returncode, "samples": samples, "windows": _windows(samples, steps, args.minutes)}


def _probe_ms() -> float:
    began = time.process_time()
    sum(range(2_000_000))
    return 1e3 * (time.process_time() - began)


def _usage(root: psutil.Process) -> dict[str, float]:
    processes = [root, *root.children(recursive=True)]
    return {
        "rss_mib": sum(one.memory_info().rss for one in processes) / 2**20,
        "descriptors": sum(one.num_fds() for one in processes),
        "threads": sum(one.num_threads() for one in processes),
        "processes": len(processes),
        "cpu_seconds": sum(one.cpu_times().user + one.cpu_times().system for one in processes),
    }


def _windows(samples: Sequence[dict[str, float]], steps: Sequence[dict[str, float]], minutes: float) -> list[Any]:
    """Medians of six parts of the run. Steps are assigned by the sum of their durations, scaled to the whole run."""
    rows, scale = [], minutes / steps[-1]["at"] if steps else 0.0
    for number in range(6):
        low, high = number * minutes / 6, (number + 1) * minutes / 6
        inside = [one for one in samples if low <= one["minutes"] < high]
        done = [one for one in steps if low <= one["at"] * scale < high]
        if inside and done:
            used = inside[-1]["cpu_seconds"] - inside[0]["cpu_seconds"]
            span = inside[-1]["minutes"] - inside[0]["minutes"]
            during = sum(inside[0]["minutes"] <= one["at"] * scale < inside[-1]["minutes"] for one in done)
            row: dict[str, float] = {"until_minute": high, "steps": len(done)}
            if span and during:
                row["cpu_seconds_per_step"] = used / during
            for part in (inside, done):
                row |= {name: statistics.median(one[name] for one in part) for name in part[0] if name != "cpu_seconds"}
            least, most = (
                {f"{name}_{kind.__name__}": kind(one[name] for one in inside) for name in USAGE} for kind in (min, max)
            )
            rows.append(row | least | most)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "kills", "memory"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of WHAT.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs of `faults`")
    parser.add_argument("--workers", type=int, default=1, help="runs of `faults` at the same time")
    parser.add_argument("--steps", type=int, default=None, help="default: 200 of `faults`, 100 of `kills`")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="of `kills`")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of `kills`")
    parser.add_argument("--minutes", type=float, default=60, help="of `memory`")
    parser.add_argument("--threads", type=int, default=2, help="of `memory`")
    parser.add_argument("--run", type=Path, help="YAML file of the run of `memory`; default: `RUN`")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the run of `memory`")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.steps = args.steps or (200 if args.what == "faults" else 100)
    result = {"faults": run_faults, "kills": run_kills, "memory": run_memory}[args.what](args)
    result["machine"] = describe_machine()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.what}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1))


if __name__ == "__main__":
    main()
