"""What some ranks have saved, others go on from: as many, fewer or more, of this strategy or another."""

from __future__ import annotations

from pathlib import Path

import pytest
from learner_fakes import Fake, batch_of, random_groups
from test_strategies import CONFIG, assert_went_alike
from worlds import alone, body, world

from arborl import checkpoint

ALGORITHM = Fake("value", reference=True)


def learn(one, seed: int) -> None:
    forest, terms = batch_of(random_groups(seed, groups=4), ALGORITHM)
    terms = one.score_terms(forest.trees, terms, ALGORITHM.needs)
    assert one.update(forest.trees, terms, ALGORITHM)["learner/skipped"] == 0.0


def kept(one, root: Path) -> Path:
    """As a run keeps it: hashed, and complete or not there. It goes on learning while it is written."""
    snapshot = one.snapshot()
    learn(one, 5)
    return checkpoint.save(root, 1, snapshot.write, {"step": 1}, keep=1)


def assert_goes_on(one, reference) -> None:
    """Both have been there; now they take the same steps."""
    for seed in (3, 4):
        learn(one, seed)
        learn(reference, seed)
    assert_went_alike(one, reference)


@pytest.mark.parametrize("lora", [0, 4])
def test_two_ranks_and_one_process_go_on_from_each_others_checkpoints(lora, tmp_path):
    single = alone(body(lora), ALGORITHM.needs, CONFIG)
    with world("fsdp2", 2, body(lora), ALGORITHM.needs, CONFIG) as group:
        for one in (group, single):
            learn(one, 1)
        saved = checkpoint.find(kept(group, tmp_path / "two").parent, "latest")
        assert (saved / "shards").is_dir()
        whole = kept(single, tmp_path / "one")
        resumed, other = (alone(body(lora), ALGORITHM.needs, CONFIG) for _ in range(2))
        resumed.load(saved)
        other.load(whole)
        assert resumed.done == other.done == 1
        assert_goes_on(resumed, other)
        group.load(whole)
        other.load(whole)
        assert_goes_on(group, other)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (("fsdp2", 2), ("fsdp2", 4)),
        (("fsdp2", 2), ("tensor", 2)),
        (("tensor", 2), ("ddp", 2)),
        (("tensor", 2), ("zero2", 2)),
        (("zero2", 2), ("fsdp2", 1)),
    ],
)
def test_another_strategy_on_other_ranks_goes_on(saver, loader, lora, tmp_path):
    single = alone(body(lora), ALGORITHM.needs, CONFIG)
    learn(single, 1)
    with world(*saver, body(lora), ALGORITHM.needs, CONFIG) as group:
        learn(group, 1)
        saved = kept(group, tmp_path)
    with world(*loader, body(lora), ALGORITHM.needs, CONFIG) as group:
        group.load(saved)
        assert_goes_on(group, single)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_every_stage_of_zero_can_be_gone_on_from(stage, tmp_path):
    single = alone(body(), ALGORITHM.needs, CONFIG)
    learn(single, 1)
    with world(f"zero{stage}", 2, body(), ALGORITHM.needs, CONFIG) as group:
        learn(group, 1)
        saved = kept(group, tmp_path)
    with world(f"zero{stage}", 2, body(), ALGORITHM.needs, CONFIG) as group:
        group.load(saved)
        assert_goes_on(group, single)
