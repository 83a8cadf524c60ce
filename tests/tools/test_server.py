import asyncio
import contextlib
import json
import time
from typing import Annotated

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra 'serve'")
pytest.importorskip("prometheus_client", reason="the extra 'serve'")

from arborl.errors import ConfigError
from arborl.tools import EpisodeState, TaskField, tool
from arborl.tools.core.arguments import ArgumentError
from arborl.tools.library.calculator import calculator
from arborl.tools.library.python import python
from arborl.tools.remote.tool_client import ToolClient
from arborl.tools.remote.tool_dispatcher import CallJournal, ToolDispatcher
from arborl.tools.remote.tool_protocol import CallRequest, bearer_header
from arborl.tools.remote.tool_server import make_app

RUNS: list[str] = []


class Purse:
    """What an episode has collected."""

    closed = 0

    def __init__(self) -> None:
        self.coins = 0

    def close(self) -> None:
        Purse.closed += 1


@tool(stateful=True)
async def collect(coins: int, purse: Annotated[Purse, EpisodeState(Purse)]) -> int:
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
def check(guess: str, answer: Annotated[str, TaskField()]) -> bool:
    """Compare with the task's answer."""
    return guess == answer


@pytest.fixture(autouse=True)
def _fresh():
    RUNS.clear()
    Purse.closed = 0


def serving(play, api_key: str | None = None, headers: dict | None = None, drain: bool = True, tools=(), **options):
    """`play(http, dispatcher)` against the application, without a network."""

    async def run():
        dispatcher = ToolDispatcher([calculator, collect, nap, check, *tools], **options)
        app = make_app(dispatcher, api_key, limit_seconds=2.5)
        url, transport = "http://127.0.0.1", httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app) if drain else contextlib.nullcontext(),
            httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=20) as http,
        ):
            result = await play(http, dispatcher)
        return result

    return asyncio.run(run())


def post(http, path: str, **body):
    return http.post(path, json=body)


def called(*bodies, **options) -> list[httpx.Response]:
    """The answers to these calls, one after another; a body in bytes is sent as it is."""

    async def play(http, dispatcher):
        head = {"Content-Type": "application/json"}
        data = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
        return [await http.post("/call", content=each, headers=head) for each in data]

    return serving(play, **options)


def test_it_describes_its_tools():
    async def play(http, dispatcher):
        return (await http.get("/tools")).json()

    by_name = {each["name"]: each for each in serving(play)}
    assert by_name["calculator"]["parameters"] == calculator.spec.parameters
    assert (by_name["collect"]["stateful"], by_name["calculator"]["stateful"]) == (True, False)
    assert by_name["collect"]["parameters"]["required"] == ["coins"]
    assert by_name["check"]["fields"] == ["answer"]


def test_it_answers_calls_good_and_bad():
    calls = [
        {"name": "calculator", "arguments": {"expression": "6*7"}},
        {"name": "calculater", "arguments": {}},
        {"name": "calculator", "arguments": {"expresion": "1"}},
        {"name": "calculator", "arguments": {"expression": "1/0"}},
        {"name": "check", "arguments": {"guess": "a"}, "fields": {"answer": "a"}},
        {"name": "check", "arguments": {"guess": "a"}},
    ]
    answers = [answer.json() for answer in called(*calls)]
    assert answers[0]["content"] == "42"
    assert [answer["kind"] for answer in answers] == ["ok", "unknown_tool", "arguments", "exception", "ok", "exception"]
    assert answers[4]["content"] == "true"


def test_execute_takes_and_gives_the_shape_older_clients_know():
    async def play(http, dispatcher):
        good = await post(http, "/execute", code="print('Hello, Tool!')")
        bad = await post(http, "/execute", code="1/0", timeout=3)
        return good.json(), bad.json()

    good, bad = serving(play, tools=[python])
    assert good.pop("execution_time") > 0
    assert good == {"success": True, "output": "Hello, Tool!", "error": None}
    assert not bad["success"]
    assert "ZeroDivisionError" in bad["error"]


def test_code_is_run_only_where_python_is_among_the_tools():
    async def play(http, dispatcher):
        return (await post(http, "/execute", code="1")).status_code, (await http.get("/openapi.json")).json()["paths"]

    code, paths = serving(play)
    assert code == 404
    assert "/execute" not in paths
    assert "/call" in paths


def test_health_and_metrics_tell_how_it_stands():
    async def play(http, dispatcher):
        await post(http, "/call", name="calculator", arguments={"expression": "1"})
        await post(http, "/call", name="nothing")
        return (await http.get("/health")).json(), (await http.get("/metrics")).text

    health, metrics = serving(play)
    assert health == {"status": "ok", "running": 0, "waiting": 0, "sandbox": None}
    assert 'arborl_tool_calls_total{kind="ok",tool="calculator"} 1.0' in metrics
    assert 'arborl_tool_calls_total{kind="unknown_tool",tool="unknown"} 1.0' in metrics
    assert 'arborl_tool_hanging{tool="calculator"} 0.0' in metrics


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer secreT"}, {"X-API-Key": ""}])
def test_without_the_right_key_nothing_is_run(headers):
    async def play(http, dispatcher):
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
    (answer,) = called({"name": "nap", "arguments": {"seconds": 0}}, api_key="secret", headers=headers)
    assert answer.json()["content"] == "slept"


def test_an_empty_key_is_refused_when_the_server_is_made():
    with pytest.raises(ConfigError, match="the API key is empty"):
        make_app(ToolDispatcher([calculator]), "")


@pytest.mark.parametrize("key", ["a\nb", " a", "a\x7f"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ConfigError, match="the API key begins or ends"):
        make_app(ToolDispatcher([calculator]), key)
    with pytest.raises(ConfigError, match="the API key begins or ends"):
        ToolClient("http://127.0.0.1:1", key)


def test_a_key_may_have_any_letters():
    key = "schlüssel-ключ-鍵"

    async def play(http, dispatcher):
        answers = [await http.get("/tools", headers=one) for one in (bearer_header(key), bearer_header("schlüssel"))]
        answers.append(await http.get("/tools", headers={"X-API-Key": key.encode()}))
        return [answer.status_code for answer in answers]

    assert serving(play, key) == [200, 401, 200]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "127.0.0.1:30003"}, 200),
        ({"Host": "[::1]:30003"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8", "Origin": "http://localhost:8"}, 200),
        ({"Host": "evil.example:30003"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Host": "[::1"}, 421),
        ({"Host": "127.0.0.1", "Origin": "https://evil.example"}, 421),
        ({"Host": "127.0.0.1", "Origin": "null"}, 421),
    ],
)
def test_without_a_key_a_page_in_a_browser_cannot_reach_it_by_a_name_of_its_own(headers, code):
    """DNS rebinding: a page's own name, resolved to this machine, makes its requests the same origin's."""

    async def play(http, dispatcher):
        return (await http.get("/tools", headers=headers)).status_code

    assert serving(play) == code


def test_with_a_key_any_name_will_do():
    async def play(http, dispatcher):
        return (await http.get("/tools", headers={"Host": "tools.example", "X-API-Key": "secret"})).status_code

    assert serving(play, "secret") == 200


def test_a_slow_tool_holds_up_only_itself():
    async def play(http, dispatcher):
        slow = [asyncio.ensure_future(post(http, "/call", name="nap", arguments={"seconds": 300})) for _ in range(8)]
        while dispatcher.running < 2:
            await asyncio.sleep(0.001)
        quick = await asyncio.wait_for(post(http, "/call", name="calculator", arguments={"expression": "6*7"}), 40)
        codes = [(await task).status_code for task in slow if task.done()]
        for task in (*slow, *dispatcher._tasks):
            task.cancel()
        return quick.json()["content"], codes

    assert serving(play, concurrency=2, queue=3) == ("42", [429] * 3)


def test_calls_that_wait_for_their_session_hold_up_no_other_session():
    async def play(http, dispatcher):
        free = asyncio.Event()

        @tool(stateful=True)
        async def hold(free_now: bool) -> str:
            """Wait."""
            if not free_now:
                await free.wait()
            return "held"

        dispatcher = ToolDispatcher([hold], concurrency=2)
        calls = [CallRequest(name="hold", arguments={"free_now": False}, session="a") for _ in range(5)]
        held = [asyncio.ensure_future(dispatcher.call(call)) for call in calls]
        await asyncio.sleep(0.01)
        other = CallRequest(name="hold", arguments={"free_now": True}, session="b")
        answer = await asyncio.wait_for(dispatcher.call(other), 40)
        counts = dispatcher.running, dispatcher.waiting
        free.set()
        await asyncio.gather(*held)
        return answer.content, counts, (dispatcher.running, dispatcher.waiting)

    assert serving(play) == ("held", (1, 4), (0, 0))


def test_calls_beyond_the_queue_are_refused_and_not_run():
    async def play(http, dispatcher):
        calls = [post(http, "/call", name="nap", arguments={"seconds": 0.3}) for _ in range(10)]
        return await asyncio.gather(*calls)

    answers = serving(play, concurrency=2, queue=3)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 5 + [429] * 5
    assert len(RUNS) == codes.count(200)
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 429)


def test_no_more_run_at_a_time_than_it_allows():
    async def play(http, dispatcher):
        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, dispatcher.running)
                await asyncio.sleep(0.005)

        looking = asyncio.ensure_future(look())
        await asyncio.gather(*(post(http, "/call", name="nap", arguments={"seconds": 0.05}) for _ in range(20)))
        looking.cancel()
        return most

    assert serving(play, concurrency=4) == 4


def test_a_body_that_is_too_large_is_refused():
    async def play(http, dispatcher):
        async def pieces():
            for _ in range(40):
                yield b"x" * 100_000

        received = (await http.post("/call", content=b"x" * 3_000_000)).status_code
        unsaid = (await http.post("/call", content=pieces())).status_code
        return received, unsaid

    assert serving(play) == (413, 413)


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
    (answer,) = called(body)
    assert answer.status_code in (200, 400, 422)
    json.dumps(answer.json())


def test_a_call_sent_twice_is_run_once():
    async def play(http, dispatcher):
        call = {"name": "collect", "arguments": {"coins": 5}, "key": "k1", "session": "s"}
        together = await asyncio.gather(*(post(http, "/call", **call) for _ in range(5)))
        later = await post(http, "/call", **call)
        return [answer.json() for answer in (*together, later)]

    answers = serving(play)
    assert [answer["content"] for answer in answers] == ["5"] * 6
    assert [answer["replayed"] for answer in answers].count(False) == 1
    assert RUNS == ["collect 5"]


@pytest.mark.parametrize(
    "other", [{"arguments": {"coins": 6}}, {"session": "t"}, {"name": "nap", "arguments": {"seconds": 0}}]
)
def test_a_key_that_was_another_calls_is_refused(other, tmp_path):
    call = {"name": "collect", "arguments": {"coins": 5}, "key": "k1", "session": "s"}

    async def play(http, dispatcher):
        first = asyncio.ensure_future(post(http, "/call", **call))
        while not RUNS:
            await asyncio.sleep(0.001)
        during = await post(http, "/call", **call | other)
        await first
        return during, await post(http, "/call", **call | other)

    async def later(http, dispatcher):
        return await post(http, "/call", **call | other)

    now = serving(play, journal=CallJournal(tmp_path / "journal"))
    answers = [*now, serving(later, journal=CallJournal(tmp_path / "journal"))]
    assert [answer.status_code for answer in answers] == [409] * 3
    assert "the key 'k1' belongs to another call" in answers[0].json()["detail"]
    assert RUNS == ["collect 5"]


def test_a_journal_that_cannot_be_written_runs_nothing_and_says_so(tmp_path):
    journal = CallJournal(tmp_path / "journal")

    async def play(http, dispatcher):
        journal._connection.execute("PRAGMA query_only = ON")  # as on a full disk
        answer = await post(http, "/call", name="collect", arguments={"coins": 5}, key="k", session="s")
        journal._connection.execute("PRAGMA query_only = OFF")
        return answer

    answer = serving(play, journal=journal)
    assert answer.status_code == 503
    assert "the journal of stateful calls cannot be used" in answer.json()["detail"]
    assert RUNS == []


def test_a_file_that_is_no_journal_is_one_sentence(tmp_path):
    (tmp_path / "journal").write_bytes(b"not SQLite" * 1000)
    with pytest.raises(ConfigError, match=r"not a usable journal .* Remove it"):
        CallJournal(tmp_path / "journal")


def test_arguments_that_nest_too_deep_are_no_request():
    (answer,) = called(b'{"name": "nap", "key": "k", "arguments": {"seconds": ' + b"[" * 500 + b"]" * 500 + b"}}")
    assert answer.status_code == 422
    assert "nested more than" in answer.json()["detail"]


MANY = {
    "empty objects": '"arguments": {"seconds": [' + ",".join(["{}"] * 600_000) + "]}",
    "wrong values": '"arguments": {"seconds": [' + ",".join(['""'] * 600_000) + "]}",
    "unknown arguments": '"arguments": {' + ",".join(f'"{n}": 1' for n in range(180_000)) + "}",
    "unknown keys": ",".join(f'"{n}": 1' for n in range(180_000)),
    "fields": '"fields": {' + ",".join(f'"{n}": 1' for n in range(180_000)) + "}",
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(body):
    text = ('{"name": "nap", ' + body + "}").encode()
    assert 1_700_000 < len(text) < 2**21
    before = time.process_time()
    (answer,) = called(text)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("body: the JSON has more than 65,536 ")
    assert time.process_time() - before < 1.0  # parsed and checked, most of these took several seconds


def test_arguments_have_fewer_values_than_fields():
    many = [1] * 20_000
    refused, answered = called(
        {"name": "nap", "arguments": {"seconds": many}},
        {"name": "nap", "arguments": {"seconds": 0}, "fields": {"document": many}},
    )
    assert refused.status_code == 422
    assert "more than 8,192 values and keys" in refused.json()["detail"]
    assert answered.json()["ok"]


def test_an_error_names_some_of_many_wrong_arguments():
    (answer,) = called({"name": "nap", "arguments": {f"a{n}": 1 for n in range(1000)}})
    content = answer.json()["content"]
    assert "argument 'a0' is unknown" in content
    assert "and 993 more" in content
    assert len(content) < 1000


def test_json_within_a_text_is_read_within_bounds():
    """A text where something else is wanted is read as JSON; one with too many values stays a text."""
    takes = nap._arguments
    assert takes.check({"seconds": "3"}) == {"seconds": 3}
    before = time.process_time()
    with pytest.raises(ArgumentError, match="seconds"):
        takes.check({"seconds": "[" + ",".join(["{}"] * 600_000) + "]"})
    assert time.process_time() - before < 1.0


def test_a_client_that_hangs_up_does_not_stop_a_call_that_has_begun():
    async def play(http, dispatcher):
        call = {"name": "collect", "arguments": {"coins": 5}, "key": "k1", "session": "s"}
        first = asyncio.ensure_future(post(http, "/call", **call))
        while not RUNS:
            await asyncio.sleep(0.001)
        first.cancel()
        return (await post(http, "/call", **call)).json()

    assert serving(play)["content"] == "5"
    assert RUNS == ["collect 5"]


def test_state_lasts_a_session_and_calls_of_one_take_turns():
    async def play(http, dispatcher):
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


def test_idle_sessions_are_ended():
    async def play(http, dispatcher):
        await post(http, "/call", name="collect", arguments={"coins": 1}, session="old")
        await asyncio.sleep(0.15)
        await post(http, "/call", name="collect", arguments={"coins": 1}, session="new")
        return Purse.closed

    assert serving(play, session_seconds=0.1) == 1


def test_a_server_started_anew_neither_runs_again_nor_pretends(tmp_path):
    """Calls of an earlier life: one answered, one begun, and one that comes after with its session's state gone."""
    path = tmp_path / "journal"

    async def before(http, dispatcher):
        await post(http, "/call", name="collect", arguments={"coins": 5}, key="done", session="s")
        begun = CallRequest(name="collect", arguments={"coins": 5}, key="begun", session="s")
        dispatcher.journal.begin("begun", begun.digest)

    serving(before, journal=CallJournal(path), drain=False)  # killed: no one closed anything
    RUNS.clear()

    async def after(http, dispatcher):
        keys = {"done": "s", "begun": "s", "new": "s", "other": "t"}
        calls = [post(http, "/call", name="collect", arguments={"coins": 5}, key=k, session=s) for k, s in keys.items()]
        return [answer.json() for answer in await asyncio.gather(*calls)]

    done, begun, new, other = serving(after, journal=CallJournal(path))
    assert (done["content"], done["replayed"]) == ("5", True)
    assert begun["kind"] == "lost"
    assert "its effect is unknown" in begun["content"]
    assert new["kind"] == "lost"
    assert "was restarted" in new["content"]
    assert other["content"] == "5"
    assert RUNS == ["collect 5"]


def test_a_server_that_is_about_to_stop_takes_no_more_and_finishes_what_it_has():
    async def play(http, dispatcher):
        running = asyncio.ensure_future(post(http, "/call", name="nap", arguments={"seconds": 0.2}))
        while not RUNS:
            await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(dispatcher.drain(5))
        await asyncio.sleep(0.01)
        refused = await post(http, "/call", name="nap", arguments={"seconds": 0})
        health = (await http.get("/health")).json()["status"]
        await draining
        return (await running).json()["content"], refused.status_code, health

    assert serving(play, drain=False) == ("slept", 503, "draining")


def test_it_grants_a_rate_limit_to_all_who_ask_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.tools.core.rate_limit.default_limit_dir", lambda: tmp_path)

    async def play(http, dispatcher):
        asks = [post(http, "/limit", name="x", per_minute=60, burst=2, timeout=2.5) for _ in range(6)]
        answers = await asyncio.gather(*asks)
        other = await post(http, "/limit", name="x", per_minute=600)
        return [answer.json()["granted"] for answer in answers], other

    granted, other = serving(play)
    assert granted.count(True) == 4  # two at once, two more in the two seconds and a half
    assert other.status_code == 409
    assert "in use with per_minute=60" in other.json()["detail"]


def test_limits_that_owe_nothing_leave_no_file_behind(tmp_path, monkeypatch):
    """One that has granted ahead is kept: a server started anew must not grant it again."""
    monkeypatch.setattr("arborl.tools.core.rate_limit.default_limit_dir", lambda: tmp_path)

    async def play(http, dispatcher):
        for name in "abc":
            await post(http, "/limit", name=name, per_minute=1e9)
        return (await post(http, "/limit", name="slow", per_minute=1, burst=1)).json()["granted"]

    assert serving(play)
    assert len(list(tmp_path.glob("*.limit"))) == 1

    async def again(http, dispatcher):
        return (await post(http, "/limit", name="slow", per_minute=1, burst=1, timeout=0.1)).json()["granted"]

    assert not serving(again)


def test_limits_beyond_the_most_take_the_place_of_those_that_owe_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.tools.core.rate_limit.default_limit_dir", lambda: tmp_path)
    monkeypatch.setattr("arborl.tools.remote.tool_server.MAX_RATE_LIMITS", 3)

    async def play(http, dispatcher):
        return [(await post(http, "/limit", name=f"n{i}", per_minute=1e9)).status_code for i in range(10)]

    assert serving(play) == [200] * 10
