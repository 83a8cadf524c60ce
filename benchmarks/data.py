"""Throughput and memory of a data mixture with a large Parquet file.

    python benchmarks/data.py --json

A file of `--rows` rows is written to a temporary folder, once with row groups of 20,000 rows and once with pyarrow's
default (about a million), and mixed with two small files in the ratio 0.4 / 0.3 / 0.3, in batches of 256. Each case
runs in its own process. Memory is the peak resident set minus the resident set after all imports. `rows_per_cpu_s` uses
the CPU time of the process, so it does not depend on the load of the machine. The baseline `whole` reads the complete
file with pyarrow and draws rows by a permutation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256
ROW_GROUP_SIZES = (20_000, 1_048_576)


def write_parquet(path: Path, rows: int, group: int) -> None:
    """Write rows like those of word problems: a question of about 100 characters, an answer, a label."""
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    with pyarrow.parquet.ParquetWriter(path, schema()) as writer:
        for start in range(0, rows, group):
            count = min(group, rows - start)
            a, b = rng.integers(1, 10_000, size=(2, count))
            columns = [
                [f"Problem {start + i}: a shop sells {x} lamps and {y} books. How many things in all?" for i, (x, y) in
                 enumerate(zip(a.tolist(), b.tolist(), strict=True))],
                (a + b).astype(str).tolist(),
                ["math"] * count,
            ]  # fmt: skip
            writer.write_table(pyarrow.table(columns, schema=schema()), row_group_size=group)


def schema() -> Any:
    import pyarrow

    return pyarrow.schema([("question", "string"), ("answer", "string"), ("data_source", "string")])


def memory_mb(key: str) -> float:
    """`VmRSS` (current resident set) or `VmHWM` (peak resident set) in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024 / 1e6


def measure_source(folder: Path, draw: int) -> dict[str, float]:
    import pyarrow.parquet

    from arborl.config.data_config import DataConfig
    from arborl.data import open_source

    pyarrow.cpu_count()
    config = DataConfig.model_validate(
        {
            "sources": {
                "math": {"path": folder / "large.parquet", "ratio": 0.4},
                "code": {"path": folder / "code.json", "ratio": 0.3},
                "search": {"path": folder / "search.json", "ratio": 0.3},
            }
        }
    )
    base = memory_mb("VmRSS")
    began = time.perf_counter()
    source = open_source(config, "frozen_lake", seed=0)
    opened = time.perf_counter() - began
    source.take(0, BATCH)
    first = time.perf_counter() - began
    steps = draw // BATCH
    began, cpu_seconds = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        source.take(step, BATCH)
    mixed_seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_seconds
    pool = source.pools["math"]  # type: ignore[attr-defined]
    began = time.perf_counter()
    for step in range(steps):
        pool.take(step * BATCH, BATCH)
    parquet_seconds = time.perf_counter() - began
    return {
        "open_s": opened,
        "first_batch_s": first,
        "rows_per_s": steps * BATCH / mixed_seconds,
        "rows_per_s_parquet_alone": steps * BATCH / parquet_seconds,
        "rows_per_cpu_s": steps * BATCH / cpu_seconds,
        "rss_above_mb": memory_mb("VmHWM") - base,
    }


def measure_full_read(folder: Path, draw: int) -> dict[str, float]:
    """Baseline: read the whole file and draw rows by a permutation."""
    import pyarrow.parquet

    base = memory_mb("VmRSS")
    began = time.perf_counter()
    table = pyarrow.parquet.read_table(folder / "large.parquet").combine_chunks()  # `take` is slower on chunked tables
    order = np.random.default_rng(0).permutation(len(table))
    table.take(order[:BATCH]).to_pylist()
    first = time.perf_counter() - began
    began = time.perf_counter()
    steps = min(draw // BATCH, 200)
    for step in range(steps):
        table.take(order[step * BATCH : (step + 1) * BATCH]).to_pylist()
    seconds = time.perf_counter() - began
    return {"first_batch_s": first, "rows_per_s": steps * BATCH / seconds, "rss_above_mb": memory_mb("VmHWM") - base}


CASES = {"ours": measure_source, "whole": measure_full_read}


def run_case(case: str, folder: Path, draw: int) -> dict[str, float]:
    """Run one case in its own process."""
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), "--draw", str(draw)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {key: round(value, 3) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--draw", type=int, default=500_000, help="rows to draw")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(CASES[args.case](args.folder, args.draw)))
        return
    import pyarrow

    report: dict[str, Any] = {"rows": args.rows, "python": platform.python_version(), "pyarrow": pyarrow.__version__}
    report["machine"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in ("code", "search"):
            rows = [{"question": f"{source} {n}?", "answer": str(n)} for n in range(5000)]
            (folder / f"{source}.json").write_text(json.dumps(rows))
        for group in ROW_GROUP_SIZES:
            write_parquet(folder / "large.parquet", args.rows, group)
            size = (folder / "large.parquet").stat().st_size / 1e6
            results = {case: run_case(case, folder, args.draw) for case in CASES}
            report[f"groups_of_{group}"] = {"file_mb": round(size, 1)} | results
    print(json.dumps(report) if args.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
