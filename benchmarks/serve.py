"""`arborl serve` compared with `transformers serve`: many concurrent clients stream replies of the same model.

    python benchmarks/serve.py --clients 200 --json

Each client sends one request of similar form and different length and reads the streamed reply. Reported are lost
streams, seconds until the first chunk of a reply (median and 99th percentile), and chunks per second over all clients.
Servers run one after the other, each in its own process; the clients run in this process and use a part of the CPU.
`--sides` selects the servers: `arborl`, `transformers` (default options), `transformers-cb` (continuous batching).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from arborl.models.model_files import resolve

QUESTION = "What is the sum of these numbers, and which of them is the largest"


@dataclass
class Stream:
    """Outcome and times of one streamed reply."""

    outcome: str = "lost"
    first: float = float("nan")
    """Seconds from the request to the first chunk."""
    seconds: float = 0.0
    chunks: int = 0


@contextmanager
def start_server(side: str, model: str, settings: list[str], threads: int, seconds: float) -> Iterator[tuple[int, str]]:
    """Run a server process; yields its port and the name of the model in requests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bin_dir = Path(sys.executable).parent
    if side == "arborl":
        command, name = (
            [str(bin_dir / "arborl"), "serve", model, *settings, "--port", str(port), "--quiet"],
            Path(model).name,
        )
    else:
        name = str(resolve(model))
        command = [str(bin_dir / "transformers"), "serve", name, "--port", str(port), "--device", "cpu"]
        command += ["--continuous-batching"] if side == "transformers-cb" else []
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    env |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }  # for both servers: spinning threads slow down other processes
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for_port(port, process, seconds)
        yield port, name
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for_port(port: int, process: subprocess.Popen[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server exited: {(process.stderr.read() if process.stderr else '')[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the server did not start within {seconds:g} s")


async def stream_reply(port: int, model: str, number: int, tokens: int, patience: float) -> Stream:
    """Send one request and read its stream. Uses a plain socket, because HTTP clients would dominate the CPU time."""
    question = " ".join([QUESTION] * (1 + number % 4))
    body = {"model": model, "stream": True, "max_tokens": tokens, "temperature": 1.0, "seed": number,
            "messages": [{"role": "user", "content": f"{number}: {question}?"}]}  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    stream, began = Stream(), time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
            writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
            status = (await reader.readline()).split()
            stream.outcome = "lost" if len(status) < 2 or status[1] == b"200" else f"status {int(status[1])}"
            async for line in reader:
                if line.startswith(b"data: {"):
                    _add_event(stream, json.loads(line[6:]), time.perf_counter() - began)
            writer.close()
    except TimeoutError:
        stream.outcome = "timeout"
    except (OSError, ValueError) as error:
        stream.outcome = type(error).__name__
    stream.seconds = time.perf_counter() - began
    return stream


def _add_event(stream: Stream, event: dict, seconds: float) -> None:
    choice = (event.get("choices") or [{}])[0]
    if choice.get("delta", {}).get("content"):
        stream.chunks += 1
        if stream.chunks == 1:
            stream.first = seconds
    if choice.get("finish_reason"):
        stream.outcome = "whole"


async def run_clients(port: int, model: str, clients: int, tokens: int, patience: float) -> tuple[list[Stream], float]:
    await stream_reply(port, model, 0, 4, patience)  # warm-up request
    began = time.perf_counter()
    streams = await asyncio.gather(*(stream_reply(port, model, number, tokens, patience) for number in range(clients)))
    return streams, time.perf_counter() - began


def measure(side: str, args: argparse.Namespace) -> dict:
    with start_server(side, args.model, args.settings, args.threads, args.patience) as (port, name):
        streams, seconds = asyncio.run(run_clients(port, name, args.clients, args.tokens, args.patience))
    outcomes = Counter(stream.outcome for stream in streams)
    first = [stream.first for stream in streams if stream.chunks]
    chunks = sum(stream.chunks for stream in streams)
    return {
        "side": side, "model": args.model, "clients": args.clients, "tokens": args.tokens,
        "whole": outcomes["whole"], "others": {name: n for name, n in outcomes.items() if name != "whole"},
        "first_p50_s": round(float(np.percentile(first, 50)), 3) if first else None,
        "first_p99_s": round(float(np.percentile(first, 99)), 3) if first else None,
        "seconds": round(seconds, 2), "chunks_s": round(chunks / seconds, 1), "threads": args.threads,
        "cpu": platform.machine(), "python": platform.python_version(), "torch": version("torch"),
        "transformers": version("transformers"), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="seedling")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of tokens per reply")
    parser.add_argument("--sides", default="arborl,transformers,transformers-cb")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=float, default=300.0, help="timeout of a stream in seconds")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="settings of arborl serve, as a.b=c")
    parser.add_argument("--json", action="store_true", help="print one JSON line per measurement")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * args.clients + 256)), hard))
    for _ in range(args.repeats):
        for side in args.sides.split(","):
            row = measure(side, args)
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                print(f"{side:<16} {row['whole']}/{row['clients']} complete   first chunk p50 {row['first_p50_s']} s, "
                      f"p99 {row['first_p99_s']} s   {row['chunks_s']} chunks/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
