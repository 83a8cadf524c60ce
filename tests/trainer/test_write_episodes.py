"""Episode files are written in the background, before the checkpoint of their step."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from arborl.checkpoint import complete_checkpoints
from arborl.errors import DiskWriteError
from arborl.rollout.episode_store import EpisodeStore
from arborl.trainer.hooks import SaveCheckpoints, WriteEpisodes
from arborl.types import Episode, Group, Task


class SlowStore(EpisodeStore):
    """Writes when the test allows it."""

    def __init__(self, folder, error=None):
        super().__init__(folder)
        self.may_write, self.error = threading.Event(), error

    def write(self, step, groups):
        assert self.may_write.wait(30)
        if self.error is not None:
            raise self.error
        return super().write(step, groups)


def groups():
    task = Task("a")
    return [Group(task, [Episode(f"a#{number}", task) for number in range(3)])]


def after(keep, step):
    asyncio.run(keep.after(SimpleNamespace(step=step, demonstrations=()), groups(), {}))


@pytest.fixture
def keep(tmp_path):
    made = WriteEpisodes(tmp_path / "episodes")
    made.store = SlowStore(tmp_path / "episodes")
    yield made
    made.store.may_write.set()
    made.close()


def test_a_file_is_written_in_the_background_and_close_waits_for_it(keep):
    after(keep, 1)
    assert keep.store.paths() == []
    threading.Timer(0.05, keep.store.may_write.set).start()
    keep.close()
    assert [path.name for path in keep.store.paths()] == ["step-000001.jsonl"]
    assert [episode.id for episode in keep.store.read(keep.store.paths()[0])] == ["a#0", "a#1", "a#2"]


def test_files_are_written_one_at_a_time(keep):
    after(keep, 1)
    threading.Timer(0.05, keep.store.may_write.set).start()
    after(keep, 2)
    assert keep.store.paths()[0].name == "step-000001.jsonl"
    keep.flush()
    assert [path.name for path in keep.store.paths()] == ["step-000001.jsonl", "step-000002.jsonl"]


class Learner:
    def reserve(self):
        return lambda: None

    def snapshot(self):
        return SimpleNamespace(write=lambda folder: (folder / "model").mkdir(), live=False)


def test_a_checkpoint_follows_the_episode_file_of_its_step(keep, tmp_path):
    trainer = SimpleNamespace(step=1, num_steps=9, learner=Learner(), state=lambda: {"step": 1})
    save = SaveCheckpoints(tmp_path / "checkpoints", 1, 2, {}, lambda folder: None, keep.flush)
    after(keep, 1)
    save(trainer)
    assert not save.background.wait(0.2)
    assert complete_checkpoints(tmp_path / "checkpoints") == []
    keep.store.may_write.set()
    save.finish()
    assert len(keep.store.paths()) == len(complete_checkpoints(tmp_path / "checkpoints")) == 1
    save.close()


def test_a_failed_episode_file_ends_the_run_at_the_next_step_without_a_checkpoint(keep, tmp_path):
    keep.store.error = DiskWriteError("disk full")
    after(keep, 1)
    keep.store.may_write.set()
    with pytest.raises(DiskWriteError, match="disk full"):
        after(keep, 2)
    trainer = SimpleNamespace(step=2, num_steps=9, learner=Learner(), state=lambda: {"step": 2})
    save = SaveCheckpoints(tmp_path / "checkpoints", 1, 2, {}, lambda folder: None, keep.flush)
    save(trainer)
    with pytest.raises(DiskWriteError, match="disk full"):
        save.finish()
    assert complete_checkpoints(tmp_path / "checkpoints") == []
    save.close()
