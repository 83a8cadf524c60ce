"""The learner: token trees and terms in, one optimiser step out. It knows no algorithm, only its needs and its loss.

Start with `learner.py`. `batch.py` cuts and packs trees into micro-batches; `score.py` runs the models over them, by a
way that `attention_choice.py` has chosen and checked (`executor.py`, `tree_attention.py`, `flex_attention.py`); `optimizer.py` and `trust_region.py`
move the weights; `distributed.py` sums over processes.
"""
