"""Configuration: every knob, with its default, in one typed tree. No torch, no objects, no side effects.

Start with `run.py` (the tree); `base.py` words mistakes; `load.py` reads files and `a.b=c` overrides.
"""

from arborl.config.base import Config
from arborl.config.run import RunConfig

__all__ = ["Config", "RunConfig"]
