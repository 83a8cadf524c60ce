"""`arborl export`: a Hugging Face model with the log-probabilities of the policy, and a model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from arborl.cli.main import app

SMALL = [
    "trainer.steps=1", "rollout.tasks_per_step=1", "rollout.group_size=2", "env.args.size=3", "env.args.max_steps=2",
    "sampling.max_tokens=4", "evaluation.tasks=2", "track.gifs=0", "track.tensorboard=false", "threads=1",
    "model.device=cpu", "algorithm.skip_zero_variance=false",
]  # fmt: skip


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_adapters_are_merged_and_the_card_has_the_metrics(here: Path) -> None:
    done = call("train", "output_dir=run", "model.lora.rank=2", *SMALL)
    assert done.exit_code == 0, done.output
    done = call("export", "run", "--out", "model", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["merged"]
    assert result["max_gap"] < 1e-3
    files = {path.name for path in (here / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert not any("adapter" in name for name in files)
    card = (here / "model" / "README.md").read_text()
    assert 'base_model: "seedling"' in card
    assert "trained on frozen_lake with grpo" in card
    assert "| success |" in card
    assert "exists already" in call("export", "run", "--out", "model").stderr


def test_a_model_is_exported_in_another_dtype(here: Path) -> None:
    done = call("export", "seedling", "--out", "coarse", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert json.loads((here / "coarse" / "config.json").read_text())["dtype"] == "bfloat16"
    assert len({file.stat().st_mode for file in (here / "coarse").iterdir()}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "seedling"], "Write arborl export PATH --out FOLDER."),
        (["export", "seedling", "--out", "x", "--dtype", "int3"], "--dtype int3: must be one of float32"),
        (["export", "sedling!", "--out", "x"], "Did you mean 'seedling'?"),
    ],
)
def test_wrong_input_is_one_message_and_writes_nothing(here: Path, words, message) -> None:
    done = call(*words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert list(here.iterdir()) == []
