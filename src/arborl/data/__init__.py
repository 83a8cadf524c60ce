"""Data: where tasks come from. What a step gets follows from the seed and the steps before it; nothing is drawn twice
before all of its source has been drawn once. It knows no agent, no reward and no model.

In reading order:

    source.py       What the trainer takes tasks from
    from_config.py  From a configuration to a source of tasks
    demonstrations.py  Demonstrations first, tasks afterwards
    reading/        Rows out of files: opened, numbered, read as tasks, and divided into trained and held out
    mixing/         Several sources in one batch
    made/           Data that is made here, offline and from a seed; every answer is computed
    public/         Public sets in their own layouts
"""

from arborl.data.from_config import FileTasks, open_source
from arborl.data.mixing.mixture import Mixture
from arborl.data.source import EnvTasks, TaskSource

__all__ = ["EnvTasks", "FileTasks", "Mixture", "TaskSource", "open_source"]
