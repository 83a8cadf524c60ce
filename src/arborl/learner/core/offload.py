"""Host memory: offloaded optimizer state and reference model, and copies of the state for checkpoints.

With offload, masters and moments are copied to the device in chunks, updated there by the same AdamW, and copied back:
the result equals that of a run without offload to the last bit, at the cost of two transfers over the bus.

A copy for a checkpoint is taken at one moment; training continues while it is written. Its memory is allocated once and
reused (faulting in new pages takes longer than the copy); for a GPU it is pinned, and copies run on their own stream.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.learner.core.memory_forecast import OFFLOAD_CHUNK
from arborl.learner.core.packing import chunks

log = logging.getLogger(__name__)

STEP_COUNT = "step"  # the entry of AdamW's state that is not a moment

Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]
"""Parameters with their masters: a float32 copy, or the parameter itself."""


class OffloadedOptimizerState:
    """Keeps master weights and moments in host memory."""

    def __init__(self, device: torch.device, gradients: bool):
        self.device, self.gradients = device, gradients
        self.masters: dict[nn.Parameter, Tensor] = {}  # the numbers of masters that are copies
        self.placeholders: dict[nn.Parameter, Tensor] = {}
        """The data of these masters between steps. If their gradients are on the device, so must they be: then it is a
        tensor that takes no memory."""
        self.moments: dict[nn.Parameter, dict[str, Tensor]] = {}

    def master_of(self, parameter: Tensor) -> nn.Parameter:
        kept = self._keep(parameter.detach().float())
        placeholder = kept if self.gradients else torch.empty(1, device=self.device).expand(parameter.shape)
        master = nn.Parameter(placeholder)
        self.masters[master], self.placeholders[master] = kept, placeholder
        return master

    def value(self, master: nn.Parameter) -> Tensor:
        return self.masters.get(master, master.detach())

    @torch.no_grad()
    def step(self, adam: torch.optim.Optimizer, pairs: Pairs) -> None:
        """Step all masters that have a gradient and round them into their parameters."""
        gradients = {master: master.grad for _, master in pairs}
        for _, master in pairs:
            master.grad = None  # AdamW skips parameters without a gradient
        for some in chunks([pair for pair in pairs if gradients[pair[1]] is not None], _fits):
            for _, master in some:
                self._load(adam, master, gradients.pop(master))
            adam.step()
            for parameter, master in some:
                self._store(adam, parameter, master)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the host may read its copies now

    def restore(self, adam: torch.optim.Optimizer, saved: dict[int, dict[str, Tensor]]) -> None:
        """Set the moments, numbered as in the optimizer's `state_dict`; they stay in host memory."""
        flat = [master for group in adam.param_groups for master in group["params"]]
        for number, state in saved.items():
            moments = self.moments[flat[number]] = {k: self._keep(v) for k, v in state.items() if k != STEP_COUNT}
            adam.state[flat[number]] = moments | {STEP_COUNT: state[STEP_COUNT].to(self.device)}

    def _load(self, adam: torch.optim.Optimizer, master: nn.Parameter, gradient: Tensor | None) -> None:
        assert gradient is not None
        if master in self.masters:
            master.data = self._fetch(self.masters[master])
        master.grad = gradient.to(self.device)
        for name, value in self.moments.get(master, {}).items():
            adam.state[master][name] = self._fetch(value)

    def _store(self, adam: torch.optim.Optimizer, parameter: nn.Parameter, master: nn.Parameter) -> None:
        master.grad = None
        state, moments = adam.state[master], self.moments.setdefault(master, {})
        for name, value in state.items():
            if name != STEP_COUNT:
                moments[name] = state[name] = self._keep(value, moments.get(name))
        if master in self.masters:
            parameter.copy_(master.detach())
            self._keep(master.detach(), self.masters[master])
            master.data = self.placeholders[master]

    def _fetch(self, kept: Tensor) -> Tensor:
        return kept.to(self.device, copy=True, non_blocking=True)

    def _keep(self, value: Tensor, place: Tensor | None = None) -> Tensor:
        place = host_tensor(value, self.device.type == "cuda") if place is None else place
        return place.copy_(value, non_blocking=True)


def _fits(some: Pairs, pair: tuple[nn.Parameter, nn.Parameter]) -> bool:
    return sum(master.numel() for _, master in some) + pair[1].numel() <= OFFLOAD_CHUNK


class OffloadedModel:
    """A frozen model whose weights are in host memory, and on the device while it is used. Storages are released and
    allocated again under the same tensors, so that references to parameters and compiled code remain valid."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.kept: dict[int, Tensor] = {}  # the bytes of each storage
        self._offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the context the weights are on the device and may be changed."""
        for number, storage in self._storages().items():
            storage.resize_(self.kept[number].nbytes)
            _bytes_of(storage).copy_(self.kept[number])
        try:
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        before, self.kept = self.kept, {}
        for number, storage in self._storages().items():
            data = _bytes_of(storage)
            place = before.get(number)
            if place is None or place.nbytes != data.nbytes:
                place = host_tensor(data, data.is_cuda)
            self.kept[number] = place.copy_(data)
            storage.resize_(0)

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        return {p.untyped_storage()._cdata: p.untyped_storage() for p in self.model.parameters()}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]


SLAB_BYTES = 2**30  # bytes per allocation; a larger tensor gets its own
ALIGNMENT = 512
MIN_PINNED_BYTES = 2**20  # smaller tensors are pinned by torch, which shares pages between tensors
MAX_MEMORY_SHARE = 0.9  # share of the host's free memory that copies may take


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Nested dicts and lists whose tensors are copies in host memory."""

    tree: Any
    live: bool = False
    """Host memory was too small: these are the original tensors, and they must not change while they are read."""
    event: Any = None  # on a GPU, the event after the last copy
    sources: list[Tensor] = field(default_factory=list)  # the tensors being copied, kept alive until then

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        self.sources.clear()

    def block_stream(self) -> None:
        """Make later GPU work wait until everything is copied; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class HostCopier:
    def __init__(self, device: torch.device):
        self.device = device
        self.sizes: tuple[int, ...] = ()
        self.slabs: list[Tensor] = []
        self.lock = threading.Lock()
        self.stream: Any = None

    @staticmethod
    def tensor_sizes(tree: Any) -> tuple[int, ...]:
        return tuple(tensor.nbytes for tensor in _unique_tensors(tree).values())

    def reserve(self, sizes: tuple[int, ...]) -> bool:
        """Allocate the memory of copies of these sizes; False if the host has too little."""
        with self.lock:
            if sizes == self.sizes:
                return True
            self.sizes, self.slabs = (), []  # release the old memory first
            wanted, _ = _layout(sizes)
            if sum(wanted) > MAX_MEMORY_SHARE * free_memory():
                return False
            self.slabs = [
                _pinned(size) if self.device.type == "cuda" else _prefault(np.empty(size, dtype=np.uint8))
                for size in wanted
            ]
            self.sizes = sizes
            return True

    def copy(self, tree: Any) -> HostCopy:
        """Copy all tensors of `tree`; other values are copied with `deepcopy`. Tensors that share memory stay
        shared."""
        found = _unique_tensors(tree)
        if not self.reserve(tuple(tensor.nbytes for tensor in found.values())):
            log.warning("host memory is too small for a copy of the checkpoint: training waits while it is written")
            return HostCopy(_map_tensors(tree, lambda tensor: tensor.detach()), live=True)
        _, places = _layout(self.sizes)
        copies = {
            key: _part(self.slabs[slab], start, tensor)
            for (key, tensor), (slab, start) in zip(found.items(), places, strict=True)
        }
        event = self._copy([(copies[key], tensor) for key, tensor in found.items()])
        made = _map_tensors(tree, lambda tensor: copies[_key(tensor)])
        return HostCopy(made, event=event, sources=list(found.values()) if event is not None else [])

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
    """Free bytes of the host, or of the container if that has a lower limit."""
    free = _read_counters("/proc/meminfo").get("MemAvailable:", 2**63 // 1024) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = _read_counters(group / "memory.stat").get("inactive_file", 0)
        return free if limit == "max" else min(free, int(limit) - int(used) + cached)
    except (OSError, ValueError):
        return free


def _read_counters(path: str | Path) -> dict[str, int]:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdigit()}


def _key(tensor: Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _unique_tensors(tree: Any) -> dict[tuple[Any, ...], Tensor]:
    found: dict[tuple[Any, ...], Tensor] = {}
    _map_tensors(tree, lambda tensor: found.setdefault(_key(tensor), tensor.detach()))
    return found


def _map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, change) for value in tree)
    return copy.deepcopy(tree)


def _layout(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of the slabs, and slab and offset of each tensor."""
    slabs: list[int] = []
    places: list[tuple[int, int]] = []
    for size in sizes:
        if not slabs or slabs[-1] + size > SLAB_BYTES:
            slabs.append(0)
        places.append((len(slabs) - 1, slabs[-1]))
        slabs[-1] += -(-size // ALIGNMENT) * ALIGNMENT
    return slabs, places


def _part(slab: Tensor, start: int, like: Tensor) -> Tensor:
    """A part of a slab as a tensor with its own storage: writers save the whole storage of a tensor."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    own = torch.from_numpy(slab.numpy()[start : start + like.nbytes])
    return own.view(like.dtype).view(like.shape)


def host_tensor(like: Tensor, pinned: bool) -> Tensor:
    if not pinned or like.nbytes < MIN_PINNED_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
    return _pinned(like.nbytes).view(like.dtype).view(like.shape)


def _prefault(array: NDArray[np.uint8]) -> Tensor:
    """Fault in the pages now, in many threads, instead of at the first copy."""
    return torch.from_numpy(array).zero_()


def _pinned(size: int) -> Tensor:
    """Pinned memory of exactly this size; torch would round up to a power of two. Pages are faulted in before they are
    pinned, because the driver would do it under its lock."""
    array = np.empty(size, dtype=np.uint8)
    made = _prefault(array)
    runtime: Any = torch.cuda.cudart()
    error_code = int(runtime.cudaHostRegister(made.data_ptr(), size, 0)) if size else 0
    if error_code:
        with suppress(RuntimeError):  # clear the error, which the next kernel launch would report
            torch.zeros(1, device="cuda")
        log.warning("host memory cannot be pinned (CUDA error %d): copies from the GPU are slower", error_code)
    elif size:
        weakref.finalize(array, runtime.cudaHostUnregister, made.data_ptr()).atexit = False
    return made
