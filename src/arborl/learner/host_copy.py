"""A copy of tensors in the host's memory, made at one moment, so that training goes on while it is written to disk.

The memory is taken once and used again for every copy: fresh pages cost more time than what is copied into them. For a
GPU it is pinned: the copies then run beside the computation, at the full speed of the bus, on a stream of their own.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

SLAB = 2**30
"""Bytes taken at once; a larger tensor has a slab of its own."""
ALIGNED = 512
SMALL = 2**20
"""Below, memory is pinned by torch, which shares pages between tensors."""
SPARE = 0.9
"""Part of the host's free memory that copies may take."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Nested dicts and lists whose tensors are copies."""

    tree: Any
    live: bool = False
    """The host had no room: these are the tensors themselves, and they must not change while they are read."""
    event: Any = None
    """On a GPU, reached when all has been copied."""
    sources: list[Tensor] = field(default_factory=list)
    """What is being copied, kept alive until then."""

    def wait(self) -> None:
        """Until all has been copied."""
        if self.event is not None:
            self.event.synchronize()
        self.sources.clear()

    def hold(self) -> None:
        """What the device is given to do from now on waits until all has been copied; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class HostCopies:
    """Takes copies, each into the memory of the one before: only one is good at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sizes: tuple[int, ...] = ()
        self.slabs: list[Tensor] = []
        self.lock = threading.Lock()
        self.stream: Any = None

    @staticmethod
    def sizes_of(tree: Any) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(tensor.nbytes for tensor in _unique(tree).values())

    def reserve(self, sizes: tuple[int, ...]) -> bool:
        """Take the memory that copies of these sizes need; False where the host has not enough."""
        with self.lock:
            if sizes == self.sizes:
                return True
            self.sizes, self.slabs = (), []  # the former are given back first
            wanted, _ = _layout(sizes)
            if sum(wanted) > SPARE * free_memory():
                return False
            self.slabs = [
                _pinned(size) if self.device.type == "cuda" else _touched(np.empty(size, dtype=np.uint8))
                for size in wanted
            ]
            self.sizes = sizes
            return True

    def take(self, tree: Any) -> Copied:
        """Copy all tensors of `tree`; whatever else is in it is copied by value. Tensors that are one stay one."""
        found = _unique(tree)
        if not self.reserve(tuple(tensor.nbytes for tensor in found.values())):
            log.warning("the host has no memory for a copy of what a checkpoint holds: the run waits for its writing")
            return Copied(_changed(tree, lambda tensor: tensor.detach()), live=True)
        _, places = _layout(self.sizes)
        copies = {
            key: _part(self.slabs[slab], start, tensor)
            for (key, tensor), (slab, start) in zip(found.items(), places, strict=True)
        }
        event = self._copy([(copies[key], tensor) for key, tensor in found.items()])
        made = _changed(tree, lambda tensor: copies[_key(tensor)])
        return Copied(made, event=event, sources=list(found.values()) if event is not None else [])

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        with torch.no_grad():
            if self.device.type != "cuda":
                for copied, tensor in pairs:
                    copied.copy_(tensor)
                return None
            self.stream = self.stream or torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                for copied, tensor in pairs:
                    copied.copy_(tensor, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            return event


def free_memory() -> int:
    """Bytes of the host that could be taken now: of the machine, or of the container where that allows less."""
    free = _numbers("/proc/meminfo").get("MemAvailable:", 2**63 // 1024) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = _numbers(group / "memory.stat").get("inactive_file", 0)
        return free if limit == "max" else min(free, int(limit) - int(used) + cached)
    except (OSError, ValueError):
        return free


def _numbers(path: str | Path) -> dict[str, int]:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdigit()}


def _key(tensor: Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _unique(tree: Any) -> dict[tuple[Any, ...], Tensor]:
    found: dict[tuple[Any, ...], Tensor] = {}
    _changed(tree, lambda tensor: found.setdefault(_key(tensor), tensor.detach()))
    return found


def _changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _changed(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_changed(value, change) for value in tree)
    return copy.deepcopy(tree)


def _layout(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The slabs' sizes, and slab and start of each tensor."""
    slabs: list[int] = []
    places: list[tuple[int, int]] = []
    for size in sizes:
        if not slabs or slabs[-1] + size > SLAB:
            slabs.append(0)
        places.append((len(slabs) - 1, slabs[-1]))
        slabs[-1] += -(-size // ALIGNED) * ALIGNED
    return slabs, places


def _part(slab: Tensor, start: int, like: Tensor) -> Tensor:
    """Part of a slab with a storage of its own, or whoever writes it would take it for one with its neighbours."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    own = torch.from_numpy(slab.numpy()[start : start + like.nbytes])
    return own.view(like.dtype).view(like.shape)


def host_tensor(like: Tensor, pinned: bool) -> Tensor:
    """Memory of the host for a tensor of this shape and type."""
    if not pinned or like.nbytes < SMALL:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
    return _pinned(like.nbytes).view(like.dtype).view(like.shape)


def _touched(array: NDArray[np.uint8]) -> Tensor:
    """Its pages are looked for by the system now, in many threads, and not at the first copy."""
    return torch.from_numpy(array).zero_()


def _pinned(size: int) -> Tensor:
    """Touched before it is pinned, or the driver would look for the pages under its lock; and of exactly this size,
    where torch would take the next power of two."""
    array = np.empty(size, dtype=np.uint8)
    made = _touched(array)
    runtime: Any = torch.cuda.cudart()
    refused = int(runtime.cudaHostRegister(made.data_ptr(), size, 0)) if size else 0
    if refused:
        with suppress(RuntimeError):  # the next launch would be blamed for it
            torch.zeros(1, device="cuda")
        log.warning("the host's memory cannot be pinned (CUDA error %d): copies from the GPU are slower", refused)
    elif size:
        weakref.finalize(array, runtime.cudaHostUnregister, made.data_ptr()).atexit = False
    return made
