"""Rewards: values of finished episodes. Rewards never see token ids.

reward.py          The interface of rewards, `@reward`, and `Rewards`, which scores groups
threaded_calls.py  Sync reward functions in threads, with adaptive concurrency
answers.py         Rewards of the final answer: number, text, choice, format; and `env`
code_tests.py      Code tested in the sandbox
asserts.py         Tests written as asserts
score_function.py  Reward functions written for verl and TRL; verl's rules by data source
efficiency.py      Fewer tool calls for the same answer
judge.py           Answers judged by a language model behind an endpoint
reward_model.py    Reward models: sequence classifiers on disk
text/              Rewards that read conversations: helpfulness, safety, correctness; combinations of rewards
"""

import inspect
from collections.abc import Mapping
from typing import Any

from arborl.errors import ConfigError
from arborl.registry import Registry, call_checked
from arborl.rewards.reward import GroupReward, Reward, Rewards, as_reward, reward

REWARDS = Registry(
    "reward",
    {
        "choice": "arborl.rewards.answers:MultipleChoice",
        "code_tests": "arborl.rewards.code_tests:CodeTests",
        "composite": "arborl.rewards.text.composite:CompositeReward",
        "conciseness": "arborl.rewards.text.library_rewards:ConcisenessReward",
        "correctness": "arborl.rewards.text.library_rewards:CorrectnessReward",
        "customer_service": "arborl.rewards.text.library_rewards:CustomerServiceReward",
        "data_source": "arborl.rewards.score_function:DataSource",
        "efficient": "arborl.rewards.efficiency:Efficient",
        "engagement": "arborl.rewards.text.library_rewards:EngagementReward",
        "env": "arborl.rewards.answers:environment",
        "equal": "arborl.rewards.answers:Equal",
        "exact": "arborl.rewards.answers:exact",
        "format": "arborl.rewards.answers:Format",
        "helpfulness": "arborl.rewards.text.library_rewards:HelpfulnessReward",
        "ifeval": "arborl.rewards.text.ifeval:InstructionFollowingReward",
        "judge": "arborl.rewards.judge:Judge",
        "multi_objective": "arborl.rewards.text.composite:MultiObjectiveReward",
        "posted": "arborl.rewards.answers:posted",
        "repetition": "arborl.rewards.answers:Repetition",
        "reward_model": "arborl.rewards.reward_model:RewardModel",
        "safety": "arborl.rewards.text.library_rewards:SafetyReward",
        "sales_assistant": "arborl.rewards.text.library_rewards:SalesAssistantReward",
        "score_function": "arborl.rewards.score_function:ScoreFunction",
        "short_answer": "arborl.rewards.answers:ShortAnswer",
        "similarity_aware": "arborl.rewards.text.library_rewards:SimilarityAwareReward",
        "task_completion": "arborl.rewards.text.library_rewards:TaskCompletionReward",
        "technical_support": "arborl.rewards.text.library_rewards:TechnicalSupportReward",
        "trl_function": "arborl.rewards.score_function:TrlFunction",
    },
)


def find_reward(name: str, args: Mapping[str, Any], where: str) -> Reward:
    """A reward of the registry, or `package.module:attribute`, made with its arguments."""
    target = REWARDS[name]
    if inspect.isclass(target):
        target = call_checked(target, args, where)
    elif args:
        raise ConfigError(f"{where}: the reward {name!r} is a function and takes no arguments here. Remove them.")
    return as_reward(target)


__all__ = ["REWARDS", "GroupReward", "Reward", "Rewards", "find_reward", "reward"]
