"""Environments: they answer messages. They never see tokens, models or rewards other than their own.

Start with `env.py` (what an environment is), then `frozen_lake.py` (one). `checker.py` holds yours to the contract.
"""

from arborl.envs.env import Env, Observation, Step
from arborl.registry import Registry

ENVS = Registry(
    "environment",
    {
        "frozen_lake": "arborl.envs.frozen_lake:FrozenLake",
        "question": "arborl.envs.question:Question",
    },
)

__all__ = ["ENVS", "Env", "Observation", "Step"]
