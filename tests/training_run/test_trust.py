"""A configuration can name code: code named by another user's run folder is imported only with `--trust`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import parts_of_mine as mine
import pytest
from small_runs import invoke

import arborl
from arborl.config.load_config import from_kwargs
from arborl.config.trust import imported_parts, load_run_config
from arborl.errors import ConfigError
from arborl.registry import load
from arborl.training_run.run_folder import write_config

SMALL = {
    "engine": {"name": "scripted", "args": {"replies": ["Answer:yes"]}}, "rollout.tasks_per_step": 2,
    "rollout.group_size": 2,
    "evaluation.tasks": 1, "evaluation.greedy": False, "track.tensorboard": False, "track.gifs": 0, "steps": 1,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    arborl.run(env=mine.Lake, output_dir=tmp_path / "run", **SMALL)
    return tmp_path / "run"


def test_a_run_of_ones_own_needs_no_word_wherever_it_is_moved(run):
    moved = run.rename(run.parent / "elsewhere")
    assert invoke("evaluate", str(moved)).exit_code == 0
    assert ((run.parent / "state" / "arborl" / "key").stat().st_mode & 0o777) == 0o600


def test_another_users_run_is_refused_with_its_imports_until_trusted(run, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another"))
    for words in (["evaluate", str(run)], ["evaluate", str(run / "checkpoints" / "step-000001")],
                  ["train", "--resume", str(run)]):  # fmt: skip
        output = invoke(*words)
        assert output.exit_code == 2, output.output
        assert "would import and run parts_of_mine:Lake" in output.stderr
        assert "--trust" in output.stderr
    assert invoke("evaluate", str(run), "--trust").exit_code == 0
    assert invoke("train", "--resume", str(run), "--trust", "trainer.steps=1").exit_code == 0


def test_an_own_run_with_a_modified_configuration_is_refused(run):
    mark = run.parent / "mark"
    text = (run / "config.yaml").read_text()
    evil = {"name": "subprocess:getoutput", "args": {"cmd": f"touch {mark}"}}
    (run / "config.yaml").write_text(text + f"\ndata.rows: {json.dumps(evil)}\n")
    assert "subprocess:getoutput" in invoke("evaluate", str(run)).stderr
    assert invoke("evaluate", str(run), "--trust").exit_code == 2  # and is no source of rows even so
    assert not mark.exists()


def test_names_given_on_the_command_line_are_the_users_own(run, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another"))
    assert invoke("evaluate", str(run), "env=parts_of_mine:Lake").exit_code == 0


def test_a_run_of_library_parts_alone_needs_no_key_and_no_word(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    arborl.run(output_dir=tmp_path / "run", **SMALL)
    assert not (tmp_path / "state").exists()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert invoke("evaluate", str(tmp_path / "copy")).exit_code == 0


def test_every_place_that_may_import_is_seen():
    config = from_kwargs(
        agent={"name": "a.b:Agent", "tool_format": "f:Parser", "tool_args": {"t:Tool": {"x": "in.args:Tool"}}},
        tools=["t:Tool"], rewards=["env", {"name": "r:reward", "args": {"of": ["deep.er:one"]}}],
        data={"sources": {"s": {"rows": {"name": "d:rows", "args": {}}, "env": "e:Env"}}, "agents": {"n": "n:Named"}},
        engine={"name": "scripted", "args": {"replies": ["Answer:yes"]}}, name="my:run",
        **{"rollout.group_filter": "g:keep", "sampling.stop": ["Stop:now"], "sampling.max_tokens": 8},
    )  # fmt: skip
    wanted = {
        "a.b:Agent",
        "f:Parser",
        "in.args:Tool",
        "t:Tool",
        "r:reward",
        "deep.er:one",
        "d:rows",
        "e:Env",
        "n:Named",
    }
    assert set(imported_parts(config)) == wanted | {"g:keep"}


def test_commands_and_servers_of_tools_are_code_too(tmp_path, monkeypatch):
    """A folder from elsewhere may start nothing, and be sent no key, that this user did not write."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "run"
    home.mkdir()
    entries = [{"mcp": {"command": ["touch", str(tmp_path / "mark")]}}, {"server": "http://h:1", "api_key_env": "HOME"}]
    sources = {"s": {"path": "rows.json", "tools": [{"mcp": {"url": "http://m:1/mcp"}}]}}
    config = from_kwargs(agent="tool", tools=entries, rewards=["equal"], data={"sources": sources})
    write_config(home, config)
    load_run_config(home / "config.yaml")  # ours, and signed
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    output = invoke("train", "--resume", "latest", f"output_dir={home}")
    assert output.exit_code == 2, output.output
    assert f"would connect to http://m:1/mcp and start touch {tmp_path}/mark" in output.stderr
    assert "connect to http://h:1 and use the environment variable HOME, and was not written" in output.stderr
    assert not (tmp_path / "mark").exists()
    with pytest.raises(ConfigError, match="would connect to http://m:1/mcp, and"):  # what is given is the user's own
        load_run_config(home / "config.yaml", ["tools=[{server:'http://h:1'}]"])
    load_run_config(home / "config.yaml", ["tools=[calculator]", "data.sources.s.tools=[calculator]"])


@pytest.mark.parametrize(
    "path",
    ["subprocess:getoutput", "os:system", "builtins:eval", "arborl.cli.main:os.system", "os:path", "runpy:run_path"],
)
def test_what_is_pythons_own_or_behind_another_module_is_no_part(path):
    with pytest.raises(ConfigError, match=r"is part of Python|is a module"):
        load(path, "environment")


@pytest.mark.parametrize(("setting", "output"), [("env=json.decoder:JSONDecoder", "is part of Python"),
                                                ("env=numpy:float64", "has no reset()"),
                                                ("agent=numpy:float64", "float64 is not an agent")])  # fmt: skip
def test_what_is_no_environment_or_agent_is_refused_at_the_start(tmp_path, monkeypatch, setting, output):
    monkeypatch.chdir(tmp_path)
    reported = invoke("train", setting)
    assert reported.exit_code == 2, reported.output
    assert output in reported.stderr


def test_ones_own_parts_may_be_called_and_made_as_they_like(tmp_path, monkeypatch):
    lines = ("from functools import partial", "from arborl.envs.games.frozen_lake import FrozenLake",
             "small = partial(FrozenLake, size=3)")  # fmt: skip
    (tmp_path / "calendar_of_mine.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert load("calendar_of_mine:small")().size == 3


def test_a_tracker_class_of_a_folder_counts_as_code_and_arguments_of_a_service_do_not():
    given = from_kwargs(
        track={
            "trackers": [
                "their.module:Tracker",
                {"name": "wandb", "args": {"project": "team:lakes", "mode": "offline"}},
            ]
        }
    )
    assert list(imported_parts(given)) == ["their.module:Tracker"]


def test_the_program_of_an_endpoint_is_code_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "run"
    home.mkdir()
    agents = {"far": {"name": "endpoint", "args": {"url": "http://h:1/play"}}}
    agent = {"name": "endpoint", "args": {"command": ["touch", "mark"]}}
    config = from_kwargs(agent=agent, rewards=["equal"], data={"path": "rows.json", "agents": agents})
    write_config(home, config)
    load_run_config(home / "config.yaml")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match=r"would connect to http://h:1/play and start touch mark, and"):
        load_run_config(home / "config.yaml")
    with pytest.raises(ConfigError, match="would connect to http://h:1/play, and"):
        load_run_config(home / "config.yaml", ["agent.args.command=[touch,mine]"])
