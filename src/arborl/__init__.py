"""Arbor: train language-model agents by reinforcement learning.

Names are imported when they are first used, so `import arborl` is quick and loads no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arborl.agents import Agent
    from arborl.api import Run, run
    from arborl.config import RunConfig
    from arborl.envs import Env, Observation, Step
    from arborl.rewards import reward
    from arborl.tools import tool
    from arborl.types import Episode, Message, Task

    __version__: str

# torch's build for Arm gives memory back to the system 10 ms after it was freed, and takes it again in the next step:
# without this, a fifth of an update on a CPU goes into page faults (docs/results/step.md)
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")

_HOMES = {
    "Agent": "arborl.agents",
    "Env": "arborl.envs",
    "Episode": "arborl.types",
    "Message": "arborl.types",
    "Observation": "arborl.envs",
    "Run": "arborl.api",
    "RunConfig": "arborl.config",
    "Step": "arborl.envs",
    "Task": "arborl.types",
    "reward": "arborl.rewards",
    "run": "arborl.api",
    "tool": "arborl.tools",
}

__all__ = [
    "Agent",
    "Env",
    "Episode",
    "Message",
    "Observation",
    "Run",
    "RunConfig",
    "Step",
    "Task",
    "__version__",
    "reward",
    "run",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("arborl")
    elif name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'arborl' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
