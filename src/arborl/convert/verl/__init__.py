"""verl's keys, with those of its mixed-training and StateLM forks.

verl_keys.py        Table of all keys with a counterpart: rules and verl's defaults
verl_key_lists.py   Keys that need none, by their exact names
verl_rules.py       Rules for data, rollout, trackers, models, devices
verl_losses.py      Losses, clipping, KL, advantages
verl_parts.py       Agents, tools, tool servers and interactions
verl_rewards.py     Rewards
verl_supervised.py  The supervised trainers
"""
