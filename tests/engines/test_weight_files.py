"""Folders of weights for servers: whose process is gone, whose folder goes; the others stay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from arborl.engines.remote.weight_sync import LOCK_NAME, WeightFiles
from arborl.errors import EngineError


@pytest.fixture
def owner(tmp_path: Path):
    """Starts processes that have weights in this folder and say where."""
    started: list[int] = []

    def start() -> tuple[int, Path]:
        (hears, says), (waits, lets_go) = os.pipe(), os.pipe()
        if (child := os.fork()) == 0:
            os.close(lets_go)
            files = WeightFiles(None, tmp_path)  # type: ignore[arg-type]
            os.write(says, str(files.home).encode())
            os.read(waits, 1)
            os._exit(0)
        started.append(child)
        for end in (says, waits):
            os.close(end)
        home = Path(os.read(hears, 4096).decode())
        (home / "000001-version-1").mkdir()
        (home / "000001-version-1" / "model.safetensors").write_bytes(b"much")
        return child, home

    yield start
    for child in started:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_a_killed_run_left_goes_when_the_next_begins_and_a_living_one_keeps_its_own(owner, tmp_path):
    dead, left = owner()
    _, kept = owner()
    os.kill(dead, signal.SIGKILL)
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
    assert left.exists()
    mine = WeightFiles(None, tmp_path)  # type: ignore[arg-type]
    assert not left.exists()
    assert (kept / "000001-version-1" / "model.safetensors").exists()
    assert mine.home.stat().st_mode & 0o777 == 0o755
    another = WeightFiles(None, tmp_path)  # type: ignore[arg-type]
    assert another.home != mine.home
    assert mine.home.exists(), "two in one process"
    mine.close()
    another.close()
    assert list(tmp_path.iterdir()) == [kept]


def test_folders_that_are_not_known_to_be_dead_are_left_alone(tmp_path):
    unknown = tmp_path / "arborl-weights-of-an-older-version"
    unknown.mkdir()
    other = tmp_path / "weights"
    other.mkdir()
    (other / LOCK_NAME).touch()
    elsewhere = tmp_path / "arborl-weights-of-another-host"
    elsewhere.mkdir()
    (elsewhere / f"{LOCK_NAME}-too").touch()
    link = tmp_path / "arborl-weights-link"
    link.symlink_to(other)
    WeightFiles(None, tmp_path).close()  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == sorted([unknown, other, elsewhere, link])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_not_touched(tmp_path):
    theirs = tmp_path / "arborl-weights-theirs"
    theirs.mkdir()
    (theirs / LOCK_NAME).touch()
    os.chown(theirs, 1234, 1234)
    WeightFiles(None, tmp_path).close()  # type: ignore[arg-type]
    assert (theirs / LOCK_NAME).exists()


def test_only_the_newest_weights_stay_and_the_folder_stays_held(seedling, tmp_path):
    model = seedling[0]
    files = WeightFiles(model, tmp_path)
    first = files.write(model.state_dict(), 1)
    second = files.write(model.state_dict(), 2)
    files.remove_others(second)
    assert not first.exists()
    assert (second / "model.safetensors").exists()
    WeightFiles(None, tmp_path).close()  # type: ignore[arg-type]
    assert second.exists()
    files.close()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"engine\.args\.weights_dir=.*file.*cannot be written"):
        WeightFiles(None, tmp_path / "file")  # type: ignore[arg-type]
