"""The configuration of an untrusted run folder imports, starts, contacts and reads nothing without `--trust`."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from typer.testing import CliRunner

from arborl.agents import AGENTS
from arborl.cli.main import app
from arborl.config.config_base import Config
from arborl.config.load_config import from_kwargs
from arborl.config.run_config import RunConfig
from arborl.config.trust import ACTION_KEYS, capabilities, load_run_config
from arborl.envs import ENVS
from arborl.errors import ArborError, ConfigError
from arborl.registry import load, parse_part_name
from arborl.rewards import REWARDS
from arborl.tools import TOOLS
from arborl.training_run.resume import ResumePoint, changes, check_changes

ODD = ["evil:", "evil", "evil-mod:Env", "evil:Env\n", "evil:1", "évil:Env", " evil:Env", "evil:Env ", "evil::Env",
       "evil:Env:x", ".evil:Env", "evil.:Env", "evil:Env.__class__", "evil:.Env", "EVIL:Env"]  # fmt: skip
PLACES = ["env.name", "agent.name", "rewards", "data.rows.name", "agent.tool_format", "algorithm.loss",
          "algorithm.advantage", "rollout.group_filter", "env.args.id", "tools"]  # fmt: skip


@pytest.fixture
def untrusted(tmp_path, monkeypatch) -> Path:
    """A run folder from elsewhere with modules in it, which is the current folder too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "untrusted"
    (home / "checkpoints" / "step-000001" / "model").mkdir(parents=True)
    for name in ("evil", "evil-mod", "évil", "EVIL"):
        (home / f"{name}.py").write_text(f"from pathlib import Path\nPath({str(home / 'ran')!r}).touch()\n")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    return home


def refused(home: Path, text: str, *overrides: str) -> str:
    (home / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_run_config(home / "config.yaml", overrides)
    return str(error.value)


VERBS = (["evaluate", "."], ["serve", "."], ["chat", "."], ["serve", ".", "--follow", "."])


def check_refused(home: Path, name: str, place: str, verb: list[str]) -> None:
    """The command ends with an error and imports nothing of the folder."""
    value = f"[{name!r}]" if place in ("rewards", "tools") else repr(name)
    quoted = value.replace("'", '"')
    env = "env: gymnasium\n" if place == "env.args.id" else ""
    (home / "config.yaml").write_text(f"{env}{place}: {quoted}\n", encoding="utf-8")
    output = CliRunner().invoke(app, verb)
    assert output.exit_code != 0, (place, verb, output.output)
    assert not (home / "ran").exists(), (place, verb)


@pytest.mark.parametrize("number", range(len(ODD)), ids=ODD)
def test_a_name_of_an_odd_form_is_imported_by_no_command(untrusted, number):
    """In some places, with the commands in turn: they read a configuration by the same function. The next test has all
    places and commands."""
    for index, place in enumerate(PLACES):
        if (number + index) % 3:
            continue
        check_refused(untrusted, ODD[number], place, VERBS[(number + index) % len(VERBS)])


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("name", ODD)
def test_a_name_of_an_odd_form_is_imported_by_none_of_the_commands_anywhere(untrusted, name, verb):
    for place in PLACES:
        check_refused(untrusted, name, place, verb)


@pytest.mark.parametrize("name", [name for name in ODD if parse_part_name(name) is None])
def test_what_is_no_part_name_is_not_imported_at_all(untrusted, name):
    with pytest.raises(ArborError):
        load(name, "environment")
    with pytest.raises((ValueError, ArborError, gymnasium.error.Error)):
        ENVS["gymnasium"](id=name)
    assert not (untrusted / "ran").exists()


@pytest.mark.parametrize("name", ["evil.py:Env", "./evil.py:Env", "../untrusted/evil-mod.py:Env"])
def test_a_file_is_code_that_needs_trust_too(untrusted, name):
    (untrusted / "config.yaml").write_text(f"env: {name!r}\n")
    output = CliRunner().invoke(app, ["evaluate", "."])
    assert f"would import and run {name}" in output.output + output.stderr
    assert not (untrusted / "ran").exists()


def test_modules_of_the_current_folder_are_not_imported_when_an_untrusted_configuration_is_read(untrusted):
    """Neither one that is called like a library's, nor a plugin of Hydra's."""
    mark = f"from pathlib import Path\nPath({str(untrusted / 'ran')!r}).touch()\n"
    for name in ("yaml", "httpx", "peft", "jinja2"):
        (untrusted / f"{name}.py").write_text(mark)
    (untrusted / "hydra_plugins").mkdir()
    (untrusted / "hydra_plugins" / "evil.py").write_text(mark)
    (untrusted / "config.yaml").write_text("env: evil:Env\n")
    for start in (["-m", "arborl"], ["-P", "-c", "from arborl.cli.main import main; main()"]):
        done = subprocess.run(
            [sys.executable, *start, "evaluate", "."], cwd=untrusted, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert "would import and run evil:Env" in done.stderr
        assert not (untrusted / "ran").exists()


def test_a_function_of_a_file_is_loaded_once_and_needs_no_package(tmp_path, monkeypatch):
    (tmp_path / "some-project").mkdir()
    file = tmp_path / "some-project" / "my rewards.py"
    file.write_text("calls = []\ndef score():\n    calls.append(1)\n    return len(calls)\n")
    monkeypatch.chdir(tmp_path)
    assert load(f"{file}:score")() == 1
    assert load("some-project/my rewards.py:score")() == 2
    with pytest.raises(ArborError, match=r"there is no file some-project/other\.py in /.*, where"):
        load("some-project/other.py:score", "function")
    with pytest.raises(ArborError, match=r"has no 'scores' .*Did you mean 'score'"):
        load(f"{file}:scores", "function")
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(ArborError, match=r"SyntaxError: .* \(broken.py, line 1\)"):
        load("broken.py:score")


REACHES = {
    "rewards: [{name: judge, args: {model: m, base_url: 'http://e:1', key: HF_TOKEN}}]":
        "connect to http://e:1 and use the environment variable HF_TOKEN",
    "rewards: [{name: helpfulness, args: {judge: {model: m, base_url: 'http://e:1', key: HF_TOKEN}}}]":
        "connect to http://e:1 and use the environment variable HF_TOKEN",
    "rewards: [{name: composite, args: {rewards: [{judge: {model: m, base_url: 'http://e:1'}}]}}]":
        "connect to http://e:1",
    "engine: {name: http, args: {urls: ['http://e:1'], api_key_env: HF_TOKEN}}":
        "connect to http://e:1 and use the environment variable HF_TOKEN",
    "algorithm: {name: distill, args: {teacher: 'http://e:1/v1?model=m'}}": "connect to http://e:1/v1?model=m",
    "track.trackers: [{name: mlflow, args: {uri: 'http://e:1'}}]": "log to mlflow and connect to http://e:1",
    "track.trackers: [{name: wandb, args: {project: p, entity: them}}]": "log to wandb and log to p and log to them",
    "env: {name: openenv, args: {url: 'http://e:1'}}": "connect to http://e:1",
    "placement: {name: ray, engines: 2, address: 'e:6379'}": "connect to e:6379",
    "tools: [{fetch: {allow: [e.org]}}]\nagent: tool": "connect to e.org",
    "engine: {name: vllm, args: {python: ./evil}}": "start ./evil",
    "engine: {name: vllm, args: {worker_cls: evil.Worker}}": "start vLLM with worker_cls evil.Worker",
    "sandbox: {allow_unsafe: true}": "run code of the model without a sandbox",
    "rollout: {record: /home/me/.profile}": "write to /home/me/.profile",
    "name: 'x-${oc.env:HF_TOKEN}'": "read the environment variable HF_TOKEN",
    "a: oc.env\nname: '${${a}:HF_TOKEN}'": "a: unknown key",
}  # fmt: skip


@pytest.mark.parametrize("text", REACHES)
def test_addresses_programs_and_keys_of_an_untrusted_configuration_need_trust_and_are_printed(
    untrusted, monkeypatch, caplog, text
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_secret")
    output = refused(untrusted, text)
    assert REACHES[text] in output
    assert "hf_secret" not in output
    if "unknown key" not in output:
        load_run_config(untrusted / "config.yaml", trust=True)
        assert REACHES[text] in caplog.text


def test_what_the_user_writes_on_the_command_line_needs_no_trust(untrusted, monkeypatch):
    monkeypatch.setenv("MINE", "key")
    (untrusted / "config.yaml").write_text("env: frozen_lake\n")
    load_run_config(
        untrusted / "config.yaml", ["engine=http", "engine.args.urls=[http://mine:1]", "engine.args.api_key_env=MINE"]
    )
    load_run_config(untrusted / "config.yaml", ["name=${oc.env:MINE}"])
    text = "engine: {name: http, args: {urls: ['http://e:1']}}"
    assert "connect to http://e:1" in refused(untrusted, text, "engine.args.model=http://e:12")
    assert "import and run evil:Env" in refused(untrusted, "env: evil:Env", "env.args.x=evil:Env")


def test_a_fifo_as_signature_blocks_nothing(untrusted):
    os.mkfifo(untrusted / ".signature")
    assert "import and run evil:Env" in refused(untrusted, "env: evil:Env")


def test_settings_inside_an_untrusted_checkpoint_are_not_imported(untrusted):
    """`state.json` says with which settings a checkpoint was made; it is not signed."""
    before = from_kwargs(algorithm={"name": "grpo", "loss": "evil:loss"})
    start = ResumePoint(
        untrusted / "checkpoints" / "step-000001", {"step": 1}, before, tuple(changes(before, RunConfig()))
    )
    with pytest.raises(ConfigError, match="made with evil:loss, not imported"):
        check_changes(start, RunConfig(), 10)
    assert not (untrusted / "ran").exists()


def test_the_terminal_is_shown_no_control_characters(untrusted):
    output = refused(untrusted, 'engine: {name: vllm, args: {python: "\\e[2Jevil\\r"}}')
    assert "\x1b" not in output
    assert "\r" not in output


def test_export_reads_no_environment_variable_of_an_untrusted_configuration(untrusted, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_secret")
    (untrusted / "config.yaml").write_text("name: '${oc.env:HF_TOKEN}'\n")
    output = CliRunner().invoke(app, ["export", ".", "--out", "out"])
    assert output.exit_code == 2
    assert "read the environment variable HF_TOKEN" in output.stderr


def test_every_built_in_parameter_that_is_called_like_an_address_a_program_or_a_key_is_listed():
    named = re.compile(r"(^|_)(urls?|uri|host|address|server|endpoint|command|python|env|key|allow|public)$")
    listed = {name for names in ACTION_KEYS.values() for name in names}
    found = {
        parameter
        for registry in (AGENTS, ENVS, REWARDS, TOOLS)
        for part in registry
        for parameter, about in inspect.signature(registry[part]).parameters.items()
        if "str" in str(about.annotation)
    }

    def fields(model: type[Config]) -> set[str]:
        inner = (one for one in Config.__subclasses__())
        return set(model.model_fields).union(*(set(one.model_fields) for one in inner))

    wanted = {name for name in found | fields(RunConfig) if named.search(name)} - {"env"}
    assert wanted <= listed, wanted - listed


def test_a_plain_run_asks_for_nothing():
    assert capabilities(RunConfig()) == []
    assert (
        capabilities(from_kwargs(agent="tool", tools=["python", "calculator"], rewards=["equal"], data="a.json")) == []
    )
