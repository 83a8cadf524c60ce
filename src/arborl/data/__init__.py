"""Data: where tasks come from. What a step gets follows from the seed and the steps before it; nothing is drawn twice
before all of its source has been drawn once. It knows no agent, no reward and no model.

Start with `source.py` (what the trainer asks), `mixture.py` (several sources in exact shares) and `opening.py` (from a
configuration to a source); then `tables.py` (rows by number), `rows.py` (a row as a task), `order.py` (which row next).
"""

from arborl.data.mixture import Mixture
from arborl.data.opening import FileTasks, open_source
from arborl.data.source import EnvTasks, TaskSource

__all__ = ["EnvTasks", "FileTasks", "Mixture", "TaskSource", "open_source"]
