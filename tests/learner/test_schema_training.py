"""Training on completions that a JSON schema constrained: the learner scores them under the same masks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

import arborl
from arborl.config.load_config import from_kwargs
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.rollout.episode_store import episode_from_json, episode_to_json
from arborl.rollout.token_trees import build_token_trees, downsample_branches
from arborl.training_run.build import build
from arborl.types import Message, Sampling

pytest.importorskip("llguidance", reason="the extra 'json'")

MOVE = {
    "type": "object", "required": ["move"], "additionalProperties": False,
    "properties": {"why": {"type": "string", "maxLength": 10}, "move": {"enum": ["up", "down", "left", "right"]}},
}  # fmt: skip


async def json_player(task, env, model):
    """Thinks freely, then moves by a JSON object."""
    messages = [*(await env.reset(task, task.seed)).messages]
    for _ in range(2):
        thought = await model.chat(messages)
        move = await model.chat([*messages, thought, Message("user", "Your move as JSON.")], schema=MOVE)
        model.count({"moves/valid": float(json.loads(move.content)["move"] in MOVE["properties"]["move"]["enum"])})
        step = await env.step(Message("assistant", f"<answer>{json.loads(move.content)['move']}</answer>"))
        if step.over:
            break
        messages += [thought, *step.observation.messages]


def config_of(**more):
    settings = {
        "agent": json_player, "sampling": {"max_tokens": 60, "max_context": 512, "top_p": 0.95},
        "env": {"name": "frozen_lake", "args": {"size": 3}}, "rollout": {"tasks_per_step": 2, "group_size": 3},
        "evaluation": {"tasks": 1}, "threads": 1,
    }  # fmt: skip
    return settings | more


@pytest.fixture(scope="module")
def played():
    parts = build(from_kwargs(**config_of(agent="player")), {"player": json_player})
    return parts, asyncio.run(parts.rollout.collect(parts.source.take(0, 2), 5, 3))


@pytest.mark.parametrize("attention", ["dense", "blocks"])
def test_the_learner_scores_constrained_tokens_under_their_masks(played, attention):
    parts, groups = played
    assert [str(e.failure) for group in groups for e in group.episodes] == ["None"] * 6
    forest = build_token_trees(groups, parts.rollout.schema_masks)
    learner = Learner(parts.model, LearnerConfig(attention=attention, micro_batch_tokens=300), parts.rollout.sampling)
    recorded = torch.from_numpy(forest.terms.logprob)
    assert (learner.logprobs(forest.trees, forest.terms) - recorded).abs().max() < 1e-4
    unmasked = learner.logprobs(forest.trees, dataclasses.replace(forest.terms, allowed=None))
    masked = np.array([mask is not None for mask in forest.terms.allowed])
    assert masked.any()
    assert not masked.all()
    assert (unmasked - recorded)[masked].abs().max() > 0.1  # without the masks they would be others
    assert (unmasked - recorded)[~masked].abs().max() < 1e-4


def test_masks_survive_files_processes_and_downsampling(played):
    parts, groups = played
    episode = groups[0].episodes[0]
    stored = episode_from_json(episode_to_json(episode))
    assert [call.schema for call in stored.calls] == [call.schema for call in episode.calls]
    assert {bool(call.schema) for call in stored.calls} == {True, False}
    forest = build_token_trees(groups, parts.rollout.schema_masks)
    terms = pickle.loads(pickle.dumps(forest.terms))
    assert terms.allowed.tolist() == forest.terms.allowed.tolist()
    weighted = dataclasses.replace(forest.terms, weight=np.ones(len(forest.terms)))
    thinned, terms, _ = downsample_branches(groups, weighted, 1, "last", 3)
    assert len(terms) < len(forest.terms)
    learner = Learner(parts.model, LearnerConfig(), parts.rollout.sampling)
    assert (learner.logprobs(thinned.trees, terms) - torch.from_numpy(terms.logprob)).abs().max() < 1e-4


def test_what_cannot_be_recomputed_is_refused(played):
    parts, groups = played
    with pytest.raises(ValueError, match="schema_masks"):
        build_token_trees(groups)
    with pytest.raises(ConfigError, match="frequency_penalty"):
        Learner(parts.model, LearnerConfig(), Sampling(frequency_penalty=0.5))


@arborl.reward
def says_right(episode) -> float:
    return float(np.mean(["right" in turn.message.content for turn in episode.turns]))


def test_a_run_trains_an_agent_that_answers_in_json(tmp_path):
    arborl.run(
        steps=2, output_dir=tmp_path / "run", algorithm="grpo", rewards=[says_right],
        **config_of(track={"gifs": 0, "tensorboard": False}, rollout={"tasks_per_step": 3, "group_size": 4}),
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["policy/logprob_diff_max"] for row in rows if "policy/logprob_diff_max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    assert all(row["learner/grad_norm"] > 0 for row in rows if "policy/logprob_diff_max" in row)


async def bad_player(task, env, model):
    observation = await env.reset(task, task.seed)
    await model.chat(observation.messages, schema={"type": "array", "uniqueItems": True})


def test_a_schema_that_is_not_supported_fails_the_episode_by_its_keyword():
    parts = build(from_kwargs(**config_of(agent="player")), {"player": bad_player})
    (group,) = asyncio.run(parts.rollout.collect(parts.source.take(0, 1), 5, 1))
    assert "uniqueItems" in str(group.episodes[0].failure)
