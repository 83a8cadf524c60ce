"""Tools under load: 1,000 concurrent calls through server and client, sandbox start-up times, the rate limiter.

    python benchmarks/tools.py --case calls

Cases: `calls` (calculator and python through `arborl tools serve`), `restart` (stateful calls; the server is killed and
restarted halfway), `sandbox` (time of a lease and of a run, compared with `subprocess.run`), `limit` (rate that several
processes reach under one rate limit). Prints one JSON line per measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np

from arborl.sandbox import Sandbox, SandboxPool, best_level
from arborl.tools.remote.tool_client import ToolClient

LEDGER = """
import os, time
from arborl.tools import tool

@tool(stateful=True)
def enter(line: str) -> str:
    '''Write a line into the ledger.'''
    with open(os.environ["LEDGER"], "a") as file:
        file.write(line + chr(10))
    time.sleep(0.02)
    return line
"""
LIMIT = """
import os, sys, time
from arborl.tools.core.rate_limit import RateLimit, RateLimitTimeout
count, rate, burst, seconds = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
folder = sys.argv[5]
limit = RateLimit(60 * rate, burst, "load", folder=folder)
begin = time.monotonic() + 0.02 * count + 0.2
for number in range(count):
    if os.fork() == 0:
        stamps = []
        time.sleep(max(begin - time.monotonic(), 0))
        try:
            while True:
                stamps.append((limit.acquire_sync(timeout=begin + seconds - time.monotonic()), time.monotonic()))
        except RateLimitTimeout:
            pass
        with open(f"{folder}/{number}.txt", "w") as file:
            file.writelines(f"{granted!r} {seen!r}\\n" for granted, seen in stamps)
        os._exit(0)
for _ in range(count):
    os.wait()
"""


class Server:
    """`arborl tools serve` in a separate process."""

    def __init__(self, tools: str, **env: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.tools, self.env = f"http://127.0.0.1:{self.port}", tools, {**os.environ, **env}
        self.folder = tempfile.TemporaryDirectory()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "arborl", "tools", "serve", "--tools", self.tools, "--port", str(self.port)]
        command += ["--journal", f"{self.folder.name}/journal"]
        self.process = subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        while True:
            try:
                httpx.get(f"{self.url}/health")
                return
            except httpx.HTTPError:
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def print_result(case: str, **numbers: object) -> None:
    machine_info = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}
    print(json.dumps({"case": case, **rounded, **machine_info}), flush=True)


async def timed(calls: int, one: Callable[[int], Awaitable[object]]) -> tuple[float, list[float], list[object]]:
    """Run all calls concurrently: total seconds, seconds from the start to the end of each call, and the results."""
    start = time.perf_counter()

    async def timed_call(number: int) -> tuple[float, object]:
        result = await one(number)
        return time.perf_counter() - start, result

    results = await asyncio.gather(*(timed_call(number) for number in range(calls)))
    return time.perf_counter() - start, [end for end, _ in results], [result for _, result in results]


def measure_calls(count: int) -> None:
    server = Server("calculator,arborl.tools.library.python:python_once")
    server.wait()

    async def run_calls() -> None:
        client = ToolClient(server.url, concurrency=64)
        await client.call("calculator", {"expression": "1"})

        async def calculate(number: int) -> object:
            return (await client.call("calculator", {"expression": f"{number}*7"})).content

        total_seconds, end_times, results = await timed(count, calculate)
        num_correct = sum(result == str(7 * number) for number, result in enumerate(results))
        report_calls("calculator", count, total_seconds, end_times, num_correct)
        alone = [(await timed(1, calculate))[0] for _ in range(100)]
        print_result(
            "calculator alone", p50_ms=1e3 * float(np.median(alone)), p99_ms=1e3 * float(np.percentile(alone, 99))
        )

        async def run(number: int) -> object:
            return (await client.call("python", {"code": f"print({number} * 7)"})).content

        total_seconds, end_times, results = await timed(count, run)
        num_correct = sum(result == str(7 * number) for number, result in enumerate(results))
        report_calls("python, a fresh sandbox each", count, total_seconds, end_times, num_correct)
        await client.close()

    asyncio.run(run_calls())
    server.stop()


def report_calls(name: str, count: int, total_seconds: float, end_times: list[float], num_correct: int) -> None:
    p50, p99 = (float(np.percentile(end_times, share)) for share in (50, 99))
    print_result(
        name,
        calls=count,
        right=num_correct,
        lost=count - num_correct,
        seconds=total_seconds,
        per_second=count / total_seconds,
        p50_s=p50,
        p99_s=p99,
    )


def measure_restart(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ledger_tool.py").write_text(LEDGER)
        ledger = Path(folder, "ledger")
        server = Server("ledger_tool:enter", PYTHONPATH=folder, LEDGER=str(ledger))
        server.wait()

        async def run_calls() -> tuple[float, list[float], list[object]]:
            client = ToolClient(server.url, call_seconds=90)

            async def enter(number: int) -> object:
                return (await client.call("enter", {"line": str(number)})).kind

            async def kill() -> None:
                while not ledger.exists() or len(ledger.read_text().splitlines()) < count // 2:
                    await asyncio.sleep(0.01)
                server.stop()
                server.start()

            kill_task = asyncio.ensure_future(kill())
            done = await timed(count, enter)
            await kill_task
            return done

        total_seconds, end_times, kinds = asyncio.run(run_calls())
        server.stop()
        lines = Counter(ledger.read_text().splitlines())
        print_result(
            "stateful, server killed half-way", calls=count, kinds=dict(Counter(kinds)), seconds=total_seconds,
            run=len(lines), run_twice=sum(n > 1 for n in lines.values()), p99_s=float(np.percentile(end_times, 99)),
        )  # fmt: skip


def measure_sandbox() -> None:
    code, level = "print(6 * 7)", best_level()

    def run_subprocess() -> None:
        subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True)

    def run_new_sandbox() -> None:
        with Sandbox() as box:
            assert box.run_sync(code).ok

    pool = SandboxPool(spare=4)
    with Sandbox() as kept:
        cases = {
            "bare process": run_subprocess,
            "sandbox, started for the call": run_new_sandbox,
            "sandbox, kept": lambda: kept.run_sync(code),
        }
        for name, one in cases.items():
            one()
            times = []
            for _ in range(100):
                start = time.perf_counter()
                one()
                times.append(time.perf_counter() - start)
            print_result(
                name,
                level=level.name,
                p50_ms=1e3 * float(np.median(times)),
                p99_ms=1e3 * float(np.percentile(times, 99)),
            )
    waits = []
    for _ in range(50):
        time.sleep(0.15)  # until the pool is refilled
        start = time.perf_counter()
        with pool.lease_sync() as box:
            box.run_sync(code)
            waits.append(time.perf_counter() - start)
    print_result("sandbox, from the warm pool", level=level.name, p50_ms=1e3 * float(np.median(waits)))

    async def lease_many() -> float:
        return (await timed(300, lambda number: pool.run(code)))[0]

    print_result("leases at once", level=level.name, leases=300, per_second=300 / asyncio.run(lease_many()))
    pool.close()


def measure_limit() -> None:
    for count, rate, burst in ((1, 10, 5), (8, 10, 5), (64, 10, 5), (8, 1000, 20)):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [str(count), str(rate), str(burst), "10", folder]
            subprocess.run([sys.executable, "-c", LIMIT, *arguments], check=True)
            rows = [line.split() for file in Path(folder).glob("*.txt") for line in file.read_text().splitlines()]
        granted, seen = (np.sort(np.array([float(row[column]) for row in rows])) for column in (0, 1))
        print_result(
            "limit", processes=count, per_second=rate, burst=burst, reached=len(granted) / (10 * rate),
            most_beyond_rate=largest_excess(granted, rate), most_beyond_rate_as_callers_saw=largest_excess(seen, rate),
        )  # fmt: skip


def largest_excess(times: np.ndarray, rate: float) -> float:
    """Largest excess of events over rate × length in any time window; must not exceed the burst."""
    line = np.arange(len(times)) - rate * times
    return float((line - np.minimum.accumulate(line)).max() + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("calls", "restart", "sandbox", "limit"), action="append")
    parser.add_argument("--calls", type=int, default=1000, help="number of concurrent calls")
    arguments = parser.parse_args()
    for case in arguments.case or ("calls", "restart", "sandbox", "limit"):
        {"calls": lambda: measure_calls(arguments.calls), "restart": lambda: measure_restart(arguments.calls),
         "sandbox": measure_sandbox, "limit": measure_limit}[case]()  # fmt: skip


if __name__ == "__main__":
    main()
