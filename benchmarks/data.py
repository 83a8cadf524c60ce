"""How fast a mixture with a large Parquet file gives tasks, and how much memory it takes.

    python benchmarks/data.py --json

A file of `--rows` rows is written to a temporary folder, once with row groups of 20,000 rows and once with those that
pyarrow writes when it is not asked (a million), and mixed with two small files, 0.4 / 0.3 / 0.3, in batches of 256.
Each case runs in a process of its own: memory is the highest resident set above what the process had with everything
imported. `rows_per_cpu_s` is by the process's own time, so it tells the same on a busy machine. Beside it stands what
one would do without: read the whole file with pyarrow and draw rows by a permutation.
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
GROUPS = (20_000, 1_048_576)


def write(path: Path, rows: int, group: int) -> None:
    """Rows as word problems have them: some hundred characters, an answer, a label."""
    import pyarrow
    import pyarrow.parquet

    chance = np.random.default_rng(0)
    with pyarrow.parquet.ParquetWriter(path, schema()) as writer:
        for start in range(0, rows, group):
            count = min(group, rows - start)
            a, b = chance.integers(1, 10_000, size=(2, count))
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


def memory(key: str) -> float:
    """`VmRSS` (the present resident set) or `VmHWM` (the highest so far), MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024 / 1e6


def ours(folder: Path, draw: int) -> dict[str, float]:
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
    base = memory("VmRSS")
    began = time.perf_counter()
    source = open_source(config, "frozen_lake", seed=0)
    opened = time.perf_counter() - began
    source.take(0, BATCH)
    first = time.perf_counter() - began
    steps = draw // BATCH
    began, busy = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        source.take(step, BATCH)
    mixed, busy = time.perf_counter() - began, time.process_time() - busy
    pool = source.pools["math"]  # type: ignore[attr-defined]
    began = time.perf_counter()
    for step in range(steps):
        pool.take(step * BATCH, BATCH)
    alone = time.perf_counter() - began
    return {
        "open_s": opened,
        "first_batch_s": first,
        "rows_per_s": steps * BATCH / mixed,
        "rows_per_s_parquet_alone": steps * BATCH / alone,
        "rows_per_cpu_s": steps * BATCH / busy,
        "rss_above_mb": memory("VmHWM") - base,
    }


def whole(folder: Path, draw: int) -> dict[str, float]:
    """Read the whole file, draw by a permutation."""
    import pyarrow.parquet

    base = memory("VmRSS")
    began = time.perf_counter()
    table = pyarrow.parquet.read_table(folder / "large.parquet").combine_chunks()  # in chunks, `take` is slower still
    order = np.random.default_rng(0).permutation(len(table))
    table.take(order[:BATCH]).to_pylist()
    first = time.perf_counter() - began
    began = time.perf_counter()
    steps = min(draw // BATCH, 200)
    for step in range(steps):
        table.take(order[step * BATCH : (step + 1) * BATCH]).to_pylist()
    spent = time.perf_counter() - began
    return {"first_batch_s": first, "rows_per_s": steps * BATCH / spent, "rss_above_mb": memory("VmHWM") - base}


CASES = {"ours": ours, "whole": whole}


def measured(case: str, folder: Path, draw: int) -> dict[str, float]:
    """In a process of its own."""
    words = [sys.executable, __file__, "--case", case, "--folder", str(folder), "--draw", str(draw)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return {key: round(value, 3) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--draw", type=int, default=500_000, help="rows to draw")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(CASES[given.case](given.folder, given.draw)))
        return
    import pyarrow

    out: dict[str, Any] = {"rows": given.rows, "python": platform.python_version(), "pyarrow": pyarrow.__version__}
    out["machine"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in ("code", "search"):
            rows = [{"question": f"{source} {n}?", "answer": str(n)} for n in range(5000)]
            (folder / f"{source}.json").write_text(json.dumps(rows))
        for group in GROUPS:
            write(folder / "large.parquet", given.rows, group)
            size = (folder / "large.parquet").stat().st_size / 1e6
            found = {case: measured(case, folder, given.draw) for case in CASES}
            out[f"groups_of_{group}"] = {"file_mb": round(size, 1)} | found
    print(json.dumps(out) if given.json else json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
