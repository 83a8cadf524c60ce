"""Conversation: an agent talks with a user, scripted or simulated.

Start with `game.py` (the environment), then `scenario.py` (what a conversation is about), `presets.py` (three shelves
of scenarios) and `user.py` (a user played by a model).
"""

from arborl.envs.conversation.game import Conversation
from arborl.envs.conversation.presets import CONVERSATION_CONFIGS
from arborl.envs.conversation.scenario import Line, Persona, Scenario

__all__ = ["CONVERSATION_CONFIGS", "Conversation", "Line", "Persona", "Scenario"]
