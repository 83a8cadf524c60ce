"""Every fault of the table is found, and healthy runs have no finding."""

from __future__ import annotations

from pathlib import Path

import fault_runs as runs
import pytest
from fault_table import PAGE, listed
from faults import FAULTS, Fault

import arborl
from arborl.diagnosis import examine_run


def check(fault: Fault, tmp: Path) -> None:
    found = fault.find(tmp)
    finding = next((one for one in found if one.name == fault.finding and one.state != "ok"), None)
    assert finding is not None, [(one.name, one.state, one.detail) for one in found if one.state != "ok"]
    assert finding.state == fault.state
    assert finding.advice.endswith(".")
    assert finding.detail


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.what, marks=[pytest.mark.slow] * fault.is_covered) for fault in FAULTS],
)
def test_a_fault_is_found(fault, tmp_path):
    check(fault, tmp_path)


def test_the_page_lists_every_fault_as_found():
    rows = listed(PAGE.read_text())
    assert [(fault.what, fault.finding) for fault in FAULTS] == [(what, finding) for what, finding, _ in rows]
    assert {outcome for *_, outcome in rows} == {"found"}


# ------------------------------------------------------------------------------------------------ healthy runs


def test_a_healthy_run_has_no_fault(tmp_path):
    state, learning = examine_run(runs.write(tmp_path / "run"))
    assert (state.name, state.state, learning.name, learning.state) == ("run", "ok", "learning", "ok")
    assert state.detail == "30 of 30 steps, 480 episodes, finished"
    assert learning.detail.endswith("improved")


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
def test_a_small_run_that_learns_has_no_fault(name, tmp_path):
    arborl.run(output_dir=tmp_path / "run", **SMALL | HEALTHY[name])
    assert [finding.name for finding in examine_run(tmp_path / "run")] == ["run", "learning", "execution", "accounting"]


def test_two_steps_are_too_few_to_judge(tmp_path):
    arborl.run(output_dir=tmp_path / "run", steps=2, **SMALL)
    findings = [(finding.name, finding.state) for finding in examine_run(tmp_path / "run")]
    assert findings == [("run", "ok"), ("learning", "warn"), ("execution", "ok"), ("accounting", "ok")]


def test_scripted_replies_have_no_difference_between_engine_and_learner(tmp_path, caplog):
    arborl.run(output_dir=tmp_path / "run", stub=True, **SMALL | {"evaluation.tasks": 0})
    assert [finding.name for finding in examine_run(tmp_path / "run")] == ["run", "learning", "execution", "accounting"]
    assert "disagree" not in caplog.text
