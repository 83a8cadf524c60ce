"""Losses over pairs and whole episodes: `prepare` and `loss` together have the gradient of the loss itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from algorithm_batches import batch_of, counters, episode, group, model_outputs, pick, random_groups, terms_of

from arborl.algorithms import Recipe
from arborl.algorithms.preference_losses import pairs
from arborl.config.algorithm_config import AlgorithmConfig


def direct_loss(name: str, new, terms, groups, beta: float, min_gap: float = 0.0):
    """The loss as its paper writes it, over Python lists of episodes, differentiable in `new`."""
    episodes = [(number, e) for number, g in enumerate(groups) for e in g.valid_episodes]
    reference = torch.from_numpy(terms.reference)
    gains = [(new - reference)[torch.from_numpy(terms.episode == i)] for i in range(len(episodes))]
    if name == "kto":
        parts = []
        for i, (g, e) in enumerate(episodes):
            mates = [gains[j].sum() for j, (other, _) in enumerate(episodes) if other == g]
            z = torch.stack(mates).mean().clamp(min=0).detach()
            sign = 1.0 if e.reward >= 0.5 else -1.0
            parts.append(1 - torch.sigmoid(sign * beta * (gains[i].sum() - z)))
        return torch.stack(parts).mean()
    parts = []
    for i, (g, better) in enumerate(episodes):
        for j, (h, worse) in enumerate(episodes):
            if g == h and better.reward - worse.reward > min_gap:
                if name == "dpo":
                    parts.append(-F.logsigmoid(beta * (gains[i].sum() - gains[j].sum())))
                else:
                    parts.append((gains[i].mean() - gains[j].mean() - 1 / (2 * beta)) ** 2)
    return torch.stack(parts).mean()


def own_loss(algorithm: Recipe, new: torch.Tensor, batch) -> torch.Tensor:
    batch = dataclasses.replace(batch, sequence_M=algorithm.prepare(new.detach(), batch))
    loss, _ = algorithm.loss(model_outputs(new), batch)
    return (loss * batch.weight_M).sum()


def own_gradient(algorithm: Recipe, new: torch.Tensor, batch) -> torch.Tensor:
    (found,) = torch.autograd.grad(own_loss(algorithm, new, batch), new)
    return found


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
@pytest.mark.parametrize("which", ["best_worst", "all"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_those_of_the_loss_written_out(name, which, seed):
    settings = {} if name == "kto" else {"pairs": which, "min_gap": 0.1}
    algorithm = Recipe(AlgorithmConfig(name=name, args={"beta": 0.3} | settings))
    groups = algorithm.keep(random_groups(seed, most=5))
    terms = algorithm.credit(groups, terms_of(groups, seed))
    new = torch.from_numpy(-np.random.default_rng(seed).exponential(size=len(terms))).requires_grad_()
    direct = direct_loss(name, new, terms, groups, 0.3, settings.get("min_gap", 0.0))
    assert own_loss(algorithm, new, batch_of(terms)).item() == pytest.approx(direct.item(), abs=1e-9)
    (expected,) = torch.autograd.grad(direct, new)
    assert expected.abs().max() > 0
    assert own_gradient(algorithm, new, batch_of(terms)) == pytest.approx(expected.numpy(), abs=1e-9)


def test_dpo_golden_values():
    # gains 2 - 1 = 1 apart, beta 0.5: each term of the better one is pulled by 0.5 * sigmoid(-0.5)
    groups = [group(episode(1.0, tokens=1), episode(0.0, tokens=1))]
    algorithm = Recipe(AlgorithmConfig(name="dpo", args={"beta": 0.5}))
    terms = algorithm.credit(groups, dataclasses.replace(terms_of(groups), reference=np.array([-3.0, -2.0])))
    new = torch.tensor([-1.0, -1.0]).double().requires_grad_()
    pull = 0.5 / (1 + np.exp(0.5))
    assert own_gradient(algorithm, new, batch_of(terms)).tolist() == pytest.approx([-pull, pull])
    assert own_loss(algorithm, new, batch_of(terms)).item() == pytest.approx(np.log(1 + np.exp(-0.5)))


def test_groups_may_be_prepared_one_by_one():
    # a micro-batch holds whole groups, never part of one
    for name in ("dpo", "ipo", "kto", "gspo"):
        algorithm = Recipe(AlgorithmConfig(name=name))
        groups = algorithm.keep(random_groups(4))
        batch = batch_of(algorithm.credit(groups, terms_of(groups)))
        now = batch.old_M + 0.1
        whole = algorithm.prepare(now, batch)
        for number in range(len(groups)):
            rows = (batch.group_M == number).nonzero()[:, 0]
            assert torch.allclose(algorithm.prepare(now[rows], pick(batch, rows)), whole[rows], atol=1e-12), name


def test_pairs_are_of_one_group_and_further_apart_than_the_gap():
    score, of = torch.tensor([1.0, 0.6, 0.0, 9.0]), torch.tensor([0, 0, 0, 1])
    assert pairs(score, of).nonzero().tolist() == [[0, 1], [0, 2], [1, 2]]
    assert pairs(score, of, 0.5).nonzero().tolist() == [[0, 2], [1, 2]]


def test_best_and_worst_alone_are_kept_and_the_rest_is_counted():
    algorithm = Recipe(AlgorithmConfig(name="dpo"))
    five = [episode(r) for r in (0.5, 1.0, 0.0, 1.0, 0.0)]
    (kept,) = algorithm.keep([group(*five)])
    assert kept.episodes[0] is five[1]
    assert kept.episodes[1] is five[2]
    assert len(kept.episodes) == 2
    assert counters(algorithm) == {"dropped/outside_pairs": 3.0}
    assert algorithm.keep([group(episode(1.0), episode(1.0))]) == []
    assert counters(algorithm) == {"dropped/no_pair": 1.0}


def test_every_pair_weighs_the_same():
    groups = [group(episode(1.0), episode(0.5), episode(0.0)), group(episode(1.0), episode(0.0))]
    terms = Recipe(AlgorithmConfig(name="dpo", args={"pairs": "all"})).credit(groups, terms_of(groups))
    assert terms.weight.tolist() == pytest.approx([1 / 4] * len(terms))  # 3 pairs and 1
