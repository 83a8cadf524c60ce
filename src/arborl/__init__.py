"""Arbor: train language-model agents by reinforcement learning.

Names are imported on first use: `import arborl` is fast and loads no torch.
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
    from arborl.training_run import Run, replay, run
    from arborl.types import Episode, Message, Task

    __version__: str

# The allocator of torch for Arm returns memory to the system after 10 ms and allocates it again in the next step.
# Without this setting a fifth of an update on a CPU is spent on page faults (docs/results/step.md).
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")
# Waiting threads sleep. Spinning threads of torch would take cores from compiled steps and updates, which have their
# own threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_PACKAGES = {
    "Agent": "agents", "Env": "envs", "Episode": "types", "HPOConfig": "conversational.hpo",
    "HPOSummary": "conversational.hpo", "Message": "types", "Observation": "envs", "Run": "training_run",
    "RunConfig": "config", "Step": "envs", "Task": "types", "get_search_space": "conversational.hpo",
    "quick_hpo": "conversational.hpo", "replay": "training_run", "reward": "rewards", "run": "training_run",
    "tool": "tools",
}  # fmt: skip
"""Packages of the names that are not in `conversational`."""

__all__ = [
    "CONVERSATION_CONFIGS", "Agent", "AgentConfig", "CheckpointCallback", "CompositeReward", "ConcisenessReward",
    "ConversationEnvironment", "ConversationMemory", "ConversationTurn", "CorrectnessReward",
    "CustomerServiceReward", "DistributedTrainer", "EarlyStoppingCallback", "EngagementReward", "Env",
    "Environment", "EnvironmentState", "Episode", "GSPOConfig", "HPOConfig", "HPOSummary", "HelpfulnessReward",
    "Message", "MultiObjectiveReward", "MultiTurnAgent", "MultiTurnGRPOTrainer", "MultiTurnTrajectory",
    "NeuralReward", "NeuralRewardTrainer", "Observation", "RewardFunction", "RewardResult", "Run", "RunConfig",
    "SafetyReward", "SalesAssistantReward", "SimilarityAwareReward", "Step", "TRLGRPOTrainerWrapper", "Task",
    "TaskCompletionReward", "TechnicalSupportReward", "TrainingConfig", "TrajectoryGroup", "ValueFunction",
    "__version__", "get_config_for_task", "get_search_space", "quick_hpo", "replay", "reward", "reward_function", "run",
    "tool", "train", "train_with_gspo",
]  # fmt: skip
_MODULES = {name: f"arborl.{_PACKAGES.get(name, 'conversational')}" for name in __all__ if name != "__version__"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("arborl")
        except PackageNotFoundError:  # run from sources without installation
            value = "0"
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'arborl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
