"""Rewards that other rewards are made of, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from arborl.errors import ConfigError
from arborl.registry import call_checked
from arborl.rewards import REWARDS
from arborl.rewards.reward import Reward, as_reward


def find_reward(name: str, args: Mapping[str, Any], where: str) -> Reward:
    """A reward of the table, or `package.module:attribute`, made with its arguments.

    Args:
        name: of the reward.
        args: its arguments, where it takes some.
        where: they were given, for the error message.
    """
    found = REWARDS[name]
    if inspect.isclass(found):
        found = call_checked(found, args, where)
    elif args:
        raise ConfigError(f"{where}: the reward {name!r} is a function and takes no arguments here.")
    return as_reward(found)
