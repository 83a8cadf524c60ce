"""Duration of a step, in closed form.

A batch has N groups of M episodes. An episode needs `L·s + O` seconds: sampled tokens L times the seconds s of a decode
step, plus O seconds in tools and environment. L and O are drawn from the workload.

Synchronous (`max_lag=0`): the batch ends with its last group. Expected maxima follow from the sample's distribution F:
a group is complete at time t with probability P(Bin(M+R, F(t)) ≥ M), with R redundant episodes, and a batch of N groups
with that probability to the power N. The decode step is integrated over the rows that are still active.

Asynchronous: `max_lag+1` batches are in flight. A step lasts at least as long as the sampling work of one batch on full
engines, and the mean time of a group divided by `max_lag+1`. Groups that need longer than `max_lag` steps are started
again and waited for (`rollout/pipeline.py`): with q their share, a step also lasts at least the update plus the
expected completion of qN groups with one redundant episode. The step is the fixed point of this equation.

docs/results/planner.md compares the estimate with measured and published runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arborl.cluster.planner.workload import EpisodeSample

BUCKETS = 64
"""Parts of the integral over active rows."""
ITERATIONS = 40


@dataclass(frozen=True, slots=True)
class StepTimeInputs:
    """What a step consists of. Times are in seconds."""

    episodes: EpisodeSample
    groups: int
    group_size: int
    engines: int
    max_requests: int
    """Of one engine at once."""
    kv_tokens: float
    """KV cache of one engine."""
    sampling_step: Callable[[float, float], float]
    """Time of a decode step, by rows and by the sum of their context lengths."""
    prefill: Callable[[float], float]
    """Time to read this number of prompt tokens."""
    learn: Callable[[float, float], float]
    """Time of an update, by tokens and by sampled tokens."""
    publish: float
    """Time of a weight transfer; engines pause meanwhile."""
    max_lag: int = 0
    concurrency: float = math.inf
    """Episodes at once, over all engines."""
    redundancy: int = 0
    shared: bool = False
    """Whether engines pause during an update because they use the learner's devices."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A step on average. Times are in seconds."""

    step: float
    wait: float
    """Time in which the learner waits for groups."""
    learn: float
    publish: float
    engine_busy: float
    """Share of the time in which an engine samples."""
    learner_busy: float
    lag: float
    """Mean staleness of the trained groups, in policy versions."""
    lag_max: int
    sampled: float
    """Tokens per second."""


def expected_completion(times: NDArray[np.float64], groups: float, size: int = 1, redundancy: int = 0) -> float:
    """Expected time until `groups` groups are complete, each with `size` of its `size + redundancy` episodes."""
    if groups <= 0:
        return 0.0
    ordered = np.sort(times)
    share = np.arange(1, len(ordered) + 1) / len(ordered)
    members = size + redundancy
    complete = sum(math.comb(members, k) * share**k * (1 - share) ** (members - k) for k in range(size, members + 1))
    probability = np.clip(complete, 0.0, 1.0) ** groups
    return float(ordered @ np.diff(probability, prepend=0.0))


def estimate_step(inputs: StepTimeInputs) -> StepEstimate:
    """Duration of a step and utilisation of engines and learner."""
    estimate = _Estimate(inputs)
    return estimate.asynchronous() if inputs.max_lag else estimate.synchronous()


class _Estimate:
    def __init__(self, inputs: StepTimeInputs):
        self.inputs, episodes = inputs, inputs.episodes
        self.sampled, self.outside = float(episodes.sampled.mean()), float(episodes.outside.mean())
        self.members = inputs.group_size + inputs.redundancy
        self.per_engine = inputs.groups * self.members / inputs.engines
        groups_here = max(1.0, inputs.groups / inputs.engines)
        self.prefill = inputs.prefill(self.per_engine * episodes.observed + groups_here * episodes.prompt)
        trained = inputs.groups * inputs.group_size
        self.trained_tokens = trained * self.sampled
        tokens = trained * (self.sampled + episodes.observed) + inputs.groups * episodes.prompt
        self.learn = inputs.learn(tokens, self.trained_tokens)

    def _context(self, rows: float, sampled: float) -> float:
        """Sum of context lengths; a group's prompt is read once."""
        prompts = self.inputs.episodes.prompt * min(rows, max(1.0, rows / self.members))
        return prompts + rows * (sampled + self.inputs.episodes.observed)

    def _max_rows(self, in_flight: float) -> float:
        inputs, episodes = self.inputs, self.inputs.episodes
        per_row = episodes.prompt / self.members + episodes.observed + self.sampled / 2
        limits = (in_flight, inputs.max_requests, inputs.concurrency / inputs.engines, inputs.kv_tokens / per_row)
        return max(1.0, min(limits))

    def _active(self, slots: float) -> tuple[float, float]:
        """Mean rows of an engine with this number of slots, and its decode step: episodes in tools need no row."""
        rows = slots
        for _ in range(8):
            step = self.inputs.sampling_step(max(1.0, rows), self._context(max(1.0, rows), self.sampled / 2))
            rows = slots * self.sampled * step / (self.sampled * step + self.outside)
        return max(1.0, rows), step

    def _times(self, step: float) -> NDArray[np.float64]:
        return self.inputs.episodes.sampled * step + self.inputs.episodes.outside

    def synchronous(self) -> StepEstimate:
        inputs = self.inputs
        rows = self._max_rows(self.per_engine)
        full = inputs.sampling_step(rows, self._context(rows, self.sampled / 2))
        decode = (self.per_engine - rows) * self.sampled / rows * full + self._drain(rows)
        sampling = decode
        if self.outside:
            times = self._times(self._active(rows)[1])
            waves = max(1.0, self.per_engine * inputs.engines / inputs.concurrency)
            last = expected_completion(times, inputs.groups, inputs.group_size, inputs.redundancy)
            sampling = max(decode, last + (waves - 1) * float(times.mean()))
        wait = sampling + self.prefill
        return self._result(wait + self.learn + inputs.publish, wait, decode + self.prefill, 0.0)

    def _drain(self, rows: float) -> float:
        """Seconds from full rows to the end of the last episode of the batch."""
        inputs, lengths = self.inputs, np.sort(self.inputs.episodes.sampled)
        end = expected_completion(lengths, inputs.groups, inputs.group_size, inputs.redundancy)
        seconds = previous = 0.0
        for bucket in range(BUCKETS):
            last = bucket == BUCKETS - 1
            length = end if last else min(end, float(lengths[(bucket + 1) * len(lengths) // BUCKETS - 1]))
            active = max(1.0, rows * (1 - bucket / BUCKETS))
            seconds += (length - previous) * inputs.sampling_step(
                active, self._context(active, (length + previous) / 2)
            )
            previous = length
        return seconds

    def asynchronous(self) -> StepEstimate:
        inputs, batches = self.inputs, self.inputs.max_lag + 1
        slots = self._max_rows(self.per_engine * batches)
        rows, decode_step = self._active(slots)
        work = self.per_engine * self.sampled / rows * decode_step + self.prefill
        times = self._times(decode_step)
        group_time = expected_completion(times, 1, inputs.group_size, inputs.redundancy)
        update = self.learn + inputs.publish
        wait = restart = 0.0
        for _ in range(ITERATIONS):
            bound = max(work, group_time / batches)
            step = update + max(bound, restart) if inputs.shared else max(bound, update + restart)
            wait = step - update
            share = float((times <= inputs.max_lag * step + wait).mean())
            late = 1 - sum(
                math.comb(self.members, k) * share**k * (1 - share) ** (self.members - k)
                for k in range(inputs.group_size, self.members + 1)
            )
            waited = expected_completion(times, late * inputs.groups, inputs.group_size, inputs.redundancy + 1)
            restart = (restart + waited) / 2
        return self._result(step, max(0.0, wait), work, min(float(inputs.max_lag), group_time / step))

    def _result(self, step: float, wait: float, engine: float, lag: float) -> StepEstimate:
        inputs = self.inputs
        return StepEstimate(
            step, wait, self.learn, inputs.publish, min(1.0, engine / step), min(1.0, self.learn / step), lag,
            inputs.max_lag, self.trained_tokens / step,
        )  # fmt: skip
