"""Hyper-parameter search: settings are tried, each as a whole run, and the best is told beside those one had.

It trains nothing by itself: a trial is a run like any other. A study is a folder, and goes on when it is begun again.

In reading order:

    space.py          What is searched: parameters by name, and the values that each may take
    named.py          Search spaces by name, and the conversational door's words for keys of a configuration
    trial.py          A trial: one setting, tried; and what a study asks of whoever tries it
    study.py          A study: a plan and an objective in; a folder with trials, a summary and pictures out
    backends/         Who chooses the next setting and runs the trials: Optuna, Ray Tune, Weights & Biases
    run_objective.py  What a setting is worth on a run: a whole training run, in a process of its own
    run_trial.py      The other side of it: the process of one trial
    budget.py         That every trial costs the same
    keep.py           Which checkpoints are worth keeping
    summary.py        What a study found
    plots.py          A study as pictures
"""

from arborl.tune.named import get_search_space
from arborl.tune.space import read_space
from arborl.tune.study import search
from arborl.tune.summary import HPOSummary
from arborl.tune.trial import Plan, Report, Trial

__all__ = ["HPOSummary", "Plan", "Report", "Trial", "get_search_space", "read_space", "search"]
