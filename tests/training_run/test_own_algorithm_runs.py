"""A run with an advantage and a loss of one's own, from a file and from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import parts_of_mine as mine
import pytest
from typer.testing import CliRunner

import arborl
from arborl.cli.main import app
from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.training_run import train

SMALL = {
    "engine": "scripted", "rollout.tasks_per_step": 2, "rollout.group_size": 3, "env.args.size": 3, "seed": 3,
    "env.args.max_steps": 4, "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0, "threads": 1,
    "model.device": "cpu", "deterministic": True, "algorithm.skip_zero_variance": False, "learner.minibatches": 2,
    "steps": 2, "trainer.save_every": 1, "learner.micro_batch_tokens": 100,
}  # fmt: skip


def weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step-{step:06}" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    return arborl.run(output_dir=tmp_path_factory.mktemp("theirs") / "run", algorithm="grpo", **SMALL).folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    own = {"advantage": mine.grpo_again, "loss": mine.ppo_again, "args": {"low": 0.2}}
    return arborl.run(output_dir=tmp_path_factory.mktemp("ours") / "run", algorithm=own, **SMALL).folder


def test_grpo_and_ppo_written_anew_give_the_same_weights_bit_for_bit(theirs, ours):
    assert weights(ours, 1) == weights(theirs, 1)
    assert weights(ours, 2) == weights(theirs, 2)
    assert weights(ours, 1) != weights(ours, 2)


def test_the_configuration_names_them_and_a_run_goes_on_from_the_command_line(ours, theirs, tmp_path, monkeypatch):
    config = load(ours / "config.yaml")
    assert config.algorithm.advantage == "parts_of_mine:grpo_again"
    assert (config.algorithm.loss, config.algorithm.own_args) == ("parts_of_mine:ppo_again", {"low": 0.2})
    cut = shutil.copytree(ours, tmp_path / "run")
    shutil.rmtree(cut / "checkpoints" / "step-000002")
    done = CliRunner().invoke(app, ["train", "--resume", "latest", f"output_dir={cut}"])
    assert done.exit_code == 0, done.output
    assert weights(cut, 2) == weights(theirs, 2)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))  # another user's
    output = CliRunner().invoke(app, ["train", "--resume", "latest", f"output_dir={cut}", "trainer.steps=3"])
    assert output.exit_code == 2
    assert "parts_of_mine:grpo_again" in output.output
    assert "parts_of_mine:ppo_again" in output.output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["algorithm.advantage=parts_of_mine:wrong_shape"], "returns an array of shape (2,) instead of 3 numbers"),
        (["algorithm.advantage=parts_of_mine:nothing"], "has no 'nothing' (wanted as advantage)"),
        (["algorithm.loss=nowhere_at_all:f"], "cannot import 'nowhere_at_all' for the loss"),
        (["algorithm.loss=parts_of_mine:ppo_again", "algorithm.args.lo=1"], "Did you mean 'low'?"),
        (["algorithm.advantage=parts_of_mine:grpo_again", "learner.critic=shared"], "the advantage uses no values"),
    ],
)
def test_errors_of_a_custom_algorithm_are_reported_before_the_first_rollout(tmp_path, words, complaint):
    done = CliRunner().invoke(app, ["train", f"output_dir={tmp_path / 'run'}", *words])
    assert done.exit_code == 2, done.output
    assert complaint in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


def test_one_that_cannot_be_imported_goes_on_from_python_alone(tmp_path):
    def credit(rewards, memory, value):
        memory["steps"] = memory.get("steps", 0) + 1
        return value - value + memory["steps"] * 0.1, value

    given = SMALL | {"steps": 1, "rollout.tasks_per_step": 2, "algorithm.skip_zero_variance": False}
    done = arborl.run(output_dir=tmp_path / "run", **given | {"algorithm.advantage": credit})
    assert load(done.folder / "config.yaml").algorithm.advantage == "object:credit"
    state = done.folder / "checkpoints" / "step-000001" / "state.json"
    assert json.loads(state.read_text())["algorithm"] == {"own": {"steps": 1}}
    with pytest.raises(ConfigError, match="given to the run as a Python object"):
        train(load(done.folder / "config.yaml", [f"output_dir={done.folder}", "trainer.steps=2"]), resume="1")
    more = given | {"steps": 2, "algorithm.advantage": credit, "algorithm.entropy_coef": 0.01}
    again = arborl.run(output_dir=tmp_path / "run", resume="latest", **more)
    state = again.folder / "checkpoints" / "step-000002" / "state.json"
    assert json.loads(state.read_text())["algorithm"] == {"own": {"steps": 2}}
