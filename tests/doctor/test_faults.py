"""What is made wrong is found and told, with what to do; and runs that are well are left in peace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import fault_runs as runs
import pytest
from faults import FAULTS, MODELS, REAL, WRITTEN, Fault
from typer.testing import CliRunner

import arborl
from arborl.cli.main import app
from arborl.config.load import named_key
from arborl.doctor import examine_run
from arborl.doctor.episode_rules import EPISODE_RULES
from arborl.trainer.diagnosis import DIAGNOSES
from arborl.trainer.trends import TRENDS

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("fault", REAL, ids=lambda fault: fault.what)
def test_what_was_wrong_with_a_run_is_found_in_its_folder(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.parametrize("fault", WRITTEN, ids=lambda fault: fault.what)
def test_what_is_written_in_a_folder_is_found(fault, tmp_path):
    check(fault, tmp_path)


def test_a_run_that_is_well_is_left_in_peace(tmp_path):
    (alone,) = examine_run(runs.write(tmp_path / "run"))
    assert (alone.name, alone.state) == ("run", "ok")
    assert alone.detail == "24 of 24 steps, 384 episodes, finished"
