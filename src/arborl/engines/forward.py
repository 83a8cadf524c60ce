"""The forward pass for sampling: Llama and its relatives in few operations, over the model's own weights.

Layers that read the same input run as one product (`models/joined.py`), under adapters as two (`models/adapted.py`).
What is left between the products is done by `Ops`: with torch on a CPU, with fused kernels on a GPU. A model of another
kind, or one for which `executor_check.py` finds other numbers, is run by the library's own code.

N tokens, H query heads, K key heads, D head size, E model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.models.adapted import Adapted, product
from arborl.models.attention import Attend, Bounds, layout
from arborl.models.joined import Joined
from arborl.models.lean import GATE_UP, KINDS, QKV, bounds_of, norm, signed, turn

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
    activation: nn.Module
    down: Product
    after: nn.Module
    """The norm of what comes out: the next layer's first, or the model's last."""
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
        if self.why_not() is None:
            self._join()

    @property
    def fused(self) -> bool:
        """Whether the model is run by this code and not by the library's."""
        return self.rope is not None

    def leave_to_library(self) -> None:
        """Have the library's code run this model."""
        self.blocks, self.rope = [], None

    def __call__(self, tokens: Tensor, ops: Ops) -> Tensor:
        """The last layer's output for each token, `[N, E]`."""
        x_NE = self.model.base_model.embed_tokens(tokens)
        h_NE = ops.norm(x_NE, self.blocks[0].before)
        for block in self.blocks:
            x_NE, h_NE = self.layer(block, x_NE, h_NE, ops)
        return h_NE

    def layer(self, block: Block, x_NE: Tensor, h_NE: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """One layer's output, and its norm as the next layer (or the head) wants it; `h_NE` is the norm of its input.
        The input may be overwritten."""
        assert self.rope is not None
        out_NE = block.out(ops.attention(block, block.qkv(h_NE), self.rope))
        x_NE, h_NE = ops.add_norm(x_NE, out_NE, block.between)
        out_NE = block.down(ops.gate(block.gate_up(h_NE), block.activation))
        return ops.add_norm(x_NE, out_NE, block.after)

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

    def why_not(self) -> str | None:
        """Why this code cannot run such a model; None where it can."""
        kind = type(self.model).__name__
        if kind not in KINDS:
            return f"{kind} is not one of {', '.join(KINDS)}"
        rope = (getattr(self.model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        return None if rope in STATIC_ROPE else f"its position embedding ({rope}) depends on the length of a sequence"

    def _join(self) -> None:
        self.blocks = []
        base = self.model.base_model
        after = [*(layer.input_layernorm for layer in base.layers[1:]), base.norm]
        for number, (layer, follower) in enumerate(zip(base.layers, after, strict=True)):
            a, mlp = layer.self_attn, layer.mlp
            self.blocks.append(
                Block(
                    number, layer.input_layernorm, product(a, *QKV), getattr(a, "q_norm", None),
                    getattr(a, "k_norm", None), product(a, "o_proj"), layer.post_attention_layernorm,
                    product(mlp, *GATE_UP), mlp.act_fn, product(mlp, "down_proj"), follower, float(a.scaling),
                    bounds_of(a),
                )
            )  # fmt: skip
        self.rope = Rope.of(self.model, self.length)


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
