"""Running steps on a CPU with `sampling_step.c`: one call a thread for the whole step, from tokens to tokens.

It works on a copy of the weights, laid out for its products, as they were when it was last told that they had changed:
the learner may write into its own meanwhile. Adapters are added into that copy. Nothing goes through torch, so no
thread waits in its pool, and a step costs few microseconds of Python. What it cannot run (`why_not`) is run with torch
(`executor.py`).
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, addressof, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.engines.cache import host_memory
from arborl.engines.draw_tokens import Top, draw
from arborl.engines.executor import Ready, Sampled, Step, Stored
from arborl.engines.forward import Forward, Product
from arborl.engines.thread_team import ThreadTeam
from arborl.errors import EngineError
from arborl.models.adapted import Adapted
from arborl.models.attention import layout, logit_cap
from arborl.models.compiled import compiled
from arborl.models.joined import Joined
from arborl.models.lean import epsilon

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("sampling_step.c")
SHARE = 0.1
"""Of the machine's memory that the copy of the weights may take."""
TOKENS_A_THREAD = 4
"""With fewer, another thread costs more than it brings."""
ROOM = 32
"""Pages hold a multiple of so many tokens: as many as vectors may reach."""

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
    """As `Step` in the C source."""

    _fields_ = [
        *((name, c_int64) for name in ("layers", "width", "inner", "heads", "key_heads", "size", "vocabulary")),
        *((name, c_float) for name in ("epsilon", "scale")),
        *((name, c_void_p) for name in ("layer", "embedding", "last", "head", "head_bias", "cos", "sin")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("pages", "page", "room", "padded")),
        *((name, c_int64) for name in ("tokens", "table_width", "sampled")),
        *((name, c_void_p) for name in ("token", "position", "row", "table", "x", "q")),
        *((name, c_void_p) for name in ("after", "temperature", "uniform", "logits", "drawn", "logprob")),
        *((name, c_int64) for name in ("parts", "apart")),
        *((name, c_void_p) for name in ("bounds", "scratch")),
        ("scratch_each", c_int64),
        *((name, c_int) for name in ("arrived", "round")),
    ]


def library() -> ctypes.CDLL | None:
    """The compiled step, where there is one."""
    found = compiled(SOURCE)
    if found is not None:
        found.scratch_floats.restype = found.panel.restype = found.lanes.restype = found.step_bytes.restype = c_int64
        found.scratch_floats.argtypes = [POINTER(_Step), c_int64]
        found.run.argtypes = [POINTER(_Step), c_int64]
        found.pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
        found.run.restype = found.pack.restype = None
        if found.step_bytes() != ctypes.sizeof(_Step):
            log.warning("%s is not used: it is laid out otherwise here", SOURCE.name)
            return None
    return found


def why_not(forward: Forward, context: int) -> str | None:
    """Why the compiled step cannot run this model; None where it can: float32, Llama or a relative with plain
    attention and SiLU, and weights small enough to be kept twice."""
    model = forward.model
    if not forward.fused:
        return forward.why_not() or "its layers are run by the library's code"
    base, head, blocks = model.base_model, model.get_output_embeddings(), forward.blocks
    norms = [base.norm, *(n for b in blocks for n in (b.before, b.between, b.q_norm, b.k_norm) if n is not None)]
    products = [p for b in blocks for p in (b.qkv, b.out, b.gate_up, b.down)]
    needed = {
        "it is not in float32": all(p.dtype == torch.float32 for p in model.parameters()),
        "its attention has a window or capped scores": layout(model).plain(context),
        "its embedding or its head is of an unknown kind": type(base.embed_tokens) is nn.Embedding
        and type(head) is nn.Linear
        and logit_cap(model) is None,
        "its activation is not SiLU": model.config.hidden_act in ("silu", "swish"),
        "its norms or the scales of its attention differ from layer to layer": len({epsilon(n) for n in norms}) == 1
        and len({block.scale for block in blocks}) == 1,
        "the size of its heads is odd": layout(model).size % 2 == 0,
        "its linear layers are of an unknown kind": all(effective(product) is not None for product in products),
        f"a second copy of its weights would take more than {SHARE:.0%} of the memory": sum(
            p.nbytes for p in model.parameters()
        )
        <= SHARE * host_memory(),
        "there is no C compiler (cc, gcc or clang) that can compile it": library() is not None,
    }
    return next((reason for reason, met in needed.items() if not met), None)


@torch.no_grad()
def effective(product: Product) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a product, adapters added in; None where it is of no known form."""
    if isinstance(product, Joined):
        return None if product.weight is None else (product.weight, product.bias)
    if isinstance(product, Adapted):
        own, first = product.weight[: product.width], product.weight[product.width :]
        return own + product.second.T @ first, None if product.bias is None else product.bias[: product.width]
    return (product.weight, product.bias) if type(product) is nn.Linear else None


class CpuCache(Stored):
    """Keys `[layers, pages, K, D, room]`, values `[layers, pages, K, room, D]` whose last dimension is filled up to
    whole vectors: as the compiled step wants them. K key heads, D head size."""

    def __init__(self, model: PreTrainedModel, pages: int, size: int, lanes: int):
        found = layout(model)
        self.pages, self.size, self.room = pages, size, -(-size // ROOM) * ROOM
        self.padded = -(-found.size // lanes) * lanes
        shape = (found.layers, pages, found.key_heads)
        self.keys: Floats = np.zeros((*shape, found.size, self.room), dtype=np.float32)
        self.values: Floats = np.zeros((*shape, self.room, self.padded), dtype=np.float32)

    def copy(self, source: int, target: int, count: int) -> None:
        """Give page `target` the first `count` tokens of `source`."""
        self.keys[:, target, ..., :count] = self.keys[:, source, ..., :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]

    def clear(self, pages: int | None = None) -> None:
        """Zeros in the first `pages` pages again, or in all."""
        self.keys[:, :pages] = 0
        self.values[:, :pages] = 0


class CpuExecutor:
    """Steps by the compiled code; for models that `why_not` has nothing against."""

    ahead = False
    own_weights = True
    many = 4096

    def __init__(self, forward: Forward, pages: int, page_size: int, context: int):
        found = library()
        assert found is not None
        self.library, self.forward, self.model = found, forward, forward.model
        self.cache = CpuCache(self.model, pages, page_size, int(found.lanes()))
        self.context = context
        self.packed: dict[Any, Floats] = {}
        self.held: list[Any] = []
        """What the step points to and nobody else may hold."""
        self.taken = False
        self.threads = ThreadTeam("sampling")
        self.scratch: Floats = np.zeros((0, 0), dtype=np.float32)
        self.between: Floats = np.zeros(0, dtype=np.float32)
        self.step = self._described()

    def at_once(self, tokens: int) -> int:
        return self.many

    def weights_changed(self) -> None:
        self.forward.refresh()
        self._take_weights()  # now: the learner may soon be at them again

    def warm(self, truncates: bool) -> None:
        """Lay the weights out, if nobody has yet."""
        if not self.taken:
            self._take_weights()

    def launch(self, step: Step) -> Sampled:
        draws, count = step.draws, len(step.sampled)
        drawn, logprob, logits = self.run_step(step, draws.apart)
        top: Top | None = None
        if logits is not None:
            rows = np.arange(count) if draws.top else np.flatnonzero(draws.truncated_B)
            token_B, logprob_B, top = draw(torch.from_numpy(logits[rows]), draws.some(rows))
            cut = draws.truncated_B[rows]  # no token depends on whether another request wants the likeliest ones
            drawn[rows[cut]], logprob[rows[cut]] = token_B.numpy()[cut], logprob_B.double().numpy()[cut]
        return Ready(drawn, logprob, top)

    def run_step(self, step: Step, with_logits: bool) -> tuple[NDArray[np.int64], NDArray[np.float64], Floats | None]:
        """Tokens and log-probabilities of the sampled rows, and their logits."""
        self.warm(False)
        reading, draws = step.reading, step.draws
        counts = reading.counts
        tokens, count = np.ascontiguousarray(step.tokens, dtype=np.int32), len(step.sampled)
        ends = np.cumsum(counts)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        bounds = self._parts(ends)
        drawn, logprob = np.zeros(count, np.int64), np.zeros(count)
        vocabulary = int(self.step.vocabulary)
        logits = np.zeros((count, vocabulary), np.float32) if with_logits else None
        s, parts = self.step, len(bounds) - 1
        s.tokens, s.table_width, s.sampled = len(tokens), reading.tables.shape[1], count
        s.parts, s.apart = parts, bool(np.isin(bounds[1:-1], ends).all())
        s.arrived = s.round = 0
        columns: dict[str, NDArray[Any] | None] = {
            "token": tokens, "position": reading.positions.astype(np.int32), "row": row, "table": reading.tables,
            "after": ends[step.sampled] - 1, "temperature": draws.temperature_B, "uniform": draws.uniform_B,
            "logits": logits, "drawn": drawn, "logprob": logprob, "bounds": bounds,
        }  # fmt: skip
        held = [self._point(name, column) for name, column in columns.items()]
        self._make_room(len(tokens), parts)
        self.threads.run(lambda part: self.library.run(s, part), parts)
        del held
        return drawn, logprob, logits

    # ------------------------------------------------------------------------------------------ threads

    def _parts(self, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each thread's tokens begin and end: at the ends of rows, where that costs little balance."""
        tokens = int(ends[-1])
        parts = self.threads.start(max(1, min(torch.get_num_threads(), tokens // TOKENS_A_THREAD)))
        cuts = np.arange(parts + 1) * tokens // parts
        near = np.concatenate([[0], ends])
        nearest = near[np.abs(near[None] - cuts[:, None]).argmin(1)]
        return np.where(np.abs(nearest - cuts) * 16 * parts <= tokens, nearest, cuts).astype(np.int64)

    def _make_room(self, tokens: int, parts: int) -> None:
        s = self.step
        each = int(self.library.scratch_floats(s, self.context)) + 64
        if self.scratch.shape[0] < parts:
            self.scratch = np.zeros((parts, each), dtype=np.float32)
        s.scratch_each = each
        self._point("scratch", self.scratch)
        needed = tokens * int(s.width + s.heads * s.size)
        if len(self.between) < needed:
            self.between = np.zeros(needed, dtype=np.float32)
        s.x = self.between.ctypes.data
        s.q = s.x + tokens * int(s.width) * 4

    # ------------------------------------------------------------------------------------------ the model

    def _point(self, name: str, column: NDArray[Any] | None) -> NDArray[Any] | None:
        column = None if column is None else np.ascontiguousarray(column)
        setattr(self.step, name, None if column is None else column.ctypes.data)
        return column

    def _described(self) -> _Step:
        found, cache, block = layout(self.model), self.cache, self.forward.blocks[0]
        base = self.model.base_model
        s = _Step()
        s.layers, s.heads, s.key_heads, s.size = found.layers, found.heads, found.key_heads, found.size
        s.vocabulary, s.width = self.model.get_output_embeddings().weight.shape
        s.inner = base.layers[0].mlp.config.intermediate_size
        s.epsilon, s.scale = epsilon(base.norm), block.scale
        s.keys, s.values = cache.keys.ctypes.data, cache.values.ctypes.data
        s.pages, s.page, s.room, s.padded = cache.pages, cache.size, cache.room, cache.padded
        return s

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Lay the weights out as they are now."""
        s, forward, base = self.step, self.forward, self.model.base_model
        assert forward.rope is not None
        self.held = []
        layers = (_Layer * len(forward.blocks))()
        for block, layer in zip(forward.blocks, layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                found = effective(getattr(block, name))
                if found is None:
                    raise EngineError(f"layer {block.number}: {name} is no longer of a form that can be laid out")
                setattr(layer, name, self._pack((block.number, name), found[0]))
                setattr(layer, f"{name}_bias", self._hold(found[1]))
            for name in ("before", "between", "q_norm", "k_norm"):
                module = getattr(block, name)
                setattr(layer, name, None if module is None else self._hold(module.weight))
        head = self.model.get_output_embeddings()
        s.layer, s.head, s.head_bias = addressof(layers), self._pack("head", head.weight), self._hold(head.bias)
        s.embedding, s.last = self._hold(base.embed_tokens.weight), self._hold(base.norm.weight)
        s.cos, s.sin = self._hold(forward.rope.cos), self._hold(forward.rope.sin)
        self.held.append(layers)
        self.taken = True

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.held.append(tensor)
        return tensor.data_ptr()

    def _pack(self, name: Any, weight: Tensor) -> int:
        outs, depth = weight.shape
        panel = int(self.library.panel())
        if name not in self.packed:
            self.packed[name] = np.zeros(-(-outs // panel) * panel * depth, dtype=np.float32)
        weight = weight.detach().contiguous()
        self.library.pack(weight.data_ptr(), self.packed[name].ctypes.data, outs, depth)
        return self.packed[name].ctypes.data
