"""The import paths of the StateSet guide: replace `stateset_agents` by `arborl.stateset` in its import lines.

`from arborl.stateset.core.agent import AgentConfig` gives `arborl.AgentConfig`. New code imports from `arborl`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import arborl

SUBMODULES = {
    "core.agent": ("AgentConfig", "MultiTurnAgent"),
    "core.environment": ("CONVERSATION_CONFIGS", "ConversationEnvironment", "Environment", "EnvironmentState"),
    "core.memory": ("ConversationMemory",),
    "core.reward": (
        "CompositeReward", "ConcisenessReward", "CorrectnessReward", "EngagementReward", "HelpfulnessReward",
        "RewardFunction", "RewardResult", "SafetyReward", "TaskCompletionReward", "reward_function",
    ),
    "core.trajectory": ("ConversationTurn", "MultiTurnTrajectory", "TrajectoryGroup"),
    "core.value_function": ("ValueFunction",),
    "rewards": ("CustomerServiceReward", "SalesAssistantReward", "SimilarityAwareReward", "TechnicalSupportReward"),
    "rewards.multi_objective_reward": ("MultiObjectiveReward",),
    "training.callbacks": ("CheckpointCallback", "EarlyStoppingCallback"),
    "training.config": ("TrainingConfig", "get_config_for_task"),
    "training.distributed": ("DistributedTrainer",),
    "training.gspo_trainer": ("GSPOConfig", "train_with_gspo"),
    "training.hpo": ("HPOConfig", "HPOSummary", "get_search_space", "quick_hpo"),
    "training.multi_turn_trainer": ("MultiTurnGRPOTrainer",),
    "training.neural_reward_trainer": ("NeuralReward", "NeuralRewardTrainer"),
    "training.trl_grpo_wrapper": ("TRLGRPOTrainerWrapper",),
}  # fmt: skip
"""Names of the guide by the path below `stateset_agents`."""

__path__: list[str] = []  # submodules are found in `sys.modules` only
__all__ = sorted({name for names in SUBMODULES.values() for name in names} | {"train"})


class _Submodule(ModuleType):
    """A module whose names are those of `arborl`, imported on first use."""

    def __init__(self, name: str, names: tuple[str, ...]):
        super().__init__(name, f"Names of the StateSet guide: {', '.join(names) or 'in submodules'}.")
        self.__path__: list[str] = []
        self.__all__ = list(names)

    def __getattr__(self, name: str) -> Any:
        return _find(self.__name__, self.__all__, name)


def _find(module: str, names: list[str], name: str) -> Any:
    if name in names:
        return getattr(arborl, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(names) or 'submodules only'}")


def __getattr__(name: str) -> Any:
    return _find(__name__, __all__, name)


def _register() -> None:
    parents = {path.rpartition(".")[0] for path in SUBMODULES} - {""}
    for path in sorted({*SUBMODULES, *parents}):
        parent, _, last = path.rpartition(".")
        module = _Submodule(f"{__name__}.{path}", SUBMODULES.get(path, ()))
        sys.modules[module.__name__] = module
        setattr(sys.modules[f"{__name__}.{parent}" if parent else __name__], last, module)


_register()
