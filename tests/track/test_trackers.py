"""Where a run's numbers go."""

import json
import logging
import math
import time

import pytest

from arborl.errors import DiskWriteError
from arborl.track import JsonlTracker, TensorBoardTracker, Trackers
from arborl.track.jsonl import read_metrics


class Kept:
    """A tracker that remembers."""

    def __init__(self):
        self.rows, self.closed = [], 0

    def log(self, metrics, step):
        self.rows.append((step, metrics))

    def close(self):
        self.closed += 1


class Broken(Kept):
    def log(self, metrics, step):
        super().log(metrics, step)
        raise OSError("disk full")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_that_raises_is_reported_and_closed_once_and_the_others_continue(caplog):
    good, broken = Kept(), Broken()
    trackers = Trackers([broken, good])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            trackers.log({"a": 1.0}, step)
    trackers.close()
    trackers.close()
    assert [step for step, _ in good.rows] == [0, 1, 2]
    assert len(broken.rows) == len(caplog.records) == 1
    assert (good.closed, broken.closed) == (1, 1)


def test_a_line_is_on_disk_as_soon_as_its_step_is_logged_and_is_always_json(tmp_path):
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log({"a": math.nan, "b": -math.inf, "c": 1.0}, 0)
    assert rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 0, "a": None, "b": None, "c": 1.0}]
    tracker.close()


def test_a_killed_and_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path)
    for step in range(5):
        first.log({"try": 1.0}, step)
    first.file.write('{"step": 5, "tr')  # killed while writing
    first.close()

    second = JsonlTracker(path, done=2)
    for step in range(3, 6):
        second.log({"try": 2.0}, step)
    second.close()
    assert [(row["step"], row["try"]) for row in rows(path)] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert [other.name for other in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_comes_to_the_latest_step_later_is_added_to_its_line_also_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path)
    first.log({"evaluation/success": 0.1}, 0)
    first.log({"reward/mean": 0.5}, 1)
    first.log({"evaluation/success": 0.9}, 1)
    first.close()
    again = JsonlTracker(path, done=1)  # a finished run that is resumed measures again
    again.log({"evaluation/success": 0.8}, 1)
    again.close()
    assert rows(path) == [
        {"step": 0, "evaluation/success": 0.1},
        {"step": 1, "reward/mean": 0.5, "evaluation/success": 0.8},
    ]


def test_a_new_run_keeps_no_line_of_another_and_nulls_survive_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1.0}\n')
    JsonlTracker(path).log({"b": math.nan}, 1)
    JsonlTracker(path, done=1).close()
    assert list(read_metrics(path)) == [{"step": 1, "b": None}]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path)
    for step in range(4):
        first.log({"reward/mean": 0.0}, step)
    first.close()
    time.sleep(1.1)  # files are read in the order of the second they were opened in
    second = TensorBoardTracker(tmp_path, done=1)
    for step in range(2, 4):
        second.log({"reward/mean": 1.0}, step)
    second.close()

    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("reward/mean")] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_metrics_that_cannot_be_written_end_the_run_with_a_sentence(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"reward/mean": 1.0}, 0)
    tracker.file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(DiskWriteError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
        Trackers([tracker]).log({"reward/mean": 1.0}, 1)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]


def test_a_line_is_on_disk_as_soon_as_its_step_is_logged(tmp_path):
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log({"reward/mean": 0.5}, 0)
    assert rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 0, "reward/mean": 0.5}]
    tracker.close()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_so_the_file_stays_json(tmp_path, number):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"a": number, "b": 1.0}, 0)
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 0, "a": None, "b": 1.0}]


def test_nulls_survive_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log({"a": math.nan}, 0)
    JsonlTracker(path, done=0).close()
    assert list(read_metrics(path)) == [{"step": 0, "a": None}]
