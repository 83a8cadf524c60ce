"""Environments: they answer messages. They never see tokens, models or rewards other than their own.

In reading order:

    env.py           What an environment is: `reset` opens an episode, `step` answers one message of the agent
    wrapper.py       An environment around another: whatever it does not do itself, the inner one does
    prompted.py      An environment in other words: a prompt around what it says, and its action read out of a reply
    validation.py    Whether what an environment returned is of the shape its record promises
    checker.py       Holds an environment to its contract: run it on yours before you train on it
    splits.py        Which generated problems are held out: one in ten, by a hash of the problem itself
    answers.py       What a message says to do
    question.py      One question, one answer: the episode is over with the first message, and rewards judge it
    frozen_lake.py   FrozenLake
    sokoban/         Sokoban: push every box onto a target
    shop/            Shop: find and buy what the instruction asks for, over WebShop's pages and with its reward
    rooms/           Rooms: find the treasure in a house with locked doors and their keys
    countdown.py     Countdown: make the target out of the numbers, each used once, with + - * / and brackets
    documents.py     Questions about a document that is not in the prompt
    conversation/    Conversation: an agent talks with a user, scripted or simulated
    gym.py           Gymnasium both ways: its environments as ours (`from_gymnasium`), ours as its (`to_gymnasium`)
    extras/          Environments of other packages
    tiles.py         A FrozenLake grid as a picture
    text_picture.py  A page of text as a picture
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
