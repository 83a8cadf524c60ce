"""The front doors: train and evaluate, from Python or from the command line; both come through here.

In reading order:

    entry_points.py  Train and evaluate: configuration in, a run folder out
    measure.py       Policies on the same held-out tasks, or on prompts of one's own
    export.py        A run's policy as a folder that plain transformers loads, with a card
    session.py       One run, from its first evaluation to its last file
    execution.py     How the model of a run is executed: device, precision, execution paths
    resume.py        Going on from a checkpoint: from which, and with which settings
    losses.py        A run whose learner has lost a rank goes on by itself
    located.py       What a path or a name on a command line stands for
    folder.py        The folder of a run
    objects.py       Parts given as Python objects, and what they are called in a configuration
    signals.py       Being told to stop
    render.py        Episodes as moving pictures while a run goes on, with the model's words beside the frames
    artifacts.py     What a run leaves for people: a curve, some episodes as moving pictures, a report
"""

from arborl.api.entry_points import Run, evaluate, measure, run, train
from arborl.api.measure import Asked

__all__ = ["Asked", "Run", "evaluate", "measure", "run", "train"]
