"""Algorithms: reward becomes a loss. Pure functions over episodes and over flat vectors of terms; they know no model.

Every function can be called on arrays alone, and says its formula, its source and an example. In reading order:

    algorithm.py            what an algorithm is; `Recipe`: an advantage, a loss, and what is around them
    selection.py            which groups and episodes can teach something
    reward_arrays.py        what a batch earned, as arrays: by episode, turn and token
    statistics.py           means and deviations, one vote an episode
    advantages.py           the table `ADVANTAGES`: groups and terms in, one number a term out
    episode_advantages.py   formulas by episode: GRPO, RLOO, REINFORCE, ReMax, OPO, MaxRL, GDPO, RAE
    turn_advantages.py      formulas by turn or token: GAE, GiGPO, StarPO, REINFORCE++, discounted turns
    losses.py               the table `LOSSES`: what the models say and the terms in, one loss a term out
    token_losses.py         formulas by token: PPO's clip, GSPO, CISPO, SAPO, TOPR, decoupled PPO, value loss
    preference_losses.py    formulas by episode or pair: DPO, IPO, KTO
    own.py                  an advantage or a loss of one's own: a function whose parameters are filled by name
    own_check.py            whether such a function does what it should, tried on a small batch
    kl.py                   estimators of the KL to the reference, and its adaptive coefficient
    off_policy.py           importance weights (TIS, MIS, IcePop), staleness, penalty for length
    aggregation.py          how much each term counts: the loss's normalisation
    source_weights.py       sources that count more, or less, than their episodes do
    by_source.py            another algorithm for each source, in one batch
    demonstrated.py         demonstrations that are imitated beside an algorithm, or before it
"""

from arborl.algorithms.advantages import ADVANTAGES
from arborl.algorithms.aggregation import WEIGHTS
from arborl.algorithms.algorithm import Algorithm, Needs, Recipe
from arborl.algorithms.by_source import BySource, make_algorithm
from arborl.algorithms.losses import LOSSES, PREPARES
from arborl.algorithms.own import finder
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm_config import PRESETS

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
    "finder",
    "make_algorithm",
]
