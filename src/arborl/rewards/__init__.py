"""Rewards: what an episode was worth. They read finished episodes and never see a model's tokens.

Start with `reward.py`: the protocol, `@reward`, and `Rewards`, which scores groups and keeps one bad reward from
costing more than its episode.
"""

from arborl.registry import Registry
from arborl.rewards.reward import Reward, Rewards, reward

REWARDS = Registry(
    "reward",
    {
        "env": "arborl.rewards.rules:environment",
        "exact": "arborl.rewards.rules:exact",
    },
)

__all__ = ["REWARDS", "Reward", "Rewards", "reward"]
