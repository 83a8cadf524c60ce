"""Rewards: what an episode was worth. They read finished episodes and never see a model's tokens.

In reading order:

    reward.py       What a reward is, `@reward` for plain functions, and `Rewards`, which scores groups
    plain_calls.py  Plain functions of rewards in threads: one that blocks holds up neither the event loop nor another
    by_source.py    Other rewards for the tasks of some sources
    rules.py        Rewards that follow a rule
    tags.py         Text between tags, found in one pass: a model may open a tag ten thousand times and close none
    numbers.py      Equality of answers: numbers as numbers, however they are written, and everything else as text
    choice.py       Answers with one right solution: a letter, or a few words
    format.py       The form of what an agent wrote: an answer where one is expected, and no call that could not be read
    fields.py       Fields of a task, for rewards that are told their names
    code.py         Code judged by what it does
    code_values.py  Values that code under test computed: how they leave the sandbox, and how they are compared
    asserts.py      Tests written as asserts
    score_function.py  Rewards for rows in verl's form: a function of one's own, or what the row's source asks for
    efficiency.py   Fewer tool calls for the same answer
    reward_model.py An episode scored by a reward model of one's own
    neural.py       A reward that was learned from preferences
    endpoint.py     A judging model behind any endpoint that speaks OpenAI's chat completions
    judge.py        An answer judged by a language model
    by_name.py      Rewards that other rewards are made of, by name
    text/           Rewards that read conversations: helpful, safe, right, brief, engaged; and rewards made of rewards
"""

from arborl.registry import Registry
from arborl.rewards.reward import GroupReward, Reward, Rewards, reward

REWARDS = Registry(
    "reward",
    {
        "choice": "arborl.rewards.choice:Choice",
        "code_tests": "arborl.rewards.code:CodeTests",
        "composite": "arborl.rewards.text.composite:CompositeReward",
        "conciseness": "arborl.rewards.text.general:ConcisenessReward",
        "correctness": "arborl.rewards.text.task:CorrectnessReward",
        "customer_service": "arborl.rewards.text.domains:CustomerServiceReward",
        "data_source": "arborl.rewards.score_function:DataSource",
        "efficient": "arborl.rewards.efficiency:Efficient",
        "engagement": "arborl.rewards.text.general:EngagementReward",
        "env": "arborl.rewards.rules:environment",
        "equal": "arborl.rewards.numbers:Equal",
        "exact": "arborl.rewards.rules:exact",
        "format": "arborl.rewards.format:Format",
        "helpfulness": "arborl.rewards.text.general:HelpfulnessReward",
        "judge": "arborl.rewards.judge:Judge",
        "multi_objective": "arborl.rewards.text.composite:MultiObjectiveReward",
        "posted": "arborl.rewards.rules:posted",
        "reward_model": "arborl.rewards.reward_model:RewardModel",
        "safety": "arborl.rewards.text.safety:SafetyReward",
        "sales_assistant": "arborl.rewards.text.domains:SalesAssistantReward",
        "score_function": "arborl.rewards.score_function:ScoreFunction",
        "short_answer": "arborl.rewards.choice:ShortAnswer",
        "similarity_aware": "arborl.rewards.text.similarity:SimilarityAwareReward",
        "task_completion": "arborl.rewards.text.task:TaskCompletionReward",
        "technical_support": "arborl.rewards.text.domains:TechnicalSupportReward",
    },
)

__all__ = ["REWARDS", "GroupReward", "Reward", "Rewards", "reward"]
