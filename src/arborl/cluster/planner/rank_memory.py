"""Memory of a learner's rank and of an engine, by part.

The learner's forecast (`arborl.learner.core.memory_forecast`), with the parts divided that a strategy shards.
`single` and `ddp`
hold everything on every rank. `fsdp2` shards weights, master weights, moments and gradients, and gathers two layers at
a time. `tensor` also divides heads, feed-forward part and vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from arborl.cluster.planner.hardware import Device
from arborl.cluster.planner.model_shape import ModelShape
from arborl.config.run_config import RunConfig
from arborl.engines.engine import default_cache_tokens
from arborl.learner.core.memory_forecast import (
    LIBRARY_BYTES,
    MIN_CACHED_SEQUENCES,
    MemoryForecast,
    MemoryPlan,
    MemoryPlanner,
    ModelSizes,
    learner_sizes,
    logit_rows,
    uses_fused_layers,
)

Strategy = Literal["single", "ddp", "fsdp2", "tensor"]
CUDA_CONTEXT = int(0.5 * 2**30)
"""Bytes of a process's CUDA context."""
SHARDED: tuple[Strategy, ...] = ("fsdp2", "tensor")
GATHERED_LAYERS = 2
"""Layers whose weights fsdp2 holds whole: the current one and the next."""
NARROWED = ("weights", "parameters", "trained", "coarse", "largest", "queries", "keys", "inner", "vocabulary")
"""Sizes that tensor parallelism divides."""


def configured_strategy(config: RunConfig) -> Strategy | None:
    """The strategy of a configuration; None for `single`. DeepSpeed's ZeRO stage 3 counts as fsdp2; stages 1 and 2
    count as ddp, which overestimates their memory."""
    strategy = config.learner.strategy
    if strategy == "zero3":
        return "fsdp2"
    if strategy == "zero1" or strategy == "zero2":  # mypy narrows this form only
        return "ddp"
    return None if strategy == "single" else strategy


@dataclass(frozen=True, slots=True)
class ExtraModels:
    value: bool
    reference: bool

    @classmethod
    def of(cls, config: RunConfig) -> ExtraModels:
        """From the settings; user-defined parts are not considered."""
        algorithms = (config.algorithm, *config.algorithm.by_source.values())
        return cls(
            value=any(one.uses_critic for one in algorithms),
            reference=any(one.kl.coef > 0 or one.loss in ("dpo", "ipo", "kto") for one in algorithms),
        )


@dataclass(frozen=True, slots=True)
class RankPlanner(MemoryPlanner):
    """Memory forecast of one of several ranks."""

    strategy: Strategy = "single"
    ranks: int = 1
    engine: int = 0
    """Bytes of an engine's own copy of the weights on the same device."""

    @property
    def least(self) -> int:
        """Least total bytes over all micro-batch settings, with the KV cache of `SEQUENCES` full sequences; of one
        sequence where that does not fit."""

        def total(kv_tokens: int) -> int:
            return min(self.forecast(*one, kv_tokens, self.can_free_kv).total for one in self._candidates())

        several = total(self.kv_least)
        return several if several <= self.limit else total(self.kv_floor)

    def forecast(self, tokens: int, recompute: bool, kv_tokens: int, kv_freed: bool = False) -> MemoryForecast:
        if self.strategy == "tensor" and self.ranks > 1:
            whole = dataclasses.replace(self, sizes=_narrow(self.sizes, self.ranks), ranks=1, strategy="single")
            return whole.forecast(tokens, recompute, kv_tokens, kv_freed)
        forecast = MemoryPlanner.forecast(self, tokens, recompute, kv_tokens, kv_freed)
        if self.strategy == "fsdp2" and self.ranks > 1:
            layer = self.sizes.weights // max(1, self.sizes.layers)
            gradients = self.sizes.gradients(self.config.master == "float32") // max(1, self.sizes.layers)
            forecast = dataclasses.replace(
                forecast,
                weights=-(-forecast.weights // self.ranks) + GATHERED_LAYERS * layer,
                optimizer=-(-forecast.optimizer // self.ranks),
                gradients=-(-forecast.gradients // self.ranks) + (gradients if forecast.gradients else 0),
                others=-(-forecast.others // self.ranks),
            )
        return dataclasses.replace(forecast, weights=forecast.weights + self.engine)


def _narrow(sizes: ModelSizes, ranks: int) -> ModelSizes:
    """One rank's part under tensor parallelism."""
    return dataclasses.replace(sizes, **{name: -(-getattr(sizes, name) // ranks) for name in NARROWED})


def learner_plan(
    shape: ModelShape, config: RunConfig, device: Device, strategy: Strategy, ranks: int, sampling: bool, split: int = 1
) -> MemoryPlan:
    """Memory of a learner's rank, with the micro-batch settings that the learner would choose."""
    planner, learner = rank_planner(shape, config, device, strategy, ranks, sampling, split), config.learner
    if device.cuda:
        return planner.plan()
    tokens, recompute = learner.micro_batch_tokens or 4_096, learner.recompute is True
    forecast = planner.forecast(tokens, recompute, planner.kv_wanted)
    return MemoryPlan(tokens, recompute, planner.kv_wanted, forecast, planner.limit)


def rank_planner(
    shape: ModelShape, config: RunConfig, device: Device, strategy: Strategy, ranks: int, sampling: bool, split: int = 1
) -> RankPlanner:
    sizes, learner, engine = learner_sizes(shape.sizes, strategy in SHARDED), config.learner, config.engine
    context, kv_token = config.sampling.max_context, shape.kv_token if sampling else 0
    shared = strategy in ("single", "ddp") and split == 1 and engine.name == "local"
    weights = sizes.weights // (ranks if strategy != "ddp" else 1)
    free = max(0, device.memory - weights - (CUDA_CONTEXT if device.cuda else 0))
    usual = default_cache_tokens("cuda" if device.cuda else "cpu", free, kv_token, context) if kv_token else 0
    wanted = (engine.kv_tokens or usual) if kv_token else 0
    fused = uses_fused_layers(sizes, learner, True)
    rows = logit_rows(device.memory, sizes.vocabulary, fused) if device.cuda else 4_096
    return RankPlanner(
        sizes, learner.model_copy(update={"strategy": "single", "ranks": 1}), ExtraModels.of(config),
        context=context,
        limit=int(learner.memory_share * (weights + free)),
        kv_token=kv_token // split,
        kv_wanted=wanted,
        kv_least=wanted if engine.kv_tokens else min(wanted, MIN_CACHED_SEQUENCES * context),
        kv_floor=wanted if engine.kv_tokens else min(wanted, context),
        logit_rows=rows,
        cuda=device.cuda,
        truncates=config.sampling.top_k > 0 or config.sampling.top_p < 1 or config.sampling.min_p > 0,
        can_free_kv=device.cuda and sampling and (engine.sleep_mode or not shared),
        strategy=strategy,
        ranks=ranks,
        engine=0 if shared or not sampling else sizes.weights // split,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of a device that only samples."""

    weights: int
    kv: int
    beside: int
    tokens: int
    """KV cache of the whole engine, in tokens."""
    split: int
    """Devices per engine."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.beside


def engine_memory(shape: ModelShape, config: RunConfig, device: Device, max_devices: int) -> EngineMemory | None:
    """Memory of the smallest engine that holds the weights and 8 sequences of full length; None if none does."""
    context, beside = config.sampling.max_context, LIBRARY_BYTES if device.cuda else 0
    split = 1
    while split <= min(max_devices, device.per_host):
        weights = shape.sizes.weights // split
        free = int(0.9 * device.memory) - weights - beside
        wanted = config.engine.kv_tokens or config.engine.requests() * context
        tokens = min(wanted, max(0, free) * split // max(1, shape.kv_token))
        if tokens >= min(wanted, 8 * context):
            return EngineMemory(weights, tokens * shape.kv_token // split, beside, tokens, split)
        split *= 2
    return None


def memory_parts(forecast: MemoryForecast) -> dict[str, int]:
    parts = {
        "weights": forecast.weights, "master weights and AdamW": forecast.optimizer, "gradients": forecast.gradients,
        "other models": forecast.others, "activations": forecast.activations, "logits": forecast.logits,
        "KV cache": forecast.kv, "reserve": forecast.beside,
    }  # fmt: skip
    return {name: size for name, size in parts.items() if size}
