"""The strategies by name. Libraries are imported where one needs them."""

from __future__ import annotations

from arborl.config.run_config import LearnerConfig
from arborl.learner.peers import ALONE, Peers
from arborl.learner.strategy import Replicated, Strategy


def strategy_of(config: LearnerConfig, ranks: Peers = ALONE) -> Strategy:
    """The one that the configuration names."""
    if config.strategy == "single":
        return Strategy(config)
    if config.strategy == "ddp":
        return Replicated(config, ranks)
    if config.strategy == "fsdp2":
        from arborl.learner.fsdp2 import FullySharded

        return FullySharded(config, ranks)
    if config.strategy == "tensor":
        from arborl.learner.tensor_parallel import TensorParallel

        return TensorParallel(config, ranks)
    from arborl.learner.zero import Zero

    return Zero(config, ranks)
