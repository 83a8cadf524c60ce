"""Help, JSON output, exit codes and shell completion of every command."""

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
    result = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"arborl {verb}" in result.stdout.partition("Example")[2]


def test_examples_belong_to_existing_commands() -> None:
    assert set(EXAMPLES) <= set(verbs())


@pytest.mark.parametrize("verb", ["version", "env list", "tools list"])
def test_json_output(verb: str) -> None:
    result = CliRunner().invoke(app, [*verb.split(), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def test_help_explains_exit_codes_and_completion() -> None:
    result = CliRunner().invoke(app, ["--help"]).stdout
    assert "Exit codes: 0 success" in result
    assert "--install-completion" in result


def test_shell_completion_and_output_without_colors_to_a_pipe() -> None:
    variables = {"_ARBORL_COMPLETE": "complete_bash", "COMP_WORDS": "arborl ev", "COMP_CWORD": "1", "PATH": ""}
    program = [sys.executable, "-m", "arborl"]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["evaluate"], done.stderr
    listed = subprocess.run([*program, "env", "list"], env={"TERM": "xterm-256color"}, capture_output=True, check=True)
    assert b"frozen_lake" in listed.stdout
    assert b"\x1b" not in listed.stdout
