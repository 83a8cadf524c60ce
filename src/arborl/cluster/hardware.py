"""Devices by name: memory, bandwidth, arithmetic, links.

Numbers are those of the vendors' data sheets: arithmetic without sparsity, links one way. How much of them a run gets
is in `plan_times.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from arborl.errors import ConfigError, did_you_mean

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one core of a CPU."""

    name: str
    memory: int
    """Bytes that a program sees."""
    bandwidth: float
    """Bytes a second of its memory."""
    bfloat16: float
    """Operations a second of products of matrices."""
    float32: float
    link: float
    """Bytes a second to another device of the same host."""
    network: float
    """Bytes a second to a device of another host."""
    per_host: int = 8

    @property
    def cuda(self) -> bool:
        return self.name != "cpu"

    def peak(self, item: int) -> float:
        """Operations a second with numbers of so many bytes."""
        return self.bfloat16 if item < 4 else self.float32

    def wire(self, ranks: int) -> float:
        """Bytes a second between so many devices: the slowest link among them."""
        return self.link if ranks <= self.per_host else self.network


def _gpu(
    name: str, gib: float, bandwidth: float, bfloat16: float, float32: float, link: float, network: float
) -> Device:
    """From GiB, terabytes a second, operations a second in units of 1e12, and gigabytes a second."""
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
        # One core of a server's processor; measured on two cores with AVX-512 (docs/results/step.md), not a data sheet.
        Device("cpu", 4 * GIB, 10 * GIGA, 75 * GIGA, 75 * GIGA, 5 * GIGA, 1 * GIGA, 64),
    )
}


def device_named(name: str) -> Device:
    """The device, whatever case and dashes its name is written with.

    Example:
        device_named("H200").memory, device_named("RTX 4090").bandwidth
    """
    plain = re.sub(r"nvidia|[\s_-]", "", name.lower()).removesuffix("80gb").removesuffix("sxm")
    found = {re.sub("-", "", known): device for known, device in DEVICES.items()}.get(plain)
    if found is None:
        raise ConfigError(
            f"--gpu {name}: nothing is known of it.{did_you_mean(plain, DEVICES)} Known: {', '.join(DEVICES)}."
        )
    return found
