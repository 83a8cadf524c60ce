"""`arborl init` writes files that work unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from arborl.cli.init_command import PRESETS, configuration_text
from arborl.cli.main import app
from arborl.config.load_config import load


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["init", *words])


@pytest.mark.parametrize("preset", [*PRESETS, "ppo", "gigpo"])
def test_a_configuration_of_every_preset_loads(here: Path, preset: str) -> None:
    done = call("--path", "run.yaml", "--preset", preset)
    assert done.exit_code == 0, done.output
    text = (here / "run.yaml").read_text()
    assert "#" in text
    assert load(here / "run.yaml", []).algorithm.name == (preset if preset in ("sft", "ppo", "gigpo") else "grpo")


def test_the_default_is_the_demo_in_config_yaml(here: Path) -> None:
    assert call().exit_code == 0
    assert (here / "config.yaml").read_text() == configuration_text(Path("config.yaml"), "lake")


def test_every_part_is_written_with_a_test_that_passes(here: Path) -> None:
    for kind in ("env", "tool", "reward", "agent"):
        done = call(kind, f"my_{kind}")
        assert done.exit_code == 0, done.output
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        capture_output=True, text=True, check=False, cwd=here, env={"PYTHONPATH": str(here), "PATH": ""},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_existing_files_are_overwritten_only_with_force(here: Path) -> None:
    (here / "test_x.py").write_text("mine")
    assert "exists already" in call("tool", "x").stderr
    assert not (here / "x.py").exists()
    assert call("tool", "x", "--force").exit_code == 0
    assert (here / "test_x.py").read_text() != "mine"


RECIPES = sorted(path.parent.name for path in (Path(__file__).parents[2] / "recipes").glob("*/run.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_written_with_its_commands_and_can_be_checked_at_once(here: Path, name: str) -> None:
    done = call("--recipe", name)
    assert done.exit_code == 0, done.output
    file = f"recipes/{name}/run.yaml"
    assert f"arborl train {file}" in done.output
    checked = CliRunner().invoke(app, ["train", file, "model.name=seedling", "--print"])
    missing = ("Write: pip install 'arborl[", "no game file is there")  # games are made by the recipe's first command
    assert checked.exit_code == 0 or any(text in checked.output for text in missing), checked.output


def test_an_unknown_recipe_is_named_with_the_known_ones(here: Path) -> None:
    assert "Did you mean 'statelm'? Known: calculator, code," in call("--recipe", "statelmm").stderr
    assert "Leave the part and --path out" in call("env", "x", "--recipe", "statelm").stderr
    assert list(here.iterdir()) == []


def test_a_preset_with_generated_rows_says_how_to_make_them_unless_they_exist(here: Path) -> None:
    assert "arborl data make arithmetic --out .\nCheck it" in call("--preset", "tools").output
    (here / "arithmetic.json").write_text("[]")
    assert "data make" not in call("--preset", "tools", "--force").output
