"""Demonstrations beside an algorithm: separate losses, independent of the split of the batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from algorithm_batches import batch_of, episode, group, model_outputs, pick, random_groups, terms_of

from arborl.algorithms import AlgorithmNeeds, Recipe, make_algorithm
from arborl.algorithms.combined_algorithms import DemonstrationAlgorithm
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.types import NOT_SAMPLED, Group

INNER = [
    AlgorithmConfig(name="grpo"),
    AlgorithmConfig(name="gspo", clip_low=0.2, clip_high=0.2, anchor="rollout"),
    AlgorithmConfig(name="dpo"),
    AlgorithmConfig(by_source={"web": AlgorithmConfig(name="gspo", anchor="rollout")}),
]


def demonstrations(count: int) -> list[Group]:
    return [group(episode(1.0, tokens=1 + number, version=NOT_SAMPLED)) for number in range(count)]


def value(algorithm, new: torch.Tensor, batch, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    part, models = pick(batch, rows), model_outputs(new[rows])
    if algorithm.whole:
        part = dataclasses.replace(part, sequence_M=algorithm.prepare(new[rows].detach(), part))
    loss, seen = algorithm.loss(models, part)
    return (loss * part.weight_M).sum(), {name: vector.sum() for name, vector in seen.items()}


@pytest.mark.parametrize("config", INNER, ids=lambda config: config.name)
def test_the_loss_is_the_algorithms_own_plus_the_weighted_imitation(config):
    played = [*random_groups(1), *random_groups(2, source="web")]
    algorithm = DemonstrationAlgorithm(make_algorithm(config), weight=0.3)
    kept = algorithm.keep([*played, *demonstrations(3)])
    assert {number for number, one in enumerate(kept) if one.episodes[0].is_offline} == {0, 3, 6}  # among the others
    terms = algorithm.credit(kept, terms_of(kept))
    new = torch.from_numpy(terms.logprob + 0.05).requires_grad_()
    whole, seen = value(algorithm, new, batch_of(terms), torch.arange(len(terms)))

    given = torch.from_numpy(terms.version == NOT_SAMPLED)
    alone = make_algorithm(config)
    others = alone.keep(played)
    own = alone.credit(others, _rows_of(terms, ~given.numpy(), others))
    theirs, _ = value(alone, new[~given], batch_of(own), torch.arange(len(own)))
    imitation = Recipe(AlgorithmConfig(name="sft"))
    shown = imitation.keep(demonstrations(3))
    mine = imitation.credit(shown, terms_of(shown))
    sft = -(new[given] * torch.from_numpy(mine.weight)).sum()
    assert whole.item() == pytest.approx((theirs + 0.3 * sft).item(), abs=1e-12)
    assert seen["sft/loss"].item() / len(terms) == pytest.approx(sft.item())
    parts = [torch.from_numpy(np.flatnonzero(terms.tree == number)) for number in range(len(kept))]
    assert sum(value(algorithm, new, batch_of(terms), rows)[0].item() for rows in parts) == pytest.approx(whole.item())


def _rows_of(terms, rows, groups):
    """The columns that `terms_of` made up, at the places of the groups alone."""
    alone = terms_of(groups)
    names = ("logprob", "proximal", "reference", "value", "teacher")
    return dataclasses.replace(alone, **{name: getattr(terms, name)[rows] for name in names})


def test_a_batch_of_demonstrations_alone_needs_nothing_else_and_counts_whole():
    algorithm = DemonstrationAlgorithm(Recipe(AlgorithmConfig(name="ppo", kl={"coef": 0.1})), weight=0.3)
    assert algorithm.needs.value  # the learner is made before the first batch
    kept = algorithm.keep(demonstrations(2))
    assert algorithm.needs == AlgorithmNeeds()
    terms = algorithm.credit(kept, terms_of(kept))
    assert terms.weight.sum() == pytest.approx(1.0)
    assert algorithm.keep(random_groups(1))
    assert algorithm.needs.value


def test_where_every_group_was_dropped_demonstrations_keep_their_weight():
    algorithm = DemonstrationAlgorithm(Recipe(AlgorithmConfig()), weight=0.3)
    kept = algorithm.keep([group(episode(1.0), episode(1.0)), *demonstrations(2)])
    assert len(kept) == 2
    assert algorithm.credit(kept, terms_of(kept)).weight.sum() == pytest.approx(0.3)


def test_a_row_of_weight_2_counts_as_two():
    algorithm = Recipe(AlgorithmConfig(name="sft"), given=True)
    one, two = demonstrations(2)
    two.episodes[0].weight = 2.0
    terms = algorithm.credit([one, two], terms_of([one, two]))
    by_episode = [terms.weight[terms.episode == number].sum() for number in (0, 1)]
    assert by_episode == pytest.approx([1 / 3, 2 / 3])
