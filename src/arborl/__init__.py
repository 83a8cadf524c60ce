"""Arbor: train language-model agents by reinforcement learning.

Names are imported when they are first used, so `import arborl` is quick and loads no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arborl.agents import Agent
    from arborl.api import Run, run
    from arborl.config import RunConfig
    from arborl.conversational import (
        CompositeReward,
        ConcisenessReward,
        ConversationTurn,
        CorrectnessReward,
        CustomerServiceReward,
        EngagementReward,
        HelpfulnessReward,
        MultiObjectiveReward,
        MultiTurnTrajectory,
        RewardFunction,
        RewardResult,
        SafetyReward,
        SalesAssistantReward,
        SimilarityAwareReward,
        TaskCompletionReward,
        TechnicalSupportReward,
        TrajectoryGroup,
        reward_function,
    )
    from arborl.conversational.hpo import HPOConfig, HPOSummary, get_search_space, quick_hpo
    from arborl.envs import Env, Observation, Step
    from arborl.rewards import reward
    from arborl.tools import tool
    from arborl.types import Episode, Message, Task

    __version__: str

# torch's build for Arm gives memory back to the system 10 ms after it was freed, and takes it again in the next step:
# without this, a fifth of an update on a CPU goes into page faults (docs/results/step.md)
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")

_HOMES = {
    "Agent": "arborl.agents",
    "CompositeReward": "arborl.conversational",
    "ConcisenessReward": "arborl.conversational",
    "ConversationTurn": "arborl.conversational",
    "CorrectnessReward": "arborl.conversational",
    "CustomerServiceReward": "arborl.conversational",
    "EngagementReward": "arborl.conversational",
    "Env": "arborl.envs",
    "Episode": "arborl.types",
    "HPOConfig": "arborl.conversational.hpo",
    "HPOSummary": "arborl.conversational.hpo",
    "HelpfulnessReward": "arborl.conversational",
    "Message": "arborl.types",
    "MultiObjectiveReward": "arborl.conversational",
    "MultiTurnTrajectory": "arborl.conversational",
    "Observation": "arborl.envs",
    "RewardFunction": "arborl.conversational",
    "RewardResult": "arborl.conversational",
    "Run": "arborl.api",
    "RunConfig": "arborl.config",
    "SafetyReward": "arborl.conversational",
    "SalesAssistantReward": "arborl.conversational",
    "SimilarityAwareReward": "arborl.conversational",
    "Step": "arborl.envs",
    "Task": "arborl.types",
    "TaskCompletionReward": "arborl.conversational",
    "TechnicalSupportReward": "arborl.conversational",
    "TrajectoryGroup": "arborl.conversational",
    "get_search_space": "arborl.conversational.hpo",
    "quick_hpo": "arborl.conversational.hpo",
    "reward": "arborl.rewards",
    "reward_function": "arborl.conversational",
    "run": "arborl.api",
    "tool": "arborl.tools",
}

__all__ = [
    "Agent",
    "CompositeReward",
    "ConcisenessReward",
    "ConversationTurn",
    "CorrectnessReward",
    "CustomerServiceReward",
    "EngagementReward",
    "Env",
    "Episode",
    "HPOConfig",
    "HPOSummary",
    "HelpfulnessReward",
    "Message",
    "MultiObjectiveReward",
    "MultiTurnTrajectory",
    "Observation",
    "RewardFunction",
    "RewardResult",
    "Run",
    "RunConfig",
    "SafetyReward",
    "SalesAssistantReward",
    "SimilarityAwareReward",
    "Step",
    "Task",
    "TaskCompletionReward",
    "TechnicalSupportReward",
    "TrajectoryGroup",
    "__version__",
    "get_search_space",
    "quick_hpo",
    "reward",
    "reward_function",
    "run",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("arborl")
    elif name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'arborl' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
