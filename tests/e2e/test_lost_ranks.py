"""A run whose learner loses a rank goes on by itself, and ends as one that lost none."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from test_runs import SMALL, settled, weights

sys.path.insert(0, str(Path(__file__).parent.parent / "learner"))

from worlds import Copies

from arborl.config.load_config import load
from arborl.errors import LearnerRankLost
from arborl.learner.distributed import launch
from arborl.learner.distributed.run_store import JoinInfo
from arborl.rollout.episode_store import EpisodeStore
from arborl.training_run import train

TWO = [*SMALL, "learner.ranks=2", "evaluation.tasks=0", "track.gifs=0"]
LOST = ("learner/lost", "learner/steps_lost", "learner/seconds_lost")


class Kill:
    """After these steps, once for each time that a step is named."""

    def __init__(self, *steps: int):
        self.left = list(steps)

    async def after(self, trainer, groups, metrics):
        if self.left and trainer.step == self.left[0]:
            self.left.pop(0)
            os.kill(trainer.learner.launcher.all[1].pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Ranks that need not import torch; all that were ever started."""
    started: list[Copies] = []

    def processes(count: int, info: JoinInfo, device: str, threads: int) -> Copies:
        started.append(Copies(count, info))
        return started[-1]

    monkeypatch.setattr(launch, "RankProcesses", processes)
    yield started
    assert all(rank.poll() is not None for one in started for rank in one.all.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that has lost none."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RankProcesses", lambda count, info, device, threads: Copies(count, info))
        train(load(None, [*TWO, "learner.strategy=ddp", f"output_dir={home / 'run'}"]))
    return home / "run"


def begin(home: Path, *words: str, kill: Kill | None = None, resume: str | None = None):
    requested = [*TWO, "learner.strategy=ddp", f"output_dir={home}", *words]
    return train(load(None, requested), hooks=[kill] if kill else [], resume=resume)


def assert_same_run(home: Path, whole: Path) -> None:
    """In weights, metrics and episodes; each step is there once."""
    ours, theirs = weights(home), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [{key: value for key, value in row.items() if key not in LOST} for row in settled(home)]
    assert rows == settled(whole)
    assert any(row.get("learner/grad_norm", 0) > 0 for row in rows)
    for file in (whole / "episodes").glob("step-*.jsonl"):
        ours, theirs = (list(EpisodeStore.read(folder / "episodes" / file.name)) for folder in (home, whole))
        assert [(one.id, one.rewards) for one in ours] == [(one.id, one.rewards) for one in theirs]
    assert json.loads((home / "summary.json").read_text())["steps"] == 4
    assert not list(home.glob("summary.before*"))


def losses(home: Path) -> dict[int, tuple[float, float]]:
    """By step, ranks lost and steps lost."""
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert all(row["learner/seconds_lost"] > 0 for row in rows if "learner/lost" in row)
    return {row["step"]: (row["learner/lost"], row["learner/steps_lost"]) for row in rows if "learner/lost" in row}


def test_a_run_that_loses_a_rank_goes_on_from_its_checkpoint(tmp_path, whole, capfd):
    begin(tmp_path / "run", kill=Kill(3))
    assert_same_run(tmp_path / "run", whole)
    assert losses(tmp_path / "run") == {3: (1.0, 1.0)}
    output = " ".join(capfd.readouterr().out.split())
    assert "learner rank 1 of 2 ended with -9. All ranks were restarted. Lost: 1 step, " in output


@pytest.mark.slow
def test_ranks_may_be_lost_twice_and_before_the_first_checkpoint(tmp_path, whole):
    begin(tmp_path / "run", kill=Kill(1, 3))
    assert_same_run(tmp_path / "run", whole)
    assert losses(tmp_path / "run") == {1: (1.0, 1.0), 3: (1.0, 1.0)}


@pytest.mark.slow
def test_metrics_of_a_repeated_step_are_written_again(tmp_path, whole):
    begin(tmp_path / "run", "trainer.save_every=4", kill=Kill(1, 2))
    assert losses(tmp_path / "run") == {1: (2.0, 3.0)}


def test_a_rank_that_is_lost_at_one_step_again_ends_the_run(tmp_path, whole):
    with pytest.raises(
        LearnerRankLost, match=r"ended with -9: .*stopped, because a rank was lost at the same step, 4, bef"
    ):
        begin(tmp_path / "run", kill=Kill(3, 3))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]


@pytest.mark.slow
def test_a_run_goes_on_by_itself_as_often_as_it_may_and_then_by_hand(tmp_path, whole):
    with pytest.raises(LearnerRankLost, match=r"\(learner.restarts=0\). Resume .* with arborl train --resume latest"):
        begin(tmp_path / "run", "learner.restarts=0", kill=Kill(3))
    begin(tmp_path / "run", "learner.restarts=0", resume="latest")
    (aside,) = (tmp_path / "run").glob("summary.before*")
    aside.unlink()
    assert_same_run(tmp_path / "run", whole)


@pytest.fixture
def control_c():
    """Which a shell's background jobs have off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("control_c")
def test_control_c_while_ranks_are_started_anew_ends_the_run(tmp_path, whole, forks, monkeypatch):
    first = launch.RankProcesses

    def interrupted(*about):
        if forks:
            os.kill(os.getpid(), signal.SIGINT)
        return first(*about)

    monkeypatch.setattr(launch, "RankProcesses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "run", kill=Kill(3))
    monkeypatch.setattr(launch, "RankProcesses", first)
    begin(tmp_path / "run", resume="latest")
    assert_same_run(tmp_path / "run", whole)


class NotFinite:
    """Reports a loss that is not finite in steps 2 to 4, until the run has rolled back."""

    async def after(self, trainer, groups, metrics):
        if metrics["alarm/rollbacks"] == 0 and trainer.step in (2, 3, 4):
            metrics["policy/loss"] = float("nan")


@pytest.mark.slow
def test_a_rollback_restarts_all_ranks_with_a_lower_rate(tmp_path, forks):
    begin(tmp_path / "run", "trainer.on_alarm=rollback", kill=NotFinite())
    assert len(forks) == 2
    rows = settled(tmp_path / "run")
    assert [row["alarm/rollbacks"] for row in rows] == [1] * 4
    assert rows[0]["learner/lr"] == pytest.approx(3e-4)
