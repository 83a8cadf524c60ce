"""Studies: what is tried, what becomes of it, and that a study which is killed goes on."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arborl.errors import ConfigError, RunStopped
from arborl.tune import HPOSummary, StudyPlan, Trial, TrialReport, read_space, search
from arborl.tune.backends.optuna_study import OptunaBackend, StudyStorage
from arborl.tune.trial import StudyError

pytest.importorskip("optuna")
TOY = Path(__file__).with_name("toy_study.py")
SPACE = read_space({"x": "uniform:-10:10"})


def plan(folder: Path, trials: int = 6, **more: Any) -> StudyPlan:
    return StudyPlan(**{"space": SPACE, "trials": trials, "folder": folder / "study", "default": {"x": 9.0}, **more})


async def parabola(params: dict[str, Any], report: TrialReport) -> float:
    return -float((params.get("x", 9.0) - 2) ** 2)


def study(study_plan: StudyPlan, objective: Any = parabola, **more: Any) -> HPOSummary:
    return asyncio.run(search(study_plan, objective, **more))


def trials_of(study_plan: StudyPlan) -> list[Trial]:
    """The same without a summary and its pictures."""
    return asyncio.run(OptunaBackend().run(study_plan, parabola, lambda trial: None))


def process(folder: Path, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOY), str(folder / "study"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(running: subprocess.Popen[str], line: str) -> None:
    assert running.stdout is not None
    for output_line in running.stdout:
        if output_line.strip() == line:
            return
    pytest.fail(f"never printed {line!r}")


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "study" / "summary.json").read_text())["trials"]


# ------------------------------------------------------------------------------------------------ what is tried


def test_the_settings_as_they_are_come_first_and_are_compared_with(tmp_path: Path) -> None:
    tried_params: list[dict[str, Any]] = []

    async def objective(params: dict[str, Any], report: TrialReport) -> float:
        tried_params.append(params)
        return await parabola(params, report)

    found = study(plan(tmp_path, 8), objective)
    assert tried_params[0] == {}
    assert len(tried_params) == 8
    assert found.trials[0].default
    assert found.trials[0].params == {"x": 9.0}
    assert found.default_reward == -49.0
    assert found.gain == pytest.approx(found.best_reward + 49.0)
    assert found.best_params == found.best.params
    assert found.best_reward == max(trial.value or -1e9 for trial in found.trials)
    there = {path.name for path in found.folder.iterdir()}
    assert {"study.db", "summary.json", "search_space.json", "history.png", "parameters.png"} <= there
    written = json.loads((found.folder / "summary.json").read_text())
    assert (written["best_params"], written["default_reward"]) == (found.best_params, -49.0)
    keys = {"number", "params", "value", "state", "seconds", "folder", "reason", "default"}
    assert [set(row) for row in written["trials"]] == [keys] * 8
    assert len(study(plan(tmp_path, 8), objective).trials) == len(tried_params) == 8  # a complete study tries no more


def test_a_smaller_number_may_be_better(tmp_path: Path) -> None:
    async def loss(params: dict[str, Any], report: TrialReport) -> float:
        return -await parabola(params, report)

    found = study(plan(tmp_path, direction="minimize"), loss)
    assert found.best_reward == min(trial.value or 0.0 for trial in found.trials)
    assert found.gain == pytest.approx(49.0 - found.best_reward)


def test_the_search_gets_nearer(tmp_path: Path) -> None:
    """With an estimator of what is good, the last of thirty trials are nearer than the first."""
    values = [trial.value or 0.0 for trial in trials_of(plan(tmp_path, 30))]
    assert max(values) > -0.1
    assert sum(values[-10:]) > sum(values[1:11])


def test_the_seed_decides_what_is_tried(tmp_path: Path) -> None:
    plans = [plan(tmp_path / name, 6, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, again, other = ([trial.params for trial in trials_of(each)] for each in plans)
    assert one == again
    assert one[1:] != other[1:]


def test_a_study_in_two_parts_is_the_study_in_one(tmp_path: Path) -> None:
    """The later part draws on from where the former ended, and does not begin its chance anew."""
    whole = trials_of(plan(tmp_path / "whole", 12))
    trials_of(plan(tmp_path / "parts", 5))
    parts = trials_of(plan(tmp_path / "parts", 12))
    assert [trial.params for trial in parts] == [trial.params for trial in whole]


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_failed_trial_is_reported_with_its_reason_and_is_never_the_best(tmp_path: Path) -> None:
    """The unchanged settings fail too, so there is no gain."""
    broken = {0: ValueError("it broke\nbadly"), 3: SystemExit(3)}
    values = {1: float("nan"), 2: float("inf")}

    async def objective(params: dict[str, Any], report: TrialReport) -> float:
        if report.trial in broken:
            raise broken[report.trial]
        return values.get(report.trial) or await parabola(params, report)

    found = study(plan(tmp_path, 6), objective)
    assert [trial.state for trial in found.trials] == [*["failed"] * 4, "done", "done"]
    reasons = [trial.reason for trial in found.trials[:4]]
    assert reasons == ["ValueError: it broke badly", "its value is nan", "its value is inf", "SystemExit: 3"]
    assert found.best.number in (4, 5)
    assert (found.default_reward, found.gain) == (None, None)


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (ValueError("no such thing"), RunStopped, r"None of 3 trials finished(.|\n)*no such thing"),
        (StudyError("metric=sucess: the run does not measure it."), ConfigError, "does not measure it"),
    ],
)
def test_errors_of_all_trials_end_the_study(
    tmp_path: Path, error: Exception, raised: type[Exception], match: str
) -> None:
    async def objective(params: dict[str, Any], report: TrialReport) -> float:
        raise error

    with pytest.raises(raised, match=match):
        study(plan(tmp_path, 3, jobs=2), objective)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trials": 0}, "trials=0 must be a whole number >= 1"),
        ({"trials": 2.5}, "trials=2.5 must be a whole number"),
        ({"jobs": 0}, "jobs=0 must be a whole number >= 1"),
        ({"direction": "maximise"}, "Did you mean 'maximize'?"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(tmp_path, **more)
    assert message in str(error.value)


def test_a_folder_with_another_study_is_refused_with_what_differs(tmp_path: Path) -> None:
    study(plan(tmp_path, 2), about={"config": {"seed": 0, "trainer.steps": 4}})
    other = plan(tmp_path, 2, space=read_space({"x": "uniform:-10:11", "y": [1, 2]}))
    with pytest.raises(ConfigError) as error:
        study(other, about={"config": {"seed": 1, "trainer.steps": 4}})
    message = str(error.value)
    assert "holds another study" in message
    assert '"high": 10.0} there' in message
    assert '"high": 11.0} here' in message
    assert "space.y: nothing there" in message
    assert "config.seed: 0 there, 1 here" in message
    assert "trainer.steps" not in message


def test_a_folder_with_other_things_and_an_unknown_backend_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no backend is called 'optua'\. Did you mean 'optuna'\?"):
        study(plan(tmp_path, 2), backend="optua")
    assert not (tmp_path / "study").exists()
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files: thesis.tex"):
        study(plan(tmp_path, 2))


# ------------------------------------------------------------------------------------------------ pruning


def steps(better: Callable[[int], bool]) -> Any:
    """Trials of four steps; those that are not better are low all the way."""
    taken: dict[int, int] = {}

    async def objective(params: dict[str, Any], report: TrialReport) -> float:
        level = 1.0 if better(report.trial) else 0.0
        for step in range(4):
            taken[report.trial] = step
            if report(step, level + step):
                return float("nan")
        return level + 4

    return objective, taken


def test_a_trial_that_does_worse_than_the_median_is_stopped(tmp_path: Path) -> None:
    objective, taken = steps(lambda number: number < 4)
    found = study(plan(tmp_path, 6), objective)
    assert [trial.state for trial in found.trials] == ["done"] * 4 + ["pruned"] * 2
    assert taken[4] == 0
    assert found.trials[4].value == 0.0
    assert found.best.number < 4


def test_a_trial_may_stop_by_raising(tmp_path: Path) -> None:
    objective, _ = steps(lambda number: number < 4)

    async def raising(params: dict[str, Any], report: TrialReport) -> float:
        if math.isnan(value := await objective(params, report)):
            raise RunStopped("there is no number")
        return float(value)

    assert study(plan(tmp_path, 5), raising).trials[4].state == "pruned"


def test_without_pruning_every_trial_comes_to_its_end(tmp_path: Path) -> None:
    objective, _ = steps(lambda number: number < 4)
    assert {trial.state for trial in study(plan(tmp_path, 6, pruning=False), objective).trials} == {"done"}


def test_the_settings_as_they_are_are_never_stopped(tmp_path: Path) -> None:
    """Also where their first attempt was lost, and they come last."""
    objective, _ = steps(lambda number: number not in (0, 6))

    async def interrupted(params: dict[str, Any], report: TrialReport) -> float:
        if report.trial == 0:
            raise asyncio.CancelledError
        return await objective(params, report)

    with pytest.raises(asyncio.CancelledError):
        study(plan(tmp_path, 1), interrupted)
    found = study(plan(tmp_path, 6), objective)
    default = [trial for trial in found.trials if trial.default]
    assert [trial.state for trial in default] == ["lost", "done"]


# ------------------------------------------------------------------------------------------------ several at once


def test_trials_run_concurrently_up_to_the_number_of_jobs(tmp_path: Path) -> None:
    running, most = 0, 0

    async def objective(params: dict[str, Any], report: TrialReport) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.2)
        running -= 1
        return await parabola(params, report)

    found = study(plan(tmp_path, 5, jobs=3), objective)
    assert most == 3
    assert len(found.trials) == 5


def test_a_killed_study_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    killed = process(tmp_path, 4, 0.5)
    wait_for(killed, "begins 2")
    killed.kill()
    killed.wait()
    again = process(tmp_path, 4, 0)
    assert again.wait(200) == 0
    trials = rows(tmp_path)
    assert [trial["state"] for trial in trials] == ["done", "done", "lost", "done", "done"]
    assert trials[2]["params"] == trials[3]["params"]  # it is tried again
    assert trials[2]["reason"] == "its process died"


def test_a_trial_whose_process_ends_twice_has_failed(tmp_path: Path) -> None:
    """Else a setting that takes the memory of the machine would be tried for ever."""
    for _ in range(2):
        board = StudyStorage(plan(tmp_path, 3))
        board.claim()
        board.close()  # as far as others can see, this is a process that has ended
    trials = trials_of(plan(tmp_path, 3))
    assert [trial.state for trial in trials] == ["lost", "failed", "done", "done"]
    assert [trial.default for trial in trials] == [True, True, False, False]
    assert trials[1].reason.endswith("twice")


@pytest.mark.slow
def test_two_processes_share_a_study_and_one_takes_over_what_the_other_leaves(tmp_path: Path) -> None:
    one = process(tmp_path, 5, 100)
    wait_for(one, "begins 0")
    two = process(tmp_path, 5, 0, 2)
    wait_for(two, "ended 4 done")
    one.kill()
    one.wait()
    assert two.wait(200) == 0
    assert [trial["state"] for trial in rows(tmp_path)] == ["lost", "done", "done", "done", "done", "done"]


@pytest.mark.slow
def test_two_processes_that_start_together_run_no_more_than_the_requested_trials(tmp_path: Path) -> None:
    both = [process(tmp_path, 5, 0.1) for _ in range(2)]
    assert [one.wait(200) for one in both] == [0, 0]
    trials = rows(tmp_path)
    assert [trial["state"] for trial in trials] == ["done"] * 5
    assert sum(trial["default"] for trial in trials) == 1


def test_a_trial_that_was_interrupted_twice_has_not_failed(tmp_path: Path) -> None:
    """Who interrupts a study means no trial of it."""

    async def interrupted(params: dict[str, Any], report: TrialReport) -> float:
        raise asyncio.CancelledError

    for _ in range(3):
        with pytest.raises(asyncio.CancelledError):
            study(plan(tmp_path, 2), interrupted)
    assert [trial.state for trial in trials_of(plan(tmp_path, 2))] == ["lost", "lost", "lost", "done", "done"]


@pytest.mark.parametrize("name", ["a b", "50% of {it}", "why?", "#1", "ünï", "it's"])
def test_a_study_may_be_kept_in_any_folder(tmp_path: Path, name: str) -> None:
    trials_of(plan(tmp_path / name, 1))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(trials_of(plan(tmp_path / name, 2))) == 2
    assert (tmp_path / name / "study" / "study.db").exists()


def test_an_interrupted_trial_is_tried_again(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def slow(params: dict[str, Any], report: TrialReport) -> float:
        if report.trial == 1:
            begun.set()
            await asyncio.sleep(300)
        return 1.0

    async def main() -> None:
        searching = asyncio.create_task(search(plan(tmp_path, 3), slow))
        await begun.wait()
        searching.cancel()
        async with asyncio.timeout(100):
            await searching

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    found = study(plan(tmp_path, 3))
    states = {trial.number: trial.state for trial in found.trials}
    assert list(states.values()).count("done") == 3
    assert list(states.values()).count("lost") == 1


def test_trials_are_reported_when_they_end(tmp_path: Path) -> None:
    heard: list[Trial] = []
    found = study(plan(tmp_path, 3), tell=heard.append)
    assert heard == list(found.trials)
