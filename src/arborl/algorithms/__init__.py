"""Algorithms: from rewards to a loss. Functions over episodes and over flat vectors of terms, independent of the model.

Every function can be called on arrays, and states its formula and its source. In reading order:

    recipe.py               the interface `Algorithm`; `Recipe`: an advantage, a loss, and the settings around them
    selection.py            which groups and episodes have a gradient
    reward_arrays.py        the rewards of a batch as arrays: per episode, turn and token
    statistics.py           means and standard deviations with equal weight per episode
    advantages.py           the table `ADVANTAGES`: groups and terms in, one number per term out
    episode_advantages.py   per episode: GRPO, RLOO, REINFORCE, ReMax, OPO, MaxRL, GDPO, RAE
    turn_advantages.py      per turn or token: GAE, GiGPO, StarPO, REINFORCE++, discounted turns
    loss_table.py           the table `LOSSES`, and the normalization of the loss
    token_losses.py         per token: PPO's clip, GSPO, CISPO, SAPO, TOPR, decoupled PPO, value loss; KL estimators
    preference_losses.py    per episode or pair: DPO, IPO, KTO
    importance_weights.py   importance weights (TIS, MIS, IcePop), staleness, penalty for length
    custom_functions.py     custom advantages and losses, and their check
    combined_algorithms.py  one algorithm per source, weights per source, imitation of demonstrations
"""

from arborl.algorithms.advantages import ADVANTAGES
from arborl.algorithms.combined_algorithms import PerSourceAlgorithm, make_algorithm
from arborl.algorithms.custom_functions import object_finder
from arborl.algorithms.loss_table import LOSSES, PREPARES, WEIGHTS
from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds, Recipe
from arborl.algorithms.token_losses import LossParts, ModelOutputs, TermBatch
from arborl.config.algorithm_config import PRESETS

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "PREPARES",
    "PRESETS",
    "WEIGHTS",
    "Algorithm",
    "AlgorithmNeeds",
    "LossParts",
    "ModelOutputs",
    "PerSourceAlgorithm",
    "Recipe",
    "TermBatch",
    "make_algorithm",
    "object_finder",
]
