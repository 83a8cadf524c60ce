"""Devices, and the time of a sampling step, an update and a weight transfer on them.

Numbers of devices are those of the vendors' data sheets: arithmetic without sparsity, links in one direction. Times
follow a roofline model: bytes / (bandwidth × efficiency) and operations / (peak × efficiency), plus a fixed cost per
layer and per row. Where both bounds are close, neither is reached: they are added as sqrt(a² + b²). Efficiencies were
fitted to the local engine and the learner on one H200 (`GPU_EFFICIENCY`) and on two cores (`CPU_EFFICIENCY`);
docs/results/planner.md has the data and the errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from arborl.cluster.planner.model_shape import ModelShape
from arborl.errors import ConfigError, did_you_mean

GIB = 2**30
TERA = 1e12
GIGA = 1e9
HOST_BUS = 50e9
"""Bytes per second between a GPU and host memory."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one core of a CPU."""

    name: str
    memory: int
    """Usable bytes."""
    bandwidth: float
    """Bytes per second of its memory."""
    bfloat16: float
    """Operations per second of matrix products."""
    float32: float
    link: float
    """Bytes per second to a device of the same host."""
    network: float
    """Bytes per second to a device of another host."""
    per_host: int = 8

    @property
    def cuda(self) -> bool:
        return self.name != "cpu"

    def peak(self, item_bytes: int) -> float:
        """Operations per second with numbers of this size."""
        return self.bfloat16 if item_bytes < 4 else self.float32

    def link_bandwidth(self, ranks: int) -> float:
        """Bytes per second of the slowest link between this number of devices."""
        return self.link if ranks <= self.per_host else self.network


def _gpu(
    name: str, gib: float, bandwidth: float, bfloat16: float, float32: float, link: float, network: float
) -> Device:
    """In GiB, TB/s, TFLOP/s and GB/s."""
    return Device(name, int(gib * GIB), bandwidth * TERA, bfloat16 * TERA, float32 * TERA, link * GIGA, network * GIGA)


DEVICES = {
    device.name: device
    for device in (
        _gpu("b200", 178.4, 8.0, 2250, 75, 900, 50),
        _gpu("h200", 139.8, 4.8, 989, 67, 450, 50),
        _gpu("h100", 79.1, 3.35, 989, 67, 450, 50),
        _gpu("h800", 79.1, 3.35, 989, 67, 200, 50),
        _gpu("h20", 95.6, 4.0, 148, 44, 450, 50),
        _gpu("a100", 79.1, 2.04, 312, 19.5, 300, 25),
        _gpu("a100-40", 39.4, 1.56, 312, 19.5, 300, 25),
        _gpu("l40s", 44.5, 0.864, 362, 91.6, 32, 12.5),
        _gpu("l4", 22.5, 0.3, 121, 30.3, 32, 12.5),
        _gpu("a10g", 22.5, 0.6, 70, 31.5, 32, 12.5),
        _gpu("rtx4090", 23.6, 1.01, 165, 82.6, 32, 3.1),
        # One core of a server CPU, measured on two cores with AVX-512 (docs/results/step.md).
        Device("cpu", 4 * GIB, 10 * GIGA, 75 * GIGA, 75 * GIGA, 5 * GIGA, 1 * GIGA, 64),
    )
}


def device_named(name: str) -> Device:
    """The device; case, spaces and dashes of the name do not matter."""
    plain = re.sub(r"nvidia|[\s_-]", "", name.lower()).removesuffix("80gb").removesuffix("sxm")
    device = {re.sub("-", "", known): device for known, device in DEVICES.items()}.get(plain)
    if device is None:
        raise ConfigError(f"--gpu {name}: unknown.{did_you_mean(plain, DEVICES)} Known: {', '.join(DEVICES)}.")
    return device


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Reached share of a device's limits, and fixed costs in seconds."""

    bandwidth: float
    sampling: float
    """Share of the peak in a sampling step and in prefill."""
    learning: float
    """Share of the peak in an update of a very wide model."""
    half_width: float
    """Hidden size at which an update reaches half of `learning`; 0: the share does not depend on the width."""
    layer: float
    """Per layer of a sampling step."""
    step: float
    """Per sampling step."""
    row: float
    """Per row of a sampling step: logits, draw, bookkeeping."""
    micro_batch_layer: float
    """Per layer of a micro-batch, forward and backward."""
    adapter: float
    """Per matrix product with an adapter, four per layer."""
    all_reduce: float = 12e-6
    """Per small all-reduce, two per layer under tensor parallelism."""


GPU_EFFICIENCY = Efficiency(
    bandwidth=0.80, sampling=0.62, learning=0.60, half_width=600, layer=22e-6, step=0.3e-3, row=1.5e-6,
    micro_batch_layer=0.25e-3, adapter=4e-6,
)  # fmt: skip
CPU_EFFICIENCY = Efficiency(
    bandwidth=0.80, sampling=0.70, learning=0.90, half_width=0, layer=20e-6, step=0.5e-3, row=10e-6,
    micro_batch_layer=0.5e-3, adapter=10e-6,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Times in seconds of one model on one kind of device."""

    shape: ModelShape
    device: Device
    efficiency: Efficiency

    @classmethod
    def of(cls, shape: ModelShape, device: Device) -> DeviceTimes:
        return cls(shape, device, GPU_EFFICIENCY if device.cuda else CPU_EFFICIENCY)

    @property
    def peak(self) -> float:
        return self.device.peak(self.shape.sizes.item)

    def sampling_step(self, devices: int = 1) -> Callable[[float, float], float]:
        """Seconds of one decode step as a function of rows and of the sum of their context lengths."""
        shape, sizes, efficiency = self.shape, self.shape.sizes, self.efficiency
        communication = 2 * sizes.layers * efficiency.all_reduce if devices > 1 else 0.0
        adapters = 4 * sizes.layers * efficiency.adapter if sizes.rank else 0.0
        fixed = sizes.layers * efficiency.layer + efficiency.step + communication + adapters
        bandwidth = efficiency.bandwidth * self.device.bandwidth * devices
        operations = efficiency.sampling * self.peak * devices
        weights, kv_token = shape.read_bytes / bandwidth, shape.kv_token / bandwidth
        row, attention = 2 * (shape.body + shape.head) / operations, 4 * sizes.layers * sizes.queries / operations

        def seconds(rows: float, context: float) -> float:
            work = math.hypot(weights + context * kv_token, rows * row + context * attention)
            return fixed + rows * efficiency.row + work

        return seconds

    def prefill(self, tokens: float, devices: int = 1) -> float:
        """Seconds to read prompt tokens, in addition to the decode step they share."""
        return 2 * tokens * self.shape.body / (self.efficiency.sampling * self.peak * devices)

    def learning(self, tokens: float, terms: float, context: float, passes: float) -> float:
        """Seconds of forward and backward passes on one device, without communication."""
        shape, sizes, efficiency = self.shape, self.shape.sizes, self.efficiency
        products = 2 * (tokens * shape.body + terms * shape.head)
        attention = 4 * tokens * context * sizes.layers * sizes.queries
        share = efficiency.learning
        share *= sizes.hidden / (sizes.hidden + efficiency.half_width) if efficiency.half_width else 1.0
        return passes * (products + attention) / (share * self.peak)

    def micro_batches(self, count: float) -> float:
        """Fixed cost in seconds of this number of micro-batches."""
        return count * self.shape.sizes.layers * self.efficiency.micro_batch_layer

    def optimizer_step(self, shards: int = 1, offload: bool = False) -> float:
        """Seconds of AdamW: master weights, moments and gradients are read, all but gradients written."""
        moved = 28 * self.shape.sizes.trained / shards
        host = HOST_BUS if self.device.cuda else self.device.bandwidth
        return moved / (host if offload else self.efficiency.bandwidth * self.device.bandwidth)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes."""
        return size * (ranks - 1) / ranks / self.device.link_bandwidth(ranks) if ranks > 1 else 0.0

    def publish(self, learners: int, engines: int, devices: int = 1) -> float:
        """Seconds to send new weights (with LoRA: the adapter) to engines on other devices."""
        sizes = self.shape.sizes
        size = 4 * sizes.trained if sizes.rank else sizes.weights
        return size / devices / self.device.link_bandwidth(learners + engines)
