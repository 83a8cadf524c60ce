"""The forward pass for sampling: Llama and its relatives in few operations, over the model's own weights.

Layers that read the same input run as one product (`models/joined.py`), under adapters as two (`models/adapted.py`).
What is left between the products is done by `Ops`: with torch on a CPU, with fused kernels on a GPU. A model of another
kind, or one whose numbers come out differently, is run by the library's own code.

N tokens, H query heads, K key heads, D head size, E model size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.models.adapted import Adapted, product
from arborl.models.attention import Attend, Bounds, layout
from arborl.models.joined import Joined
from arborl.models.lean import GATE_UP, KINDS, QKV, agrees, bounds_of, norm, signed, turn

log = logging.getLogger(__name__)

Product = Joined | Adapted | nn.Module

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Position embeddings whose angles depend on the position alone."""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer."""

    number: int
    before: nn.Module
    qkv: Product
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    out: Product
    between: nn.Module
    gate_up: Product
    down: Product
    scale: float
    bounds: Bounds

    @property
    def products(self) -> list[Joined | Adapted]:
        """Those that are bound to memory of their own."""
        return [p for p in (self.qkv, self.out, self.gate_up, self.down) if isinstance(p, Joined | Adapted)]


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines of every position, `[L, D]`, in the model's precision."""

    cos: Tensor
    sin: Tensor
    """As `signed` gives them."""

    @classmethod
    def of(cls, model: PreTrainedModel, length: int) -> Rope:
        base = model.base_model
        positions = torch.arange(length, device=model.device)[None]
        like = torch.zeros((), dtype=model.dtype, device=model.device)
        cos, sin = (part[0] for part in base.rotary_emb(like, positions))
        return cls(cos.contiguous(), signed(sin))


class Ops(Protocol):
    """What happens between the products, for the tokens of one step."""

    def norm(self, x: Tensor, module: nn.Module) -> Tensor: ...

    def add_norm(self, x: Tensor, y: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        ...

    def attention(self, block: Block, qkv: Tensor, rope: Rope) -> Tensor:
        """Turn queries and keys by their position, put keys and values into the cache, attend. `[N, H * D]`."""
        ...

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor: ...


class Forward:
    """A model prepared for sampling contexts of up to `length` tokens."""

    def __init__(self, model: PreTrainedModel, length: int):
        self.model, self.length = model, length
        self.blocks: list[Block] = []
        self.rope: Rope | None = None
        if self._known():
            self._join()
            if not agrees(model, self._check):
                self.blocks, self.rope = [], None

    @property
    def fused(self) -> bool:
        """Whether the model is run by this code and not by the library's."""
        return self.rope is not None

    def __call__(self, tokens: Tensor, ops: Ops) -> Tensor:
        """The last layer's output for each token, `[N, E]`."""
        base, rope = self.model.base_model, self.rope
        assert rope is not None
        x_NE = base.embed_tokens(tokens)
        h_NE = ops.norm(x_NE, self.blocks[0].before)
        activation = base.layers[0].mlp.act_fn
        followers = [*(block.before for block in self.blocks[1:]), base.norm]
        for block, follower in zip(self.blocks, followers, strict=True):
            out_NE = block.out(ops.attention(block, block.qkv(h_NE), rope))
            x_NE, h_NE = ops.add_norm(x_NE, out_NE, block.between)
            out_NE = block.down(ops.gate(block.gate_up(h_NE), activation))
            x_NE, h_NE = ops.add_norm(x_NE, out_NE, follower)
        return h_NE

    def refresh(self) -> bool:
        """After weights have changed: take the adapters anew. True where weights were given other memory, and were
        joined again: what was recorded before is void."""
        parts = [part for block in self.blocks for part in block.products]
        if any(part.moved for part in parts):
            self._join()
            return True
        for part in parts:
            if isinstance(part, Adapted):
                part.refresh()
        return False

    def _known(self) -> bool:
        model = self.model
        if type(model).__name__ not in KINDS:
            return False
        rope = getattr(model.config, "rope_parameters", None) or {}
        return rope.get("rope_type", "default") in STATIC_ROPE

    def _join(self) -> None:
        self.blocks = []
        for number, layer in enumerate(self.model.base_model.layers):
            a, mlp = layer.self_attn, layer.mlp
            self.blocks.append(
                Block(
                    number, layer.input_layernorm, product(a, *QKV), getattr(a, "q_norm", None),
                    getattr(a, "k_norm", None), product(a, "o_proj"), layer.post_attention_layernorm,
                    product(mlp, *GATE_UP), product(mlp, "down_proj"), float(a.scaling), bounds_of(a),
                )
            )  # fmt: skip
        self.rope = Rope.of(self.model, self.length)

    def _check(self, model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self(tokens, TorchOps(model, attend, positions))


class TorchOps:
    """The same with torch, for any device."""

    def __init__(self, model: PreTrainedModel, attend: Attend, positions: Tensor):
        shape = layout(model)
        self.attend, self.positions = attend, positions
        self.turn: tuple[Tensor, Tensor] | None = None
        self.heads, self.key_heads, self.size = shape.heads, shape.key_heads, shape.size

    def norm(self, x: Tensor, module: nn.Module) -> Tensor:
        return norm(module, x)

    def add_norm(self, x: Tensor, y: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, self.norm(x, module)

    def attention(self, block: Block, qkv: Tensor, rope: Rope) -> Tensor:
        qkv_NJD = qkv.view(len(qkv), -1, self.size)
        turning, v_NKD = qkv_NJD.split([self.heads + self.key_heads, self.key_heads], dim=1)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = turning.split([self.heads, self.key_heads], dim=1)
            turning = torch.cat([self.norm(q, block.q_norm), self.norm(k, block.k_norm)], dim=1)
        if self.turn is None:
            self.turn = (rope.cos[self.positions, None], rope.sin[self.positions, None])
        cos, sin = self.turn
        q_NHD, k_NKD = turn(turning, cos, sin).split([self.heads, self.key_heads], dim=1)
        return self.attend(block.number, q_NHD, k_NKD, v_NKD, block.scale, block.bounds).flatten(1)

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        out: Tensor = activation(gate) * up
        return out
