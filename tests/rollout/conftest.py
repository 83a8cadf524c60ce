"""Rollouts of scripted replies."""

from __future__ import annotations

import pytest

from arborl.agents.chat_agents import ChatAgent
from arborl.engines.scripted import ScriptedEngine
from arborl.rollout.env_workers import Workers
from arborl.rollout.groups import DEFAULT_OPTIONS
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.types import Sampling


@pytest.fixture
def make_rollout(seedling):
    """Makes a rollout; `env(task)` makes its environments."""
    renderer = seedling[1]

    def make(env, replies=("yes", "no", "maybe so"), workers="auto", training=DEFAULT_OPTIONS, **limits) -> Rollout:
        ids = [[*renderer.tokenizer.encode(text), renderer.stop[0]] for text in replies]
        episode_factories = EpisodeFactories(agent=lambda task: ChatAgent(), env=env)
        bounds = EpisodeLimits(**limits)
        return Rollout(
            ScriptedEngine(ids), renderer, episode_factories, Sampling(8), bounds, 64, Workers(workers), training
        )

    return make
