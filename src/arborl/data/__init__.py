"""Data: where tasks come from. A source keeps no place: the tasks of a step follow from the seed and the step alone.

Start with `source.py` (the protocol and both sources), then `files.py` (reading rows) and `rows.py` (a row as a task).
"""

from arborl.data.source import EnvTasks, FileTasks, TaskSource

__all__ = ["EnvTasks", "FileTasks", "TaskSource"]
