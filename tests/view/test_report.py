"""One page about a run."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

import arborl
from arborl.failures import Failures
from arborl.rollout.episode_store import EpisodeStore
from arborl.track import JsonlTracker
from arborl.types import Call, Completion, Episode, Failure, FinishReason, Group, Message, StopReason, Task, Turn
from arborl.view import Frame, save_gif, write_report
from arborl.view.transcript import transcript
from arborl.view.web.token_text import pieces

pytestmark = pytest.mark.usefixtures("quick_figures")
EVIL = "<script>alert('x')</script> & \"quoted\""
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Holds the page to well-formedness and keeps its tags and text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def having(self, kind):
        return [attrs for _, attrs in self.tags if kind in (attrs.get("class") or "").split()]


def decode(tokens):
    return "".join(chr(token) for token in tokens)


def episode(name, reward, words=EVIL, failure=None):
    tokens = tuple(ord(letter) for letter in words)
    call = Call((1, 2), Completion(tokens, (-0.5,) * len(tokens), FinishReason.STOP), 0)
    turn = Turn(Message("assistant", words, sampled=True), (Message("user", f"map {EVIL}"),), reward)
    opening = (Message("system", "rules"), Message("user", EVIL))
    stop = StopReason.ERROR if failure else StopReason.DONE
    return Episode(name, Task(f"{name} {EVIL}"), 0, opening, [turn], [call], stop, {"env": reward}, failure=failure)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "lake-001"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "name: lake <b>bold</b>\nseed: 7\nmodel: {name: seedling}\nalgorithm: grpo\nlearner: {lr: 0.001}\n"
    )
    summary = {"before": {"success": 0.18, "reward": 0.17}, "after": {"success": 0.93, "reward": 0.92}}
    (folder / "summary.json").write_text(json.dumps({**summary, "train_seconds": 118.0, "steps": 2, "seed": 7}))
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step in range(2):
        tracker.log({"episode/success": step / 2, "reward/mean": step / 2}, step)
    tracker.close()
    save_gif([Frame(Image.new("RGB", (64, 64)), "Left")], folder / "frames" / "first.gif")
    store = EpisodeStore(folder / "episodes")
    failure = Failure(f"tool {EVIL}", "ValueError", EVIL)
    for step in range(3):
        given = [episode(f"s{step}e{i}", float(i)) for i in range(8)] + [episode("broken", 0.0, failure=failure)]
        store.write(step, [Group(given[0].task, given)])
    return folder


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_tells_what_the_run_was_and_what_came_of_it(run):
    page = read(write_report(run))
    for part in ("lake <b>bold</b>", "model seedling", "algorithm grpo", "seed 7", "learning rate 0.001", "1:58"):
        assert part in page.text
    for number in ("18.0%", "93.0%", "0.170", "0.920"):
        assert number in page.text


def test_curve_and_replays_are_inside_the_page_and_nothing_is_loaded(run):
    html = write_report(run).read_text(encoding="utf-8")
    sources = [attrs["src"] for tag, attrs in Page(html).tags if tag == "img"]
    assert [source.split(";")[0] for source in sources] == ["data:image/png", "data:image/gif"]
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|https?:", html)


@pytest.mark.parametrize("how", [None, decode])
def test_words_of_tasks_models_and_errors_are_escaped(run, how):
    page = read(write_report(run, how))
    tags = "html head meta title style body h1 h2 h3 p span b table tr th td img div figure figcaption details summary"
    assert {tag for tag, _ in page.tags} <= {*tags.split(), "pre", "dl", "dt", "dd"}
    assert page.text.count(EVIL) >= 8


def test_the_last_steps_show_their_best_beside_their_worst_one_between_and_one_that_failed(run):
    page = read(write_report(run, last_steps=2))
    shown = re.findall(r"step (\d) · episode (\w+)", page.text)
    assert shown == [
        *[("2", "s2e7"), ("2", "s2e0"), ("2", "s2e3"), ("2", "broken")],
        *[("1", "s1e7"), ("1", "s1e0"), ("1", "s1e3"), ("1", "broken")],
    ]
    assert len(page.having("beside")) == 2
    assert len(page.having("failure")) == 2


def test_tokens_are_shaded_and_carry_their_log_probability_when_they_can_be_decoded(run):
    assert read(write_report(run)).having("token") == []
    tokens = read(write_report(run, decode)).having("token")
    assert len(tokens) == 8 * len(EVIL)
    assert tokens[0]["style"] == "--doubt:0.39"
    assert tokens[0]["title"] == "token 60, log-probability -0.500, probability 60.7%"


def call(prompt, words, turn):
    tokens = tuple(map(ord, words))
    return Call(tuple(map(ord, prompt)), Completion(tokens, (-0.1,) * len(tokens), FinishReason.STOP), turn)


def test_a_call_the_environment_never_heard_is_shown_too():
    broken = episode("e", 0.0, "heard", Failure("environment 'lake'", "ValueError", "gone"))
    broken.calls.append(call("p", "too late", 1))
    page = Page(transcript(broken, "step 3", decode))
    assert page.text.index("heard") < page.text.index("too late") < page.text.index("gone")


def test_between_two_calls_of_a_turn_stands_what_a_tool_answered():
    shown_episode = episode("e", 1.0, "42")
    shown_episode.calls = [call("6*7?", "calc", 0), call("6*7?calc = <42>", "42", 0), call("short", "ok", 0)]
    shown = Page(transcript(shown_episode, "step 3", decode)).text
    assert "assistantcalc= <42>assistant42(another context, 5 tokens)assistant+1ok" in shown


@pytest.mark.parametrize("how", [None, decode])
def test_what_tools_answered_is_shown_as_messages_with_or_without_a_tokenizer(how):
    shown_episode = episode("e", 1.0, "42")
    question, wants = Message("user", "6*7?"), Message("assistant", "calc", sampled=True)
    answered = Message("tool", f"42 {EVIL}", name="calc")
    first, second = call("6*7?", "calc", 0), call("6*7?calc= <42>", "42", 0)
    shown_episode.calls = [
        dataclasses.replace(first, messages=(question,), reply=wants),
        dataclasses.replace(second, messages=(question, wants, answered), reply=Message("assistant", "42")),
    ]
    page = Page(transcript(shown_episode, "step 3", how))
    assert f"assistantcalctool42 {EVIL}assistant+142" in page.text
    assert len(page.having("tool")) == 1


def test_failures_are_shown_by_cause_with_a_traceback_that_begins_in_the_users_file(run):
    theirs = '  File "/home/me/lake.py", line 9, in step\n    raise ValueError(EVIL)\n'
    ours = f'  File "{arborl.__file__}", line 3, in f\n    wait()\n'
    trace = f"Traceback (most recent call last):\n{ours}{theirs}ValueError: {EVIL}\n"
    failures = Failures()
    failures.add(
        [Episode(f"e{i}", Task("t"), failure=Failure("tool 'x'", "ValueError", EVIL, trace)) for i in range(5)],
        "step 2",
    )
    failures.add([Episode("late", Task("t"), failure=Failure("reward 'y'", "timeout", "took longer"))], "step 3")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"failures": failures.state()}))
    page = read(write_report(run))
    shown = page.text[page.text.index("Failures") : page.text.index("Learning curve")]
    assert shown.index(f"×5tool 'x': ValueError: {EVIL}") < shown.index("first in episode e0 of step 2")
    assert shown.index("/home/me/lake.py") < shown.index("×1reward 'y': timeout")
    assert arborl.__file__ not in shown


def test_failures_of_a_run_without_a_summary_are_those_of_its_last_episodes(run):
    (run / "summary.json").unlink()
    assert f"×2tool {EVIL}: ValueError" in read(write_report(run)).text


def test_steps_in_which_nothing_was_learned_are_named_with_what_to_try(run):
    tracker = JsonlTracker(run / "metrics.jsonl")
    flat = {"episode/count": 8.0, "episode/calls": 1.0, "group/zero_variance": 1.0}
    flat |= {"learner/grad_norm": 0.0, "learner/terms": 0.0}
    for step in (1, 2):
        tracker.log(flat | {"episode/success": 1.0, "reward/mean": 1.0}, step)
    tracker.log(flat | {"learner/grad_norm": 1.0, "learner/terms": 9.0}, 3)
    tracker.close()
    page = read(write_report(run)).text
    assert "Every group has zero reward variance (all episodes succeed)(2 of 3 steps, the last at 2)" in page


def test_flat_groups_entropy_valid_replies_stops_and_tool_failures_are_drawn(run):
    tracker = JsonlTracker(run / "metrics.jsonl")
    for step in range(1, 4):
        tracker.log(
            {"episode/count": 8.0, "episode/failed": 1.0, "group/zero_variance": 0.5, "policy/entropy": 1.0,
             "episode/valid": 0.5, "stop/done": 0.5, "stop/max_turns": 0.5, "episode/tool/calls": 1.0,
             "episode/tool/exception": 0.5, "reward/mean": 0.1, "learner/grad_norm": 1.0}, step,
        )  # fmt: skip
    tracker.close()
    page = read(write_report(run))
    assert "Health" in page.text
    with Image.open(run / "health.png") as picture:
        assert picture.width < 2.5 * picture.height  # two rows of three


def test_a_folder_without_steps_has_a_page_without_a_curve(tmp_path):
    assert tmp_path.name in read(write_report(tmp_path)).text
    (tmp_path / "metrics.jsonl").write_text("")
    assert [tag for tag, _ in read(write_report(tmp_path)).tags if tag == "img"] == []


@pytest.mark.parametrize(
    ("data", "shown"),
    [("a√b".encode(), ["a", "", "", "√", "b"]), (b"a\xe2", ["a", "\N{REPLACEMENT CHARACTER}"])],
)
def test_pieces_join_to_the_whole_text_also_where_a_character_spans_tokens(data, shown):
    assert pieces(list(data), lambda ids: bytes(ids).decode(errors="replace")) == shown
