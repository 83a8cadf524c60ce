"""Every algorithm on the same work: seedling learns FrozenLake, same tasks, same number of episodes, default settings.

    python benchmarks/algorithms.py --out runs/algorithms --workers 2 --json

One process an algorithm, one thread each. Prints a line for each with held-out success before and after; the folders
hold the curves, and `OUT/curves.png` all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAMES = ("grpo", "rloo", "reinforce_plus_plus", "ppo", "gspo", "gigpo", "a2c", "dpo")

ONE = """
import json, sys
import arborl
name, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
done = arborl.run(algorithm=name, output_dir=folder, **settings)
"""


def train(name: str, out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own."""
    began = time.perf_counter()
    given = {
        "model.device": "cpu", "threads": 1, "track.gifs": 0, "track.tensorboard": False, "evaluation.greedy": False,
    } | settings  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ONE, name, str(out / name), json.dumps(given)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"algorithm": name, "error": done.stderr.strip().splitlines()[-1:]}
    summary = json.loads((out / name / "summary.json").read_text())
    return {"algorithm": name, "summary": summary, "seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON line a run, nothing else")
    args = parser.parse_args()
    settings = {"steps": args.steps, "seed": args.seed}
    with ThreadPoolExecutor(args.workers) as pool:
        rows = list(pool.map(lambda name: train(name, args.out, settings), args.names))
    for row in rows:
        row |= {"steps": args.steps, "seed": args.seed, "machine": platform.machine()}
        print(json.dumps(row) if args.json else row)
    from arborl.view import compare

    folders = [args.out / row["algorithm"] for row in rows if "error" not in row]
    compare(folders, args.out / "curves.png", f"FrozenLake with seedling, {args.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
