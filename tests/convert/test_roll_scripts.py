"""ROLL's start scripts lead to their YAML; files of other systems are recognised by `train` and `convert`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.convert import convert
from arborl.errors import ConfigError

LAKE = {"env_type": "frozen_lake", "max_steps": 5, "max_tokens_per_step": 32, "env_config": {"size": 4}}
PLAY = {
    "exp_name": "play", "pretrain": "some/model", "sequence_length": 512, "rollout_batch_size": 4,
    "adv_estimator": "grpo", "actor_train": {"training_args": {"learning_rate": 1e-6}},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Ice"], "num_groups_partition": [2]},
    "custom_envs": {"Ice": LAKE},
}  # fmt: skip
BY_FOLDER = "CONFIG_PATH=$(basename $(dirname $0))\n"
START = "python examples/start_agentic_pipeline.py --config_path $CONFIG_PATH --config_name play\n"


@pytest.fixture
def root(tmp_path):
    """A repository as ROLL's: `examples/lake/play.yaml`."""
    (tmp_path / "examples" / "lake").mkdir(parents=True)
    (tmp_path / "examples" / "lake" / "play.yaml").write_text(yaml.safe_dump(PLAY))
    return tmp_path


def write(root: Path, text: str, name: str = "examples/lake/run.sh") -> Path:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"#!/bin/bash\nset +x\n{BY_FOLDER}{START}", "examples/lake/run.sh"),
        (f'CONFIG_PATH="$(basename "$(dirname "${{BASH_SOURCE[0]}}")")"\n{START}', "examples/lake/run.sh"),
        ("D=examples/lake\npython examples/start_agentic_pipeline.py \\\n --config_path $D \\\n --config_name play",
         "a.sh"),
        (f"CONFIG_PATH=lake\n{START}", "scripts/deep/run.sh"),
        ('FOLDER="lake"\nNAME="play"\npython examples/start_agentic_pipeline.py --config_path=${FOLDER} '
         '--config_name=${NAME}.yaml "$@"', "run.sh"),
        (f"CONFIG_PATH=$(cd $(dirname $0) && pwd)\n{START}", "examples/lake/run.sh"),
        (f"pip install x\npython -m spacy download y\n{BY_FOLDER}{START}{START}", "examples/lake/run.sh"),
        (f"CONFIG_PATH=lake\n{START}", "examples/lake/command.txt"),
    ],
)  # fmt: skip
def test_a_script_that_starts_a_pipeline_leads_to_its_file(text, name, root):
    draft = convert("roll", [write(root, text, name)])
    assert (draft.settings["env.name"], draft.settings["name"]) == ("frozen_lake", "play")
    assert "start_script" in draft.accounted()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("python -m gem.tools.search_engine.retrieval_server --topk 3 &\n", "starts no pipeline of ROLL"),
        ("", "starts no pipeline of ROLL"),
        (f"{BY_FOLDER}{START.replace('play', 'nowhere')}", r"'lake/nowhere', which is not there. Beside it: play.yaml"),
        (f"{BY_FOLDER}{START}{START.replace('play', 'other')}", r"starts several pipelines \(lines 2, 3\)"),
        ("python examples/start_agentic_pipeline.py --config_path lake\n", "without --config_name"),
        (f"{BY_FOLDER}{START.replace('start_agentic', 'start_rlvr_vl')}", "a pipeline for images"),
        ('python "examples/start_agentic_pipeline.py --config_path lake\n', "never closed"),
    ],
)
def test_a_script_that_starts_no_training_is_refused(text, says, root):
    with pytest.raises(ConfigError, match=says):
        convert("roll", [write(root, text)])


def test_a_pipeline_that_only_samples_is_said_to_train_nothing(root):
    file = write(root, f"{BY_FOLDER}{START.replace('start_agentic', 'start_agentic_rollout')}")
    line = next(line for line in convert("roll", [file]).lines if line.key == "start_script")
    assert (line.kind, "arborl evaluate" in line.why) == ("lost", True)


def test_a_script_and_later_overrides(root):
    more = write(root, "max_steps=7 rollout_batch_size=8\n", "more.txt")
    draft = convert("roll", [write(root, f"{BY_FOLDER}{START}"), more])
    assert (draft.settings["trainer.steps"], draft.settings["rollout.tasks_per_step"]) == (7, 4)


# ------------------------------------------------------------------------------------------------ whose file it is


VERL = "python3 -m verl.trainer.main_ppo \\\n actor_rollout_ref.model.path=m data.train_files=rows.json\n"
FLY = "python3 -m agentfly.cli train agent.init_config.agent_type=hf actor_rollout_ref.model.path=m\n"
OTHERS = {
    "play.yaml": (yaml.safe_dump(PLAY), "a file of ROLL", "roll"),
    "trainer.yaml": ("actor_rollout_ref: {model: {path: m}}\n", "a file of verl", "verl"),
    "fly.yaml": ("agent: {agent_type: hf}\nactor_rollout_ref: {}\n", "a file of AgentFly", "agentfly"),
    "run.sh": (f"{BY_FOLDER}{START}", "a script of ROLL", "roll"),
    "ppo.sh": (VERL, "a script of verl", "verl"),
    "fly.sh": (FLY, "a script of AgentFly", "agentfly"),
    "list.txt": ("actor_rollout_ref.model.path=m\n", "a file of verl", "verl"),
    "grpo.py": ("from trl import GRPOTrainer\n", "a script of TRL", "trl"),
    "agent.py": ("import stateset_agents\n", "a script of StateSet", "stateset"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("more", [[], ["--print"], ["--resume", "latest"]], ids=["train", "print", "resume"])
def test_train_says_whose_file_it_is_and_how_to_convert_it(name, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, whose, system = OTHERS[name]
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["train", name, *more])
    assert done.exit_code == 2
    assert f"{name}: this is {whose}. Convert it: arborl convert {system} {name} --out run." in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("ours.yaml", "learner: {lrr: 1}\n", "learner.lrr: unknown key"),
        ("torn.yaml", "actor_train: [\n", "not valid YAML"),
        ("empty.sh", "echo hello\n", "a script is not a configuration"),
        ("mine.py", "print()\n", "a script is not a configuration"),
        ("notes.txt", "hello\n", "ends in .yaml"),
        ("commented.sh", "# actor_rollout_ref.model.path=m\n", "a script is not a configuration"),
    ],
)
def test_other_files_have_the_errors_that_they_had(name, text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["train", name])
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(("system", "name"), [("roll", "ppo.sh"), ("verl", "play.yaml"), ("agentfly", "run.sh")])
def test_convert_says_whose_file_it_is(system, name, tmp_path):
    text, whose, right = OTHERS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"this is {whose}. Convert it: arborl convert {right} "):
        convert(system, [tmp_path / name])
