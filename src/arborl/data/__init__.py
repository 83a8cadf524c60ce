"""Data: sources of tasks. The tasks of a step follow from the seed and the earlier steps; no row repeats within a pass.

task_source.py     The interface of task sources; tasks of environments
source_factory.py  Task sources from a configuration; demonstrations
longbench.py       LongBench-v2 and NovelQA
reading/           Rows from files
mixing/            Several sources in one batch
generated/         Data sets generated from a seed
"""

from arborl.data.mixing.mixture import Mixture
from arborl.data.source_factory import FileTasks, open_source
from arborl.data.task_source import EnvTasks, TaskSource

__all__ = ["EnvTasks", "FileTasks", "Mixture", "TaskSource", "open_source"]
