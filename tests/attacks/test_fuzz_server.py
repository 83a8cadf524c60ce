"""The tool server against requests no one would write: from its own schema, and as bytes on its socket.

Quick by default; `pytest tests/attacks --hypothesis-profile thorough` sends ten times as much.
"""

import contextlib
import gc
import itertools
import os
import random
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("uvicorn", reason="the extra 'serve'")

import httpx
from hypothesis import HealthCheck, Phase, given, settings

from arborl.tools import tool
from arborl.tools.library.calculator import calculator
from arborl.tools.library.python import python_once
from arborl.tools.remote.tool_dispatcher import ToolDispatcher
from arborl.tools.remote.tool_server import make_app, make_server

KEY = "secret"


@tool(stateful=True)
def remember(text: str) -> str:
    """Say it again."""
    return text


@tool
async def nap(seconds: float) -> str:
    """Sleep a little."""
    return f"{seconds}"


def application():
    return make_app(ToolDispatcher([calculator, remember, nap, python_once], concurrency=8), KEY, limit_seconds=0.02)


def test_no_request_of_its_schema_is_answered_with_a_server_error(tmp_path, monkeypatch):
    schemathesis = pytest.importorskip("schemathesis")
    monkeypatch.setattr("arborl.tools.core.rate_limit.default_limit_dir", lambda: tmp_path)
    schema = schemathesis.openapi.from_asgi("/openapi.json", application(), headers={"X-API-Key": KEY})
    seen: list[int] = []
    quietly = settings(
        max_examples=settings().max_examples // 2,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    modes = schemathesis.GenerationMode
    operations = [each.ok() for each in schema.get_all_operations()]
    for operation, mode in itertools.product(operations, [modes.POSITIVE, modes.NEGATIVE]):
        if mode is modes.NEGATIVE and not operation.body:
            continue  # nothing to get wrong

        @quietly
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case):
            answer = case.call(headers={"X-API-Key": KEY})
            seen.append(answer.status_code)
            assert answer.status_code < 500, (case, answer.text)

        one()
    assert len(seen) > 50
    assert {200, 422} <= set(seen)


WHOLE = (
    b"POST /call HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: secret\r\nContent-Type: application/json\r\n"
    b'Content-Length: 62\r\n\r\n{"name": "calculator", "arguments": {"expression": "6*7"}}    '
)
PIECES = [
    b"POST", b"GET", b"DELETE /sessions/%00%ff HTTP/1.1", b" ", b"\r\n", b"\n", b"\0", b"\xff\xfe", b"HTTP/9.9",
    b"HTTP/1.0", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"ffffffffffffffff\r\n", b"-1\r\n",
    b"0\r\n\r\n", b"Expect: 100-continue", b"Connection: upgrade\r\nUpgrade: websocket", b"X: " + b"y" * 70_000,
    b"Host: \xc3\x28", b"/" + b"a" * 70_000, b"/../../etc/passwd", b"{" * 2000, b"[" * 2000, b'{"name":',
    b"Authorization: Bearer " + b"\xff" * 40,
]  # fmt: skip


def attack(rng: random.Random) -> bytes:
    """A request with some of its bytes changed, cut, doubled, or replaced by what parsers stumble over."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(2000))
    data = bytearray(WHOLE)
    for _ in range(rng.randrange(1, 6)):
        at, length = rng.randrange(len(data) + 1), rng.randrange(12)
        match rng.randrange(5):
            case 0:
                data[at : at + length] = rng.randbytes(length)
            case 1:
                del data[at : at + 1 + length * 4]
            case 2:
                data[at:at] = rng.choice(PIECES)
            case 3:
                data[at:at] = data[at : at + 60]
            case _:
                data[at : at + length] = rng.choice(PIECES)
    return bytes(data) * rng.choice([1, 1, 1, 2, 5])


def answered(address, data: bytes) -> bytes:
    """What the server says; the client may go away in the middle."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=40) as link:
        link.sendall(data)
        if data[-1:] < b"\x80":
            link.shutdown(socket.SHUT_WR)
        while piece := link.recv(2**16):
            received += piece
    return received


@contextlib.contextmanager
def served():
    app = application()
    app.state.half_open.seconds = 0.1
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = make_server(app, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield listening.getsockname(), app
        finally:
            server.should_exit = True
            thread.join(20)


def footprint() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_no_bytes_on_its_socket_bring_it_down_or_stay_behind(caplog):
    """No answer of 500 and up, no wait beyond the deadline of a half-open request, and nothing held afterwards."""
    rng = random.Random(0)
    with served() as (address, app):
        url = f"http://{address[0]}:{address[1]}"
        answered(address, WHOLE)
        before = footprint()
        codes: dict[bytes, int] = {}
        for _ in range(10 * settings().max_examples):
            for line in answered(address, attack(rng)).split(b"HTTP/1.1 ")[1:]:
                codes[line[:3]] = codes.get(line[:3], 0) + 1
        assert all(code < b"500" for code in codes), codes
        body = {"name": "calculator", "arguments": {"expression": "6*7"}}
        assert httpx.post(f"{url}/call", json=body, headers={"X-API-Key": KEY}).json()["content"] == "42"
        deadline = time.monotonic() + 40
        while (len(app.state.half_open) or footprint() > before) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(app.state.half_open) == 0
        assert footprint() <= before
    assert "Traceback" not in caplog.text
    assert b"400" in codes
    assert b"200" in codes or b"401" in codes
