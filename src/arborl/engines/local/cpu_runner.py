"""Steps on a CPU by `sampling_step.c`: one call per thread for the whole step, from tokens to tokens. The threads
divide either the tokens of a step or the columns of its products (`shares_columns`); the results are equal.

The compiled step uses a packed copy of the weights with adapters merged, made by `weights_changed`, so the learner may
update its own meanwhile. Nothing runs through torch: no thread waits in its pool, and a step costs few microseconds of
Python. What it does not support (`unsupported_reason`) runs with torch (`model_runner.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, addressof, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.cores import available_cores
from arborl.engines.local.fused_forward import FusedForward, Product
from arborl.engines.local.kv_cache import host_memory
from arborl.engines.local.model_runner import CacheStorage, FinishedOutput, ModelStep, StepOutput
from arborl.engines.local.sampler import LogitEdit, redraw
from arborl.errors import EngineError
from arborl.models.attention import attention_layout, logit_cap
from arborl.models.c_library import load_c_library
from arborl.models.fast_forward import epsilon
from arborl.models.fused_linear import FusedLinear, LoraProduct
from arborl.models.sampling import packed_masks

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("sampling_step.c")
MAX_WEIGHT_SHARE = 0.1
"""Largest share of the host's memory for the packed copy of the weights."""
TOKENS_PER_THREAD, WORK_PER_THREAD = 4, 64 * 2**20
"""Of threads with their own tokens, the least tokens, and tokens times bytes of weights: with fewer, a further thread
costs more than it gains."""
COLUMN_MODE_BYTES, COLUMN_MODE_TOKENS = 64 * 2**20, 512
"""Threads share the columns of products from this size of the weights on, in steps of at most so many tokens: they then
read the weights once per step instead of once per thread."""
COLUMN_BYTES_PER_THREAD = 16 * 2**20
"""Bytes of weights per thread that shares columns: with fewer, waiting for each other costs more than it gains."""
BLOCK_ALIGNMENT = 32
"""Tokens that a block's capacity is a multiple of, so that vector loads stay inside."""

Floats = NDArray[np.float32]


class _Layer(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "gate_up", "gate_up_bias", "down", "down_bias",
            "before", "between",
        )
    ]  # fmt: skip


class _Step(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "width", "inner", "heads", "key_heads", "size", "vocabulary")),
        *((name, c_float) for name in ("epsilon", "scale")),
        *((name, c_void_p) for name in ("layer", "embedding", "last", "head", "head_bias", "cos", "sin")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("pages", "page", "room", "padded")),
        *((name, c_int64) for name in ("tokens", "table_width", "sampled")),
        *((name, c_void_p) for name in ("token", "position", "row", "table", "x", "q")),
        *((name, c_void_p) for name in ("after", "temperature", "uniform", "logits")),
        *((name, c_void_p) for name in ("allowed", "penalties", "penalized", "penalty", "drawn", "logprob")),
        *((name, c_int64) for name in ("parts", "columns", "apart")),
        *((name, c_void_p) for name in ("bounds", "scratch", "shared")),
        ("scratch_each", c_int64),
        *((name, c_int) for name in ("arrived", "round", "next")),
    ]


def library() -> ctypes.CDLL | None:
    found = load_c_library(SOURCE)
    if found is not None:
        for function in ("scratch_floats", "shared_floats", "panel", "lanes", "step_bytes"):
            getattr(found, function).restype = c_int64
        found.scratch_floats.argtypes = [POINTER(_Step), c_int64]
        found.shared_floats.argtypes = [POINTER(_Step)]
        found.run.argtypes = [POINTER(_Step), c_int64]
        found.pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
        found.run.restype = found.pack.restype = None
        if found.step_bytes() != ctypes.sizeof(_Step):
            log.warning("%s is not used: its struct layout differs on this platform", SOURCE.name)
            return None
    return found


def unsupported_reason(forward: FusedForward, context: int) -> str | None:
    """Why the compiled step cannot run this model; None if it can: Llama or a related model in float32 with plain
    attention and SiLU, small enough for a second copy of its weights."""
    model = forward.model
    if not forward.is_fused:
        return forward.unsupported_reason() or "its layers are run by the library's code"
    base, head, layers = model.base_model, model.get_output_embeddings(), forward.layers
    norms = [base.norm, *(n for x in layers for n in (x.input_norm, x.mlp_norm, x.q_norm, x.k_norm) if n is not None)]
    products = [p for x in layers for p in (x.qkv, x.out, x.gate_up, x.down)]
    weight_bytes = sum(p.nbytes for p in model.parameters())
    requirements = {
        "it is not in float32": all(p.dtype == torch.float32 for p in model.parameters()),
        "its attention has a window or capped scores": attention_layout(model).is_plain(context),
        "its embedding or its head is of an unknown kind": type(base.embed_tokens) is nn.Embedding
        and type(head) is nn.Linear
        and logit_cap(model) is None,
        "its activation is not SiLU": model.config.hidden_act in ("silu", "swish"),
        "its norms or the scales of its attention differ from layer to layer": len({epsilon(n) for n in norms}) == 1
        and len({layer.scale for layer in layers}) == 1,
        "the size of its heads is odd": attention_layout(model).size % 2 == 0,
        "its linear layers are of an unknown kind": all(merged_weight(product) is not None for product in products),
        f"a second copy of its weights would take more than {MAX_WEIGHT_SHARE:.0%} of the memory": weight_bytes
        <= MAX_WEIGHT_SHARE * host_memory(),
        "there is no C compiler (cc, gcc or clang) that can compile it": library() is not None,
    }
    return next((reason for reason, met in requirements.items() if not met), None)


@torch.no_grad()
def merged_weight(product: Product) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a product with its adapter merged; None for an unknown kind."""
    if isinstance(product, FusedLinear):
        return None if product.weight is None else (product.weight, product.bias)
    if isinstance(product, LoraProduct):
        base, first = product.weight[: product.width], product.weight[product.width :]
        return base + product.second.T @ first, None if product.bias is None else product.bias[: product.width]
    return (product.weight, product.bias) if type(product) is nn.Linear else None


class CpuKVCache(CacheStorage):
    """Keys `[layers, blocks, K, D, capacity]` and values `[layers, blocks, K, capacity, D]`, D padded to whole vectors:
    the layout of the compiled step. K key heads, D head size."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int, lanes: int):
        layout = attention_layout(model)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.capacity = -(-block_size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        self.padded = -(-layout.size // lanes) * lanes
        shape = (layout.layers, num_blocks, layout.key_heads)
        self.keys: Floats = np.zeros((*shape, layout.size, self.capacity), dtype=np.float32)
        self.values: Floats = np.zeros((*shape, self.capacity, self.padded), dtype=np.float32)

    def copy(self, source: int, target: int, count: int) -> None:
        self.keys[:, target, ..., :count] = self.keys[:, source, ..., :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]

    def clear(self, num_blocks: int | None = None) -> None:
        self.keys[:, :num_blocks] = 0
        self.values[:, :num_blocks] = 0


class CpuModelRunner:
    """Steps by the compiled code, for models without an `unsupported_reason`."""

    runs_ahead = False
    copies_weights = True
    max_tokens = 4096

    def __init__(self, forward: FusedForward, num_blocks: int, block_size: int, context: int):
        found = library()
        assert found is not None
        self.library, self.forward, self.model = found, forward, forward.model
        self.cache = CpuKVCache(self.model, num_blocks, block_size, int(found.lanes()))
        self.context = context
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        self.packed: dict[Any, Floats] = {}
        self.referenced: list[Any] = []
        self.has_weights = False
        self.threads = ThreadGroup("sampling")
        self.scratch: Floats = np.zeros((0, 0), dtype=np.float32)
        self.shared: Floats = np.zeros(0, dtype=np.float32)
        self.activations: Floats = np.zeros(0, dtype=np.float32)
        self.step = self._make_step()

    def token_budget(self, tokens: int) -> int:
        return self.max_tokens

    def weights_changed(self) -> None:
        self.forward.refresh()
        self._pack_weights()  # now: the learner may soon change them again

    def warm_up(self, truncates: bool) -> None:
        if not self.has_weights:
            self._pack_weights()

    def launch(self, step: ModelStep) -> StepOutput:
        sampling, top = step.sampling.without_edits(), None  # the compiled step edits logits
        rows = sampling.redrawn_rows()
        token, logprob, logits = self.run_step(step, rows)
        if len(rows):
            logits_RV, token_B, logprob_B = map(torch.from_numpy, (logits, token, logprob))
            top = redraw(logits_RV, rows, sampling, token_B, logprob_B)
        return FinishedOutput(token, logprob, top)

    def run_step(
        self, step: ModelStep, logit_rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], Floats]:
        """The sampled tokens, their log-probabilities, and the edited logits of some of the sampled rows."""
        self.warm_up(False)
        metadata, sampling = step.metadata, step.sampling
        counts = metadata.counts
        tokens, count = np.ascontiguousarray(step.tokens, dtype=np.int32), len(step.sampled)
        ends = np.cumsum(counts)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        columns_shared = self.shares_columns(len(tokens))
        bounds = self._partition(ends, columns_shared)
        token, logprob = np.zeros(count, np.int64), np.zeros(count)
        logits = np.zeros((len(logit_rows), int(self.step.vocabulary)), np.float32)
        s, parts = self.step, len(bounds) - 1
        s.tokens, s.table_width, s.sampled = len(tokens), metadata.tables.shape[1], count
        s.parts, s.columns, s.apart = parts, columns_shared, bool(np.isin(bounds[1:-1], ends).all())
        s.arrived = s.round = s.next = 0
        columns: dict[str, NDArray[Any] | None] = {
            "token": tokens, "position": metadata.positions.astype(np.int32), "row": row, "table": metadata.tables,
            "after": ends[step.sampled] - 1, "temperature": sampling.temperature_B, "uniform": sampling.uniform_B,
            "logits": _pointers(logit_rows, logits, count) if len(logits) else None, "drawn": token, "logprob": logprob,
            "bounds": bounds,
        }  # fmt: skip
        edits, masks = self._edit_columns(sampling.edits, count)
        referenced = [self._set_pointer(name, column) for name, column in (columns | edits).items()]
        self._allocate_scratch(len(tokens), parts)
        self.threads.run(lambda part: self.library.run(s, part), parts)
        del referenced, masks
        return token, logprob, logits

    def _edit_columns(
        self, edits: Mapping[int, LogitEdit], count: int
    ) -> tuple[dict[str, NDArray[Any] | None], NDArray[np.uint8] | None]:
        """The inputs of `edit` in the compiled step, and the masks that they point to."""
        names = ("allowed", "penalties", "penalized", "penalty")
        if not edits:
            return dict.fromkeys(names), None
        rows = sorted(edits)
        masked = [row for row in rows if edits[row].allowed is not None]
        masks = packed_masks([edits[row].allowed for row in masked], int(self.step.vocabulary))
        counts = np.zeros(count + 1, np.int64)
        counts[[row + 1 for row in rows]] = [len(edits[row].penalized) for row in rows]
        columns = (
            _pointers(np.asarray(masked, np.int64), masks, count),
            np.cumsum(counts),
            np.concatenate([edits[row].penalized for row in rows]),
            np.concatenate([edits[row].penalty for row in rows]),
        )
        return dict(zip(names, columns, strict=True)), masks

    def shares_columns(self, tokens: int) -> bool:
        """Whether the threads share the columns of products in a step of so many tokens, instead of its tokens."""
        is_large = self.weight_bytes >= COLUMN_MODE_BYTES
        return is_large and tokens <= COLUMN_MODE_TOKENS and torch.get_num_threads() > 1

    def _partition(self, ends: NDArray[np.int64], columns_shared: bool) -> NDArray[np.int64]:
        """Where the tokens of each thread begin and end: at ends of sequences where that keeps the balance."""
        tokens = int(ends[-1])
        if columns_shared:
            most = self.weight_bytes // COLUMN_BYTES_PER_THREAD
        else:
            most = min(tokens // TOKENS_PER_THREAD, tokens * self.weight_bytes // WORK_PER_THREAD)
        most = min(most, available_cores())  # the threads wait for each other
        parts = self.threads.start(max(1, min(torch.get_num_threads(), most)))
        cuts = np.arange(parts + 1) * tokens // parts
        candidates = np.concatenate([[0], ends])
        nearest = candidates[np.abs(candidates[None] - cuts[:, None]).argmin(1)]
        return np.where(np.abs(nearest - cuts) * 16 * parts <= tokens, nearest, cuts).astype(np.int64)

    def _allocate_scratch(self, tokens: int, parts: int) -> None:
        s = self.step
        each = int(self.library.scratch_floats(s, self.context)) + 64
        if self.scratch.shape[0] < parts:
            self.scratch = np.zeros((parts, each), dtype=np.float32)
        s.scratch_each = each
        self._set_pointer("scratch", self.scratch)
        needed = tokens * int(s.width + s.heads * s.size)
        if len(self.activations) < needed:
            self.activations = np.zeros(needed, dtype=np.float32)
        if s.columns and len(self.shared) < (size := int(self.library.shared_floats(s))):
            self.shared = np.zeros(size, dtype=np.float32)
        self._set_pointer("shared", self.shared)
        s.x = self.activations.ctypes.data
        s.q = s.x + tokens * int(s.width) * 4

    # ------------------------------------------------------------------------------------------ model

    def _set_pointer(self, name: str, column: NDArray[Any] | None) -> NDArray[Any] | None:
        column = None if column is None else np.ascontiguousarray(column)
        setattr(self.step, name, None if column is None else column.ctypes.data)
        return column

    def _make_step(self) -> _Step:
        layout, cache, base = attention_layout(self.model), self.cache, self.model.base_model
        s = _Step()
        s.layers, s.heads, s.key_heads, s.size = layout.layers, layout.heads, layout.key_heads, layout.size
        s.vocabulary, s.width = self.model.get_output_embeddings().weight.shape
        s.inner = base.layers[0].mlp.config.intermediate_size
        s.epsilon, s.scale = epsilon(base.norm), self.forward.layers[0].scale
        s.keys, s.values = cache.keys.ctypes.data, cache.values.ctypes.data
        s.pages, s.page, s.room, s.padded = cache.num_blocks, cache.block_size, cache.capacity, cache.padded
        return s

    @torch.no_grad()
    def _pack_weights(self) -> None:
        s, forward, base = self.step, self.forward, self.model.base_model
        assert forward.rope is not None
        self.referenced = []
        packed = (_Layer * len(forward.layers))()
        for layer, target in zip(forward.layers, packed, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                found = merged_weight(getattr(layer, name))
                if found is None:
                    raise EngineError(f"layer {layer.number}: {name} is no longer of a form that can be packed")
                setattr(target, name, self._pack((layer.number, name), found[0]))
                setattr(target, f"{name}_bias", self._copy(found[1]))
            norms = {
                "before": layer.input_norm,
                "between": layer.mlp_norm,
                "q_norm": layer.q_norm,
                "k_norm": layer.k_norm,
            }
            for name, module in norms.items():
                setattr(target, name, None if module is None else self._copy(module.weight))  # type: ignore[arg-type]
        head = self.model.get_output_embeddings()
        s.layer, s.head, s.head_bias = addressof(packed), self._pack("head", head.weight), self._copy(head.bias)
        s.embedding, s.last = self._copy(base.embed_tokens.weight), self._copy(base.norm.weight)
        s.cos, s.sin = self._copy(forward.rope.cos), self._copy(forward.rope.sin)
        self.referenced.append(packed)
        self.has_weights = True

    def _copy(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.referenced.append(tensor)
        return tensor.data_ptr()

    def _pack(self, name: Any, weight: Tensor) -> int:
        outs, depth = weight.shape
        panel = int(self.library.panel())
        if name not in self.packed:
            self.packed[name] = np.zeros(-(-outs // panel) * panel * depth, dtype=np.float32)
        weight = weight.detach().contiguous()
        self.library.pack(weight.data_ptr(), self.packed[name].ctypes.data, outs, depth)
        return self.packed[name].ctypes.data


def _pointers(rows: NDArray[np.int64], values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Addresses of the values of these rows; 0 for the other rows."""
    pointers = np.zeros(count, np.int64)
    pointers[rows] = values.ctypes.data + np.arange(len(rows)) * values.strides[0]
    return pointers


# ------------------------------------------------------------------------------------------------ threads

Part = Callable[[], None]
PartQueue = SimpleQueue[Part | None]


class ThreadGroup:
    """Threads that run the parts of one job at the same time. The parts of a compiled step wait for each other, so each
    needs a running thread: `ThreadPoolExecutor` does not guarantee that. Where the system starts fewer threads, the
    caller splits the job into fewer parts."""

    def __init__(self, name: str):
        self.name = name
        self._reset()

    def _reset(self) -> None:
        self.pid, self.size = os.getpid(), 1
        self.is_limited = False
        self.parts: PartQueue = SimpleQueue()
        weakref.finalize(self, self.parts.put, None)

    def start(self, wanted: int) -> int:
        """Start threads until there are `wanted`, including the calling one; returns their number."""
        if self.pid != os.getpid():  # a forked process has this object and none of its threads
            self._reset()
        while self.size < wanted and not self.is_limited:
            thread = threading.Thread(target=_work, args=(self.parts,), name=f"{self.name}-{self.size}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.is_limited = True
                log.warning("%d threads instead of %d: %s", self.size, wanted, error)
            else:
                self.size += 1
        return min(self.size, wanted)

    def run(self, work: Callable[[int], object], count: int) -> None:
        """Call `work` with 0 to `count - 1`, each in its own thread, 0 in this one. Raises the first error of
        `work`."""
        if count > self.size:
            raise ValueError(f"{count} parts and {self.size} threads: call start({count}) first and use its result")
        outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

        def part(number: int) -> Part:
            return lambda: outcomes.put(_error_of(work, number))

        for number in range(1, count):
            self.parts.put(part(number))
        try:
            work(0)
        finally:  # the other threads use memory that the caller is about to free
            errors = [outcomes.get() for _ in range(1, count)]
        for error in errors:
            if error is not None:
                raise error


def _error_of(work: Callable[[int], object], number: int) -> BaseException | None:
    try:
        work(number)
    except BaseException as error:
        return error
    return None


def _work(parts: PartQueue) -> None:
    while (part := parts.get()) is not None:
        part()
        del part  # it references objects of the caller
    parts.put(None)  # for the next thread
