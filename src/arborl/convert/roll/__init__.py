"""ROLL's keys.

roll_pipelines.py     Order of the rules for each pipeline: agentic, RLVR, SFT, DPO, distillation
roll_environments.py  Environments, groups, validation
roll_env_tags.py      Environment types of ROLL and their counterparts
roll_rewards.py       Rewards by domain, data sources by tag
roll_algorithm.py     Advantages, losses, KL, clipping
roll_supervised.py    SFT, DPO and distillation
roll_learner.py       Model, optimizer, batch sizes
roll_key_table.py     Keys with a rule of their own, and keys without counterpart
"""
