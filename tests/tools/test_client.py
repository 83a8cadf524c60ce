import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("uvicorn", reason="the extra 'serve'")

import httpx
import pytest
import uvicorn

from arborl.errors import ConfigError
from arborl.retry import CircuitBreaker
from arborl.tools import RateLimit, Toolbox, ToolContext
from arborl.tools.remote.tool_client import ToolClient
from arborl.types import Task, ToolCall

TOOLS = """
import os, time
from typing import Annotated
from arborl.tools import EpisodeState, TaskField
from arborl.tools import tool

@tool(stateful=True)
def enter(line: str) -> str:
    '''Write a line into the ledger.'''
    with open(os.environ["LEDGER"], "a") as file:
        file.write(line + chr(10))
    time.sleep(0.02)
    return "entered " + line

class Count:
    value = 0

@tool(stateful=True)
def add(n: int, count: Annotated[Count, EpisodeState(Count)]) -> int:
    '''Add to a count of the episode's own.'''
    count.value += n
    return count.value

@tool
def double(n: int) -> int:
    '''Double.'''
    return 2 * n

@tool
def right(guess: str, answer: Annotated[str, TaskField()]) -> bool:
    '''Compare with the answer.'''
    return guess == answer
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Served:
    """A real server in a process of its own, on a port that it keeps when it is started anew."""

    def __init__(self, folder, *options: str):
        (folder / "served_tools.py").write_text(TOOLS)
        self.port, self.ledger = free_port(), folder / "ledger"
        self.options = ("--journal", str(folder / "journal"), *options)
        self.env = {**os.environ, "PYTHONPATH": str(folder), "LEDGER": str(self.ledger)}
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        names = ",".join(f"served_tools:{name}" for name in ("enter", "add", "double", "right"))
        command = [sys.executable, "-m", "arborl", "tools", "serve", "--tools", names, "--port", str(self.port)]
        self.process = subprocess.Popen([*command, *self.options], env=self.env, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/health", timeout=40)
                return
            except httpx.HTTPError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)

    def lines(self) -> list[str]:
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("served"))
    made.wait()
    yield made
    made.stop(signal.SIGKILL)


def test_remote_tools_stand_in_a_toolbox_like_any_other(served):
    client = ToolClient(served.url)
    box = Toolbox(client.tools())
    assert [spec.name for spec in box.specs] == ["enter", "add", "double", "right"]
    assert box.specs[2].parameters["properties"] == {"n": {"type": "integer"}}

    async def play():
        async with ToolContext(Task("t", fields={"answer": "yes", "other": object()})) as context:
            calls = [
                ToolCall("1", "double", {"n": 21}),
                ToolCall("2", "double", {"m": 21}),
                ToolCall("3", "right", {"guess": "yes"}),
                ToolCall("4", "add", {"n": 2}),
                ToolCall("5", "add", {"n": 3}),
                ToolCall("6", "double", {"n": object()}),
            ]
            first = await box.run(calls, context)
            second = await box.run([ToolCall("7", "add", {"n": 1})], context)
        async with ToolContext() as other:
            third = await box.run([ToolCall("8", "add", {"n": 1})], other)
        await client.close()
        return first, second, third

    first, second, third = asyncio.run(play())
    assert [result.content for result in first[:1]] == ["42"]
    assert [result.kind for result in first] == ["ok", "arguments", "ok", "ok", "ok", "arguments"]
    assert [result.content for result in first[2:5]] == ["true", "2", "5"]
    assert second[0].content == "6"
    assert third[0].content == "1"  # another episode, another count


def test_one_client_serves_one_event_loop_after_another(served):
    client = ToolClient(served.url)
    (double,) = [each for each in client.tools() if each.name == "double"]
    for n in (1, 2):
        assert asyncio.run(double.run({"n": n})).content == str(2 * n)


def test_a_server_that_is_not_there_is_named_before_the_run():
    with pytest.raises(ConfigError, match=r"no tool server answers at http://127\.0\.0\.1:1 .*arborl tools serve"):
        ToolClient("http://127.0.0.1:1").tools()
    with pytest.raises(ConfigError, match="ARBORL_TOOL_SERVER"):
        ToolClient()


def test_a_non_ascii_key_is_accepted_and_a_wrong_one_is_reported_before_and_during_a_run(tmp_path):
    key = "ключ-ü"
    locked = Served(tmp_path, "--api-key", key)
    locked.wait()
    try:
        for wrong in ("wrong", "ключ"):
            with pytest.raises(ConfigError, match="needs another API key"):
                ToolClient(locked.url, api_key=wrong).tools()
        tools = {tool.name: tool for tool in ToolClient(locked.url, key).tools()}
        assert len(tools) == 4
        assert asyncio.run(tools["double"].run({"n": 21})).content == "42"
        result = asyncio.run(ToolClient(locked.url, api_key="wrong").call("enter", {"line": "x"}))
        assert result.kind == "refused"
        assert locked.lines() == []
    finally:
        assert locked.stop() in (0, -signal.SIGTERM)


def test_a_cluster_limit_is_one_limit_for_all_who_ask_the_server(served):
    name = f"cluster-{os.getpid()}-{time.time()}"
    limits = [RateLimit(60, 2, name, scope="cluster", server=served.url) for _ in range(2)]

    async def play() -> float:
        start = time.monotonic()
        await asyncio.gather(*(limit.acquire() for limit in limits for _ in range(2)))
        return time.monotonic() - start

    assert 1.9 < asyncio.run(play()) < 10
    with pytest.raises(TimeoutError):
        limits[0].acquire_sync(timeout=0.01)
    limits[0].acquire_sync(timeout=40)
    with pytest.raises(ConfigError, match="in use with per_minute=60"):
        RateLimit(300, 2, name, scope="cluster", server=served.url).acquire_sync()


def through_a_restart(served: Served, calls: int) -> list:
    """`calls` stateful calls at once; the server is killed while some run, and started anew."""
    served.wait()
    client = ToolClient(served.url, concurrency=32, call_seconds=90, backoff=0.05)

    async def play() -> list:
        jobs = [asyncio.ensure_future(client.call("enter", {"line": f"line {n}"})) for n in range(calls)]
        while len(served.lines()) < calls // 4:
            await asyncio.sleep(0.005)
        served.stop(signal.SIGKILL)
        await asyncio.sleep(0.3)
        served.start()
        results = await asyncio.gather(*jobs)
        await client.close()
        return results

    return asyncio.run(play())


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """A server that was killed under 150 calls and runs again, what they were answered, and what was written."""
    served = Served(tmp_path_factory.mktemp("restarted"))
    try:
        yield served, through_a_restart(served, 150), served.lines()
    finally:
        served.stop(signal.SIGKILL)


def check_restart(results: list, lines: list[str], calls: int) -> None:
    assert len(results) == calls
    assert max(Counter(lines).values()) == 1, "a stateful call was run twice"
    for number, result in enumerate(results):
        assert result.kind in ("ok", "lost"), result
        if result.ok:
            assert result.content == f"entered line {number}"
            assert f"line {number}" in lines
    kinds = Counter(result.kind for result in results)
    assert kinds["ok"] >= calls // 2


def test_a_server_killed_and_started_anew_loses_no_call_and_runs_none_twice(restarted):
    _, results, lines = restarted
    check_restart(results, lines, 150)


@pytest.mark.slow
def test_a_thousand_calls_through_a_killed_server(tmp_path):
    served = Served(tmp_path)
    try:
        results = through_a_restart(served, 1000)
        check_restart(results, served.lines(), 1000)
    finally:
        served.stop(signal.SIGKILL)


def test_a_stopping_server_finishes_its_running_calls(restarted):
    served, _, before = restarted
    client = ToolClient(served.url, call_seconds=3)

    async def play():
        jobs = [asyncio.ensure_future(client.call("enter", {"line": str(n)})) for n in range(20)]
        while len(served.lines()) == len(before):
            await asyncio.sleep(0.002)
        served.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*jobs)

    results = asyncio.run(play())
    served.process.wait(60)
    entered = [result.content.removeprefix("entered ") for result in results if result.ok]
    assert sorted(entered) == sorted(served.lines()[len(before) :])  # what was run was answered
    assert {result.kind for result in results} <= {"ok", "unavailable"}


class Moody:
    """An HTTP server in a thread that answers as it was outcome, and keeps what it was sent."""

    def __init__(self, codes: list[int], headers: dict[str, str] | None = None):
        self.codes, self.headers, self.bodies, self.times = list(codes), headers or {}, [], []
        self.port = free_port()
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="critical", interface="asgi3"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self.port}"

    async def app(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(json.loads(body))
        self.times.append(time.monotonic())
        code = self.codes.pop(0) if self.codes else 200
        answer = {"content": "fine", "ok": True, "kind": "ok", "seconds": 0.0, "replayed": False}
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send(
            {"type": "http.response.body", "body": json.dumps(answer if code == 200 else {"detail": "no"}).encode()}
        )

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def moody():
    made: list[Moody] = []

    def make(*codes: int, **headers: str) -> Moody:
        made.append(Moody(list(codes), headers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_failed_requests_are_repeated_under_one_key_with_waits_and_within_the_limit(moody, tmp_path):
    server = moody(503, 429, 502)
    result = asyncio.run(ToolClient(server.url, backoff=0.01).call("x", {}))
    assert result.content == "fine"
    assert len(server.bodies) == 4
    assert len({body["key"] for body in server.bodies}) == 1
    server = moody(503, 503, **{"Retry-After": "0.3"})
    asyncio.run(ToolClient(server.url, backoff=0.01).call("x", {}))
    gaps = [later - before for before, later in zip(server.times, server.times[1:], strict=False)]
    assert all(gap >= 0.29 for gap in gaps)
    server = moody(503, 503)
    limit = RateLimit(per_minute=600, burst=1, name="retries", folder=tmp_path)
    start = time.monotonic()
    asyncio.run(ToolClient(server.url, backoff=0.001, limit=limit).call("x", {}))
    assert time.monotonic() - start >= 0.2


@pytest.mark.parametrize("code", [400, 401, 404, 422, 500])
def test_what_cannot_help_is_not_tried_again(moody, code):
    server = moody(code)
    result = asyncio.run(ToolClient(server.url, backoff=0.01).call("x", {}))
    assert (result.ok, result.kind) == (False, "refused")
    assert len(server.bodies) == 1


def test_every_call_has_a_key_of_its_own(moody):
    server = moody()
    client = ToolClient(server.url)

    async def play() -> None:
        await asyncio.gather(*(client.call("x", {}) for _ in range(5)))

    asyncio.run(play())
    assert len({body["key"] for body in server.bodies}) == 5


def test_a_call_whose_time_is_up_is_reported(moody):
    server = moody(*[503] * 1000)
    start = time.monotonic()
    result = asyncio.run(ToolClient(server.url, backoff=0.01, call_seconds=0.4).call("x", {}))
    assert result.kind == "unavailable"
    assert "within 0.4 s (503: no)" in result.content
    assert time.monotonic() - start < 20  # a thousand tries take longer


def test_no_more_requests_are_under_way_than_allowed(served):
    client = ToolClient(served.url, concurrency=3)

    async def play() -> int:
        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                running = (await asyncio.to_thread(httpx.get, f"{served.url}/health")).json()
                most = max(most, running["running"] + running["waiting"])

        looking = asyncio.ensure_future(look())
        await asyncio.gather(*(client.call("enter", {"line": f"cap {n}"}) for n in range(40)))
        looking.cancel()
        return most

    assert asyncio.run(play()) <= 3


def test_a_closed_client_takes_no_calls_after_those_under_way(served):
    client = ToolClient(served.url)

    async def play():
        running = asyncio.ensure_future(client.call("enter", {"line": "closing"}))
        await asyncio.sleep(0.01)
        await client.close()
        return await running, await client.call("double", {"n": 1})

    first, second = asyncio.run(play())
    assert first.ok
    assert (second.kind, second.ok) == ("unavailable", False)


def test_an_open_breaker_lets_one_try_at_a_time():
    now = [0.0]

    async def play() -> None:
        breaker = CircuitBreaker(failures=2, pause=1.0, clock=lambda: now[0])
        await breaker.acquire()
        breaker.record_failure()
        assert not breaker.is_open
        breaker.record_failure()
        assert breaker.is_open
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(breaker.acquire(), 0.05)
        now[0] = 1.1
        await breaker.acquire()  # the one that tries
        second = asyncio.ensure_future(breaker.acquire())
        await asyncio.sleep(0.03)
        assert not second.done()
        breaker.record_success()
        await asyncio.wait_for(second, 20)
        assert not breaker.is_open

    asyncio.run(play())


def test_a_breaker_whose_trier_gave_up_lets_the_next_try():
    now = [0.0]

    async def play() -> tuple[bool, bool]:
        breaker = CircuitBreaker(failures=1, pause=1.0, clock=lambda: now[0])
        breaker.record_failure()
        now[0] = 1.1
        await breaker.acquire()
        following = asyncio.ensure_future(breaker.acquire())
        await asyncio.sleep(0.03)
        before = following.done()
        breaker.cancel()
        await asyncio.wait([following], timeout=20)
        return before, following.done()

    assert asyncio.run(play()) == (False, True)


def test_the_pauses_of_a_breaker_grow_and_shrink_again():
    now = [0.0]
    breaker = CircuitBreaker(failures=1, pause=1.0, longest=3.0, clock=lambda: now[0])
    for expected in (1.0, 2.0, 3.0, 3.0):
        breaker.record_failure()
        assert breaker._next_probe - now[0] == expected
    breaker.record_success()
    breaker.record_failure()
    assert breaker._next_probe - now[0] == 1.0


def test_a_key_of_any_letters_opens(tmp_path):
    served = Served(tmp_path, "--api-key", "ключ-ü")
    try:
        served.wait()
        client = ToolClient(served.url, "ключ-ü")
        (double,) = [each for each in client.tools() if each.name == "double"]
        assert asyncio.run(double.run({"n": 21})).content == "42"
        with pytest.raises(ConfigError, match="needs another API key"):
            ToolClient(served.url, "ключ").tools()
    finally:
        served.stop()
