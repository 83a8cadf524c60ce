"""`arborl serve` beside `transformers serve`: many clients stream answers at once from the same model.

    python benchmarks/serve.py --clients 200 --json

Each client asks the same kind of question (of its own length) and reads its answer as it is written. Counted are
streams that were lost, seconds until the first word of an answer (median and 99th percentile), and tokens a second over
all. Servers run one after the other, each in a process of its own; the clients are in this one, and take a share of the
machine. `--sides` names others: `arborl`, `transformers` (as it is started by default), `transformers-cb` (with its
continuous batching).
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

WORDS = "What is the sum of these numbers, and which of them is the largest"


@dataclass
class Stream:
    """One client's answer."""

    outcome: str = "lost"
    first: float = float("nan")
    """Seconds from the request to the first word."""
    seconds: float = 0.0
    chunks: int = 0


@contextmanager
def server(side: str, model: str, settings: list[str], threads: int, seconds: float) -> Iterator[tuple[int, str]]:
    """A server at work: its port, and what it calls the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    beside = Path(sys.executable).parent
    if side == "arborl":
        command, name = (
            [str(beside / "arborl"), "serve", model, *settings, "--port", str(port), "--quiet"],
            Path(model).name,
        )
    else:
        name = str(resolve(model))
        command = [str(beside / "transformers"), "serve", name, "--port", str(port), "--device", "cpu"]
        command += ["--continuous-batching"] if side == "transformers-cb" else []
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}  # for both: spinning threads starve others
    made = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait(port, made, seconds)
        yield port, name
    finally:
        made.terminate()
        try:
            made.wait(20)
        except subprocess.TimeoutExpired:
            made.kill()


def _wait(port: int, made: subprocess.Popen[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if made.poll() is not None:
            raise SystemExit(f"the server ended: {(made.stderr.read() if made.stderr else '')[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"no server after {seconds:g} s")


async def one(port: int, model: str, number: int, tokens: int, patience: float) -> Stream:
    """Ask, and read to the end. A bare socket: two hundred of a full client's would measure the clients."""
    words = " ".join([WORDS] * (1 + number % 4))
    body = {"model": model, "stream": True, "max_tokens": tokens, "temperature": 1.0, "seed": number,
            "messages": [{"role": "user", "content": f"{number}: {words}?"}]}  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    said, began = Stream(), time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
            writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
            status = (await reader.readline()).split()
            said.outcome = "lost" if len(status) < 2 or status[1] == b"200" else f"status {int(status[1])}"
            async for line in reader:
                if line.startswith(b"data: {"):
                    _chunk(said, json.loads(line[6:]), time.perf_counter() - began)
            writer.close()
    except TimeoutError:
        said.outcome = "timeout"
    except (OSError, ValueError) as error:
        said.outcome = type(error).__name__
    said.seconds = time.perf_counter() - began
    return said


def _chunk(said: Stream, told: dict, at: float) -> None:
    choice = (told.get("choices") or [{}])[0]
    if choice.get("delta", {}).get("content"):
        said.chunks += 1
        if said.chunks == 1:
            said.first = at
    if choice.get("finish_reason"):
        said.outcome = "whole"


async def load(port: int, model: str, clients: int, tokens: int, patience: float) -> tuple[list[Stream], float]:
    await one(port, model, 0, 4, patience)  # what is made at the first request is not measured
    began = time.perf_counter()
    streams = await asyncio.gather(*(one(port, model, number, tokens, patience) for number in range(clients)))
    return streams, time.perf_counter() - began


def measured(side: str, asked: argparse.Namespace) -> dict:
    with server(side, asked.model, asked.settings, asked.threads, asked.patience) as (port, name):
        streams, seconds = asyncio.run(load(port, name, asked.clients, asked.tokens, asked.patience))
    outcomes = Counter(stream.outcome for stream in streams)
    first = [stream.first for stream in streams if stream.chunks]
    chunks = sum(stream.chunks for stream in streams)
    return {
        "side": side, "model": asked.model, "clients": asked.clients, "tokens": asked.tokens,
        "whole": outcomes["whole"], "others": {name: n for name, n in outcomes.items() if name != "whole"},
        "first_p50_s": round(float(np.percentile(first, 50)), 3) if first else None,
        "first_p99_s": round(float(np.percentile(first, 99)), 3) if first else None,
        "seconds": round(seconds, 2), "chunks_s": round(chunks / seconds, 1), "threads": asked.threads,
        "cpu": platform.machine(), "python": platform.python_version(), "torch": version("torch"),
        "transformers": version("transformers"), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="seedling")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--sides", default="arborl,transformers,transformers-cb")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a stream counts as lost")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="a.b=c, of arborl serve")
    parser.add_argument("--json", action="store_true", help="one line of JSON a measurement")
    asked = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * asked.clients + 256)), hard))
    for _ in range(asked.repeats):
        for side in asked.sides.split(","):
            row = measured(side, asked)
            if asked.json:
                print(json.dumps(row), flush=True)
            else:
                print(f"{side:<16} {row['whole']}/{row['clients']} whole   first word p50 {row['first_p50_s']} s, "
                      f"p99 {row['first_p99_s']} s   {row['chunks_s']} words a second", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
