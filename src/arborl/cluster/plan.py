"""Ways to place a run on N devices: what each takes of their memory, how long its steps take, and who waits.

Two ways are compared. Synchronous: all devices sample, then all learn (`max_lag=0`). Asynchronous: some sample while
the others learn, within `max_lag` versions; the division with the shortest step is taken. One device takes turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from arborl.cluster.hardware import GIB, Device
from arborl.cluster.plan_memory import (
    Needs,
    Strategy,
    engine_memory,
    learner_plan,
    own_strategy,
    parts,
    rank_planner,
)
from arborl.cluster.plan_model import Shape, shape_of
from arborl.cluster.plan_times import Times
from arborl.cluster.plan_work import Mean, Work, slowest
from arborl.cluster.simulate import Outcome, simulate
from arborl.cluster.simulate_engine import Setting
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError
from arborl.learner.forecast import Plan

MOST = 4_096
"""Devices that are planned for."""
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096)
CALLS = 12_000
"""Model calls of one simulation: of a larger run, as large a part of groups and engines is simulated as has so many."""
UPDATES, MORE = 4, 16
"""That are simulated, and one more for each version of lag: more where they are small."""
SHARES = (0.25, 0.5, 0.75)
"""Of devices, those that sample in an asynchronous run: what is tried."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One way to run on so many devices."""

    devices: int
    way: str
    """`sync` or `async`."""
    engines: int
    split: int
    """Devices an engine."""
    strategy: Strategy
    ranks: int
    """Of the learner."""
    max_lag: int
    micro_batch_tokens: int
    recompute: bool
    learner_parts: dict[str, int]
    """Bytes of a learner's rank."""
    learner_bytes: int
    engine_bytes: int
    """Of a device that only samples; 0 where there is none."""
    outcome: Outcome
    simulated: float
    """Part of the groups and engines that was simulated."""

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a way of training fits, and what a rank takes at least."""

    what: str
    fits: bool
    gib: float
    limit: float

    def __str__(self) -> str:
        if self.fits:
            return f"{self.what} yes, from {self.gib:.{0 if self.gib >= 10 else 1}f} GiB"
        return f"{self.what} no, {self.gib:.0f} GiB at least and {self.limit:.0f} may be planned with"


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Plans one run on devices of one kind."""

    config: RunConfig
    device: Device
    work: Work
    shape: Shape
    times: Times
    mean: Mean
    alone: tuple[tuple[int, float], ...]
    """Tokens and seconds outside of some episodes."""
    lag: int
    strategy: Strategy | None = None
    calls: int = CALLS

    @classmethod
    def of(
        cls, config: RunConfig, device: Device, work: Work, lag: int | None = None, strategy: Strategy | None = None
    ) -> Forecaster:
        """Args:
        lag: of the asynchronous way; without one the run's own, or 1.
        strategy: of the learner; without one the run's own, or the quickest that fits.
        """
        shape = shape_of(config.model)
        lag = lag or config.rollout.max_lag or 1
        times, seed = Times.of(shape, device), config.seed
        strategy = strategy or own_strategy(config)
        return cls(config, device, work, shape, times, work.mean(seed), work.alone(seed), lag, strategy)

    # ------------------------------------------------------------------------------------------ memory

    def fits(self, devices: int) -> list[Fit]:
        """What of full training, offloading and adapters has room, on so many devices that sample too."""
        kinds: list[tuple[str, dict[str, Any], Strategy]] = [("full", {}, "single" if devices == 1 else "ddp")]
        if devices > 1:
            kinds += [("full with fsdp2", {}, "fsdp2")]
        else:
            kinds += [("full with learner.offload=all", {"offload": "all"}, "single")]
        found = []
        for what, learner, strategy in kinds:
            found.append(self._fit(what, 0, learner, strategy, devices))
        rank = self.config.model.lora.rank or 16
        found.append(self._fit("LoRA" if rank == 16 else f"LoRA of rank {rank}", rank, {}, kinds[0][2], devices))
        return found

    def _fit(self, what: str, rank: int, learner: dict[str, Any], strategy: Strategy, devices: int) -> Fit:
        """With the smallest micro-batches and keys and values of 64 sequences of full length; more room is quicker."""
        model = self.config.model.model_copy(
            update={"lora": self.config.model.lora.model_copy(update={"rank": rank}), "quantize": "none"}
        )
        config = self.config.model_copy(
            update={"model": model, "learner": self.config.learner.model_copy(update=learner)}
        )
        shape = shape_of(model)
        engine = engine_memory(shape, config, self.device, devices)
        split = engine.split if engine is not None else 1
        planner = rank_planner(shape, config, self.device, strategy, devices, sampling=True, split=split)
        return Fit(what, planner.least <= planner.limit, planner.least / GIB, planner.limit / GIB)

    def learner(self, ranks: int, sampling: bool, split: int = 1) -> tuple[Strategy, Plan]:
        """The quickest strategy that fits; the last that was tried, where none does."""
        tried: tuple[Strategy, ...] = ("single",) if ranks == 1 else ("ddp", "fsdp2")
        if self.strategy is not None and ranks > 1:
            tried = (self.strategy,)
        for strategy in tried:
            plan = learner_plan(self.shape, self.config, self.device, strategy, ranks, sampling, split)
            if plan.fits:
                break
        return strategy, plan

    # ------------------------------------------------------------------------------------------ time

    def learn_seconds(self, tokens: float, terms: float, ranks: int, strategy: Strategy, plan: Plan) -> float:
        """Seconds of an update of all ranks."""
        sizes, learner, times = self.shape.sizes, self.config.learner, self.times
        width = ranks if strategy == "tensor" else 1
        apart = ranks // width
        own = max(tokens / apart, min(tokens, self.mean.longest))  # a branch is not divided
        needs = Needs.of(self.config)
        passes = (2.0 if sizes.rank else 3.0) + plan.recompute
        asked = float(needs.reference) + float(self.config.algorithm.importance_weights.kind != "none")
        passes = passes * (2 if needs.value and learner.has_separate_critic else 1) * learner.epochs + asked
        compute = times.learning(own, own * terms / max(tokens, 1), self.mean.tokens / 2, passes) / width
        count = math.ceil(own / max(plan.tokens, 1)) * learner.epochs
        compute += times.pieces(count)
        size = sizes.gradients(learner.master == "float32")
        if strategy == "ddp":
            talk = 2 * times.gathering(size, ranks) * learner.minibatches
            compute += talk / 2  # half of it hides behind the backward pass
        elif strategy == "fsdp2":
            each = (2 + plan.recompute) * times.gathering(sizes.weights, ranks) + times.gathering(size, ranks)
            compute = max(compute, count * each) + times.gathering(sizes.weights, ranks) / max(1, sizes.layers)
        elif strategy == "tensor" and ranks > 1:
            wide = 4 * own * sizes.hidden * sizes.item * sizes.layers * (2 + plan.recompute)
            compute += times.gathering(wide, ranks)
        shards = ranks if strategy in ("fsdp2", "tensor") else 1
        steps = learner.epochs * learner.minibatches
        return compute + steps * times.stepping(shards, learner.offload != "none")

    def place(self, devices: int) -> Iterator[Placed]:
        """The synchronous way, and the best of the asynchronous ones; those that have room."""
        sync = self._sync(devices)
        if sync is not None:
            yield sync
        found = [self._async(devices, sampling) for sampling in self._divisions(devices)]
        fitting = [one for one in found if one is not None]
        if fitting:
            yield min(fitting, key=lambda one: one.outcome.step)

    def _divisions(self, devices: int) -> list[int]:
        """Devices that sample, of so many; one device does both."""
        if devices == 1:
            return [0]
        return sorted({min(devices - 1, max(1, round(devices * share))) for share in SHARES})

    def _sync(self, devices: int) -> Placed | None:
        engine = engine_memory(self.shape, self.config, self.device, devices)
        if engine is None:
            return None
        strategy, plan = self.learner(devices, sampling=True, split=engine.split)
        if not plan.fits:
            return None
        moved = devices > 1 and strategy != "ddp"
        publish = self.times.publishing(devices, 0, engine.split) if moved else 0.0
        return self._placed("sync", devices, devices, devices, engine.split, strategy, plan, 0, publish, 0, 0)

    def _async(self, devices: int, sampling: int) -> Placed | None:
        if not sampling:  # one device, in turns
            strategy, plan = self.learner(1, sampling=True)
            if not plan.fits:
                return None
            return self._placed("async", 1, 1, 1, 1, strategy, plan, self.lag, 0.0, 0, 0)
        engine = engine_memory(self.shape, self.config, self.device, sampling)
        if engine is None or sampling < engine.split:
            return None
        strategy, plan = self.learner(devices - sampling, sampling=False)
        if not plan.fits:
            return None
        publish = self.times.publishing(devices - sampling, sampling, engine.split)
        return self._placed(
            "async", devices, sampling, devices - sampling, engine.split, strategy, plan, self.lag, publish,
            engine.total, engine.tokens,
        )  # fmt: skip

    def _placed(
        self,
        way: str,
        devices: int,
        sampling: int,
        ranks: int,
        split: int,
        strategy: Strategy,
        plan: Plan,
        lag: int,
        publish: float,
        engine_bytes: int,
        kv_tokens: int,
    ) -> Placed:
        config, engines = self.config.rollout, max(1, sampling // split)
        count, part = self._part(engines, lag)
        groups = max(1, round(config.tasks_per_step * part))
        part = groups / config.tasks_per_step
        asked = config.concurrency if "concurrency" in config.model_fields_set else None
        concurrency = max(1, round(asked * part)) if isinstance(asked, int) else 1 << 30

        calls = groups * config.group_size * self.mean.turns
        updates = max(UPDATES, min(MORE, round(self.calls / calls)))

        def learn(tokens: float, terms: float) -> float:
            return self.learn_seconds(tokens / part, terms / part, ranks, strategy, plan)

        outcome = simulate(
            Setting(
                draw=self.work.draw,
                groups=groups,
                members=config.group_size,
                engines=min(count, groups * (config.group_size + config.redundancy) * (lag + 1)),
                slots=self.config.engine.requests("cuda" if self.times.device.cuda else "cpu"),
                room=kv_tokens or plan.kv_tokens,
                sampling_step=self.times.sampling_step(split),
                reading=lambda tokens: self.times.reading(tokens, split),
                learn=learn,
                publish=publish,
                max_lag=lag,
                concurrency=concurrency,
                redundancy=config.redundancy,
                shared=way == "sync" or devices == 1,
                updates=updates + lag,
                seed=self.config.seed,
            )
        )
        return Placed(
            devices, way, engines, split, strategy, ranks, lag, plan.tokens, plan.recompute, parts(plan.forecast),
            plan.forecast.total, engine_bytes, self._whole(outcome, groups, engines, split, lag), part,
        )  # fmt: skip

    def _whole(self, outcome: Outcome, groups: int, engines: int, split: int, lag: int) -> Outcome:
        """Of the whole run, from a part of its groups and engines.

        A synchronous step waits for the slowest of all episodes, who is slower than the slowest of some: by as much as
        if each had an engine to itself, as the last one has. With lag nobody is waited for in this way.
        """
        config = self.config.rollout
        members, size = config.group_size + config.redundancy, config.group_size
        part = groups / config.tasks_per_step
        longer = 0.0
        if not lag and part < 1 and members == size:
            step = self.times.sampling_step(split)(1, self.mean.tokens)
            times = [tokens * step + outside for tokens, outside in self.alone]
            longer = slowest(times, config.tasks_per_step * size) - slowest(times, groups * size)
        shorter = outcome.step / (outcome.step + longer)
        used = min(1.0, config.tasks_per_step * members * (lag + 1) / engines)
        return replace(
            outcome,
            step=outcome.step + longer,
            wait=outcome.wait + longer,
            engine_busy=outcome.engine_busy * used * shorter,
            learner_busy=outcome.learner_busy * shorter,
            again=outcome.again / part,
            sampled=outcome.sampled / part * shorter,
        )

    def _part(self, engines: int, lag: int) -> tuple[int, float]:
        """Engines that are simulated, whole ones, and the part of the run that they are; so that it takes no longer
        than a second or so."""
        config = self.config.rollout
        calls = config.tasks_per_step * config.group_size * self.mean.turns * (UPDATES + 2 * lag)
        count = min(engines, math.ceil(engines * max(self.calls / calls, 1 / config.tasks_per_step)))
        return count, count / engines


def check_devices(count: int) -> None:
    """Refuse numbers that nothing can be planned for."""
    if not 1 <= count <= MOST:
        raise ConfigError(f"--gpus {count}: must be between 1 and {MOST:,}.")
