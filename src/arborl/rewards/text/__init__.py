"""Rewards that read conversations. They need no model; a judge or a reward model may replace them.

text_measures.py    Conversations as turns and exchanges; measures of text
text_reward.py      Base classes: `RewardFunction`, `@reward_function`, `TextReward` with judge or model
library_rewards.py  Helpfulness, conciseness, engagement, variety, safety, correctness, completion; three domains
ifeval.py           Instruction following: IFEval's verifiable instructions
composite.py        Combinations of rewards: weighted sum, minimum, product
"""
