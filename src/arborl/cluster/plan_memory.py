"""Memory by part and rank: the learner's own forecast, with what a strategy divides among ranks divided.

`single` and `ddp` hold everything on every rank. `fsdp2` divides weights, masters, moments and gradients, and gathers
two layers at a time. `tensor` divides these and whatever is as wide as heads, feed-forward part or vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from arborl.cluster.hardware import Device
from arborl.cluster.plan_model import Shape
from arborl.config.run_config import RunConfig
from arborl.engines.cache_size import usual_tokens
from arborl.learner.forecast import BESIDE, SEQUENCES, Forecast, Plan, Planner, Sizes, fused, learner_sizes, logit_rows

Strategy = Literal["single", "ddp", "fsdp2", "tensor"]
CONTEXT = int(0.5 * 2**30)
"""What a GPU's driver keeps for a process."""
DIVIDES: tuple[Strategy, ...] = ("fsdp2", "tensor")
"""Strategies with which a rank holds a part of each weight."""
GATHERED = 2
"""Layers whose weights are whole at a time: one that works, and the next."""


def own_strategy(config: RunConfig) -> Strategy | None:
    """What a configuration asks for; None where it says nothing but one process. ZeRO's third stage divides what fsdp2
    does; the first two are planned as if each rank had its own of everything, which is more than they take."""
    learner = config.learner
    if learner.strategy == "deepspeed":
        return "fsdp2" if learner.zero_stage == 3 else "ddp"
    return None if learner.strategy == "single" else learner.strategy


@dataclass(frozen=True, slots=True)
class Needs:
    """Models besides the policy."""

    value: bool
    reference: bool

    @classmethod
    def of(cls, config: RunConfig) -> Needs:
        """From what the configuration says; parts of a user's own are not asked."""
        chosen = (config.algorithm, *config.algorithm.by_source.values())
        return cls(
            value=any(one.uses_critic for one in chosen),
            reference=any(one.kl.coef > 0 or one.loss in ("dpo", "ipo", "kto") for one in chosen),
        )


@dataclass(frozen=True, slots=True)
class RankPlanner(Planner):
    """The forecast of one of several ranks."""

    strategy: Strategy = "single"
    ranks: int = 1
    engine: int = 0
    """Bytes of weights that an engine on the same device has for itself."""

    @property
    def least(self) -> int:
        """Bytes of the settings that take least, with some sequences of full length in an engine's cache; with one,
        where there is no room for some."""

        def total(kept: int) -> int:
            return min(self.forecast(*one, kept, self.lends).total for one in self._candidates())

        some = total(self.kv_least)
        return some if some <= self.limit else total(self.kv_floor)

    def forecast(self, tokens: int, recompute: bool, kv_tokens: int, lent: bool = False) -> Forecast:
        if self.strategy == "tensor" and self.ranks > 1:
            whole = dataclasses.replace(self, sizes=_narrow(self.sizes, self.ranks), ranks=1, strategy="single")
            return whole.forecast(tokens, recompute, kv_tokens, lent)
        found = Planner.forecast(self, tokens, recompute, kv_tokens, lent)
        if self.strategy == "fsdp2" and self.ranks > 1:
            layer = self.sizes.weights // max(1, self.sizes.layers)
            trained = self.sizes.gradients(self.config.master == "float32") // max(1, self.sizes.layers)
            found = dataclasses.replace(
                found,
                weights=-(-found.weights // self.ranks) + GATHERED * layer,
                optimizer=-(-found.optimizer // self.ranks),
                gradients=-(-found.gradients // self.ranks) + (trained if found.gradients else 0),
                others=-(-found.others // self.ranks),
            )
        return dataclasses.replace(found, weights=found.weights + self.engine)


def _narrow(sizes: Sizes, ranks: int) -> Sizes:
    """A rank's part of a model whose products are divided."""
    return dataclasses.replace(
        sizes,
        **{
            name: -(-getattr(sizes, name) // ranks)
            for name in (
                "weights",
                "parameters",
                "trained",
                "coarse",
                "largest",
                "queries",
                "keys",
                "inner",
                "vocabulary",
            )
        },
    )


def learner_plan(
    shape: Shape, config: RunConfig, device: Device, strategy: Strategy, ranks: int, sampling: bool, split: int = 1
) -> Plan:
    """What a learner's rank takes, and the settings that the learner would choose for it."""
    planner, learner = rank_planner(shape, config, device, strategy, ranks, sampling, split), config.learner
    if device.cuda:
        return planner.plan()
    tokens, recompute = learner.micro_batch_tokens or 4_096, learner.recompute is True
    kept = planner.forecast(tokens, recompute, planner.kv_wanted)
    return Plan(tokens, recompute, planner.kv_wanted, kept, planner.limit)


def rank_planner(
    shape: Shape, config: RunConfig, device: Device, strategy: Strategy, ranks: int, sampling: bool, split: int = 1
) -> RankPlanner:
    """The learner's planner, of one rank.

    Args:
        sampling: whether the device samples too.
        split: devices that an engine is divided among, where it samples.
    """
    sizes, learner, engine = learner_sizes(shape.sizes, strategy in DIVIDES), config.learner, config.engine
    context, token = config.sampling.max_context, shape.kv_token if sampling else 0
    share = strategy in ("single", "ddp") and split == 1 and engine.name == "local"
    own = sizes.weights // (ranks if strategy != "ddp" else 1)
    free = max(0, device.memory - own - (CONTEXT if device.cuda else 0))
    usual = usual_tokens("cuda" if device.cuda else "cpu", free, token, context) if token else 0
    wanted = (engine.kv_tokens or usual) if token else 0
    return RankPlanner(
        sizes, learner.model_copy(update={"strategy": "single", "ranks": 1}), Needs.of(config),  # divided here
        context=context,
        limit=own + int(learner.memory_share * free),
        kv_token=token // split,
        kv_wanted=wanted,
        kv_least=wanted if engine.kv_tokens else min(wanted, SEQUENCES * context),
        kv_floor=wanted if engine.kv_tokens else min(wanted, context),
        logit_rows=logit_rows(device.memory, sizes.vocabulary, fused(sizes, learner, True)) if device.cuda else 4_096,
        cuda=device.cuda,
        truncates=config.sampling.top_k > 0 or config.sampling.top_p < 1 or config.sampling.min_p > 0,
        lends=device.cuda and sampling and (engine.sleep_mode or not share),
        strategy=strategy,
        ranks=ranks,
        engine=0 if share or not sampling else sizes.weights // split,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of a device that only samples."""

    weights: int
    kv: int
    beside: int
    tokens: int
    """Whose keys and values are kept, by the engine in all."""
    split: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.beside


def engine_memory(shape: Shape, config: RunConfig, device: Device, most: int) -> EngineMemory | None:
    """With as few devices an engine as hold the weights and some sequences of full length; None where `most` do not."""
    context, beside = config.sampling.max_context, BESIDE if device.cuda else 0
    split = 1
    while split <= min(most, device.per_host):
        weights = shape.sizes.weights // split
        room = int(0.9 * device.memory) - weights - beside
        asked = config.engine.kv_tokens or config.engine.requests() * context
        tokens = min(asked, max(0, room) * split // max(1, shape.kv_token))
        if tokens >= min(asked, 8 * context):
            return EngineMemory(weights, tokens * shape.kv_token // split, beside, tokens, split)
        split *= 2
    return None


def parts(found: Forecast) -> dict[str, int]:
    """A rank's bytes by part."""
    named = {
        "weights": found.weights, "masters and AdamW": found.optimizer, "gradients": found.gradients,
        "other models": found.others, "activations": found.activations, "logits": found.logits,
        "keys and values": found.kv, "beside": found.beside,
    }  # fmt: skip
    return {name: size for name, size in named.items() if size}
