"""verl's keys, with those of its mixed-training and StateLM forks.

verl_keys.py    Table of all keys: rules and verl's defaults
verl_rules.py   Rules for data, rollout, trackers, models
verl_losses.py  Losses, clipping, KL, advantages
verl_parts.py   Agents, environments, tools and rewards
"""
