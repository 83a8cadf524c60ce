"""The front doors: train and evaluate, from Python or from the command line; both come through here.

Start with `entry_points.py`.
"""

from arborl.api.entry_points import Run, evaluate, run, train

__all__ = ["Run", "evaluate", "run", "train"]
