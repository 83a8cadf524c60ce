"""What is written in the background: one job at a time, and no failure is lost."""

import logging
import threading

import pytest

from arborl.checkpoint import BackgroundWriter, complete_checkpoints, save
from arborl.errors import DiskWriteError


class Gate:
    """A job that says when it has begun and ends when it is let."""

    def __init__(self, error=None):
        self.began, self.may_end, self.error = threading.Event(), threading.Event(), error

    def __call__(self):
        self.began.set()
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error


@pytest.fixture
def background():
    made = BackgroundWriter()
    yield made
    made.close()


def test_looking_does_not_wait_and_waiting_does(background):
    job = Gate()
    background.start(job)
    assert job.began.wait(30)
    background.raise_if_failed()
    assert background.busy
    threading.Timer(0.05, job.may_end.set).start()
    background.wait()
    assert not background.busy


def test_the_next_job_begins_when_the_one_before_has_ended(background):
    first, second = Gate(), Gate()
    background.start(first)
    threading.Timer(0.1, first.may_end.set).start()
    second.may_end.set()
    background.start(second)
    assert first.may_end.is_set()
    background.wait()
    assert second.began.is_set()


@pytest.mark.parametrize("call", ["raise_if_failed", "wait", "start"])
def test_a_failure_is_raised_by_whatever_is_called_next_and_once(background, call):
    job = Gate(DiskWriteError("disk full"))
    job.may_end.set()
    background.start(job)
    while background.busy:
        threading.Event().wait(0.01)
    with pytest.raises(DiskWriteError, match="disk full"):
        background.start(Gate()) if call == "start" else getattr(background, call)()
    background.raise_if_failed()
    background.wait()


def test_an_unread_failure_is_logged_at_the_end(caplog):
    background, job = BackgroundWriter(), Gate(DiskWriteError("runs/x: cannot be written: No space left on device."))
    job.may_end.set()
    background.start(job)
    with caplog.at_level(logging.ERROR):
        background.close()
    assert "not written: runs/x: cannot be written: No space left" in caplog.text


def test_old_checkpoints_go_only_when_a_new_one_is_whole(background, tmp_path):
    def write(folder):
        (folder / "weights").write_text("x")

    def slow(folder):
        write(folder)
        job()

    job = Gate()
    save(tmp_path, 1, write, {}, keep=1)
    background.start(lambda: save(tmp_path, 2, slow, {}, keep=1))
    assert job.began.wait(30)
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step-000001"]
    job.may_end.set()
    background.wait()
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step-000002"]
