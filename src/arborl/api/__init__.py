"""The front doors: train and evaluate, from Python or from the command line; both come through here.

Start with `door.py`.
"""

from arborl.api.door import Run, evaluate, run, train

__all__ = ["Run", "evaluate", "run", "train"]
