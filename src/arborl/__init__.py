"""Arbor: train language-model agents by reinforcement learning.

Names are imported when they are first used, so `import arborl` is quick and loads no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arborl.agents import Agent
    from arborl.config import RunConfig
    from arborl.conversational import (
        CONVERSATION_CONFIGS,
        AgentConfig,
        CheckpointCallback,
        CompositeReward,
        ConcisenessReward,
        ConversationEnvironment,
        ConversationMemory,
        ConversationTurn,
        CorrectnessReward,
        CustomerServiceReward,
        DistributedTrainer,
        EarlyStoppingCallback,
        EngagementReward,
        Environment,
        EnvironmentState,
        GSPOConfig,
        HelpfulnessReward,
        MultiObjectiveReward,
        MultiTurnAgent,
        MultiTurnGRPOTrainer,
        MultiTurnTrajectory,
        NeuralReward,
        NeuralRewardTrainer,
        RewardFunction,
        RewardResult,
        SafetyReward,
        SalesAssistantReward,
        SimilarityAwareReward,
        TaskCompletionReward,
        TechnicalSupportReward,
        TrainingConfig,
        TrajectoryGroup,
        TRLGRPOTrainerWrapper,
        ValueFunction,
        get_config_for_task,
        reward_function,
        train,
        train_with_gspo,
    )
    from arborl.conversational.hpo import HPOConfig, HPOSummary, get_search_space, quick_hpo
    from arborl.envs import Env, Observation, Step
    from arborl.rewards import reward
    from arborl.tools import tool
    from arborl.training_run import Run, run
    from arborl.types import Episode, Message, Task

    __version__: str

# torch's build for Arm gives memory back to the system 10 ms after it was freed, and takes it again in the next step:
# without this, a fifth of an update on a CPU goes into page faults (docs/results/step.md)
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
# Threads that wait should sleep: torch's, spinning between two of its operations, take cores from compiled steps and
# updates, which bring threads of their own, and from whatever else runs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "CONVERSATION_CONFIGS": "arborl.conversational",
    "Agent": "arborl.agents",
    "AgentConfig": "arborl.conversational",
    "CheckpointCallback": "arborl.conversational",
    "CompositeReward": "arborl.conversational",
    "ConcisenessReward": "arborl.conversational",
    "ConversationEnvironment": "arborl.conversational",
    "ConversationMemory": "arborl.conversational",
    "ConversationTurn": "arborl.conversational",
    "CorrectnessReward": "arborl.conversational",
    "CustomerServiceReward": "arborl.conversational",
    "DistributedTrainer": "arborl.conversational",
    "EarlyStoppingCallback": "arborl.conversational",
    "EngagementReward": "arborl.conversational",
    "Env": "arborl.envs",
    "Environment": "arborl.conversational",
    "EnvironmentState": "arborl.conversational",
    "Episode": "arborl.types",
    "GSPOConfig": "arborl.conversational",
    "HPOConfig": "arborl.conversational.hpo",
    "HPOSummary": "arborl.conversational.hpo",
    "HelpfulnessReward": "arborl.conversational",
    "Message": "arborl.types",
    "MultiObjectiveReward": "arborl.conversational",
    "MultiTurnAgent": "arborl.conversational",
    "MultiTurnGRPOTrainer": "arborl.conversational",
    "MultiTurnTrajectory": "arborl.conversational",
    "NeuralReward": "arborl.conversational",
    "NeuralRewardTrainer": "arborl.conversational",
    "Observation": "arborl.envs",
    "RewardFunction": "arborl.conversational",
    "RewardResult": "arborl.conversational",
    "Run": "arborl.training_run",
    "RunConfig": "arborl.config",
    "SafetyReward": "arborl.conversational",
    "SalesAssistantReward": "arborl.conversational",
    "SimilarityAwareReward": "arborl.conversational",
    "Step": "arborl.envs",
    "TRLGRPOTrainerWrapper": "arborl.conversational",
    "Task": "arborl.types",
    "TaskCompletionReward": "arborl.conversational",
    "TechnicalSupportReward": "arborl.conversational",
    "TrainingConfig": "arborl.conversational",
    "TrajectoryGroup": "arborl.conversational",
    "ValueFunction": "arborl.conversational",
    "get_config_for_task": "arborl.conversational",
    "get_search_space": "arborl.conversational.hpo",
    "quick_hpo": "arborl.conversational.hpo",
    "reward": "arborl.rewards",
    "reward_function": "arborl.conversational",
    "run": "arborl.training_run",
    "tool": "arborl.tools",
    "train": "arborl.conversational",
    "train_with_gspo": "arborl.conversational",
}

__all__ = [
    "CONVERSATION_CONFIGS",
    "Agent",
    "AgentConfig",
    "CheckpointCallback",
    "CompositeReward",
    "ConcisenessReward",
    "ConversationEnvironment",
    "ConversationMemory",
    "ConversationTurn",
    "CorrectnessReward",
    "CustomerServiceReward",
    "DistributedTrainer",
    "EarlyStoppingCallback",
    "EngagementReward",
    "Env",
    "Environment",
    "EnvironmentState",
    "Episode",
    "GSPOConfig",
    "HPOConfig",
    "HPOSummary",
    "HelpfulnessReward",
    "Message",
    "MultiObjectiveReward",
    "MultiTurnAgent",
    "MultiTurnGRPOTrainer",
    "MultiTurnTrajectory",
    "NeuralReward",
    "NeuralRewardTrainer",
    "Observation",
    "RewardFunction",
    "RewardResult",
    "Run",
    "RunConfig",
    "SafetyReward",
    "SalesAssistantReward",
    "SimilarityAwareReward",
    "Step",
    "TRLGRPOTrainerWrapper",
    "Task",
    "TaskCompletionReward",
    "TechnicalSupportReward",
    "TrainingConfig",
    "TrajectoryGroup",
    "ValueFunction",
    "__version__",
    "get_config_for_task",
    "get_search_space",
    "quick_hpo",
    "reward",
    "reward_function",
    "run",
    "tool",
    "train",
    "train_with_gspo",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            found: Any = version("arborl")
        except PackageNotFoundError:  # used from its sources, without having been installed
            found = "0"
    elif name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'arborl' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
