"""`learner.max_samples_per_trajectory` from the configuration to the update."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.track.jsonl import read_metrics
from arborl.training_run import train
from arborl.training_run.build import build

STEPS = [
    "agent=step", "agent.args.history_length=0", "rollout.tasks_per_step=2", "rollout.group_size=3", "trainer.steps=2",
    "trainer.save_every=1", "evaluation.tasks=0", "track.gifs=0", "track.tensorboard=false", "track.episodes=false",
    "deterministic=true", "threads=1", "model.device=cpu", "rollout.max_turns=5",
]  # fmt: skip
"""Every turn of an episode is its own branch."""
MOST = "learner.max_samples_per_trajectory=2"


def run(folder: Path, *settings: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics that are not about time, and the last weights."""
    flat = [] if "algorithm=ppo" in settings else ["algorithm.skip_zero_variance=false"]
    train(load(None, [*STEPS, *flat, *settings, f"output_dir={folder}"]))
    return outcome(folder)


def outcome(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    rows = [
        {name: value for name, value in row.items() if not (name.startswith(("time/", "system/")) or "second" in name)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    return rows, load_file(sorted((folder / "checkpoints").iterdir())[-1] / "model" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return run(tmp_path_factory.mktemp("drawn") / "run", MOST)


def check_fewer(some, whole) -> None:
    rows, weights = some
    first, of_all = rows[0], whole[0][0]
    for name in ("reward/mean", "episode/sampled", "episode/turns"):
        assert first[name] == of_all[name]
    assert first["rollout/downsampled_branches"] > 0
    terms = of_all["learner/terms"]
    assert first["learner/terms"] == terms - first["rollout/downsampled_terms"] < terms
    assert first["learner/tokens"] < of_all["learner/tokens"]
    assert "rollout/downsampled_terms" not in of_all
    assert not equal(weights, whole[1])


def test_downsampling_trains_fewer_tokens_of_the_same_episodes(whole, drawn, tmp_path):
    check_fewer(drawn, whole)
    last = run(tmp_path / "run", MOST, "learner.downsample_mode=last")
    check_fewer(last, whole)
    assert last[0][0]["rollout/downsampled_branches"] == drawn[0][0]["rollout/downsampled_branches"]
    assert not equal(last[1], drawn[1])


def test_a_limit_that_no_episode_reaches_changes_nothing(whole, tmp_path):
    rows, weights = run(tmp_path / "run", "learner.max_samples_per_trajectory=50")
    assert equal(weights, whole[1])
    assert all(row["rollout/downsampled_terms"] == 0 for row in rows)


def test_the_sample_follows_from_the_seed_also_in_a_resumed_run(drawn, tmp_path):
    rows, weights = drawn
    again, same = run(tmp_path / "run", MOST)
    assert again == rows
    assert equal(weights, same)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    (tmp_path / "run" / "summary.json").unlink()
    train(load(tmp_path / "run" / "config.yaml", []), resume="latest")
    again, same = outcome(tmp_path / "run")
    assert again == rows
    assert equal(weights, same)


TRUST_REGION = ["algorithm=trpo", "algorithm.args.cg_iterations=2", "algorithm.args.backtracks=2"]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(["algorithm=ppo", "learner.epochs=2"], id="critic"),
        pytest.param(["algorithm=grpo", "algorithm.kl.coef=0.1"], id="reference", marks=pytest.mark.slow),
        pytest.param(TRUST_REGION, id="trust region", marks=pytest.mark.slow),
        pytest.param(["algorithm.loss=decoupled_ppo"], id="proximal", marks=pytest.mark.slow),
        pytest.param(["algorithm=gspo", "algorithm.args.sequence=call"], id="calls", marks=pytest.mark.slow),
        pytest.param(["algorithm=gigpo"], id="steps"),
    ],
)
def test_every_algorithm_keeps_its_columns(algorithm, tmp_path):
    """Columns that are not filled would be refused by the loss."""
    rows, _ = run(
        tmp_path / "run", *algorithm, "trainer.steps=1", "rollout.max_turns=3", "learner.max_samples_per_trajectory=1"
    )
    assert rows[0]["rollout/downsampled_terms"] > 0
    assert rows[0].get("learner/skipped", 0.0) == 0.0
    assert np.isfinite(rows[0]["policy/loss"])
    assert rows[0]["policy/logprob_diff"] < 1e-4  # every term is scored in the context it was sampled in


def test_the_settings_are_read_and_contradictions_refused():
    config = load(None, [MOST, "learner.downsample_mode=last", "model.device=cpu"])
    assert (config.learner.max_samples_per_trajectory, config.learner.downsample_mode) == (2, "last")
    assert build(config).learner.config.max_samples_per_trajectory == 2
    for settings, says in (
        (["learner.downsample_mode=last"], "Write max_samples_per_trajectory=2 too"),
        (["learner.max_samples_per_trajectory=0"], "max_samples_per_trajectory"),
        ([MOST, "learner.downsample_mode=first"], "downsample_mode"),
        ([MOST, "algorithm.loss=dpo"], "algorithm.loss=dpo, which is of whole episodes: leave it out."),
        ([MOST, "algorithm=gspo"], "or write algorithm.args.sequence=call"),
        ([MOST, "algorithm.by_source.x.loss=kto"], "algorithm.loss=kto"),
    ):
        with pytest.raises(ConfigError) as error:
            load(None, settings)
        assert says in str(error.value), settings
