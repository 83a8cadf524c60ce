"""How long a sampling step, an update and new weights take on a device.

Roofs and overheads: bytes over bandwidth and operations over peak, each by the share of it that is reached, plus what a
layer and a row cost however little they do. Where both roofs are near, neither is reached: they are added as the sides
of a right angle. The shares were fitted to the local engine and the learner on one H200 (`GPU`) and on two cores
(`CPU`); `docs/results/planner.md` has what they were fitted to, and errors on what they were not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from arborl.cluster.hardware import Device
from arborl.cluster.plan_model import Shape


@dataclass(frozen=True, slots=True)
class Shares:
    """What a program gets of a device."""

    bandwidth: float
    sampling: float
    """Of the peak, in products of a sampling step and of prompts that are read."""
    learning: float
    """Of the peak, in an update of a model so wide that nothing else counts."""
    half: float
    """The width at which an update reaches half of that."""
    layer: float
    """Seconds a layer of a sampling step costs however little it does."""
    step: float
    """Seconds a sampling step costs besides."""
    row: float
    """Seconds each row of it costs besides: its logits, the draw, the host's bookkeeping."""
    piece: float
    """Seconds a layer of a micro-batch costs, forward and backward."""
    adapter: float
    """Seconds of the further launch that adapters cost each of a layer's four products."""
    hop: float = 12e-6
    """Seconds that devices take to add up something small, twice a layer under tensor parallelism."""


GPU = Shares(
    bandwidth=0.80, sampling=0.62, learning=0.60, half=600, layer=22e-6, step=0.3e-3, row=1.5e-6, piece=0.25e-3,
    adapter=4e-6,
)  # fmt: skip
CPU = Shares(
    bandwidth=0.80, sampling=0.70, learning=0.90, half=0, layer=20e-6, step=0.5e-3, row=10e-6, piece=0.5e-3,
    adapter=10e-6,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """Of a model on devices of a kind."""

    shape: Shape
    device: Device
    shares: Shares

    @classmethod
    def of(cls, shape: Shape, device: Device) -> Times:
        return cls(shape, device, GPU if device.cuda else CPU)

    @property
    def peak(self) -> float:
        return self.device.peak(self.shape.sizes.item)

    def sampling_step(self, split: int = 1) -> Callable[[float, float], float]:
        """Seconds of one token for each row, by rows and by tokens of all rows together whose keys and values are
        looked at.

        Args:
            split: devices that share an engine.
        """
        shape, sizes, shares = self.shape, self.shape.sizes, self.shares
        hops = 2 * sizes.layers * shares.hop if split > 1 else 0.0
        adapters = 4 * sizes.layers * shares.adapter if sizes.rank else 0.0
        always = sizes.layers * shares.layer + shares.step + hops + adapters
        moving, doing = shares.bandwidth * self.device.bandwidth * split, shares.sampling * self.peak * split
        read, token = shape.read / moving, shape.kv_token / moving
        row, seen = 2 * (shape.body + shape.head) / doing, 4 * sizes.layers * sizes.queries / doing

        def seconds(rows: float, context: float) -> float:
            work = math.hypot(read + context * token, rows * row + context * seen)
            return always + rows * shares.row + work

        return seconds

    def reading(self, tokens: float, split: int = 1) -> float:
        """Seconds to read tokens of prompts and observations, beside what a step takes anyway."""
        return 2 * tokens * self.shape.body / (self.shares.sampling * self.peak * split)

    def learning(self, tokens: float, terms: float, context: float, passes: float) -> float:
        """Seconds of one device to run forward and backward over tokens of trees, without communication.

        Args:
            terms: sampled tokens among them, at which alone logits are computed.
            context: tokens that a token sees, on average.
            passes: of products as large as a forward pass: 3 for all weights, 2 for adapters, 1 more where layers run
                twice, 1 more for every model that is asked for log-probabilities.
        """
        shape, sizes, shares = self.shape, self.shape.sizes, self.shares
        products = 2 * (tokens * shape.body + terms * shape.head)
        attention = 4 * tokens * context * sizes.layers * sizes.queries
        reached = shares.learning * sizes.hidden / (sizes.hidden + shares.half) if shares.half else shares.learning
        return passes * (products + attention) / (reached * self.peak)

    def pieces(self, count: float) -> float:
        """Seconds that micro-batches cost for being several."""
        return count * self.shape.sizes.layers * self.shares.piece

    def stepping(self, shards: int = 1, offload: bool = False) -> float:
        """Seconds of the optimiser: masters, moments and gradients are read, and all but the latter written."""
        moved = 28 * self.shape.sizes.trained / shards
        bus = 50e9 if self.device.cuda else self.device.bandwidth
        return moved / (bus if offload else self.shares.bandwidth * self.device.bandwidth)

    def gathering(self, size: float, ranks: int) -> float:
        """Seconds until each of so many devices has all of what they hold a part of, or has given its part of a sum."""
        return size * (ranks - 1) / ranks / self.device.wire(ranks) if ranks > 1 else 0.0

    def publishing(self, learners: int, engines: int, split: int = 1) -> float:
        """Seconds for new weights (of adapters, these alone) to come to engines on other devices."""
        sizes = self.shape.sizes
        size = 4 * sizes.trained if sizes.rank else sizes.weights
        return size / split / self.device.wire(learners + engines)
