"""Algorithms: reward becomes a loss. Pure functions over episodes and over flat vectors of terms; they know no model.

Start with `algorithm.py`: an algorithm is what to compare (`advantages.py`), how much each token counts, and a loss
(`losses.py`, `kl.py`).
"""
