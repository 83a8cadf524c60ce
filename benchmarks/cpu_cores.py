"""Sampling and update of a GRPO step by number of CPU cores.

    python benchmarks/cpu_cores.py --cores 1 2 4 8 16 --json
    python benchmarks/cpu_cores.py --cores 1 2 4 8 --first-core 2 --case single --model smollm2

Runs Arbor's side of `step.py` in a process for each number of cores, which may use only those (from `--first-core` on),
with as many threads. `speedup` compares with the first number of cores. One JSON line per row, or a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

STEP = Path(__file__).with_name("step.py")
SMOLLM2 = ("--prompts", "2", "--group", "8", "--prompt", "64", "--sampled", "32")
"""A step that takes seconds, not minutes."""
TIMES = ("sampling_s", "update_s", "step_s")


def measure(model: str, case: str, cores: list[int], repeats: int) -> dict[str, Any]:
    command = [sys.executable, str(STEP), "--device", "cpu", "--side", "ours", "--case", case, "--model", model]
    command += ["--repeats", str(repeats), *(SMOLLM2 if model == "smollm2" and case == "single" else ())]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(len(cores))},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    timing = json.loads(done.stdout.splitlines()[-1])[0]
    seconds, rollout = timing["seconds"], timing["rollout"]
    return {"sampling_s": round(rollout, 3), "update_s": round(seconds - rollout, 3), "step_s": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--first-core", type=int, default=0)
    parser.add_argument("--model", default="5m", help="as in step.py")
    parser.add_argument("--case", choices=["single", "multi-turn"], default="single")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    about = {
        "model": args.model, "case": args.case, "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    first: dict[str, float] = {}
    for count in args.cores:
        row = measure(args.model, args.case, list(range(args.first_core, args.first_core + count)), args.repeats)
        first = first or row
        speedup = {name.replace("_s", "_speedup"): round(first[name] / row[name], 2) for name in TIMES}
        found = {"cores": count} | row | speedup
        print(json.dumps(found | about) if args.json else found, flush=True)


if __name__ == "__main__":
    main()
