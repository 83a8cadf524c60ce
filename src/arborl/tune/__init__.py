"""Hyper-parameter search: each trial is a whole training run; a study is a folder and can be resumed.

space.py          Search spaces: parameters by name with their values
trial.py          StudyPlan, Trial, objectives and HPOSummary
study.py          search: runs a study; its folder and plots
backends/         Optuna, Ray Tune, Weights & Biases: choose parameters and run trials
run_objective.py  The objective: a training run in its own process
run_trial.py      The process of one trial
"""

from arborl.tune.space import get_search_space, read_space
from arborl.tune.study import search
from arborl.tune.trial import HPOSummary, StudyPlan, Trial, TrialReport

__all__ = ["HPOSummary", "StudyPlan", "Trial", "TrialReport", "get_search_space", "read_space", "search"]
