"""Engines: token ids in, sampled ids and their log-probabilities out. They never see a message.

Start with `engine.py` (the protocol); `local.py` samples in this process, `scripted.py` gives fixed replies.
"""

from arborl.engines.engine import Engine, Weights
from arborl.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "local": "arborl.engines.local:LocalEngine",
        "scripted": "arborl.engines.scripted:ScriptedEngine",
    },
)

__all__ = ["ENGINES", "Engine", "Weights"]
