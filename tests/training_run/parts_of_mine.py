"""Parts as a user's own module has them."""

from __future__ import annotations

import numpy as np
import torch

import arborl
from arborl.agents.chat_agents import ChatAgent
from arborl.envs.games.frozen_lake import FrozenLake


@arborl.tool
def calculator(expression: str) -> str:
    """Compute something, always wrongly.

    Args:
        expression: such as 1 + 2.
    """
    return "wrong"


@arborl.reward
def right(episode, answer: str) -> float:
    return float(episode.answer == answer)


class Lake(FrozenLake):
    """A lake of one's own."""


class Talker(ChatAgent):
    """An agent of one's own."""


def requested():
    return [{"question": f"{n}?", "answer": "wrong"} for n in range(40)]


def all_of_them(group) -> bool:
    return True


# ------------------------------------------------------------------------------------------------ an algorithm


def grpo_again(rewards, small: float = 1e-6):
    """GRPO's advantage, written anew."""
    return [np.zeros(len(r)) if len(set(r)) < 2 else (r - r.mean()) / (r.std(ddof=1) + small) for r in rewards]


def ppo_again(new, old, advantage, low: float = 0.2, high: float = 0.2):
    """PPO's loss, written anew."""
    ratio = (new - old).clamp(-20, 20).exp()
    held = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantage, held * advantage), {"policy/ratio": ratio.detach()}


def wrong_shape(rewards):
    return [r[:-1] for r in rewards]
