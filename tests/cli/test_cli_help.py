"""What a shell and a script expect of every verb."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from arborl.cli.main import EXAMPLES, app


def verbs() -> list[str]:
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [name] if inner is None else [f"{name} {one}" for one in inner]
    return found


@pytest.mark.parametrize("verb", verbs())
def test_every_help_has_an_example(verb: str) -> None:
    said = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert said.exit_code == 0
    assert "Example" in said.stdout
    assert f"arborl {verb}" in said.stdout.partition("Example")[2]


def test_examples_are_of_verbs_that_there_are() -> None:
    assert set(EXAMPLES) <= set(verbs())


@pytest.mark.parametrize("verb", ["version", "env list", "tools list"])
def test_a_script_gets_json(verb: str) -> None:
    said = CliRunner().invoke(app, [*verb.split(), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)


def test_help_says_what_exit_codes_mean_and_offers_completion() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    assert "Exit codes: 0 success" in said
    assert "--install-completion" in said


def test_a_shell_completes_verbs_and_output_to_a_pipe_has_no_colours() -> None:
    asked = {"_ARBORL_COMPLETE": "complete_bash", "COMP_WORDS": "arborl ev", "COMP_CWORD": "1", "PATH": ""}
    program = [sys.executable, "-m", "arborl"]
    done = subprocess.run(program, env=asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["evaluate"], done.stderr
    listed = subprocess.run([*program, "env", "list"], env={"TERM": "xterm-256color"}, capture_output=True, check=True)
    assert b"frozen_lake" in listed.stdout
    assert b"\x1b" not in listed.stdout
