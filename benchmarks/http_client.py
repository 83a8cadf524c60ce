"""The HTTP client of the tool server beside httpx and aiohttp: small POST requests, all from one event loop.

    python benchmarks/http_client.py --json

A server process answers every request with a fixed JSON body. Each client makes `--calls` requests of 200 bytes,
`--concurrency` at a time, with kept connections; the best of `--repeats` counts. `us_a_call` is the processor time of
the client's process, because a rollout makes these calls from the event loop that also samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import httpx

from arborl.tools.remote.http_connections import HttpConnections

REPLY = json.dumps({"result": "x" * 150}).encode()
BODY = json.dumps({"tool": "calculator", "arguments": {"expression": "1 + 2"}, "pad": "x" * 120}).encode()
JSON_HEADERS = {"Content-Type": "application/json"}
Post = Callable[[], Awaitable[bytes]]


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(REPLY)}\r\n\r\n".encode()
    try:
        while True:
            lines = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in lines.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(head + REPLY)
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


def serve(port: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def measure(post: Post, calls: int, concurrency: int, repeats: int) -> dict[str, float]:
    """Calls a second and processor time of a call, of the fastest repeat."""
    found = []
    for _ in range(repeats):
        left = iter(range(calls))

        async def caller(left: object = left) -> None:
            for _ in left:  # type: ignore[attr-defined]
                if await post() != REPLY:
                    raise SystemExit("the client returned another body than the server sent")

        started, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        found.append((time.perf_counter() - started, time.process_time() - used))
    return {
        "calls_a_second": round(calls / min(seconds for seconds, _ in found)),
        "us_a_call": round(1e6 * min(used for _, used in found) / calls, 1),
    }


async def compare(url: str, args: argparse.Namespace) -> None:
    connections = HttpConnections(url)
    limits = httpx.Limits(max_connections=args.concurrency, max_keepalive_connections=args.concurrency)
    async with (
        httpx.AsyncClient(limits=limits, timeout=60, headers=JSON_HEADERS) as with_httpx,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=args.concurrency), headers=JSON_HEADERS
        ) as with_aiohttp,
    ):

        async def ours() -> bytes:
            return (await connections.request("POST", "/call", BODY)).body

        async def by_httpx() -> bytes:
            return (await with_httpx.post(f"{url}/call", content=BODY)).content

        async def by_aiohttp() -> bytes:
            async with with_aiohttp.post(f"{url}/call", data=BODY) as reply:
                return await reply.read()

        clients: dict[str, Post] = {"arborl": ours, "httpx": by_httpx, "aiohttp": by_aiohttp}
        for name, post in clients.items():
            row = {"client": name, "concurrency": args.concurrency}
            row |= await measure(post, args.calls, args.concurrency, args.repeats)
            row |= {"httpx": httpx.__version__, "aiohttp": aiohttp.__version__, "python": platform.python_version()}
            print(json.dumps(row) if args.json else row, flush=True)
    connections.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        asyncio.run(compare(f"http://127.0.0.1:{here.recv()}", args))
    finally:
        process.terminate()


if __name__ == "__main__":
    main()
