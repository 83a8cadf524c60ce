"""Trackers that are slow, hang or break cost the run nothing but a line."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from arborl.config.load_config import from_kwargs
from arborl.errors import ConfigError
from arborl.track.background_tracker import BackgroundTracker
from arborl.track.configured_trackers import make_trackers
from arborl.track.tracker import RunStart, Trackers
from arborl.types import Episode, Task


class RecordingTracker:
    """Records calls and the threads that made them."""

    def __init__(self):
        self.calls, self.threads = [], set()

    def log(self, metrics, step):
        self.calls.append(("log", step, metrics))
        self.threads.add(threading.current_thread().name)

    def close(self):
        self.calls.append(("close",))


class Whole(RecordingTracker):
    """Has every method there is."""

    def begin(self, run):
        self.calls.append(("begin", run.name, run.step))
        run.config["seed"]["x"] = 99

    def episodes(self, episodes, step, kind):
        self.calls.append(("episodes", len(episodes), step, kind))

    def picture(self, path, step, kind):
        self.calls.append(("picture", path.name, step, kind))

    def finish(self, summary, state):
        self.calls.append(("finish", summary, state))


class Breaks(RecordingTracker):
    def log(self, metrics, step):
        super().log(metrics, step)
        raise SystemExit("you are not logged in\nrun login")


def follow(trackers, tmp_path):
    config = {"seed": {"x": 1}}
    trackers.begin(RunStart("run-001", tmp_path, config, 3))
    trackers.log({"a": 1.0}, 4)
    trackers.episodes([Episode(f"{n}", Task("t")) for n in range(100)], 4, "train")
    trackers.picture(tmp_path / "x.gif", 4, "train")
    trackers.finish({"steps": 4}, "finished")
    trackers.close()
    assert config == {"seed": {"x": 1}}  # whatever they do with theirs


def test_everything_arrives_in_order_in_a_thread_of_its_own(tmp_path):
    whole, plain = Whole(), RecordingTracker()
    follow(Trackers([BackgroundTracker("whole", lambda: whole), BackgroundTracker("plain", lambda: plain)]), tmp_path)
    assert whole.calls == [
        ("begin", "run-001", 3), ("log", 4, {"a": 1.0}), ("episodes", 16, 4, "train"), ("picture", "x.gif", 4, "train"),
        ("finish", {"steps": 4}, "finished"), ("close",),
    ]  # fmt: skip
    assert plain.calls == [("log", 4, {"a": 1.0}), ("close",)]  # what it does not have is not called
    assert whole.threads == {"tracker whole"}


def refuse():
    raise OSError("no server")


@pytest.mark.parametrize(
    ("make", "cause"),
    [(Breaks, "log: SystemExit: you are not logged in"), (refuse, "start: OSError: no server")],
)
def test_one_that_breaks_also_by_ending_the_process_is_reported_once_and_closed(make, cause, caplog):
    made = []
    aside = BackgroundTracker("broken", lambda: made.append(make()) or made[0])
    for step in range(5):
        aside.log({}, step)
    aside.thread.join(40)
    aside.log({}, 6)
    aside.close()
    assert [[row[0] for row in one.calls] for one in made] == [["log", "close"]] * len(made)
    expected = f"the tracker broken failed ({cause}) and is dropped; the run continues"
    assert [record.message for record in caplog.records] == [expected]


def test_one_that_hangs_holds_up_neither_the_steps_nor_the_end(caplog):
    stuck = threading.Event()

    class Hangs(RecordingTracker):
        def log(self, metrics, step):
            stuck.wait(300)

    aside = BackgroundTracker("slow", Hangs, max_queued=3, close_seconds=0.2)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            aside.log({}, step)
        aside.close()
    assert time.monotonic() - began < 60
    assert [record.message for record in caplog.records] == [
        "the tracker slow has 3 queued calls and is dropped; the run continues"
    ]
    late = BackgroundTracker("late", Hangs, close_seconds=0.2)
    late.log({}, 1)
    late.close()
    assert "the tracker late did not finish within 0.2 s" in caplog.records[-1].message
    stuck.set()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trackers": ["nowhere.at.all:Tracker"]}, "cannot import 'nowhere.at.all'"),
        (
            {"trackers": ["track_parts:NoTracker"]},
            r"track.trackers.0=track_parts:NoTracker: a tracker must have log\(metrics, step\)",
        ),
        (
            {"trackers": [{"name": "track_parts:Mine", "args": {"pth": "x"}}]},
            "track.trackers.0.args: .*'pth'.*Did you mean 'path'",
        ),
        (
            {"trackers": [{"name": "wandb", "args": {"project": "p", "mode": "online"}}]},
            "no key of Weights & Biases.* .mode: offline",
        ),
    ],
)
def test_wrong_settings_are_reported_before_a_tracker_is_created(settings, says, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=says):
        make_trackers(from_kwargs(track=settings).track, {})


def test_a_missing_package_is_one_sentence_with_what_to_install(monkeypatch):
    monkeypatch.setattr("arborl.track.configured_trackers.find_spec", lambda name: None)
    for settings, extra in (({"trackers": ["wandb"]}, "wandb"), ({"trackers": ["mlflow"]}, "mlflow")):
        with pytest.raises(ConfigError, match=rf"pip install 'arborl\[{extra}\]'"):
            make_trackers(from_kwargs(track=settings).track, {})


def test_one_that_breaks_even_by_ending_the_process_is_named_once_and_closed(caplog):
    broken = Breaks()
    aside = BackgroundTracker("broken", lambda: broken)
    for step in range(5):
        aside.log({}, step)
    aside.thread.join(40)
    aside.log({}, 6)
    aside.close()
    assert [row[0] for row in broken.calls] == ["log", "close"]
    assert [record.message for record in caplog.records] == [
        "the tracker broken failed (log: SystemExit: you are not logged in) and is dropped; the run continues"
    ]
