"""`arborl convert stateset`: imports of scripts written for the StateSet guide."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.convert.stateset_imports import rewrite_imports
from arborl.errors import ConfigError

SCRIPT = """import asyncio
from stateset_agents import (
    MultiTurnAgent,  # an agent
    train
)
from stateset_agents.core.agent import AgentConfig as Config; text = "é stateset_agents"
import stateset_agents.core.reward as rewards


def late():
    from stateset_agents.training import hpo
    from stateset_agents.training.hpo import quick_hpo
    return hpo, quick_hpo
"""
REWRITTEN = """import asyncio
from arborl import (
    MultiTurnAgent,  # an agent
    train
)
from arborl import AgentConfig as Config; text = "é stateset_agents"
import arborl.stateset.core.reward as rewards


def late():
    from arborl.stateset.training import hpo
    from arborl import quick_hpo
    return hpo, quick_hpo
"""


def test_imports_change_and_nothing_else_and_the_script_runs():
    text, changed = rewrite_imports(SCRIPT, "script.py")
    assert (text, changed) == (REWRITTEN, 5)
    names: dict = {}
    exec(text, names)
    hpo, quick_hpo = names["late"]()
    assert hpo.quick_hpo is quick_hpo


@pytest.mark.parametrize(
    ("line", "rewritten"),
    [
        ("import stateset_agents", "import arborl.stateset as stateset_agents"),
        ("import stateset_agents.core.agent", "import arborl.stateset as stateset_agents"),
        ("from stateset_agents.core.reward import *", "from arborl.stateset.core.reward import *"),
        ("from stateset_agents import core", "from arborl.stateset import core"),
    ],
)
def test_every_form_of_import(line, rewritten):
    assert rewrite_imports(line, "script.py") == (rewritten, 1)
    exec(rewritten, {})


def test_line_ends_and_a_byte_order_mark_stay(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_bytes(b"\xef\xbb\xbffrom stateset_agents import train\r\nx = 1\r\n")
    assert CliRunner().invoke(app, ["convert", "stateset", "old.py", "--out", "new.py"]).exit_code == 0
    assert Path("new.py").read_bytes() == b"\xef\xbb\xbffrom arborl import train\r\nx = 1\r\n"


def test_a_pipe_is_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "script.py")
    assert CliRunner().invoke(app, ["convert", "stateset", str(tmp_path / "script.py")]).exit_code == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\nfrom stateset_agents import Nope, train", "script.py:2: arborl has no 'Nope'"),
        ("import json", "imports nothing of stateset_agents"),
        ("from stateset_agents_other import x", "imports nothing of stateset_agents"),
        ("def (", "not a Python script"),
        ("import stateset_agents, json", "several modules in one import"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_place(source, words):
    with pytest.raises(ConfigError, match=words):
        rewrite_imports(source, "script.py")


def test_the_command_writes_the_script(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_text(SCRIPT, encoding="utf-8")
    done = CliRunner().invoke(app, ["convert", "stateset", "old.py", "--out", "new.py"])
    assert done.exit_code == 0, done.output
    assert Path("new.py").read_text(encoding="utf-8") == REWRITTEN
    assert "5 imports changed" in done.output
    assert CliRunner().invoke(app, ["convert", "stateset", "old.py", "new.py"]).exit_code == 2
    assert CliRunner().invoke(app, ["convert", "stateset", "missing.py"]).exit_code == 2
