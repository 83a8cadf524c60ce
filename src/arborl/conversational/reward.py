"""Rewards that read turns. `arborl.rewards.text` has them; here are the names that one inherits from."""

from arborl.rewards.text.text_reward import Context, RewardFunction, RewardResult, Turns, reward_function

__all__ = ["Context", "RewardFunction", "RewardResult", "Turns", "reward_function"]
