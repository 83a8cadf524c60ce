"""ROLL: its agentic pipeline, that with rewards by domain, and those that learn from given data.

In reading order:

    pipelines.py  Which pipeline a file is for, and what is done with its keys in which order
    learner.py    Model, optimiser, batch and sampling
    algorithm.py  Estimators, normalisation, clipping and penalties
    envs.py       Tags, and how groups are divided among them
    places.py     What its kinds of environment are here
    rows.py       Rewards by domain, and rows
    given.py      SFT, DPO and distillation
    leftover.py   Keys that stand for themselves, and those that have no counterpart
"""
