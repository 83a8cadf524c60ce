"""The import paths of the StateSet guide work below `arborl.stateset`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import arborl
from arborl.stateset import SUBMODULES

IMPORTS = [
    "from arborl.stateset import MultiTurnAgent, ConversationEnvironment, HelpfulnessReward, SafetyReward, train",
    "from arborl.stateset.core.agent import AgentConfig, MultiTurnAgent",
    "from arborl.stateset.core.environment import CONVERSATION_CONFIGS, ConversationEnvironment, Environment",
    "from arborl.stateset.core.environment import EnvironmentState",
    "from arborl.stateset.core.memory import ConversationMemory",
    "from arborl.stateset.core.reward import CompositeReward, reward_function, RewardFunction, RewardResult",
    "from arborl.stateset.core.reward import CorrectnessReward, ConcisenessReward, EngagementReward",
    "from arborl.stateset.core.reward import HelpfulnessReward, SafetyReward, TaskCompletionReward",
    "from arborl.stateset.core.trajectory import ConversationTurn, MultiTurnTrajectory",
    "from arborl.stateset.core.value_function import ValueFunction",
    "from arborl.stateset.rewards import CustomerServiceReward, TechnicalSupportReward, SalesAssistantReward",
    "from arborl.stateset.rewards import SimilarityAwareReward",
    "from arborl.stateset.rewards.multi_objective_reward import MultiObjectiveReward",
    "from arborl.stateset.training.config import TrainingConfig, get_config_for_task",
    "from arborl.stateset.training.distributed import DistributedTrainer",
    "from arborl.stateset.training.gspo_trainer import GSPOConfig, train_with_gspo",
    "from arborl.stateset.training.hpo import HPOConfig, get_search_space, quick_hpo",
    "from arborl.stateset.training.multi_turn_trainer import MultiTurnGRPOTrainer",
    "from arborl.stateset.training.neural_reward_trainer import NeuralRewardTrainer",
    "from arborl.stateset.training.trl_grpo_wrapper import TRLGRPOTrainerWrapper",
    "import arborl.stateset.core.agent",
    "import arborl.stateset as stateset_agents; stateset_agents.core.agent.AgentConfig",
    "from arborl.stateset.training import hpo; hpo.quick_hpo",
    "from arborl.stateset.core.reward import *; CompositeReward",
]


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_of_the_guide_works(line):
    names: dict = {}
    exec(line, names)
    ours = {name: value for name, value in names.items() if name in arborl.__all__}
    assert all(value is getattr(arborl, name) for name, value in ours.items())
    assert ours or line.startswith("import ") or "import hpo" in line


def test_names_are_those_of_arborl():
    for path, names in SUBMODULES.items():
        module = importlib.import_module(f"arborl.stateset.{path}")
        for name in names:
            assert getattr(module, name) is getattr(arborl, name)


def test_importing_the_paths_alone_loads_no_torch():
    code = "import sys, arborl.stateset.core.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(ImportError, match="AgentConfg"):
        exec("from arborl.stateset.core.agent import AgentConfg", {})
    with pytest.raises(AttributeError, match="it has AgentConfig, MultiTurnAgent"):
        importlib.import_module("arborl.stateset.core.agent").AgentConfg  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("arborl.stateset.core.agents")
