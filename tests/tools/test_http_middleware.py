"""The tool server at its sockets: what a client sends slowly, in pieces, without an end, or never reads."""

import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("uvicorn", reason="the extra 'serve'")

import httpx

from arborl.tools.library.calculator import calculator
from arborl.tools.remote.tool_dispatcher import ToolDispatcher
from arborl.tools.remote.tool_server import make_app, make_server

KEY = "secret"


@contextlib.contextmanager
def served(seconds: float = 0.3, most: int = 50, max_body: int = 2**16):
    """A server on a socket, in a thread: its address and its application."""
    app = make_app(ToolDispatcher([calculator]), KEY, max_body=max_body)
    app.state.half_open.seconds, app.state.half_open.maximum = seconds, most
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


def ended(link: socket.socket) -> bool:
    """Whether the server ends the connection."""
    link.settimeout(5)
    with contextlib.suppress(ConnectionError):
        while link.recv(2**16):
            pass
    return True


HEAD = b"POST /call HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /call HT",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",  # answered with 401, and still half open
    ],
)
def test_a_request_that_never_ends_is_closed(sent):
    with served() as (address, app), socket.create_connection(address) as link:
        link.sendall(sent)
        assert ended(link)
        assert (len(app.state.half_open), app.state.half_open.closed) == (0, 1)


def test_a_request_that_drips_is_closed_however_often_it_drips():
    with served() as (address, app), socket.create_connection(address) as link:
        with contextlib.suppress(ConnectionError):
            for letter in b"P" + b"x" * 199:
                link.sendall(bytes([letter]))
                time.sleep(0.02)
        assert app.state.half_open.closed == 1


def test_half_open_connections_are_counted_before_anybody_shows_a_key_and_the_oldest_go():
    with served(seconds=60, most=20) as (address, app), contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        honest = httpx.get(f"http://{address[0]}:{address[1]}/tools", headers={"X-API-Key": KEY}, timeout=40)
        assert honest.status_code == 200
        assert all(ended(link) for link in links[:40])
        assert len(app.state.half_open) <= 20


def test_a_response_that_the_client_does_not_read_is_dropped_after_a_while():
    with served() as (address, app), socket.create_connection(address) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(ConnectionError, TimeoutError):
            link.settimeout(5)
            while not app.state.half_open.closed:
                link.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nX-API-Key: secret\r\n\r\n" * 100)
        assert app.state.half_open.closed == 1


def test_a_whole_request_is_answered_however_long_that_takes(tmp_path, monkeypatch):
    """The clock is the client's: it stands while the server works."""
    monkeypatch.setattr("arborl.tools.core.rate_limit.default_limit_dir", lambda: tmp_path)
    with served() as (address, app):
        url = f"http://{address[0]}:{address[1]}"
        with httpx.Client(headers={"X-API-Key": KEY}, timeout=20) as http:
            body = {"name": "calculator", "arguments": {"expression": "6*7"}}
            for _ in range(3):  # on one connection
                assert http.post(f"{url}/call", json=body).json()["content"] == "42"
            limit = {"name": "t", "per_minute": 60 / 0.7, "timeout": 5}  # granted once in 0.7 s
            assert [http.post(f"{url}/limit", json=limit).json()["granted"] for _ in range(2)] == [True, True]
        assert app.state.half_open.closed == 0


def test_a_chunked_body_that_is_too_large_is_refused():
    with served(seconds=5) as (address, _):

        def pieces():
            for _ in range(100):
                yield b"x" * 10_000

        url = f"http://{address[0]}:{address[1]}/call"
        assert httpx.post(url, content=pieces(), headers={"X-API-Key": KEY}).status_code == 413


def test_nothing_but_http_is_spoken():
    upgrade = b"GET /call HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with served() as (address, _), socket.create_connection(address) as link:
        link.sendall(upgrade)
        assert b" 401 " in link.recv(200)
