"""Engines, environments, rewards and learner ranks as Ray actors, behind the protocols they have in one process.

ray_cluster.py       Connection to a Ray cluster or a private one, its nodes and GPUs, start and end of actors
batched_calls.py     Many calls of an actor as few Ray calls
actors.py            Base class of the actors, version check, heartbeats
ray_engine.py        Engines, and weights as byte arrays in the object store
ray_environments.py  Environments
ray_rewards.py       Rewards
ray_ranks.py         Further ranks of the learner
placed_parts.py      From a configuration to these parts
"""
