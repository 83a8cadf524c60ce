from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.rewards import REWARDS
from arborl.rewards.answers import MultipleChoice, ShortAnswer, count_sentences, f1, read_letter
from arborl.rewards.judge import Judge
from arborl.rewards.reward import Rewards
from arborl.types import Episode, Group, Message, StopReason, Task, Turn


def episode(text, stop=StopReason.DONE, metrics=None, **fields):
    turns = [Turn(Message("assistant", text))] if text is not None else []
    task = Task("t", (Message("user", "Who keeps the lamp?"),), fields)
    return Episode("e", task, turns=turns, stop=stop, metrics=metrics or {})


def value(reward, made):
    return asyncio.run(reward(made))


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("B", 1.0), ("B. Boris", 1.0), ("(B)", 1.0), ("<answer>B</answer>", 1.0), ("b", 1.0),
        ("A", -0.5), ("D: David", -0.5), ("Boris", -1.0), ("", -1.0), ("Both", -1.0),
    ],
)  # fmt: skip
def test_a_choice_is_right_wrong_or_none(text, worth):
    assert value(MultipleChoice(), episode(text, answer="B")) == worth


@pytest.mark.parametrize("reward", [MultipleChoice(exceeded=-2.0), ShortAnswer(exceeded=-2.0)])
def test_an_episode_that_passed_a_limit_is_worth_the_penalty_whatever_it_stated(reward):
    for stop in (StopReason.CONTEXT_FULL, StopReason.MAX_TURNS):
        assert value(reward, episode("B", stop, answer="B")) == -2.0
        assert value(reward, episode(None, stop, answer="B")) == -2.0
    assert value(reward, episode("B", metrics={"context/too_few_turns": 1.0}, answer="B")) == -1.0
    assert value(reward, episode("B", metrics={"context/finished": 0.0}, answer="B")) == -1.0
    assert value(reward, episode(None, answer="B")) == -1.0
    assert value(reward, episode("B", metrics={"context/finished": 1.0}, answer="B")) == 1.0


def test_an_environment_that_made_the_task_knows_what_is_right():
    assert value(ShortAnswer(), episode("Oslo", metrics={"success": 1.0})) == 1.0
    assert value(ShortAnswer(), episode("Oslo", metrics={"success": 0.0})) == -0.5
    assert value(MultipleChoice(), episode("C", metrics={"success": 1.0})) == 1.0
    with pytest.raises(LookupError, match="needs the field 'answer'"):
        value(ShortAnswer(), episode("Oslo"))


def test_short_answers_are_compared_by_their_words():
    assert value(ShortAnswer(), episode("the silver lamp!", answer="Silver lamp")) == 1.0
    assert value(ShortAnswer(), episode("lamp", answer="silver lamp")) == -0.5
    assert value(ShortAnswer(), episode("Oslo", answer=["Kristiania", "Oslo"])) == 1.0
    half = value(ShortAnswer(match="f1", wrong=0.0), episode("lamp", answer="silver lamp"))
    assert half == pytest.approx(2 / 3)
    assert value(ShortAnswer(), episode("No. It. Is. So.", answer="x")) == -1.0


@given(st.text(max_size=30), st.text(max_size=30))
def test_f1_is_symmetric_and_1_for_equal_words(one, other):
    assert f1(one, other) == f1(other, one)
    assert 0 <= f1(one, other) <= 1
    assert f1(one, one) == 1.0


# ------------------------------------------------------------------------------------------------ judge


class Server:
    """Answers with these (status, text) in turn, the last one again and again."""

    def __init__(self, *answers):
        self.answers, self.requests, self.keys = list(answers), [], []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                server.keys.append(self.headers.get("Authorization"))
                status, text = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()


def judged(server, text="Mira does", **args):
    judge = Judge(model="m", base_url=server.url, wait=0.001, **args)
    return value(judge, episode(text, answer="Mira"))


def test_the_judge_is_shown_question_answer_and_gold_and_its_last_box_counts(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with Server((200, r"first \boxed{False}, no: \boxed{True}")) as server:
        assert judged(server) == 1.0
        (requests,) = server.requests
        assert server.keys == ["Bearer secret"]
    assert requests["temperature"] == 0
    text = requests["messages"][0]["content"]
    assert all(part in text for part in ("Who keeps the lamp?", "Mira does", "Mira"))
    with Server((200, r"\boxed{false}")) as server:
        assert judged(server) == -0.5


def test_a_busy_server_is_requested_again_and_a_refusal_is_not():
    with Server((429, ""), (503, ""), (200, r"\boxed{True}")) as server:
        assert judged(server) == 1.0
        assert len(server.requests) == 3
    with Server((401, "")) as server, pytest.raises(httpx.HTTPStatusError):
        judged(server)
    assert len(server.requests) == 1


def test_a_judge_that_fails_costs_the_episode_by_name_or_falls_back():
    with Server((500, "")) as server:
        group = Group(Task("t"), [episode("Mira", answer="Mira")])
        judge = Judge(model="m", base_url=server.url, wait=0.001)
        asyncio.run(Rewards([("judge", judge, 1.0)], 5).score([group]))
        assert group.episodes[0].failure.where == "reward 'judge'"
        assert judged(server, "mira", fallback="exact") == 1.0
        assert judged(server, "otto", fallback="exact") == -0.5
    with Server((200, "I cannot tell")) as server, pytest.raises(ValueError, match="no verdict"):
        judged(server)


def test_long_answers_and_passed_limits_are_not_sent():
    with Server((200, r"\boxed{True}")) as server:
        assert judged(server, "One. Two. Three. Four.") == -1.0
        judge = Judge(model="m", base_url=server.url)
        assert value(judge, episode("Mira", StopReason.CONTEXT_FULL, answer="Mira")) == -1.0
        assert not server.requests


def test_a_judge_without_an_address_is_refused(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="needs model and base_url"):
        REWARDS["judge"](model="m")


def test_a_judge_serves_a_run_and_a_later_evaluation_and_waiting_for_it_costs_no_time():
    with Server((200, r"\boxed{True}")) as server:
        judge = Judge(model="m", base_url=server.url, concurrency=1)
        for _ in range(2):  # each has an event loop of its own
            group = Group(Task("t"), [episode("Mira", answer="Mira") for _ in range(8)])
            asyncio.run(Rewards([("judge", judge, 1.0)], 5).score([group]))
            assert [one.reward for one in group.episodes] == [1.0] * 8


@given(st.text(max_size=40))
def test_any_text_can_be_read(text):
    assert read_letter(text) is None or read_letter(text).isalpha()
    assert count_sentences(text) >= 1
