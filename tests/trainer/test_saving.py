"""Checkpoints are written in the background; a failed write ends the run a step later."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace

import pytest

from arborl.checkpoint import complete_checkpoints, find, load_state
from arborl.errors import DiskWriteError
from arborl.trainer.hooks import SaveCheckpoints


class Learner:
    """Its snapshot is the number of its weights; writing it may be held up, or fail."""

    def __init__(self):
        self.weights, self.live = 0, False
        self.gate = threading.Event()
        self.gate.set()
        self.memory_reserved = threading.Event()
        self.memory_reserved.set()
        self.error: Exception | None = None
        self.reserved = 0
        self.at_once = self.most = 0

    def reserve(self):
        self.reserved += 1
        return lambda: self.memory_reserved.wait(30)

    def snapshot(self):
        weights = self.weights

        def write(folder):
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                assert self.gate.wait(30)
                (folder / "model").mkdir()
                (folder / "model" / "weights").write_text(str(weights))
                if self.error is not None:
                    raise self.error
            finally:
                self.at_once -= 1

        return SimpleNamespace(write=write, live=self.live)


class Trainer:
    def __init__(self, num_steps=100):
        self.step, self.num_steps, self.learner, self.changing = 0, num_steps, Learner(), [0]

    def state(self):
        return {"step": self.step, "seen": self.changing}

    def train(self, save):
        self.step += 1
        self.learner.weights += 1
        self.changing[0] += 1
        save(self)


@pytest.fixture
def make(tmp_path):
    made = []

    def save(every=2, keep=2) -> SaveCheckpoints:
        made.append(SaveCheckpoints(tmp_path, every, keep, {"before": {"reward": 1.0}}, lambda folder: None))
        return made[-1]

    yield save
    for one in made:
        one.close()


def weights(folder) -> int:
    return int((folder / "model" / "weights").read_text())


def test_training_continues_while_a_checkpoint_of_an_earlier_step_is_written(make, tmp_path):
    save, trainer = make(every=2), Trainer()
    trainer.learner.gate.clear()
    for _ in range(3):
        trainer.train(save)
    assert complete_checkpoints(tmp_path) == []
    trainer.learner.gate.set()
    save.finish()
    found = find(tmp_path, "latest")
    assert (found.name, weights(found)) == ("step-000002", 2)
    assert load_state(found) == {"step": 2, "seen": [2], "before": {"reward": 1.0}}


def test_on_a_slow_disk_every_checkpoint_is_written_one_at_a_time(make, tmp_path):
    save, trainer = make(every=1, keep=10), Trainer()
    for _ in range(5):
        trainer.learner.gate.clear()
        threading.Timer(0.05, trainer.learner.gate.set).start()
        trainer.train(save)
    save.finish()
    assert [weights(folder) for folder in complete_checkpoints(tmp_path)] == [1, 2, 3, 4, 5]
    assert trainer.learner.most == 1


def test_seconds_count_waiting_and_writing(make):
    save, trainer = make(every=1), Trainer()
    assert save.seconds() == {"time/checkpoint": 0.0, "time/checkpoint_written": 0.0}
    trainer.learner.gate.clear()
    trainer.train(save)
    first = save.seconds()
    assert 0 < first["time/checkpoint"] < 0.2
    assert first["time/checkpoint_written"] == 0.0
    threading.Timer(0.3, trainer.learner.gate.set).start()
    trainer.train(save)
    second = save.seconds()
    assert second["time/checkpoint"] > 0.2
    assert second["time/checkpoint_written"] > 0.2
    save.finish()
    save.seconds()
    assert save.seconds() == {"time/checkpoint": 0.0, "time/checkpoint_written": 0.0}


def test_the_run_waits_if_the_weights_could_not_be_copied(make, tmp_path):
    save, trainer = make(every=1), Trainer()
    trainer.learner.live = True
    trainer.learner.gate.clear()
    threading.Timer(0.1, trainer.learner.gate.set).start()
    trainer.train(save)
    assert weights(find(tmp_path, "latest")) == 1


def failed(save: SaveCheckpoints, trainer: Trainer) -> None:
    """A checkpoint has been written, and the next has failed on a full disk."""
    for _ in range(2):
        trainer.train(save)
    save.finish()
    trainer.learner.error = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(2):
        trainer.train(save)
    deadline = time.monotonic() + 30
    while save.background.busy and time.monotonic() < deadline:
        time.sleep(0.01)


def test_after_a_failed_write_the_next_step_is_saved(make, tmp_path, caplog):
    save, trainer = make(every=2, keep=1), Trainer()
    failed(save, trainer)
    trainer.learner.error = None
    trainer.train(save)
    save.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert "step-000004: cannot be written: No space left on device" in caplog.text
    assert "The next step is saved instead (failure 1 of 3)" in caplog.text
    assert save.num_failed == 0


def test_the_third_failed_write_in_a_row_ends_the_run_and_keeps_the_checkpoint_before(make, tmp_path):
    save, trainer = make(every=2, keep=1), Trainer()
    failed(save, trainer)  # step 4

    def train_on():
        for _ in range(5):
            trainer.train(save)
            save.background.thread.submit(int).result()  # after the write

    with pytest.raises(DiskWriteError, match=r"step-000006: cannot be written: No space left on device"):
        train_on()
    assert trainer.step == 7
    assert weights(find(tmp_path, "latest")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_failed_last_write_is_raised_at_the_end(make):
    save, trainer = make(every=2), Trainer()
    failed(save, trainer)
    with pytest.raises(DiskWriteError, match="step-000004"):
        save.finish()


def test_a_stopped_run_saves_its_state_after_a_failed_write(make, tmp_path, caplog):
    save, trainer = make(every=2), Trainer()
    failed(save, trainer)
    trainer.learner.error = None
    trainer.step += 1
    assert save.save_now(trainer).name == "step-000005"
    assert "step-000004: cannot be written" in caplog.text
    assert load_state(find(tmp_path, "latest"))["step"] == 5


def test_a_stopped_run_writes_no_state_twice(make, tmp_path):
    save, trainer = make(every=2), Trainer()
    trainer.learner.gate.clear()
    trainer.train(save)
    trainer.train(save)
    threading.Timer(0.1, trainer.learner.gate.set).start()
    place = save.save_now(trainer)
    made = place.stat().st_ino
    assert save.save_now(trainer).stat().st_ino == made
    trainer.changing[0] += 1  # what else is remembered has changed: then again
    assert save.save_now(trainer).stat().st_ino != made
    assert load_state(place)["seen"] == [3]


def test_the_last_step_is_saved_and_memory_is_reserved_once(make, tmp_path):
    save, trainer = make(every=10), Trainer(num_steps=3)
    for _ in range(3):
        trainer.train(save)
    save.finish()
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step-000003"]
    assert trainer.learner.reserved == 1


def test_a_checkpoint_waits_for_its_memory_and_the_run_does_not(make, tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.trainer.hooks.RESERVE_SECONDS", 0.01)
    save, trainer = make(every=2), Trainer()
    trainer.learner.memory_reserved.clear()
    for _ in range(3):
        trainer.train(save)
    assert save.written is None
    trainer.learner.memory_reserved.set()
    save.background.wait()
    trainer.train(save)
    trainer.train(save)
    save.finish()
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step-000004"]


def test_the_last_step_waits_for_its_memory(make, tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.trainer.hooks.RESERVE_SECONDS", 0.01)
    save, trainer = make(every=10), Trainer(num_steps=2)
    trainer.learner.memory_reserved.clear()
    threading.Timer(0.1, trainer.learner.memory_reserved.set).start()
    trainer.train(save)
    trainer.train(save)
    save.finish()
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step-000002"]
