"""A run on which an alarm is raised warns, stops, or returns to a healthy checkpoint with a lower learning rate."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from forked import forked
from small_runs import LAKE, invoke, settled, weights

import arborl
from arborl.checkpoint import steps_around_age
from arborl.config.load_config import load
from arborl.diagnosis import examine_run
from arborl.errors import AlarmStopped, ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.training_run import train
from arborl.training_run.alarm_recovery import AlarmRecovery, read_rollbacks

SMALL = [
    *LAKE,
    "trainer.steps=7",
    "trainer.save_every=1",
    "evaluation.tasks=0",
    "deterministic=true",
    "sampling.max_tokens=6",
]
ROLLBACK = [*SMALL, "trainer.on_alarm=rollback", "trainer.rollback_lr_factor=0.5"]
SCRIPTED = [*SMALL, "engine=scripted"]


class NotFinite:
    """Reports a loss that is not finite in steps 3, 4 and 5, while the learning rate is not reduced so many times."""

    def __init__(self, times: int = 1):
        self.times, self.seen = times, []

    async def after(self, trainer, groups, metrics):
        self.seen.append(trainer.step)
        if metrics.get("alarm/rollbacks", 0.0) < self.times and trainer.step in (3, 4, 5):
            metrics["policy/loss"] = math.nan


def begin(home: Path, *words: str, hook: NotFinite | None = None, resume: str | None = None):
    return train(load(None, [*words, f"output_dir={home}"]), hooks=[hook or NotFinite()], resume=resume)


def rates(home: Path) -> list[float]:
    return [row["learner/lr"] for row in settled(home) if "learner/lr" in row]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("alarms") / "run"
    hook = NotFinite()
    begin(home, *ROLLBACK, hook=hook)
    assert hook.seen == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]
    return home


def test_a_rollback_repeats_the_steps_after_the_healthy_checkpoint_with_a_lower_rate(rolled_back):
    rows = settled(rolled_back)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["alarm/rollbacks"] for row in rows] == [0, *[1] * 6]
    assert all(row["policy/loss"] is not None for row in rows)
    whole = [6e-4 * (1 - step / 7) for step in range(7)]  # the schedule
    assert rates(rolled_back) == pytest.approx([whole[0], *(0.5 * rate for rate in whole[1:])])
    assert len(EpisodeStore(rolled_back / "episodes").paths()) == 7


def test_a_rollback_is_in_summary_doctor_report_and_log(rolled_back):
    (back,) = json.loads((rolled_back / "summary.json").read_text())["rollbacks"]
    assert (back["alarm"], back["step"], back["first_step"], back["to"], back["lr_factor"]) == (
        "not_finite_repeated", 5, 3, 1, 0.5,
    )  # fmt: skip
    found = {finding.name: finding for finding in examine_run(rolled_back)}
    assert found["rollbacks"].state == "warn"
    assert "not_finite_repeated at step 5, back to step 1" in found["rollbacks"].detail
    assert "finished" in found["run"].detail
    assert "Rolled back" in (rolled_back / "report.html").read_text()
    text = (rolled_back / "run.log").read_text()
    assert "back to the checkpoint of step 1, learning rate times 0.5" in text


@pytest.mark.slow
def test_the_run_ends_as_one_that_resumed_the_healthy_checkpoint_with_half_the_rate(rolled_back, tmp_path):
    home = tmp_path / "run"
    begin(home, *SMALL, "trainer.keep=9", hook=NotFinite(0))
    begin(home, *SMALL, "trainer.keep=9", "learner.lr_scale=0.5", hook=NotFinite(0), resume="1")
    ours, theirs = weights(rolled_back), weights(home)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_stop_saves_nothing_and_says_how_to_go_on(tmp_path):
    home = tmp_path / "run"
    with pytest.raises(AlarmStopped) as stopped:
        begin(home, *SCRIPTED, "trainer.on_alarm=stop")
    message = str(stopped.value)
    assert "alarm not_finite_repeated at step 5" in message
    assert "evidence begins at step 3" in message
    assert f"arborl train --resume 1 output_dir={home} learner.lr_scale=0.5" in message
    assert not (home / "checkpoints" / "step-000005").exists()  # the step of the alarm
    assert (home / "checkpoints" / "step-000001").exists()  # though trainer.keep=2
    summary = json.loads((home / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"], summary["alarm"]["name"]) == (True, 5, "not_finite_repeated")
    (finding, *_) = examine_run(home)
    assert finding.state == "fail"
    assert "stopped at step 5 by the alarm not_finite_repeated" in finding.detail
    begin(home, *SCRIPTED, "trainer.on_alarm=stop", "learner.lr_scale=0.5", hook=NotFinite(0), resume="1")
    assert [row["step"] for row in settled(home)] == [1, 2, 3, 4, 5, 6, 7]


def test_warn_goes_on_and_warns_once(tmp_path, caplog):
    begin(tmp_path / "run", *SCRIPTED)
    assert [row["step"] for row in settled(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    assert sum("Several updates in a row are not finite" in record.message for record in caplog.records) == 1
    assert not (tmp_path / "run" / "alarms.json").exists()


@pytest.mark.slow
def test_after_the_last_rollback_an_alarm_stops_the_run(tmp_path):
    hook = NotFinite(9)
    with pytest.raises(AlarmStopped, match=r"after 2 rollbacks \(trainer.max_rollbacks\)"):
        begin(
            tmp_path / "run",
            *SCRIPTED,
            "trainer.on_alarm=rollback",
            "trainer.max_rollbacks=2",
            "trainer.rollback_lr_factor=0.5",
            hook=hook,
        )
    assert hook.seen == [1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 5]
    assert [one.lr_factor for one in read_rollbacks(tmp_path / "run" / "alarms.json")] == [0.5, 0.25]


def test_without_a_checkpoint_before_the_evidence_the_run_starts_again(tmp_path):
    hook = NotFinite()
    begin(tmp_path / "run", *SCRIPTED, "trainer.on_alarm=rollback", "trainer.save_every=3", hook=hook)
    assert hook.seen == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]
    assert [row["alarm/rollbacks"] for row in settled(tmp_path / "run")] == [1] * 7


@pytest.mark.slow
def test_samples_in_progress_are_discarded_and_tasks_trained_once(tmp_path):
    hook = NotFinite()
    begin(
        tmp_path / "run", *SCRIPTED, "trainer.on_alarm=rollback", "rollout.max_lag=1", "deterministic=false", hook=hook
    )
    assert hook.seen[:5] == [1, 2, 3, 4, 5]
    assert hook.seen[5:] == [1, 2, 3, 4, 5, 6, 7]  # weights of step 1 may have sampled episodes of step 3
    tasks = [
        episode.task.id
        for path in EpisodeStore(tmp_path / "run" / "episodes").paths()
        for episode in EpisodeStore.read(path)
    ]
    assert len(set(tasks)) == 7 * 2
    assert len(tasks) == 7 * 2 * 3


SCRIPT = """
import os, signal, sys
sys.path[:0] = {paths!r}
from test_alarms import NotFinite, load, train

class Killed(NotFinite):
    async def after(self, trainer, groups, metrics):
        await super().after(trainer, groups, metrics)
        if {killed} and metrics["alarm/rollbacks"] and trainer.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

train(load(None, sys.argv[1:]), hooks=[Killed()], resume={resume!r})
"""


def test_a_run_killed_after_its_rollback_resumes_with_the_lower_rate_bit_for_bit(rolled_back, tmp_path):
    home, paths = tmp_path / "run", [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    for killed, resume in ((True, None), (False, "latest")):
        script = tmp_path / f"{resume}.py"
        script.write_text(SCRIPT.format(paths=paths, killed=killed, resume=resume))
        code, output = forked(str(script), *ROLLBACK, f"output_dir={home}", cwd=tmp_path)
        assert code == (-signal.SIGKILL if killed else 0), output
    assert settled(home) == settled(rolled_back)
    ours, theirs = weights(home), weights(rolled_back)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_step_after_a_rollback_is_replayed_with_its_learning_rate(rolled_back):
    result = arborl.replay(rolled_back, 4)
    assert result.differences == []
    assert result.metrics["learner/lr"] == pytest.approx(rates(rolled_back)[3])


def test_a_rollback_that_was_interrupted_is_completed(rolled_back, tmp_path):
    home = tmp_path / "run"
    for step in (1, 2, 3):
        (home / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    (back,) = json.loads((rolled_back / "alarms.json").read_text())["rollbacks"]
    (home / "alarms.json").write_text(json.dumps({"rollbacks": [back | {"done": False}]}))
    recovery = AlarmRecovery(load(None, ROLLBACK))
    recovery.load(home)
    assert [path.name for path in (home / "checkpoints").iterdir()] == ["step-000001"]
    assert recovery.lr_factor == 0.5
    assert json.loads((home / "alarms.json").read_text())["rollbacks"][0]["done"]


def test_rollbacks_after_the_step_from_which_a_run_resumes_are_forgotten(tmp_path):
    one = {"alarm": "reward_falls", "step": 9, "first_step": 8, "detail": "", "done": True}
    rows = [one | {"to": 6, "lr_factor": 0.5}, one | {"to": 4, "lr_factor": 0.25}, one | {"to": 7, "lr_factor": 0.125}]
    for step, factor in ((3, 1.0), (4, 0.25), (6, 0.25), (7, 0.125), (20, 0.125)):
        (tmp_path / "alarms.json").write_text(json.dumps({"rollbacks": rows}))
        recovery = AlarmRecovery(load(None, ROLLBACK))
        recovery.load(tmp_path)
        recovery.resumed(tmp_path, step)
        assert recovery.lr_factor == factor
        assert len(read_rollbacks(tmp_path / "alarms.json")) == len(recovery.rollbacks)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rollbacks": 3}', '{"rollbacks": [{"to": 1}]}', "[" * 99_999,
             '{"rollbacks": [{"alarm": "x", "step": 2, "first_step": 1, "detail": "", "to": 0, "lr_factor": 1e9}]}'],
)  # fmt: skip
def test_a_damaged_list_of_rollbacks_is_one_line(tmp_path, text):
    (tmp_path / "alarms.json").write_text(text)
    with pytest.raises(ConfigError, match="remove it to resume with the configured one"):
        read_rollbacks(tmp_path / "alarms.json")


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("keep", [1, 2])
def test_there_is_always_a_checkpoint_of_the_required_age(every, keep):
    kept: list[int] = []
    for step in range(every, 200, every):
        kept.append(step)
        chosen = {*kept[-keep:], *steps_around_age(kept, 6)}
        kept = [one for one in kept if one in chosen]
        assert len(kept) <= keep + 2
        if step > 6 + every:
            assert any(step - 6 - 2 * max(every, 6) <= one <= step - 6 for one in kept)


def test_settings_of_rollbacks_need_rollback():
    with pytest.raises(ConfigError, match="on_alarm=rollback"):
        load(None, ["trainer.max_rollbacks=5"])
    assert load(None, [*ROLLBACK, "trainer.max_rollbacks=5"]).trainer.max_rollbacks == 5


# ------------------------------------------------------------------------------------------------ a rate of 100 times

TOO_HIGH = [
    "learner.lr=6e-2", "trainer.save_every=1", "rollout.tasks_per_step=4", "rollout.group_size=4",
    "evaluation.tasks=40", "evaluation.greedy=false", "track.gifs=0", "track.tensorboard=false", "threads=1",
    "model.device=cpu", "env.args.size=3", "env.args.max_steps=4", "sampling.max_tokens=6", "deterministic=true",
]  # fmt: skip


@pytest.mark.slow
def test_a_rate_100_times_too_high_stops_with_exit_code_3(tmp_path):
    done = invoke("train", *TOO_HIGH, "trainer.steps=8", "trainer.on_alarm=stop", f"output_dir={tmp_path / 'run'}")
    assert done.exit_code == 3, done.output
    assert "Stopped by the alarm lr_too_high at step 3" in done.stderr


@pytest.mark.slow
def test_a_rate_100_times_too_high_warns(tmp_path):
    done = invoke("train", *TOO_HIGH, "trainer.steps=4", f"output_dir={tmp_path / 'run'}")
    assert done.exit_code == 0, done.output
    log = (tmp_path / "run" / "run.log").read_text()
    assert "The policy jumps and its reward is lost" in log
    assert "trainer.on_alarm" in log


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rate_100_times_too_high_is_lowered_by_a_rollback_and_the_run_learns(tmp_path, seed):
    home = tmp_path / "run"
    words = [*TOO_HIGH, "trainer.steps=20", "trainer.on_alarm=rollback", f"seed={seed}"]
    done = invoke("train", *words, f"output_dir={home}")
    assert done.exit_code == 0, done.output
    summary = json.loads((home / "summary.json").read_text())
    assert len(summary["rollbacks"]) >= 1
    assert summary["after"]["success"] > summary["before"]["success"] + 0.2
    assert [row["step"] for row in settled(home)] == list(range(21))
    assert max(rates(home)) <= 6.001e-4  # the default rate
    assert "learning rate times 0.01, which gives the default rate" in (home / "run.log").read_text()
