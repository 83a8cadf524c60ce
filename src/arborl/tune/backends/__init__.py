"""Who chooses the next setting and runs the trials. All three see a plan, an objective, and nothing else.

In reading order:

    backend.py       What a backend is, and which there are
    optuna_study.py  Optuna: a database that survives a kill and that several processes share
    ray_tune.py      Ray Tune: trials on the machines of a Ray cluster
    wandb_sweep.py   Sweeps of Weights & Biases
"""

from arborl.tune.backends.backend import BACKENDS, Backend, find_backend

__all__ = ["BACKENDS", "Backend", "find_backend"]
