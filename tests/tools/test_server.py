import asyncio
import json
from typing import Annotated

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("prometheus_client", reason="the extra 'serve'")

from arborl.tools import Given, State, tool
from arborl.tools.desk import Desk
from arborl.tools.journal import Journal
from arborl.tools.library.calculator import calculator
from arborl.tools.library.python import python
from arborl.tools.server import make_app

RUNS: list[str] = []


class Purse:
    """What an episode has collected."""

    closed = 0

    def __init__(self) -> None:
        self.coins = 0

    def close(self) -> None:
        Purse.closed += 1


@tool(stateful=True)
async def collect(coins: int, purse: Annotated[Purse, State(Purse)]) -> int:
    """Put coins into the purse.

    Args:
        coins: how many.
    """
    RUNS.append(f"collect {coins}")
    before = purse.coins
    await asyncio.sleep(0.01)
    purse.coins = before + coins
    return purse.coins


@tool
async def nap(seconds: float) -> str:
    """Sleep."""
    RUNS.append("nap")
    await asyncio.sleep(seconds)
    return "slept"


@tool
def check(guess: str, answer: Annotated[str, Given()]) -> bool:
    """Compare with the task's answer."""
    return guess == answer


@pytest.fixture(autouse=True)
def _fresh():
    RUNS.clear()
    Purse.closed = 0


def serving(play, api_key: str | None = None, headers: dict | None = None, drain: bool = True, **options):
    """`play(http, desk)` against the application, without a network."""

    async def run():
        desk = Desk([calculator, collect, nap, check], **options)
        app = make_app(desk, api_key, limit_seconds=0.5)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=20) as http:
            result = await play(http, desk)
        if drain:
            await desk.drain(1)
        return result

    return asyncio.run(run())


def post(http, path: str, **body):
    return http.post(path, json=body)


# ------------------------------------------------------------------------------------------------ what it answers


def test_it_describes_its_tools():
    async def play(http, desk):
        return (await http.get("/tools")).json()

    by_name = {each["name"]: each for each in serving(play)}
    assert by_name["calculator"]["parameters"] == calculator.spec.parameters
    assert (by_name["collect"]["stateful"], by_name["calculator"]["stateful"]) == (True, False)
    assert by_name["collect"]["parameters"]["required"] == ["coins"]
    assert by_name["check"]["fields"] == ["answer"]


def test_it_answers_calls_good_and_bad():
    async def play(http, desk):
        calls = [
            {"name": "calculator", "arguments": {"expression": "6*7"}},
            {"name": "calculater", "arguments": {}},
            {"name": "calculator", "arguments": {"expresion": "1"}},
            {"name": "calculator", "arguments": {"expression": "1/0"}},
            {"name": "check", "arguments": {"guess": "a"}, "fields": {"answer": "a"}},
            {"name": "check", "arguments": {"guess": "a"}},
        ]
        return [(await post(http, "/call", **call)).json() for call in calls]

    answers = serving(play)
    assert answers[0]["content"] == "42"
    assert [answer["kind"] for answer in answers] == ["ok", "unknown_tool", "arguments", "exception", "ok", "exception"]
    assert answers[4]["content"] == "true"


def test_execute_takes_and_gives_the_shape_older_clients_know():
    async def play(http, desk):
        good = await post(http, "/execute", code="print('Hello, Tool!')")
        bad = await post(http, "/execute", code="1/0", timeout=3)
        return good.json(), bad.json()

    good, bad = serving(play)
    assert good.pop("execution_time") > 0
    assert good == {"success": True, "output": "Hello, Tool!", "error": None}
    assert not bad["success"]
    assert "ZeroDivisionError" in bad["error"]


def test_health_and_metrics_tell_how_it_stands():
    async def play(http, desk):
        await post(http, "/call", name="calculator", arguments={"expression": "1"})
        await post(http, "/call", name="nothing")
        return (await http.get("/health")).json(), (await http.get("/metrics")).text

    health, metrics = serving(play)
    assert health == {"status": "ok", "running": 0, "waiting": 0, "sandbox": None}
    assert 'arborl_tool_calls_total{kind="ok",tool="calculator"} 1.0' in metrics
    assert 'arborl_tool_calls_total{kind="unknown_tool",tool="unknown"} 1.0' in metrics
    assert 'arborl_tool_stuck{tool="calculator"} 0.0' in metrics


# ------------------------------------------------------------------------------------------------ who may ask


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer secreT"}, {"X-API-Key": ""}])
def test_without_the_right_key_nothing_is_run(headers):
    async def play(http, desk):
        paths = [("POST", "/call"), ("POST", "/execute"), ("GET", "/tools"), ("POST", "/limit"), ("GET", "/metrics")]
        codes = []
        for method, path in paths:
            body = {"name": "nap", "arguments": {"seconds": 0}, "code": "1"}
            codes.append((await http.request(method, path, json=body)).status_code)
        return codes, (await http.get("/health")).status_code

    codes, health = serving(play, "secret", headers)
    assert codes == [401] * 5
    assert health == 200
    assert RUNS == []


@pytest.mark.parametrize("headers", [{"X-API-Key": "secret"}, {"Authorization": "Bearer secret"}])
def test_the_right_key_opens(headers):
    async def play(http, desk):
        return (await post(http, "/call", name="nap", arguments={"seconds": 0})).json()

    assert serving(play, "secret", headers)["content"] == "slept"


# ------------------------------------------------------------------------------------------------ its own limits


def test_calls_beyond_the_queue_are_refused_and_not_run():
    async def play(http, desk):
        calls = [post(http, "/call", name="nap", arguments={"seconds": 0.3}) for _ in range(10)]
        return await asyncio.gather(*calls)

    answers = serving(play, concurrency=2, queue=3)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 5 + [429] * 5
    assert len(RUNS) == codes.count(200)
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 429)


def test_no_more_run_at_a_time_than_it_allows():
    async def play(http, desk):
        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, desk.running)
                await asyncio.sleep(0.005)

        looking = asyncio.ensure_future(look())
        await asyncio.gather(*(post(http, "/call", name="nap", arguments={"seconds": 0.05}) for _ in range(20)))
        looking.cancel()
        return most

    assert serving(play, concurrency=4) == 4


def test_a_body_that_is_too_large_is_refused():
    async def play(http, desk):
        async def pieces():
            for _ in range(40):
                yield b"x" * 100_000

        said = (await http.post("/call", content=b"x" * 3_000_000)).status_code
        unsaid = (await http.post("/call", content=pieces())).status_code
        return said, unsaid

    assert serving(play) in ((413, 422), (413, 400))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"name": 3}',
        b'{"name": "calculator", "arguments": {"expression": NaN}}',
        b'{"name": "\\ud800"}',
        b'{"name": "nap", "arguments": {"seconds": "\\ud800"}}',
        b'{"name": "nap", "key": "a b"}',
    ],
)
def test_whatever_is_sent_is_answered_without_a_crash(body):
    async def play(http, desk):
        answer = await http.post("/call", content=body, headers={"Content-Type": "application/json"})
        return answer.status_code, answer.json()

    code, said = serving(play)
    assert code in (200, 400, 422)
    json.dumps(said)


# ------------------------------------------------------------------------------------------------ once, and in turn


def test_a_call_sent_twice_is_run_once():
    async def play(http, desk):
        call = {"name": "collect", "arguments": {"coins": 5}, "key": "k1", "session": "s"}
        together = await asyncio.gather(*(post(http, "/call", **call) for _ in range(5)))
        later = await post(http, "/call", **call)
        return [answer.json() for answer in (*together, later)]

    answers = serving(play)
    assert [answer["content"] for answer in answers] == ["5"] * 6
    assert [answer["replayed"] for answer in answers].count(False) == 1
    assert RUNS == ["collect 5"]


def test_a_client_that_hangs_up_does_not_stop_a_call_that_has_begun():
    async def play(http, desk):
        call = {"name": "collect", "arguments": {"coins": 5}, "key": "k1", "session": "s"}
        first = asyncio.ensure_future(post(http, "/call", **call))
        while not RUNS:
            await asyncio.sleep(0.001)
        first.cancel()
        return (await post(http, "/call", **call)).json()

    assert serving(play)["content"] == "5"
    assert RUNS == ["collect 5"]


def test_state_lasts_a_session_and_calls_of_one_take_turns():
    async def play(http, desk):
        async def put(session):
            return (await post(http, "/call", name="collect", arguments={"coins": 1}, session=session)).json()[
                "content"
            ]

        ours = await asyncio.gather(*(put("a") for _ in range(5)))
        other = await put("b")
        await http.delete("/sessions/a")
        again = await put("a")
        await http.delete("/sessions/never-was")
        return ours, other, again, (await post(http, "/call", name="collect", arguments={"coins": 1})).json()["content"]

    ours, other, again, alone = serving(play)
    assert ours == ["1", "2", "3", "4", "5"]
    assert (other, again, alone) == ("1", "1", "1")
    assert Purse.closed == 4  # one ended, one alone, two when the server stopped


def test_sessions_that_nobody_uses_are_ended():
    async def play(http, desk):
        await post(http, "/call", name="collect", arguments={"coins": 1}, session="old")
        await asyncio.sleep(0.15)
        await post(http, "/call", name="collect", arguments={"coins": 1}, session="new")
        return Purse.closed

    assert serving(play, session_seconds=0.1) == 1


def test_a_server_started_anew_neither_runs_again_nor_pretends(tmp_path):
    """Calls of an earlier life: one answered, one begun, and one that comes after with its session's state gone."""
    path = tmp_path / "journal"

    async def before(http, desk):
        await post(http, "/call", name="collect", arguments={"coins": 5}, key="done", session="s")
        desk.journal.begin("begun")

    serving(before, journal=Journal(path), drain=False)  # killed: nobody closed anything
    RUNS.clear()

    async def after(http, desk):
        keys = {"done": "s", "begun": "s", "new": "s", "other": "t"}
        calls = [post(http, "/call", name="collect", arguments={"coins": 5}, key=k, session=s) for k, s in keys.items()]
        return [answer.json() for answer in await asyncio.gather(*calls)]

    done, begun, new, other = serving(after, journal=Journal(path))
    assert (done["content"], done["replayed"]) == ("5", True)
    assert begun["kind"] == "lost"
    assert "may or may not" in begun["content"]
    assert new["kind"] == "lost"
    assert "started anew" in new["content"]
    assert other["content"] == "5"
    assert RUNS == ["collect 5"]


def test_a_server_that_is_about_to_stop_takes_no_more_and_finishes_what_it_has():
    async def play(http, desk):
        running = asyncio.ensure_future(post(http, "/call", name="nap", arguments={"seconds": 0.2}))
        while not RUNS:
            await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(desk.drain(5))
        await asyncio.sleep(0.01)
        refused = await post(http, "/call", name="nap", arguments={"seconds": 0})
        health = (await http.get("/health")).json()["status"]
        await draining
        return (await running).json()["content"], refused.status_code, health

    assert serving(play, drain=False) == ("slept", 503, "draining")


# ------------------------------------------------------------------------------------------------ limits for others


def test_it_grants_a_rate_limit_to_all_who_ask_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.tools.limit.default_folder", lambda: tmp_path)

    async def play(http, desk):
        asks = [post(http, "/limit", name="x", per_minute=600, burst=2, timeout=0.25) for _ in range(6)]
        answers = await asyncio.gather(*asks)
        other = await post(http, "/limit", name="x", per_minute=60)
        return [answer.json()["granted"] for answer in answers], other

    granted, other = serving(play)
    assert granted.count(True) == 4  # two at once, two more in the quarter of a second
    assert other.status_code == 409
    assert "in use with per_minute=600" in other.json()["detail"]


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(tmp_path, monkeypatch):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    monkeypatch.setattr("arborl.tools.limit.default_folder", lambda: tmp_path)
    key = {"X-API-Key": "secret"}
    app = make_app(Desk([calculator, collect, nap, check, python], concurrency=8), "secret", limit_seconds=0.05)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=key)
    seen: list[int] = []
    quietly = settings(
        max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
    )
    for operation in schema.get_all_operations():

        @quietly
        @given(case=operation.ok().as_strategy())
        def one(case):
            answer = case.call(headers=key)
            seen.append(answer.status_code)
            assert answer.status_code < 500, (case, answer.text)

        one()
    assert len(seen) > 100
    assert 200 in seen
