"""Presets as whole algorithms: what they need, what they keep, what they count, and that batches may be split."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from algorithm_batches import batch_of, counters, episode, group, model_outputs, pick, random_groups, terms_of

from arborl.algorithms import ADVANTAGES, LOSSES, PRESETS, AlgorithmNeeds, PerSourceAlgorithm, Recipe, make_algorithm
from arborl.config.algorithm_config import ADVANTAGE_READS, LOSS_READS, AlgorithmArgs, AlgorithmConfig
from arborl.rollout.token_trees import build_token_trees
from arborl.types import FinishReason, Group, Terms

NAN, INF = float("nan"), float("inf")


def playable(name: str, seed: int = 0, source: str = "") -> list[Group]:
    """Groups that every preset can learn from."""
    groups = random_groups(seed, source=source)
    if name in ("maxrl", "sft", "kto"):
        for g in groups:
            for i, e in enumerate(g.episodes):
                e.rewards = {"r": float(i % 2)}
    return groups


def total(algorithm, logprob: torch.Tensor, terms: Terms, parts: list[np.ndarray]) -> tuple[float, list[float]]:
    """Loss and its gradient by log-probability, over a batch handed in parts that each hold whole groups."""
    batch, new, value = batch_of(terms), logprob.clone().requires_grad_(), 0.0
    for numbers in parts:
        rows = torch.from_numpy(np.flatnonzero(np.isin(terms.tree, numbers)))
        part, whole = pick(batch, rows), model_outputs(new)
        models = dataclasses.replace(whole, logprob_M=new[rows], entropy_M=whole.entropy_M[rows])
        models = dataclasses.replace(models, value_M=whole.value_M[rows])
        if algorithm.whole:
            part = dataclasses.replace(part, sequence_M=algorithm.prepare(new[rows].detach(), part))
        loss, seen = algorithm.loss(models, part)
        assert loss.shape == (len(rows),)
        assert all(vector.shape == (len(rows),) and not vector.requires_grad for vector in seen.values())
        (loss * part.weight_M).sum().backward()
        value += float((loss * part.weight_M).sum().detach())
    return value, new.grad.tolist()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_a_gradient_that_is_independent_of_the_split(name):
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    groups = algorithm.keep(playable(name))
    terms = algorithm.credit(groups, terms_of(groups))
    assert np.isfinite(terms.advantage).all()
    assert np.isfinite(terms.weight).all()
    assert np.isfinite(terms.target).all() == algorithm.needs.value
    now = torch.from_numpy(terms.logprob) + 0.05
    whole, slopes = total(algorithm, now, terms, [np.arange(len(groups))])
    split, again = total(algorithm, now, terms, [np.array([2]), np.array([0]), np.array([1])])
    assert np.isfinite(whole)
    assert any(slopes)
    assert split == pytest.approx(whole, abs=1e-12)
    assert again == pytest.approx(slopes, abs=1e-12)


def test_tables_and_configuration_name_the_same_things():
    assert set(ADVANTAGES) == set(ADVANTAGE_READS)
    assert set(LOSSES) == set(LOSS_READS)
    names = AlgorithmConfig.model_fields | AlgorithmArgs.model_fields
    assert all(AlgorithmConfig(name=name).name == name for name in PRESETS)
    with pytest.raises(ValueError, match="must be one of"):
        AlgorithmConfig(name="unknown")
    assert set().union(*ADVANTAGE_READS.values(), *LOSS_READS.values()) <= set(names)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, AlgorithmNeeds()),
        ({"kl": {"coef": 0.1}}, AlgorithmNeeds(reference=True)),
        ({"kl": {"coef": 0.1, "where": "reward"}}, AlgorithmNeeds(proximal=True, reference=True)),
        ({"name": "ppo", "entropy_coef": 0.01}, AlgorithmNeeds(value=True, entropy=True)),
        ({"name": "a2c"}, AlgorithmNeeds(value=True)),
        ({"name": "remax"}, AlgorithmNeeds(greedy=True)),
        ({"name": "decoupled_ppo"}, AlgorithmNeeds(anchor=True)),
        ({"anchor": "proximal"}, AlgorithmNeeds(anchor=True)),
        ({"name": "gspo"}, AlgorithmNeeds(anchor=True)),
        ({"clip_low": 0.01}, AlgorithmNeeds(anchor=True)),
        ({"name": "trpo", "anchor": "proximal"}, AlgorithmNeeds(proximal=True)),
        ({"importance_weights": "tis"}, AlgorithmNeeds(proximal=True, anchor=True)),
        ({"name": "reinforce", "importance_weights": "tis"}, AlgorithmNeeds(proximal=True)),
        ({"name": "dpo"}, AlgorithmNeeds(reference=True)),
        ({"name": "distill"}, AlgorithmNeeds(teacher=True)),
        ({"name": "sft"}, AlgorithmNeeds()),
    ],
    ids=str,
)
def test_needs_are_exactly_the_columns_that_are_read(settings, needs):
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    assert algorithm.needs == needs
    groups = algorithm.keep(playable(settings.get("name", "grpo")))
    terms = terms_of(groups)
    known = {"proximal": needs.proximal or needs.anchor, "reference": needs.reference, "value": needs.value}
    unknown = {name: np.full(len(terms), np.nan) for name, wanted in known.items() if not wanted}
    terms = algorithm.credit(groups, dataclasses.replace(terms, **unknown))
    value, slopes = total(algorithm, torch.from_numpy(terms.logprob), terms, [np.arange(len(groups))])
    assert np.isfinite([value, *slopes]).all()


def test_only_sequence_losses_need_whole_sequences_and_only_trpo_a_trust_region():
    assert {name for name in PRESETS if make_algorithm(AlgorithmConfig(name=name)).whole} == {
        "gspo",
        "gmpo",
        "dpo",
        "ipo",
        "kto",
    }
    regions = {name: make_algorithm(AlgorithmConfig(name=name)).trust_region for name in PRESETS}
    assert {name for name, region in regions.items() if region} == {"trpo"}
    assert make_algorithm(AlgorithmConfig(name="trpo", args={"max_kl": 0.5})).trust_region.max_kl == 0.5


def test_gspo_over_calls_has_a_ratio_for_each_call():
    groups = [group(episode(turns=[0.0, 1.0], tokens=[1, 2]), episode(turns=[0.0], tokens=1))]
    terms = terms_of(groups)
    now = torch.from_numpy(terms.logprob) + torch.tensor([0.1, 0.2, 0.4, 0.7]).double()
    gaps = {}
    for sequence in ("episode", "call"):
        algorithm = Recipe(AlgorithmConfig(name="gspo", anchor="rollout", args={"sequence": sequence}))
        gaps[sequence] = algorithm.prepare(now, batch_of(algorithm.credit(groups, terms)))[:, 0].tolist()
    assert gaps["episode"] == pytest.approx([0.7 / 3] * 3 + [0.7])
    assert gaps["call"] == pytest.approx([0.1, 0.3, 0.3, 0.7])


def test_gmpo_is_the_mean_over_episodes_of_the_clipped_geometric_means():
    groups = [group(episode(1.0, tokens=3), episode(0.0, tokens=2)), group(episode(0.0, tokens=1), episode(1.0))]
    algorithm = Recipe(AlgorithmConfig(name="gmpo", anchor="rollout"))
    terms = algorithm.credit(groups, terms_of(groups))
    moved = np.array([0.1, 0.9, -0.9, 0.2, -0.8, 0.3, 0.6, -0.1])[: len(terms)]
    found, slopes = total(algorithm, torch.from_numpy(terms.logprob + moved), terms, [np.arange(2)])
    expected = 0.0
    for number in range(4):
        rows = np.flatnonzero(terms.episode == number)
        advantage = terms.advantage[rows[0]]
        held = [min(moved[row], 0.4) if advantage > 0 else max(moved[row], -0.4) for row in rows]
        expected -= advantage * np.exp(np.mean(held)) / 4
        for row, value in zip(rows, held, strict=True):
            slope = -advantage * np.exp(np.mean(held)) / len(rows) / 4 if value == moved[row] else 0.0
            assert slopes[row] == pytest.approx(slope)
    assert found == pytest.approx(expected)


def test_gpg_is_the_mean_over_all_samples_times_the_papers_factor():
    """arXiv 2504.02546: alpha = B / (B - M), where M of B samples belong to groups of equal rewards. Leaving these
    groups out of the mean is the same."""
    groups = [
        group(episode(1.0), episode(0.0)),
        group(episode(1.0), episode(1.0)),
        group(episode(0.0), episode(0.0)),
        group(episode(2.0), episode(0.0)),
    ]
    algorithm = Recipe(AlgorithmConfig(name="gpg", aggregation="episode"))
    kept = algorithm.keep(groups)
    terms = algorithm.credit(kept, terms_of(kept))
    found, _ = total(algorithm, torch.from_numpy(terms.logprob), terms, [np.arange(len(kept))])
    alpha, expected = 8 / (8 - 4), 0.0
    for number, advantage in enumerate([0.5, -0.5, 1.0, -1.0]):  # of all others it is 0
        expected -= alpha * advantage * terms.logprob[terms.episode == number].mean() / 8
    assert found == pytest.approx(expected)


def test_zero_variance_groups_are_skipped_only_if_configured():
    flat, live = group(episode(1.0), episode(1.0)), group(episode(1.0), episode(0.0))
    dead = group(episode(1.0, failed=True), episode(0.0, failed=True))
    algorithm = Recipe(AlgorithmConfig())
    assert algorithm.keep([flat, live, dead]) == [live]
    assert counters(algorithm) == {"dropped/empty_group": 1.0, "dropped/failed": 2.0, "dropped/zero_variance": 1.0}
    assert Recipe(AlgorithmConfig(skip_zero_variance=False)).keep([flat, live, dead]) == [flat, live]
    assert Recipe(AlgorithmConfig(args={"baseline": "none"})).keep([flat, live, dead]) == [flat, live]
    assert Recipe(AlgorithmConfig(name="reinforce")).keep([flat, live, dead]) == [flat, live]


def test_flat_means_what_the_advantage_compares():
    traded = group(episode(rewards={"a": 1.0, "b": 0.0}), episode(rewards={"a": 0.0, "b": 1.0}))
    assert Recipe(AlgorithmConfig()).keep([traded]) == []
    assert Recipe(AlgorithmConfig(name="gdpo")).keep([traded]) == [traded]
    slow = group(episode(turns=[0.0, 1.0], states=["s", "m"]), episode(turns=[1.0], states=["s"]))
    assert Recipe(AlgorithmConfig()).keep([slow]) == []
    assert Recipe(AlgorithmConfig(name="gigpo")).keep([slow]) == [slow]
    assert Recipe(AlgorithmConfig(name="starpo", gamma=0.9)).keep([slow]) == [slow]
    assert Recipe(AlgorithmConfig(name="step_reinforce")).keep([slow]) == [slow]


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rewards_that_are_no_numbers_leave_their_episode_out_and_are_counted(name, bad):
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    groups = [group(episode(bad), episode(1.0), episode(0.0), greedy=0.5), group(episode(bad), greedy=0.5)]
    kept = algorithm.keep(groups)
    assert algorithm.metrics()["dropped/reward_not_finite"] == 2.0
    assert algorithm.metrics()["dropped/empty_group"] == 1.0
    assert len(kept) == 1
    terms = algorithm.credit(kept, terms_of(kept))
    assert np.isfinite(terms.advantage).all()
    assert len(groups[0].episodes) == 3  # the groups given are not touched


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_nothing_to_learn_from_is_an_empty_batch_and_no_error(name):
    algorithm = make_algorithm(AlgorithmConfig(name=name))
    silent = episode(1.0, tokens=0)
    hopeless = [
        group(),
        group(episode(1.0, failed=True), episode(0.0, failed=True), greedy=0.0),
        group(silent, episode(0.0, tokens=0), greedy=0.0),
        group(episode(NAN), greedy=0.0),
    ]
    assert algorithm.keep(hopeless) == []
    assert algorithm.keep([]) == []
    terms = algorithm.credit([], build_token_trees([]).terms)
    assert len(terms) == len(terms.advantage) == len(terms.weight) == 0


def test_groups_that_an_advantage_cannot_use_are_counted():
    remax = Recipe(AlgorithmConfig(name="remax"))
    assert remax.keep([group(episode(1.0)), group(episode(1.0), greedy=NAN)]) == []
    assert counters(remax) == {"dropped/no_greedy": 2.0}
    maxrl = Recipe(AlgorithmConfig(name="maxrl"))
    assert maxrl.keep([group(episode(1.0), episode(-1.0))]) == []
    assert counters(maxrl) == {"dropped/negative_reward": 1.0}
    sft = Recipe(AlgorithmConfig(name="sft", args={"reward_threshold": 0.9}))
    (kept,) = sft.keep([group(episode(1.0), episode(0.5)), group(episode(0.1))])
    assert [e.reward for e in kept.episodes] == [1.0]
    assert counters(sft) == {"dropped/below_threshold": 2.0, "dropped/empty_group": 1.0}


def test_an_episode_that_sampled_nothing_still_counts_in_the_mean():
    groups = [group(episode(1.0, tokens=1), episode(0.0, tokens=0))]
    terms = Recipe(AlgorithmConfig(std="none")).credit(groups, terms_of(groups))
    assert terms.advantage.tolist() == [0.5]
    assert terms.weight.tolist() == [1.0]


BOTH = AlgorithmConfig(
    name="grpo",
    by_source={"chat": AlgorithmConfig(name="dpo"), "game": {"name": "gigpo", "loss": "gspo", "aggregation": "token"}},
)


def mixed() -> list[Group]:
    sources = ["game", "", "chat", "game", "unheard of"]
    return [random_groups(seed, 1, source=source)[0] for seed, source in enumerate(sources)]


def test_each_source_has_its_own_algorithm_and_weighs_by_its_episodes():
    algorithm = make_algorithm(BOTH)
    assert isinstance(algorithm, PerSourceAlgorithm)
    assert algorithm.whole
    assert algorithm.needs == AlgorithmNeeds(anchor=True, reference=True)
    groups = algorithm.keep(mixed())
    assert [g.task.source for g in groups] == ["game", "", "chat", "game", "unheard of"]
    terms = terms_of(groups)
    found = algorithm.credit(groups, terms)
    for places, config in (
        ((0, 3), BOTH.by_source["game"]),
        ((1, 4), AlgorithmConfig()),
        ((2,), BOTH.by_source["chat"]),
    ):
        own = [groups[place] for place in places]
        rows = np.flatnonzero(np.isin(terms.tree, places))
        alone = terms_of(own)
        columns = ("logprob", "proximal", "reference", "value")
        alone = dataclasses.replace(alone, **{name: getattr(terms, name)[rows] for name in columns})
        expected = Recipe(config).credit(own, alone)
        share = sum(len(g.episodes) for g in own) / sum(len(g.episodes) for g in groups)
        assert found.advantage[rows] == pytest.approx(expected.advantage)
        assert found.weight[rows] == pytest.approx(expected.weight * share)


def test_a_mixed_batch_may_be_split_too():
    algorithm = make_algorithm(BOTH)
    groups = algorithm.keep(mixed())
    terms = algorithm.credit(groups, terms_of(groups))
    now = torch.from_numpy(terms.logprob) + 0.05
    whole = total(algorithm, now, terms, [np.arange(5)])
    split = total(algorithm, now, terms, [np.array([4, 1]), np.array([0]), np.array([2, 3])])
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    assert split[1] == pytest.approx(whole[1], abs=1e-12)
    assert all(np.abs(np.array(whole[1])[terms.tree == number]).max() > 0 for number in range(5))


def test_what_a_source_logs_is_the_mean_over_its_own_terms():
    algorithm = make_algorithm(AlgorithmConfig(by_source={"game": {"name": "grpo", "clip_high": 0.3}}))
    groups = [random_groups(1, 1, source="game")[0], random_groups(2, 1)[0]]
    terms = algorithm.credit(groups, terms_of(groups))
    new = torch.from_numpy(terms.logprob) + torch.from_numpy(np.where(terms.tree == 0, 0.1, 0.2))
    _, seen = algorithm.loss(model_outputs(new), batch_of(terms))
    assert seen["source/game/policy/ratio"].mean().item() == pytest.approx(np.exp(0.1))
    assert seen["source/other/policy/ratio"].mean().item() == pytest.approx(np.exp(0.2))


def test_counts_and_memory_of_all_sources_are_kept():
    algorithm = make_algorithm(AlgorithmConfig(by_source={"duel": "rae"}))
    groups = [group(episode(1.0), source="duel", role="x"), group(episode(1.0), episode(1.0)), group(episode(NAN))]
    kept = algorithm.keep(groups)
    assert len(kept) == 1
    metrics = algorithm.metrics()
    assert metrics["dropped/zero_variance"] == 1.0
    assert metrics["source/other/dropped/reward_not_finite"] == 1.0
    algorithm.credit(kept, terms_of(kept))
    saved = json.loads(json.dumps(algorithm.state()))
    assert saved == {"": {}, "duel": {"baselines": {"duel/x": 1.0}}}
    fresh = make_algorithm(AlgorithmConfig(by_source={"duel": "rae"}))
    fresh.load_state(saved)
    assert fresh.state() == saved


def test_a_truncated_episode_is_recognized_by_its_last_completion():
    algorithm = Recipe(AlgorithmConfig(overlong={"filter": True}))
    talked = episode(turns=[0.0, 1.0])
    assert algorithm.keep([group(talked, episode(0.0))])[0].episodes[0] is talked
    talked.calls[-1] = dataclasses.replace(
        talked.calls[-1], completion=dataclasses.replace(talked.calls[-1].completion, finish=FinishReason.LENGTH)
    )
    assert algorithm.keep([group(talked, episode(0.0), episode(0.5))])[0].episodes[0] is not talked


def test_advantages_are_held_to_their_bound_on_both_sides_and_counted():
    groups = [group(*(episode(reward) for reward in (1.0, 0.0, 0.0, 0.0)))]
    free = make_algorithm(AlgorithmConfig(std="group")).credit(groups, terms_of(groups)).advantage
    held = make_algorithm(AlgorithmConfig(std="group", advantage_clip=0.6))
    assert free.max() == pytest.approx(1.5, abs=1e-5)
    assert free.min() == pytest.approx(-0.5, abs=1e-5)
    assert held.credit(groups, terms_of(groups)).advantage.tolist() == np.clip(free, -0.6, 0.6).tolist()
    assert held.metrics()["algorithm/advantage_clipped"] == 0.25
    assert "algorithm/advantage_clipped" not in make_algorithm(AlgorithmConfig()).metrics()
