"""What is made wrong is found and told, with what to do; and runs that are well are left in peace."""

from __future__ import annotations

from pathlib import Path

import fault_runs as runs
import pytest
from fault_table import PAGE, listed
from faults import FAULTS, MODELS, REAL, WRITTEN, Fault

import arborl
from arborl.doctor import examine_run


def check(fault: Fault, tmp: Path) -> None:
    found = fault.find(tmp)
    told = next((one for one in found if one.name == fault.finding and one.state != "ok"), None)
    assert told is not None, [(one.name, one.state, one.detail) for one in found if one.state != "ok"]
    assert told.state == fault.state
    assert told.advice.endswith(".")
    assert told.detail


@pytest.mark.parametrize("fault", MODELS, ids=lambda fault: fault.what)
def test_what_is_wrong_with_a_model_is_found_before_it_is_trained(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.what, marks=[pytest.mark.slow] * fault.told_elsewhere) for fault in REAL]
)
def test_what_was_wrong_with_a_run_is_found_in_its_folder(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.parametrize("fault", WRITTEN, ids=lambda fault: fault.what)
def test_what_is_written_in_a_folder_is_found(fault, tmp_path):
    check(fault, tmp_path)


def test_the_page_lists_every_fault_and_missed_none():
    told = listed(PAGE.read_text())
    assert [(fault.what, fault.finding) for fault in FAULTS] == [(what, finding) for what, finding, _ in told]
    assert {outcome for *_, outcome in told} == {"found"}


# ------------------------------------------------------------------------------------------------ runs that are well


def test_a_run_that_is_well_is_left_in_peace(tmp_path):
    (alone,) = examine_run(runs.write(tmp_path / "run"))
    assert (alone.name, alone.state) == ("run", "ok")
    assert alone.detail == "30 of 30 steps, 480 episodes, finished"


SMALL = {"rollout.tasks_per_step": 4, "rollout.group_size": 6, "evaluation.tasks": 8, "threads": 1,
         "track.tensorboard": False, "track.gifs": 0}  # fmt: skip
HEALTHY = {
    "frozen_lake": {"steps": 7},
    "ppo": {"steps": 6, "algorithm": "ppo", "learner.epochs": 2},
    "played ahead": {"steps": 7, "rollout.max_lag": 2},
    "sokoban": {"steps": 6, "env": "sokoban"},
    "shop": {"steps": 6, "env": "shop"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HEALTHY))
def test_small_runs_that_learn_are_left_in_peace(name, tmp_path):
    arborl.run(output_dir=tmp_path / "run", **SMALL | HEALTHY[name])
    assert [finding.name for finding in examine_run(tmp_path / "run")] == ["run", "execution"]


def test_two_steps_of_the_demo_are_left_in_peace(tmp_path):
    arborl.run(output_dir=tmp_path / "run", steps=2, **SMALL)
    alone, execution = examine_run(tmp_path / "run")
    assert (execution.name, execution.state) == ("execution", "ok")
    assert alone.state == "ok"


def test_scripted_replies_are_nobodys_policy_and_so_nothing_the_learner_could_disagree_with(tmp_path, caplog):
    arborl.run(output_dir=tmp_path / "run", stub=True, **SMALL | {"evaluation.tasks": 0})
    assert [finding.name for finding in examine_run(tmp_path / "run")] == ["run", "execution"]
    assert "disagree" not in caplog.text
