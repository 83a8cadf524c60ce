"""Rewards: what an episode was worth. They read finished episodes and never see a model's tokens.

Start with `reward.py`: the protocol, `@reward`, and `Rewards`, which scores groups and keeps one bad reward from
costing more than its episode.
"""

from arborl.registry import Registry
from arborl.rewards.reward import GroupReward, Reward, Rewards, reward

REWARDS = Registry(
    "reward",
    {
        "choice": "arborl.rewards.choice:Choice",
        "code_tests": "arborl.rewards.code:CodeTests",
        "efficient": "arborl.rewards.efficiency:Efficient",
        "env": "arborl.rewards.rules:environment",
        "equal": "arborl.rewards.numbers:Equal",
        "exact": "arborl.rewards.rules:exact",
        "format": "arborl.rewards.format:Format",
        "judge": "arborl.rewards.judge:Judge",
        "short_answer": "arborl.rewards.choice:ShortAnswer",
    },
)

__all__ = ["REWARDS", "GroupReward", "Reward", "Rewards", "reward"]
