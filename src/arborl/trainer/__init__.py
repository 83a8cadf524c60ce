"""The trainer: sample, score, credit, learn, publish; again.

Knows the stages and their order, and nothing inside them. Start with `trainer.py`; `evaluate.py` measures a policy,
`summary.py` turns groups into metrics, `diagnosis.py` says why a step taught nothing, `failing.py` ends a run that
cannot work.
"""
