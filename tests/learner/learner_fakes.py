"""Episodes with branches, and algorithms of a few lines each whose gradients can be written out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.algorithm_config import AlgorithmArgs
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Completion, Episode, FinishReason, Forest, Group, Sampling, Task, Terms, TokenTree

SAMPLING = Sampling(temperature=0.7)


def random_groups(seed: int, groups: int = 3, vocabulary: int = 50, longest: int = 8) -> list[Group]:
    """Episodes that share prompts, extend them, and sometimes edit them."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        prompt = rng.integers(0, vocabulary, rng.integers(1, longest)).tolist()
        episodes = []
        for e in range(int(rng.integers(2, 5))):
            context, calls = list(prompt), []
            for turn in range(int(rng.integers(1, 4))):
                sampled = rng.integers(0, vocabulary, rng.integers(1, 5)).tolist()
                logprobs = tuple(rng.uniform(-4.5, -3.0, len(sampled)).tolist())
                calls.append(Call(tuple(context), Completion(tuple(sampled), logprobs, FinishReason.STOP), turn))
                context = context + sampled + rng.integers(0, vocabulary, 3).tolist()
                if rng.random() < 0.3:
                    context = context[: len(prompt)] + rng.integers(0, vocabulary, 2).tolist()
            episodes.append(Episode(f"{e}", Task("t"), calls=calls, rewards={"r": float(rng.normal())}))
        made.append(Group(Task("t"), episodes))
    return made


class Fake:
    """An algorithm that credits an episode with its reward; losses are `clip`, `sequence`, `value` and `entropy`."""

    trust_region: AlgorithmArgs | None = None

    def __init__(self, kind: str = "clip", reference: bool = False, proximal: bool = False):
        self.kind = kind
        self.needs = AlgorithmNeeds(
            value=kind == "value", entropy=kind == "entropy", reference=reference, proximal=proximal, greedy=False
        )
        self.whole = kind == "sequence"

    def credit(self, groups: list[Group], terms: Terms) -> Terms:
        """One vote an episode."""
        rewards = np.array([e.reward for group in groups for e in group.valid_episodes])
        counts = np.bincount(terms.episode, minlength=len(rewards))
        weight = 1.0 / (len(rewards) * counts[terms.episode])
        advantage = rewards[terms.episode]
        return dataclasses.replace(terms, advantage=advantage, weight=weight, target=advantage.copy())

    def count(self, terms: Terms) -> float:
        return float(len(np.unique(terms.episode)))

    def prepare(self, now_M, terms):
        """The mean log-ratio of each episode: wrong for any part of one."""
        sums = torch.zeros(int(terms.episode_M.max()) + 1, dtype=now_M.dtype)
        counts = torch.zeros_like(sums)
        sums.index_add_(0, terms.episode_M, now_M - terms.old_M)
        counts.index_add_(0, terms.episode_M, torch.ones_like(now_M))
        return (sums / counts.clamp(min=1))[terms.episode_M]

    def loss(self, outputs, terms):
        new_M = outputs.logprob_M
        ratio_M = (new_M - terms.old_M).exp()
        if self.kind == "sequence":
            ratio_M = (terms.sequence_M + new_M - new_M.detach()).exp()
        held_M = ratio_M.clamp(0.8, 1.2)
        loss_M = -torch.minimum(ratio_M * terms.advantage_M, held_M * terms.advantage_M)
        if self.kind == "entropy":
            loss_M = loss_M - 0.1 * outputs.entropy_M
        if self.kind == "value":
            loss_M = loss_M + 0.5 * (outputs.value_M - terms.target_M).square()
        if terms.reference_M is not None:
            gap_M = terms.reference_M - new_M
            loss_M = loss_M + 0.1 * (gap_M.exp() - 1 - gap_M)
        if terms.proximal_M is not None:
            loss_M = loss_M + 0.1 * (new_M - terms.proximal_M).square()
        return loss_M, {"fake/ratio": ratio_M.detach()}


def forest_of(groups: list[Group]) -> tuple[tuple[TokenTree, ...], Terms]:
    forest = build_token_trees(groups)
    return forest.trees, forest.terms


def batch_of(groups: list[Group], algorithm: Fake) -> tuple[Forest, Terms]:
    forest = build_token_trees(groups)
    return forest, algorithm.credit(groups, forest.terms)


def gradients(learner, groups: list[Group], algorithm: Fake) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of all trained parameters after `look`, `credit` and `backward`."""
    forest = build_token_trees(groups)
    terms = algorithm.credit(groups, learner.score_terms(forest.trees, forest.terms, algorithm.needs))
    value = learner.backward(forest.trees, terms, algorithm)["policy/loss"]
    found = [g.clone() for g in learner.optimizer.gradients()]
    learner.optimizer.zero_grad()
    return value, found


def assert_same(one, other, tolerance: float = 1e-9) -> None:
    """Loss and gradients; differences are measured against the largest gradient, since most are tiny."""
    scale = max(1.0, max(float(g.abs().max()) for g in one[1]))
    assert abs(one[0] - other[0]) < tolerance * max(1.0, abs(one[0]))
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale)


def leaves(tree, path="") -> dict[str, torch.Tensor]:
    """Copies of all tensors of nested dicts and lists, by path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree.detach().cpu().clone()}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {k: v for name, value in items for k, v in leaves(value, f"{path}/{name}").items()}


def assert_equal(ours, theirs) -> None:
    """All tensors are equal to the last bit."""
    one, other = leaves(ours), leaves(theirs)
    assert one.keys() == other.keys()
    assert [name for name in other if not torch.equal(one[name], other[name])] == []


def step(learner, algorithm: Fake, seed: int) -> dict[str, float]:
    """Score, credit and update once."""
    groups = random_groups(seed)
    forest, terms = batch_of(groups, algorithm)
    seen = learner.score_terms(forest.trees, terms, algorithm.needs)
    return learner.update(forest.trees, algorithm.credit(groups, seen), algorithm)
