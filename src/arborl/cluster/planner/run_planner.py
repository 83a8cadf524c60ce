"""Synchronous and asynchronous placements of a run on N devices, with memory, step time, utilisation and staleness.

Synchronous: all devices sample, then all learn (`max_lag=0`). Asynchronous: some devices sample while the others learn,
within `max_lag` versions; of several divisions the one with the shortest step is chosen. One device alternates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from arborl.cluster.planner.hardware import GIB, Device, DeviceTimes
from arborl.cluster.planner.model_shape import ModelShape, model_shape
from arborl.cluster.planner.rank_memory import (
    ExtraModels,
    Strategy,
    configured_strategy,
    engine_memory,
    learner_plan,
    memory_parts,
    rank_planner,
)
from arborl.cluster.planner.step_time import StepEstimate, StepTimeInputs, estimate_step
from arborl.cluster.planner.workload import EpisodeSample, Workload
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError
from arborl.learner.core.memory_forecast import MemoryPlan

MAX_DEVICES = 4_096
DEVICE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096)
SAMPLING_SHARES = (0.25, 0.5, 0.75)
"""Shares of devices that sample in an asynchronous run."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    devices: int
    mode: str
    """`sync` or `async`."""
    engines: int
    split: int
    """Devices per engine."""
    strategy: Strategy
    ranks: int
    """Of the learner."""
    max_lag: int
    micro_batch_tokens: int
    recompute: bool
    learner_parts: dict[str, int]
    """Bytes of a learner's rank, by part."""
    learner_bytes: int
    engine_bytes: int
    """Of a device that only samples; 0 without one."""
    estimate: StepEstimate

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Whether a kind of training fits, and the least memory of a rank."""

    name: str
    fits: bool
    gib: float
    limit: float

    def __str__(self) -> str:
        if self.fits:
            return f"{self.name}: fits, from {self.gib:.{0 if self.gib >= 10 else 1}f} GiB"
        return f"{self.name}: does not fit, needs {self.gib:.0f} GiB of {self.limit:.0f}"


@dataclass(frozen=True, slots=True)
class RunPlanner:
    config: RunConfig
    device: Device
    workload: Workload
    shape: ModelShape
    times: DeviceTimes
    episodes: EpisodeSample
    lag: int
    strategy: Strategy | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        device: Device,
        workload: Workload,
        lag: int | None = None,
        strategy: Strategy | None = None,
    ) -> RunPlanner:
        """Args:
        lag: `max_lag` of asynchronous placements; default: the run's, or 1.
        strategy: of the learner; default: the run's, or the fastest that fits.
        """
        shape = model_shape(config.model)
        times, episodes = DeviceTimes.of(shape, device), workload.sample(config.seed)
        strategy = strategy or configured_strategy(config)
        return cls(config, device, workload, shape, times, episodes, lag or config.rollout.max_lag or 1, strategy)

    # ------------------------------------------------------------------------------------------ memory

    def fits(self, devices: int) -> list[MemoryFit]:
        """Full training, sharded or offloaded training, and LoRA, on devices that also sample."""
        if devices == 1:
            base: Strategy = "single"
            kinds: list[tuple[str, dict[str, Any], Strategy]] = [
                ("full", {}, base),
                ("full with learner.offload=all", {"offload": "all"}, base),
            ]
        else:
            base = "ddp"
            kinds = [("full", {}, base), ("full with fsdp2", {}, "fsdp2")]
        rank = self.config.model.lora.rank or 16
        found = [self._fit(name, 0, learner, strategy, devices) for name, learner, strategy in kinds]
        return [*found, self._fit("LoRA" if rank == 16 else f"LoRA of rank {rank}", rank, {}, base, devices)]

    def _fit(self, name: str, rank: int, learner: dict[str, Any], strategy: Strategy, devices: int) -> MemoryFit:
        """With the smallest micro-batches and the KV cache of 64 full sequences."""
        model = self.config.model.model_copy(
            update={"lora": self.config.model.lora.model_copy(update={"rank": rank}), "quantize": "none"}
        )
        config = self.config.model_copy(
            update={"model": model, "learner": self.config.learner.model_copy(update=learner)}
        )
        shape = model_shape(model)
        engine = engine_memory(shape, config, self.device, devices)
        split = engine.split if engine is not None else 1
        planner = rank_planner(shape, config, self.device, strategy, devices, sampling=True, split=split)
        return MemoryFit(name, planner.least <= planner.limit, planner.least / GIB, planner.limit / GIB)

    def learner(self, ranks: int, sampling: bool, split: int = 1) -> tuple[Strategy, MemoryPlan]:
        """The fastest strategy that fits; the last candidate if none does."""
        candidates: tuple[Strategy, ...] = ("single",) if ranks == 1 else ("ddp", "fsdp2")
        if self.strategy is not None and ranks > 1:
            candidates = (self.strategy,)
        for strategy in candidates:
            plan = learner_plan(self.shape, self.config, self.device, strategy, ranks, sampling, split)
            if plan.fits:
                break
        return strategy, plan

    # ------------------------------------------------------------------------------------------ time

    def learn_seconds(self, tokens: float, terms: float, ranks: int, strategy: Strategy, plan: MemoryPlan) -> float:
        """Seconds of an update on all ranks."""
        sizes, learner, times = self.shape.sizes, self.config.learner, self.times
        width = ranks if strategy == "tensor" else 1
        shards = ranks // width
        rank_tokens = max(tokens / shards, min(tokens, self.episodes.longest))  # an episode is not divided
        extra = ExtraModels.of(self.config)
        passes = (2.0 if sizes.rank else 3.0) + plan.recompute
        scoring = float(extra.reference) + float(self.config.algorithm.importance_weights.kind != "none")
        passes = passes * (2 if extra.value and learner.has_separate_critic else 1) * learner.epochs + scoring
        rank_terms = rank_tokens * terms / max(tokens, 1)
        compute = times.learning(rank_tokens, rank_terms, self.episodes.tokens / 2, passes) / width
        count = math.ceil(rank_tokens / max(plan.tokens, 1)) * learner.epochs
        compute += times.micro_batches(count)
        size = sizes.gradients(learner.master == "float32")
        if strategy == "ddp":
            reduce = 2 * times.all_gather(size, ranks) * learner.minibatches
            compute += reduce / 2  # half of it overlaps with the backward pass
        elif strategy == "fsdp2":
            each = (2 + plan.recompute) * times.all_gather(sizes.weights, ranks) + times.all_gather(size, ranks)
            compute = max(compute, count * each) + times.all_gather(sizes.weights, ranks) / max(1, sizes.layers)
        elif strategy == "tensor" and ranks > 1:
            activations = 4 * rank_tokens * sizes.hidden * sizes.item * sizes.layers * (2 + plan.recompute)
            compute += times.all_gather(activations, ranks)
        parts = ranks if strategy in ("fsdp2", "tensor") else 1
        steps = learner.epochs * learner.minibatches
        return compute + steps * times.optimizer_step(parts, learner.offload != "none")

    def plans(self, devices: int) -> Iterator[PlacementPlan]:
        """The synchronous placement and the best asynchronous one, of those that fit."""
        sync = self._sync(devices)
        if sync is not None:
            yield sync
        candidates = [self._async(devices, sampling) for sampling in self._divisions(devices)]
        fitting = [one for one in candidates if one is not None]
        if fitting:
            yield min(fitting, key=lambda one: one.estimate.step)

    def _divisions(self, devices: int) -> list[int]:
        """Numbers of sampling devices; 0: one device alternates."""
        if devices == 1:
            return [0]
        return sorted({min(devices - 1, max(1, round(devices * share))) for share in SAMPLING_SHARES})

    def _sync(self, devices: int) -> PlacementPlan | None:
        engine = engine_memory(self.shape, self.config, self.device, devices)
        if engine is None:
            return None
        strategy, plan = self.learner(devices, sampling=True, split=engine.split)
        if not plan.fits:
            return None
        publish = self.times.publish(devices, 0, engine.split) if devices > 1 and strategy != "ddp" else 0.0
        return self._plan("sync", devices, devices, devices, engine.split, strategy, plan, 0, publish, 0, 0)

    def _async(self, devices: int, sampling: int) -> PlacementPlan | None:
        if not sampling:
            strategy, plan = self.learner(1, sampling=True)
            return self._plan("async", 1, 1, 1, 1, strategy, plan, self.lag, 0.0, 0, 0) if plan.fits else None
        engine = engine_memory(self.shape, self.config, self.device, sampling)
        if engine is None or sampling < engine.split:
            return None
        strategy, plan = self.learner(devices - sampling, sampling=False)
        if not plan.fits:
            return None
        publish = self.times.publish(devices - sampling, sampling, engine.split)
        return self._plan(
            "async", devices, sampling, devices - sampling, engine.split, strategy, plan, self.lag, publish,
            engine.total, engine.tokens,
        )  # fmt: skip

    def _plan(
        self,
        mode: str,
        devices: int,
        sampling: int,
        ranks: int,
        split: int,
        strategy: Strategy,
        plan: MemoryPlan,
        lag: int,
        publish: float,
        engine_bytes: int,
        kv_tokens: int,
    ) -> PlacementPlan:
        rollout, engines = self.config.rollout, max(1, sampling // split)
        concurrency = rollout.concurrency if "concurrency" in rollout.model_fields_set else None
        estimate = estimate_step(
            StepTimeInputs(
                episodes=self.episodes,
                groups=rollout.tasks_per_step,
                group_size=rollout.group_size,
                engines=engines,
                max_requests=self.config.engine.requests("cuda" if self.device.cuda else "cpu"),
                kv_tokens=kv_tokens or plan.kv_tokens,
                sampling_step=self.times.sampling_step(split),
                prefill=lambda tokens: self.times.prefill(tokens, split),
                learn=lambda tokens, terms: self.learn_seconds(tokens, terms, ranks, strategy, plan),
                publish=publish,
                max_lag=lag,
                concurrency=concurrency if isinstance(concurrency, int) else math.inf,
                redundancy=rollout.redundancy,
                shared=mode == "sync" or devices == 1,
            )
        )
        return PlacementPlan(
            devices, mode, engines, split, strategy, ranks, lag, plan.tokens, plan.recompute,
            memory_parts(plan.forecast), plan.forecast.total, engine_bytes, estimate,
        )  # fmt: skip


def check_devices(count: int) -> None:
    """ConfigError for a number of devices out of range."""
    if not 1 <= count <= MAX_DEVICES:
        raise ConfigError(f"--gpus {count}: must be between 1 and {MAX_DEVICES:,}.")
