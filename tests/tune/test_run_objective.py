"""Trials of runs: how they are composed, what they cost, and what is found wrong before the first."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from arborl.config.config_base import to_plain
from arborl.config.load_config import load
from arborl.errors import ConfigError, RunStopped
from arborl.training_run import Run
from arborl.tune import run_trial
from arborl.tune.run_objective import RunObjective, default_direction, episodes
from arborl.tune.space import read_space
from arborl.tune.study import KeepBestCheckpoint
from arborl.tune.trial import StudyError, StudyPlan, Trial, summarize_study

pytest.importorskip("optuna")
TINY = ["engine=scripted", "trainer.steps=4", "rollout.tasks_per_step=2", "rollout.group_size=4", "evaluation.tasks=4"]


def objective(*settings: str, **more: Any) -> RunObjective:
    return RunObjective.of(None, list(settings), **more)


# ------------------------------------------------------------------------------------------------ what a trial is


def test_a_trial_is_the_run_with_its_parameters_and_nothing_else_that_matters() -> None:
    config = objective("seed=7", pruning=False).config({"learner.lr": 1e-3, "algorithm": "gspo"})
    to_plain = load(None, ["seed=7", "learner.lr=1e-3", "algorithm=gspo"])
    quiet = {"evaluation", "track", "trainer"}
    assert config.model_dump(exclude=quiet) == to_plain.model_dump(exclude=quiet)
    assert (config.evaluation.before, config.evaluation.greedy, config.track.gifs) == (False, False, 0)


def test_explicit_settings_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("track: {gifs: 2}\nevaluation.before: true\ntrainer: {keep: 5}\n")
    config = RunObjective.of(file, ["evaluation.greedy=true", "evaluation.every=3"]).config({"learner.lr": 1e-3})
    assert (config.track.gifs, config.evaluation.before, config.trainer.keep) == (2, True, 5)
    assert (config.evaluation.greedy, config.evaluation.every) == (True, 3)


def test_names_of_the_conversational_api_are_keys() -> None:
    config = objective().config({"learning_rate": 1e-3, "clip_range": 0.1, "kl_penalty": 0.02, "temperature": 0.7})
    assert (config.learner.lr, config.algorithm.clip_low, config.algorithm.clip_high) == (1e-3, 0.1, 0.1)
    assert (config.algorithm.kl.coef, config.sampling.temperature) == (0.02, 0.7)


def test_the_settings_as_they_are_say_what_they_can() -> None:
    keys = ("learner.lr", "rollout.group_size", "algorithm", "clip_range")
    space = read_space(dict.fromkeys(keys, "uniform:0:1"))
    found = objective("algorithm=gspo", "algorithm.clip_low=0.1").defaults(space)
    assert found == {"learner.lr": None, "rollout.group_size": 8, "algorithm": "gspo", "clip_range": 0.1}


# ------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, (30, 16, 8)),
        ({"learner.lr": 1e-3}, (30, 16, 8)),
        ({"rollout.group_size": 4}, (30, 32, 4)),
        ({"rollout.group_size": 16}, (30, 8, 16)),
        ({"rollout.tasks_per_step": 8}, (60, 8, 8)),
        ({"rollout.tasks_per_step": 32, "rollout.group_size": 16}, (7.5, 32, 16)),
        ({"rollout.tasks_per_step": 64, "rollout.group_size": 2}, (30, 64, 2)),
    ],
)
def test_every_trial_plays_as_many_episodes(params: dict[str, Any], expected: tuple[float, int, int]) -> None:
    run_objective = objective()
    steps, tasks, size = expected
    if steps != int(steps):
        with pytest.raises(ConfigError, match="3840 episodes of a run cannot be divided by 512"):
            run_objective.config(params)
        return
    config = run_objective.config(params)
    assert (config.trainer.steps, config.rollout.tasks_per_step, config.rollout.group_size) == (steps, tasks, size)
    assert episodes(config) == episodes(run_objective.base) == 3840


def test_a_budget_that_is_free_is_left_alone() -> None:
    config = objective(budget="free").config({"rollout.group_size": 16, "trainer.steps": 3})
    assert (config.rollout.tasks_per_step, config.rollout.group_size, config.trainer.steps) == (16, 16, 3)


@pytest.mark.parametrize(
    ("settings", "params", "message"),
    [
        ([], {"rollout.group_size": 3}, "the 128 episodes of a step cannot be divided by 3"),
        ([], {"trainer.steps": 60}, "trainer.steps and trainer.epochs are the cost of a trial"),
        (["trainer.epochs=2"], {"rollout.group_size": 4}, "Write trainer.steps, or write --budget free"),
    ],
)
def test_a_budget_that_cannot_be_held_is_refused(settings: list[str], params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        objective(*settings, pruning=False).config(params)
    assert message in str(error.value)


def test_trials_are_measured_at_the_same_numbers_of_episodes() -> None:
    run_objective = objective()
    for params in ({}, {"rollout.group_size": 4}, {"rollout.tasks_per_step": 8}):
        config = run_objective.config(params)
        per_step = config.rollout.tasks_per_step * config.rollout.group_size
        assert config.evaluation.every * per_step == 1024


# ------------------------------------------------------------------------------------------------ what is wrong with it


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"learner.lrr": "log:1e-5:1e-2"}, "learner.lrr: unknown key. Did you mean 'learner.lr'?"),
        ({"learner.learning_rate": "log:1e-5:1"}, "learner.learning_rate: unknown key. Did you mean 'learner.lr'?"),
        ({"lr": "log:1e-5:1e-2"}, "lr: unknown key. Did you mean 'learner.lr'?"),
        ({"learner.lr": "uniform:-1:1"}, "learner.lr: must be a number > 0, given -1.0."),
        ({"sampling.top_p": "uniform:0.5:1.5"}, "sampling.top_p: must be a number > 0 and <= 1, given 1.5."),
        ({"rollout.group_size": "uniform:4:8.5"}, "rollout.group_size: must be a whole number"),
        ({"algorithm": ["grpo", "gppo"]}, "gppo"),
        ({"rollout.group_size": "int:2:5"}, "cannot be divided by 5"),
        ({"evaluation.tasks": [10, 20]}, "evaluation.tasks: how trials are measured and stored"),
        ({"output_dir": ["a", "b"]}, "output_dir: how trials are measured and stored"),
        ({"learning_rate": "log:1e-5:1", "learner.lr": [1, 2]}, "learner.lr and learning_rate both set learner.lr"),
    ],
)
def test_a_wrong_parameter_is_found_before_the_first_trial(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        objective().check(read_space(space))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ([], {"metric": "sucess"}, "metric=sucess: the run does not measure it. Did you mean 'success'?"),
        ([], {"metric": "loss"}, "It has: reward, success, greedy_reward, greedy_success."),
        (["evaluation.greedy=false"], {"metric": "greedy_success"}, "does not measure it"),
        (["output_dir=runs/x"], {}, "output_dir=runs/x: all trials would write there. Leave it out; see --study."),
        (["rollout.record=x.jsonl"], {}, "all trials would write there"),
    ],
)
def test_a_run_that_cannot_be_searched_is_refused(settings: list[str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        objective(*settings, **more)
    assert message in str(error.value)


def test_held_out_tasks_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.tasks=0: trials cannot be compared"):
        objective("evaluation.tasks=0").check(read_space({"learner.lr": "log:1e-5:1e-2"}))


def test_metrics_have_longer_names_too() -> None:
    names = [objective(metric=name).metric for name in ("reward", "eval/success", "evaluation/greedy_reward")]
    assert names == ["reward", "success", "greedy_reward"]
    directions = [default_direction(name) for name in ("reward", "loss", "perplexity")]
    assert directions == ["maximize", "minimize", "minimize"]


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    assert [objective(jobs=jobs).threads for jobs in (1, 8, 40)] == [16, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [objective(jobs=jobs).threads for jobs in (1, 8)] == [4, 2]


# ------------------------------------------------------------------------------------------------ what is kept


def test_the_best_trials_checkpoints_are_kept_and_no_others(tmp_path: Path) -> None:
    plan = StudyPlan(read_space({"x": [1, 2]}), 4, tmp_path)
    trials = [Trial(0, {}, "done", 1.0, default=True), Trial(1, {}, "done", 2.0), Trial(2, {}, "done", 1.5)]
    trials.append(Trial(3, {}, "failed"))
    keep = KeepBestCheckpoint(plan)

    def there() -> list[int]:
        return [t.number for t in trials if (plan.trial_folder(t.number) / "checkpoints").exists()]

    for trial, expected in zip(trials, ([0], [1], [1], [1]), strict=True):
        (plan.trial_folder(trial.number) / "checkpoints").mkdir(parents=True)
        keep(trial)
        assert there() == expected
    (plan.trial_folder(0) / "checkpoints").mkdir()  # that of an earlier day
    keep.finish(summarize_study(plan, trials))
    assert there() == [1]


# ------------------------------------------------------------------------------------------------ for real


def arborl(*words: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "arborl", "tune", *words, *TINY, "--study", "study"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow  # one process of a trial is below, studies of many trials in test_study.py
def test_a_study_of_runs_from_the_command_line(tmp_path: Path) -> None:
    """Two processes side by side on the embedded model; each leaves a run folder, and equal settings an equal value."""
    running = arborl("--trials", "2", "--jobs", "2", "--param", "learner.lr=6e-4,6.0001e-4", folder=tmp_path)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 0, output
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert [trial["state"] for trial in summary["trials"]] == ["done", "done"]
    for trial in summary["trials"]:
        folder = tmp_path / "study" / trial["folder"]
        assert json.loads((folder / "summary.json").read_text())["after"]["reward"] == trial["value"]
        measured = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in measured if "evaluation/reward" in row] == [1, 2, 3, 4]
    assert "trial   0  reward" in output
    assert "unchanged settings" in output
    first = [json.loads((tmp_path / f"study/trials/00{n}/metrics.jsonl").read_text().splitlines()[0]) for n in (0, 1)]
    assert first[0]["reward/mean"] == first[1]["reward/mean"]  # the same weights, tasks and chance


@pytest.mark.slow
def test_a_killed_study_of_runs_leaves_no_process_behind_and_goes_on(tmp_path: Path) -> None:
    killed = arborl("--trials", "2", "--param", "learner.lr=log:1e-4:1e-3", folder=tmp_path)
    config = tmp_path / "study" / "trials" / "001" / "config.yaml"
    until = time.monotonic() + 120
    while not config.exists() and time.monotonic() < until:
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(killed.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 1
    killed.kill()
    killed.wait()
    while os.path.exists(f"/proc/{children[0]}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{children[0]}")
    again = arborl("--trials", "2", "--param", "learner.lr=log:1e-4:1e-3", folder=tmp_path)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    trials = json.loads((tmp_path / "study" / "summary.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["done", "lost", "done"]
    assert trials[1]["params"] == trials[2]["params"]


@dataclass
class Stops:
    """Says stop at once."""

    folder: Path
    trial: int = 0
    heard: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, step: int, value: float) -> bool:
        self.heard.append((step, value))
        return True


@pytest.mark.slow
def test_a_pruned_trial_ends_at_the_reported_step(tmp_path: Path) -> None:
    report = Stops(tmp_path / "trials" / "000")
    value = asyncio.run(objective(*TINY)({"learner.lr": 1e-3}, report))
    assert math.isnan(value)
    assert [step for step, _ in report.heard] == [8]  # episodes: one step of two groups of four
    summary = json.loads((report.folder / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (1, True)


def test_a_trial_whose_process_dies_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunStopped, match=r"its process ended with code 1; see .*000\.log"):
        asyncio.run(objective(*TINY)({"learner.lr": 1e-3}, Stops(tmp_path / "trials" / "000")))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"reward": 0.5, "tasks": 4.0, "failed": 0.0}, {"has": ["failed", "reward", "tasks"]}),
        ({"success": 0.25, "tasks": 4.0, "failed": 0.0}, {"value": 0.25}),
        ({"tasks": 4.0, "failed": 4.0}, {"error": "all 4 held-out episodes failed"}),
    ],
)
def test_a_run_says_its_number_or_why_there_is_none(
    after: dict[str, float], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arborl.training_run.train", lambda config, hooks: Run(Path(), {"after": after}))
    order = {"config": to_plain(load(None, [])), "metric": "success"}
    assert run_trial._train(order, None) == expected  # type: ignore[arg-type]


def test_a_file_that_is_changed_ends_the_study(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n")
    run_objective = RunObjective.of(file, [])
    file.write_text("seed: 2\n")
    with pytest.raises(StudyError, match=r"run\.yaml changed while its study runs"):
        asyncio.run(run_objective({}, Stops(tmp_path / "trials" / "000")))
