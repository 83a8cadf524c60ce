"""Conversational agents in Python: an agent, an environment and a reward as objects, trained by one call.

The package builds on the others: `train` makes a run and calls the trainer.

In reading order:

    config.py            Settings of agents and training, profiles, value function
    multi_turn_agent.py  `MultiTurnAgent`, its models and its memory
    environment.py       Environments with `reset` and `step`, conversations, trajectories
    agent_training.py    `train`, trainers as objects, trials of a search
    callbacks.py         Callbacks of training
    trl_trainer.py       Training with Hugging Face TRL
    reward_training.py   A reward model trained on preferences
    hpo.py               Hyper-parameter search
"""

from arborl.conversational.agent_training import DistributedTrainer, MultiTurnGRPOTrainer, train, train_with_gspo
from arborl.conversational.callbacks import CheckpointCallback, EarlyStoppingCallback
from arborl.conversational.config import AgentConfig, GSPOConfig, TrainingConfig, ValueFunction, get_config_for_task
from arborl.conversational.environment import (
    CONVERSATION_CONFIGS,
    ConversationEnvironment,
    ConversationTurn,
    Environment,
    EnvironmentState,
    MultiTurnTrajectory,
    TrajectoryGroup,
)
from arborl.conversational.multi_turn_agent import ConversationMemory, MultiTurnAgent
from arborl.conversational.reward_training import NeuralRewardTrainer
from arborl.conversational.trl_trainer import TRLGRPOTrainerWrapper
from arborl.rewards.reward_model import NeuralReward
from arborl.rewards.text.composite import CompositeReward, MultiObjectiveReward
from arborl.rewards.text.library_rewards import (
    ConcisenessReward,
    CorrectnessReward,
    CustomerServiceReward,
    EngagementReward,
    HelpfulnessReward,
    SafetyReward,
    SalesAssistantReward,
    SimilarityAwareReward,
    TaskCompletionReward,
    TechnicalSupportReward,
)
from arborl.rewards.text.text_reward import RewardFunction, RewardResult, reward_function

__all__ = [
    "CONVERSATION_CONFIGS", "AgentConfig", "CheckpointCallback", "CompositeReward", "ConcisenessReward",
    "ConversationEnvironment", "ConversationMemory", "ConversationTurn", "CorrectnessReward", "CustomerServiceReward",
    "DistributedTrainer", "EarlyStoppingCallback", "EngagementReward", "Environment", "EnvironmentState", "GSPOConfig",
    "HelpfulnessReward", "MultiObjectiveReward", "MultiTurnAgent", "MultiTurnGRPOTrainer", "MultiTurnTrajectory",
    "NeuralReward", "NeuralRewardTrainer", "RewardFunction", "RewardResult", "SafetyReward", "SalesAssistantReward",
    "SimilarityAwareReward", "TRLGRPOTrainerWrapper", "TaskCompletionReward", "TechnicalSupportReward",
    "TrainingConfig", "TrajectoryGroup", "ValueFunction", "get_config_for_task", "reward_function", "train",
    "train_with_gspo",
]  # fmt: skip
