"""Runs: settings in, typed parts and a run folder out. Python, command line and server build their objects here.

The package is not called `run`: `arborl.run` is the function. `runs` is ignored by git, as the folder of run folders.

In reading order:

    entry_points.py   `run`, `train`, `train_async`, `evaluate`, `measure`, `replay`
    build.py          Build the objects of a run (`RunParts`) or of a server (`ServingParts`)
    part_factory.py   Find parts by name and construct them
    fault_injection.py  `train --faults`: parts that fail on purpose
    stub_run.py       `train --stub`: small steps, scripted replies, stand-ins for what a machine lacks
    run_session.py    One run from its first evaluation to its last file
    measure.py        Evaluation of policies on the same tasks, or on prompts
    resume.py         Resuming from a checkpoint, with changed settings
    step_replay.py    `arborl replay`: an optimizer step again, from the files of its run
    step_analysis.py  What a token contributed to a step; the step without an episode
    rank_recovery.py  Restart after the loss of a learner rank
    alarm_recovery.py Stop or rollback after an alarm of the diagnosis
    run_folder.py     The run folder and its files; the model that a path stands for
    object_names.py   Names of parts that are Python objects
    signals.py        Stopping a run by signals
    artifacts.py      Learning curve, GIFs of episodes, HTML report
    export_model.py   Export of a policy for transformers, with a model card
"""

from arborl.training_run.entry_points import Run, evaluate, measure, replay, run, train
from arborl.training_run.measure import MeasureOptions

__all__ = ["MeasureOptions", "Run", "evaluate", "measure", "replay", "run", "train"]
