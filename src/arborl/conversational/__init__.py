"""Conversational agents from Python: an agent, an environment and a reward as objects, trained by one call.

A thin room over the others: an agent is our agent with an engine, an environment our environment, a reward our reward,
and `train` builds a run and calls the trainer. It never samples, scores or learns by itself.

In reading order:

    trajectory.py  What was said, as plain turns
    reward.py      Rewards that read turns; each is a reward of `arborl.rewards` too
"""
