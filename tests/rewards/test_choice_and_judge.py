from __future__ import annotations

import asyncio
import json
import re
import string
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.data.reading.row_reader import RowReader
from arborl.errors import ConfigError
from arborl.rewards import REWARDS
from arborl.rewards.answers import MultipleChoice, ShortAnswer, count_sentences, exact_match, f1, read_letter
from arborl.rewards.judge import Judge
from arborl.rewards.reward import Rewards
from arborl.rewards.score_function import DataSource
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


def squad_words(text):
    """SQuAD's normalisation, step by step: small letters, no punctuation, no articles."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


@given(st.text(st.sampled_from("aT hen.'-U,\n"), max_size=12), st.text(st.sampled_from("at hen.'-u"), max_size=12))
def test_exact_match_is_that_of_squad_and_natural_questions(one, other):
    assert exact_match(one, other) == float(squad_words(one) == squad_words(other))


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("the U.S.", "US"), ("an   apple-tree", "Apple tree."), ("Beyonce's", "beyonces"), ("Ａ", "a"), ("", "the")],
)
def test_punctuation_is_dropped_and_not_a_space(answer, gold):
    assert exact_match(answer, gold) == float(squad_words(answer) == squad_words(gold))


@pytest.mark.parametrize(
    "row",
    [
        {"golden_answers": ["Oslo", "Kristiania"]},
        {"answer": ["Kristiania", "Oslo"]},
        {"reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo", "Kristiania"]}}},
        {"reward_model": {"style": "rule", "ground_truth": {"target": "Oslo"}}},
        {"reward_model": {"ground_truth": "Oslo"}, "golden_answers": ["Bergen"]},
    ],
)
@pytest.mark.parametrize("reward", [ShortAnswer(wrong=0.0), DataSource()])
def test_any_of_several_right_answers_counts_wherever_the_row_has_them(row, reward):
    task = RowReader("nq").task({"question": "Which capital?", "data_source": "nq"} | row, "row 1")
    values = [
        value(reward, Episode("e", task, turns=[Turn(Message("assistant", text))], metrics={"success": 1.0}))
        for text in ("<answer>The oslo!</answer>", "<answer>Bergen</answer>")
    ]
    assert values == [1.0, 0.0]


@pytest.mark.parametrize("gold", [None, [], {"target": []}, {"target": None}])
def test_a_row_without_any_right_answer_is_an_error(gold):
    with pytest.raises(LookupError, match="give an answer"):
        value(ShortAnswer(), episode("Oslo", answer=gold))


def test_yes_and_no_are_right_or_wrong_and_never_partly():
    assert (f1("yes it is", "yes"), f1("No!", "no"), f1("no", "no way")) == (0.0, 1.0, 0.0)


def test_without_a_limit_of_sentences_long_answers_are_compared():
    long = "<answer>No. It. Is. So.</answer>"
    assert value(ShortAnswer(max_sentences=None), episode(long, answer="no it is so")) == 1.0
    assert value(ShortAnswer(), episode(long, answer="no it is so")) == -1.0


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


# ---------------------------------------------------------------------------------------- letters and open answers


def mixed(server, text, gold, **args):
    judge = {"name": "judge", "args": {"model": "m", "base_url": server.url, "wait": 0.001, "retries": 0}}
    judge["args"] |= args.pop("judge", {})
    return value(MultipleChoice(open=judge, **args), episode(text, answer=gold))


def test_a_letter_is_scored_by_rule_and_an_open_answer_by_the_judge():
    with Server((200, r"\boxed{True}"), (200, r"\boxed{False}")) as server:
        assert (mixed(server, "B. Boris", "B"), mixed(server, "C", "B"), mixed(server, "Boris", "B")) == (
            1.0,
            -0.5,
            -1.0,
        )
        assert server.requests == []
        assert (mixed(server, "Mira does", "Mira"), mixed(server, "Ole", "Mira")) == (1.0, -0.5)
        assert "Mira does" in server.requests[0]["messages"][0]["content"]
        assert mixed(server, "No. It. Is. So.", "Mira") == -1.0  # longer than three sentences: not judged
        assert len(server.requests) == 2


def test_an_open_answer_has_the_values_of_the_whole_unless_it_has_its_own():
    with Server((200, r"\boxed{False}")) as server:
        assert mixed(server, "Ole", "Mira", wrong=0.0) == 0.0
        assert mixed(server, "Ole", "Mira", wrong=0.0, judge={"wrong": -2.0}) == -2.0


def test_a_judge_that_fails_is_replaced_by_comparing_texts_where_that_is_asked_for():
    with Server((500, "")) as server:
        assert mixed(server, "MIRA", "Mira", judge={"fallback": "exact"}) == 1.0
        assert mixed(server, "Ole", "Mira", judge={"fallback": "exact"}) == -0.5
        with pytest.raises(httpx.HTTPError):
            mixed(server, "MIRA", "Mira")


@pytest.mark.parametrize(
    ("gold", "is_letter"), [("B", True), ("(b)", True), ("B.", True), ("E", False), ("B. subtilis", False)]
)
def test_only_the_listed_letters_are_a_choice(gold, is_letter):
    with Server((200, r"\boxed{True}")) as server:
        assert mixed(server, "b", gold, letters="ABCD") == 1.0
        assert bool(server.requests) is not is_letter


def test_any_reward_may_score_open_answers_and_no_letter_may_have_its_own_value():
    assert value(MultipleChoice(open="short_answer"), episode("the lamp", answer="Lamp")) == 1.0
    assert value(MultipleChoice(open="equal"), episode("0.5", answer="1/2")) == 1.0
    assert value(MultipleChoice(no_letter=-0.5), episode("Boris", answer="B")) == -0.5


def test_an_open_answer_without_a_reward_for_it_is_an_error_and_no_wrong_letter():
    with pytest.raises(ValueError, match=r"not one of the letters ABC.*Write open:"):
        value(MultipleChoice(), episode("B", answer="Boris"))
    for wrong in ({}, {"name": "judge", "weight": 1}, 3):
        with pytest.raises(ValueError, match=r"write {name: judge"):
            MultipleChoice(open=wrong)
    with pytest.raises(ConfigError, match=r"open\.args.modle: unknown argument"):
        MultipleChoice(open={"name": "judge", "args": {"modle": "m"}})
