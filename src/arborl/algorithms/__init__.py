"""Algorithms: reward becomes a loss. Pure functions over episodes and over flat vectors of terms; they know no model.

Start with `algorithm.py`: an algorithm is what to compare (`advantages.py`, `turns.py`; by name in `ADVANTAGES`), how
much each token counts (`weights.py`, `guards.py`), and a loss (`losses.py`, `preference.py`, `kl.py`; by name in
`LOSSES`). Every function can be called on arrays alone, and says its formula, its source and an example.
"""

from arborl.algorithms.algorithm import Algorithm, Needs, Recipe
from arborl.algorithms.by_source import BySource, make_algorithm
from arborl.algorithms.estimators import ADVANTAGES
from arborl.algorithms.losses import LossParts, Said, TermBatch
from arborl.algorithms.objectives import LOSSES, PREPARES
from arborl.algorithms.weights import WEIGHTS
from arborl.config.presets import PRESETS

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "PREPARES",
    "PRESETS",
    "WEIGHTS",
    "Algorithm",
    "BySource",
    "LossParts",
    "Needs",
    "Recipe",
    "Said",
    "TermBatch",
    "make_algorithm",
]
