"""Environments: they answer the agent's messages. They see no tokens, no model, and no rewards other than their own.

In reading order:

    env.py             The environment protocol, `<answer>` tags, and the held-out split of generated problems
    wrapper.py         Wrappers around an environment, and helpers that look through them
    prompt_wrapper.py  Prompt templates around observations, and an action pattern for replies
    validation.py      Type checks of observations, steps and metrics
    checker.py         The environment checker: tests an environment against the protocol
    games/             Environments of this library
    adapters/          Environments of other packages: Gymnasium (both directions), reasoning_gym, textarena, OpenEnv,
                       TextWorld, ALFWorld, ScienceWorld, chess puzzles, verifiers (both directions), GEM,
                       MiniWoB++
"""

from typing import TYPE_CHECKING, Any

from arborl.envs.env import Env, Observation, Step
from arborl.registry import Registry

if TYPE_CHECKING:
    from arborl.envs.adapters.gymnasium_adapter import from_gymnasium, to_gymnasium

ENVS = Registry(
    "environment",
    {
        "frozen_lake": "arborl.envs.games.frozen_lake:FrozenLake",
        "sokoban": "arborl.envs.games.sokoban:Sokoban",
        "shop": "arborl.envs.games.shop:Shop",
        "countdown": "arborl.envs.games.countdown:Countdown",
        "question": "arborl.envs.games.question:Question",
        "conversation": "arborl.envs.games.conversation_env:Conversation",
        "rooms": "arborl.envs.games.rooms:Rooms",
        "documents": "arborl.envs.games.documents_env:Documents",
        "gymnasium": "arborl.envs.adapters.gymnasium_adapter:GymnasiumEnv",
        "reasoning_gym": "arborl.envs.adapters.other_packages:ReasoningGym",
        "textarena": "arborl.envs.adapters.other_packages:TextArena",
        "openenv": "arborl.envs.adapters.other_packages:OpenEnv",
        "textworld": "arborl.envs.adapters.text_games:TextWorld",
        "alfworld": "arborl.envs.adapters.text_games:ALFWorld",
        "scienceworld": "arborl.envs.adapters.text_games:ScienceWorld",
        "chess": "arborl.envs.adapters.chess_puzzles:ChessPuzzle",
        "verifiers": "arborl.envs.adapters.verifiers_adapter:VerifiersEnv",
        "gem": "arborl.envs.adapters.gem_adapter:Gem",
        "miniwob": "arborl.envs.adapters.miniwob_adapter:MiniWob",
    },
)
EXTRAS = (
    "reasoning_gym",
    "textarena",
    "openenv",
    "textworld",
    "alfworld",
    "scienceworld",
    "chess",
    "verifiers",
    "gem",
    "miniwob",
)
"""Environments that need an optional package: `pip install 'arborl[NAME]'`."""


def __getattr__(name: str) -> Any:
    """Import the Gymnasium adapter on first use: Gymnasium is slow to import."""
    if name in ("from_gymnasium", "to_gymnasium"):
        from arborl.envs.adapters import gymnasium_adapter

        return getattr(gymnasium_adapter, name)
    raise AttributeError(f"module 'arborl.envs' has no attribute {name!r}")


__all__ = ["ENVS", "EXTRAS", "Env", "Observation", "Step", "from_gymnasium", "to_gymnasium"]
