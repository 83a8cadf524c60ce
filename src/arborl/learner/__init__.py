"""The learner: token trees and terms in, one optimiser step out. It knows no algorithm.

Start with `learner.py`; `batch.py` packs trees into micro-batches, `score.py` runs the model over them.
"""
