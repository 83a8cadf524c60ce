"""Conversational agents from Python: an agent, an environment and a reward as objects, trained by one call.

A thin room over the others: an agent is our agent with an engine, an environment our environment, a reward our reward,
and `train` builds a run and calls the trainer. It never samples, scores or learns by itself.

In reading order:

    trajectory.py  What was said, as plain turns
    reward.py      Rewards that read turns; each is a reward of `arborl.rewards` too
    hpo.py         Hyper-parameter search for conversational agents
"""

from arborl.conversational.reward import RewardFunction, RewardResult, reward_function
from arborl.conversational.trajectory import ConversationTurn, MultiTurnTrajectory, TrajectoryGroup
from arborl.rewards.text.composite import CompositeReward, MultiObjectiveReward
from arborl.rewards.text.domains import CustomerServiceReward, SalesAssistantReward, TechnicalSupportReward
from arborl.rewards.text.general import ConcisenessReward, EngagementReward, HelpfulnessReward
from arborl.rewards.text.safety import SafetyReward
from arborl.rewards.text.similarity import SimilarityAwareReward
from arborl.rewards.text.task import CorrectnessReward, TaskCompletionReward

__all__ = [
    "CompositeReward",
    "ConcisenessReward",
    "ConversationTurn",
    "CorrectnessReward",
    "CustomerServiceReward",
    "EngagementReward",
    "HelpfulnessReward",
    "MultiObjectiveReward",
    "MultiTurnTrajectory",
    "RewardFunction",
    "RewardResult",
    "SafetyReward",
    "SalesAssistantReward",
    "SimilarityAwareReward",
    "TaskCompletionReward",
    "TechnicalSupportReward",
    "TrajectoryGroup",
    "reward_function",
]
