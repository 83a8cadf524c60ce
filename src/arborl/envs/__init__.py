"""Environments: they answer messages. They never see tokens, models or rewards other than their own.

Start with `env.py` (what an environment is), then `frozen_lake.py` (one). `checker.py` holds yours to the contract.
"""

from typing import TYPE_CHECKING, Any

from arborl.envs.env import Env, Observation, Step
from arborl.registry import Registry

if TYPE_CHECKING:
    from arborl.envs.gym import from_gymnasium, to_gymnasium

ENVS = Registry(
    "environment",
    {
        "frozen_lake": "arborl.envs.frozen_lake:FrozenLake",
        "sokoban": "arborl.envs.sokoban:Sokoban",
        "shop": "arborl.envs.shop:Shop",
        "countdown": "arborl.envs.countdown:Countdown",
        "question": "arborl.envs.question:Question",
        "conversation": "arborl.envs.conversation:Conversation",
        "rooms": "arborl.envs.rooms:Rooms",
        "documents": "arborl.envs.documents:Documents",
        "gymnasium": "arborl.envs.gym:FromGymnasium",
        "reasoning_gym": "arborl.envs.extras.reasoning:ReasoningGym",
        "textarena": "arborl.envs.extras.arena:TextArena",
        "openenv": "arborl.envs.extras.openenv:OpenEnv",
    },
)
EXTRAS = ("reasoning_gym", "textarena", "openenv")
"""Environments that need a package of their own: `pip install 'arborl[NAME]'`."""


def __getattr__(name: str) -> Any:
    """The adapters are imported when they are first used: Gymnasium takes a while to load."""
    if name in ("from_gymnasium", "to_gymnasium"):
        from arborl.envs import gym

        return getattr(gym, name)
    raise AttributeError(f"module 'arborl.envs' has no attribute {name!r}")


__all__ = ["ENVS", "EXTRAS", "Env", "Observation", "Step", "from_gymnasium", "to_gymnasium"]
