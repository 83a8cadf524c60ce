"""Conversational agents from Python: an agent, an environment and a reward as objects, trained by one call.

A thin room over the others: an agent is our agent with an engine, an environment our environment, a reward our reward,
and `train` builds a run and calls the trainer. It never samples, scores or learns by itself.

In reading order:

    trajectory.py   What was said, as plain turns
    reward.py       Rewards that read turns; each is a reward of `arborl.rewards` too
    environment.py  Environments with `reset` and `step`, and the one for conversations
    agent.py        The agent and its settings
    voice.py        Who answers when it asks: the model in training, its own, or fixed replies
    memory.py       What it remembers of earlier conversations
    config.py       Settings of training, profiles, and the run they stand for
    training.py     `train`
    callbacks.py    Told of what happens, and able to end it
    trainers.py     The same run as an object; GSPO
    value.py        How values are estimated
    trl.py          The same trained by Hugging Face TRL
    trl_terms.py    What crosses the line to TRL: settings, tokens, weights
    settings.py     The base of all settings here
    preferences.py  Pairs of a better and a worse conversation, from Python and from files
    neural.py       A reward learned from such pairs
    hpo.py          Hyper-parameter search for conversational agents
"""

from arborl.conversational.agent import AgentConfig, MultiTurnAgent
from arborl.conversational.callbacks import CheckpointCallback, EarlyStoppingCallback
from arborl.conversational.config import TrainingConfig, get_config_for_task
from arborl.conversational.environment import (
    CONVERSATION_CONFIGS,
    ConversationEnvironment,
    Environment,
    EnvironmentState,
)
from arborl.conversational.memory import ConversationMemory
from arborl.conversational.neural import NeuralRewardTrainer
from arborl.conversational.reward import RewardFunction, RewardResult, reward_function
from arborl.conversational.trainers import DistributedTrainer, GSPOConfig, MultiTurnGRPOTrainer, train_with_gspo
from arborl.conversational.training import train
from arborl.conversational.trajectory import ConversationTurn, MultiTurnTrajectory, TrajectoryGroup
from arborl.conversational.trl import TRLGRPOTrainerWrapper
from arborl.conversational.value import ValueFunction
from arborl.rewards.reward_model import NeuralReward
from arborl.rewards.text.composite import CompositeReward, MultiObjectiveReward
from arborl.rewards.text.domain_rewards import CustomerServiceReward, SalesAssistantReward, TechnicalSupportReward
from arborl.rewards.text.library_rewards import (
    ConcisenessReward,
    CorrectnessReward,
    EngagementReward,
    HelpfulnessReward,
    SafetyReward,
    SimilarityAwareReward,
    TaskCompletionReward,
)

__all__ = [
    "CONVERSATION_CONFIGS",
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
    "Environment",
    "EnvironmentState",
    "GSPOConfig",
    "HelpfulnessReward",
    "MultiObjectiveReward",
    "MultiTurnAgent",
    "MultiTurnGRPOTrainer",
    "MultiTurnTrajectory",
    "NeuralReward",
    "NeuralRewardTrainer",
    "RewardFunction",
    "RewardResult",
    "SafetyReward",
    "SalesAssistantReward",
    "SimilarityAwareReward",
    "TRLGRPOTrainerWrapper",
    "TaskCompletionReward",
    "TechnicalSupportReward",
    "TrainingConfig",
    "TrajectoryGroup",
    "ValueFunction",
    "get_config_for_task",
    "reward_function",
    "train",
    "train_with_gspo",
]
