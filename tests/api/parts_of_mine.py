"""Parts as a user's own module has them."""

from __future__ import annotations

import arborl
from arborl.agents.chat import ChatAgent
from arborl.envs.frozen_lake import FrozenLake


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


def asked():
    return [{"question": f"{n}?", "answer": "wrong"} for n in range(40)]


def all_of_them(group) -> bool:
    return True
