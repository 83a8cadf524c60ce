"""Index and search of a long document by the document tools, compared with a scan of all chunks.

    python benchmarks/documents.py --tokens 1000000 --json

Builds the index with `buildIndex` and seedling's tokenizer, and searches it with `searchEngine` for frequent words,
rare words and phrases. Memory is the growth of the process, including the document itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import sqlite3
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from arborl.chat.tokenizer import FileTokenizer
from arborl.data.generated.document_problems import make_document_problem
from arborl.models.model_files import SEEDLING_DIR
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.library.document_tools import WORKSPACE, build_index, read_chunk, search_engine
from arborl.types import Task


def resident_mb() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def keywords(subjects: list[str]) -> list[str]:
    """Queries with frequent, rare, several and absent words, and with phrases."""
    other = ["fox", "harbour, tower", '"at the market"', "old horse", "nothing like this", "stranger, boat, snow, moon"]
    return [*subjects, *other]


def scan(chunks: list[str], keyword: str) -> int:
    """Baseline without an index: search every chunk for each word."""
    words = [re.compile(rf"\b{re.escape(word.strip())}\b", re.IGNORECASE) for word in keyword.split(",")]
    return sum(any(word.search(chunk) for word in words) for chunk in chunks)


async def measure(tokens: int, chunk_size: int, repeats: int) -> dict[str, Any]:
    tokenizer = FileTokenizer(SEEDLING_DIR)
    before = resident_mb()
    sample = make_document_problem(0, 10_000, hops=3, distractors=100).document
    words = round(tokens * 10_000 / len(tokenizer.encode(sample)))
    problem = make_document_problem(0, words, hops=3, distractors=100)
    task = Task("t", fields={"document_content": problem.document})
    async with ToolContext(task, tokenizer) as context:
        began = time.perf_counter()
        built = json.loads((await build_index.run({"chunk_size": chunk_size}, context)).content)
        build_seconds = time.perf_counter() - began
        index = context.state(WORKSPACE, WORKSPACE.make).index
        chunks = [index.content(number) for number in range(len(index))]
        seconds, scans = [], []
        for keyword in keywords([hop.subject for hop in problem.hops]) * repeats:
            began = time.perf_counter()
            result = await search_engine.run({"keyword": keyword}, context)
            seconds.append(time.perf_counter() - began)
            assert result.ok, result.content
            began = time.perf_counter()
            scan(chunks, keyword)
            scans.append(time.perf_counter() - began)
        began = time.perf_counter()
        await read_chunk.run({"chunk_id": len(index) // 2}, context)
        read_seconds = time.perf_counter() - began
    return {
        "tokens": index.tokens, "characters": len(problem.document), "chunk_size": chunk_size,
        "chunks": built["total_chunks"], "build_seconds": round(build_seconds, 3),
        "search_ms_median": round(1000 * statistics.median(seconds), 2),
        "search_ms_worst": round(1000 * max(seconds), 2), "scan_ms_median": round(1000 * statistics.median(scans), 2),
        "read_ms": round(1000 * read_seconds, 3), "memory_mb": round(resident_mb() - before, 1),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores", "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }  # fmt: skip


def measure_case(work: tuple[int, int, int]) -> dict[str, Any]:
    return asyncio.run(measure(*work))


def format_row(row: dict[str, Any]) -> str:
    work = "{tokens:,} tokens in {chunks:,} chunks of {chunk_size}".format_map(row)
    search = "search {search_ms_median:.1f} ms (worst {search_ms_worst:.1f}), plain scan {scan_ms_median:.1f} ms"
    return f"{work}: index {row['build_seconds']:.2f} s, {search.format_map(row)}, {row['memory_mb']:.0f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[4000, 300])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print only one JSON line per chunk size")
    args = parser.parse_args()
    # A new process for each case, so that memory is measured separately.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure_case, [(args.tokens, size, args.repeats) for size in args.chunk_size]):
            print(json.dumps(row) if args.json else format_row(row))
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
