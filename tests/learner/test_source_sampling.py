"""Sources with their own sampling parameters: every token is scored under the distribution it was sampled from."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from learner_fakes import Fake, assert_same, forest_of, gradients, random_groups

from arborl.config.config_base import dump_yaml
from arborl.config.load_config import from_kwargs, load
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.rollout.episode_store import episode_from_json, episode_to_json
from arborl.rollout.token_trees import build_token_trees
from arborl.training_run.build import build
from arborl.types import Group, Sampling, SamplingDistribution

COOL, HOT = Sampling(temperature=0.5, top_p=0.9), Sampling(temperature=1.3, top_k=20, min_p=0.01)


def two_lakes(**more):
    """Two sources that differ in how they draw."""
    lake = {"env": {"name": "frozen_lake", "args": {"size": 3}}}
    return from_kwargs(
        data={
            "sources": {
                "cool": lake | {"sampling": {"temperature": 0.5, "top_p": 0.9}},
                "hot": lake | {"sampling": {"temperature": 1.3, "top_p": 1.0}},
            }
        },
        sampling={"max_tokens": 16, "max_context": 256, "top_p": 0.95},
        rollout={"tasks_per_step": 2, "group_size": 3, "max_turns": 3},
        evaluation={"tasks": 2},
        **more,
    )


@pytest.fixture(scope="module")
def played():
    """The parts of such a run, and a batch of it."""
    parts = build(two_lakes())
    return parts, asyncio.run(parts.rollout.collect(parts.source.take(0, 2), 5, 3))


def drawn_by(group: Group, how: Sampling | None) -> Group:
    """The same group, its calls recorded with these sampling parameters."""
    note = how.drawn if how is not None else None
    return Group(
        group.task,
        [
            dataclasses.replace(episode, calls=[dataclasses.replace(call, drawn=note) for call in episode.calls])
            for episode in group.episodes
        ],
    )


@pytest.mark.parametrize("attention", ["dense", "blocks", "causal"])
def test_each_source_is_scored_under_what_it_was_drawn_from(played, attention):
    parts, groups = played
    forest = build_token_trees(groups)
    learner = Learner(parts.model, LearnerConfig(attention=attention, micro_batch_tokens=200), parts.rollout.sampling)
    logprobs = learner.logprobs(forest.trees, forest.terms)
    assert (logprobs - torch.from_numpy(forest.terms.logprob)).abs().max() < 1e-4
    as_one = learner.logprobs(forest.trees, dataclasses.replace(forest.terms, drawn=None))
    assert (as_one - logprobs).abs().max() > 0.05  # under the run's own they would not be


@pytest.mark.parametrize("kind", ["clip", "entropy", "sequence"])
def test_the_gradient_is_that_of_training_each_source_apart(tiny_llama, kind):
    groups, algorithm = random_groups(3, groups=4), Fake(kind, reference=True, proximal=True)
    own = [COOL, HOT, None, COOL]
    run = Sampling(temperature=0.9)
    config = LearnerConfig(micro_batch_tokens=40)

    def gradient(some, sampling):
        return gradients(Learner(tiny_llama, config, sampling, algorithm.needs), some, algorithm)

    together = gradient([drawn_by(group, how) for group, how in zip(groups, own, strict=True)], run)
    episodes = sum(len(group.episodes) for group in groups)
    apart = [gradient([group], how or run) for group, how in zip(groups, own, strict=True)]
    share = [len(group.episodes) / episodes for group in groups]
    total = sum(part * loss for part, (loss, _) in zip(share, apart, strict=True))
    summed = [
        sum(part * grads[i] for part, (_, grads) in zip(share, apart, strict=True)) for i in range(len(together[1]))
    ]
    assert_same(together, (total, summed))


def test_a_trust_region_step_measures_each_source_in_its_own_distribution(tiny_llama):
    from arborl.learner.attention.path_selection import DENSE
    from arborl.learner.core.packing import pack
    from arborl.learner.core.tree_forward import compute_outputs, log_distributions

    groups = [drawn_by(group, how) for group, how in zip(random_groups(1, groups=2), (COOL, HOT), strict=True)]
    trees, terms = forest_of(groups)
    batch = pack(trees, range(2), terms)
    whole_MV = log_distributions(tiny_llama, batch, Sampling(), DENSE)
    picked_M = whole_MV.gather(1, torch.from_numpy(batch.terms.token)[:, None])[:, 0]
    torch.testing.assert_close(picked_M, compute_outputs(tiny_llama, batch, Sampling(), DENSE).logprob_M)
    cool = batch.terms.tree == 0
    assert (whole_MV[cool] == -torch.inf).any()


def test_where_all_sources_agree_nothing_is_noted(seedling):
    same = {"env": "frozen_lake", "sampling": {"temperature": 1.0, "max_tokens": 8}}
    parts = build(from_kwargs(data={"sources": {"a": same, "b": same}}, rollout={"max_turns": 1}))
    groups = asyncio.run(parts.rollout.collect(parts.source.take(0, 2), 5, 1))
    assert all(call.drawn is None for group in groups for e in group.episodes for call in e.calls)
    assert build_token_trees(groups).terms.drawn is None


def test_how_a_call_was_drawn_is_on_file(played):
    _, groups = played
    notes = {group.task.source: group.episodes[0].calls[0].drawn for group in groups}
    assert notes == {"cool": SamplingDistribution(0.5, 0, 0.9, 0.0), "hot": SamplingDistribution(1.3, 0, 1.0, 0.0)}
    for group in groups:
        row = episode_to_json(group.episodes[0])
        assert episode_from_json(row).calls[0].drawn == notes[group.task.source]
        assert row["calls"][0]["drawn"] == list(notes[group.task.source])


def test_evaluation_and_greedy_play_draw_as_they_say_for_every_source(played):
    parts, _ = played
    for temperature in (1.0, 0.0):
        groups = asyncio.run(parts.evaluator.play(temperature))
        calls = {group.task.source: group.episodes[0].calls[0] for group in groups}
        assert [call.drawn.temperature for call in calls.values()] == [temperature, temperature]
        assert {name: call.drawn.top_p for name, call in calls.items()} == {"cool": 0.9, "hot": 1.0}  # the source's


def test_a_sources_sampling_is_checked_and_survives_its_file(tmp_path):
    config = two_lakes()
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert load(tmp_path / "run.yaml").data.sources["cool"].sampling == config.data.sources["cool"].sampling
    for key, value in {"temperature": 0, "top_p": 0, "top_k": -1, "min_p": 2}.items():
        with pytest.raises(ConfigError, match=rf"data.sources.cool.sampling.{key}"):
            load(tmp_path / "run.yaml", [f"data.sources.cool.sampling.{key}={value}"])
