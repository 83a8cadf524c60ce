"""Folders of weights for servers: whose process is gone, whose folder goes; the others stay."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arborl.engines.http.files import HELD, WeightFiles
from arborl.errors import EngineError

OWNER = """
import sys
from pathlib import Path
from arborl.engines.http.files import WeightFiles
files = WeightFiles(None, Path(sys.argv[1]))
print(files.home, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path):
    """Starts processes that have weights in this folder and say where."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        home = Path(process.stdout.readline().strip())
        (home / "000001-version-1").mkdir()
        (home / "000001-version-1" / "model.safetensors").write_bytes(b"much")
        return process, home

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_run_left_goes_when_the_next_begins_and_a_living_one_keeps_its_own(owner, tmp_path):
    dead, left = owner()
    alive, kept = owner()
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert left.exists()
    mine = WeightFiles(None, tmp_path)  # type: ignore[arg-type]
    assert not left.exists()
    assert (kept / "000001-version-1" / "model.safetensors").exists()
    assert mine.home.exists()
    assert mine.home.stat().st_mode & 0o777 == 0o755
    another = WeightFiles(None, tmp_path)  # type: ignore[arg-type]
    assert another.home != mine.home
    assert mine.home.exists(), "two in one process"
    mine.close()
    assert not mine.home.exists()
    alive.communicate("")  # it ends by itself, and takes its folder along
    assert sorted(tmp_path.iterdir()) == [another.home]
    another.close()


def test_folders_that_are_not_known_to_be_dead_are_left_alone(tmp_path):
    stranger = tmp_path / "arborl-weights-of-an-older-version"
    stranger.mkdir()
    other = tmp_path / "weights"
    other.mkdir()
    (other / HELD).touch()
    WeightFiles(None, tmp_path).close()  # type: ignore[arg-type]
    assert stranger.exists()
    assert other.exists()


def test_only_the_newest_weights_stay_and_the_folder_stays_held(seedling, tmp_path):
    model = seedling[0]
    files = WeightFiles(model, tmp_path)
    first = files.write(model.state_dict(), 1)
    second = files.write(model.state_dict(), 2)
    files.only(second)
    assert not first.exists()
    assert (second / "model.safetensors").exists()
    WeightFiles(None, tmp_path).close()  # type: ignore[arg-type]
    assert second.exists()
    files.close()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"engine\.weights_dir=.*file.*cannot be written"):
        WeightFiles(None, tmp_path / "file")  # type: ignore[arg-type]
