"""Forward pass for sampling: Llama and related models in few operations, over the model's own weights.

Projections of the same input run as one matrix product, with LoRA as two (`models/fused_linear.py`). `LayerOps` are the
operations between the products: torch on a CPU, Triton kernels on a GPU. Other models, and models for which
`runner_selection.py` measures a mismatch, run by the library's code.

N tokens, H query heads, K key heads, D head size, E model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.models.attention import AttentionFunction, AttentionLimits, attention_layout
from arborl.models.fast_forward import FAST_MODEL_CLASSES, GATE_UP, QKV, attention_limits, norm, rotate, signed_sin
from arborl.models.fused_linear import FusedLinear, LoraProduct, make_product

Product = FusedLinear | LoraProduct | nn.Module

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    number: int
    input_norm: nn.Module
    qkv: Product
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    out: Product
    mlp_norm: nn.Module
    gate_up: Product
    activation: nn.Module
    down: Product
    output_norm: nn.Module
    """Norm of the layer's output: the next layer's input norm or the model's final norm."""
    scale: float
    limits: AttentionLimits

    @property
    def products(self) -> list[FusedLinear | LoraProduct]:
        return [p for p in (self.qkv, self.out, self.gate_up, self.down) if isinstance(p, FusedLinear | LoraProduct)]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines (`signed_sin`) of every position, `[L, D]`, in the model's precision."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, length: int) -> RotaryTable:
        positions = torch.arange(length, device=model.device)[None]
        like = torch.zeros((), dtype=model.dtype, device=model.device)
        cos, sin = (part[0] for part in model.base_model.rotary_emb(like, positions))
        return cls(cos.contiguous(), signed_sin(sin))


class LayerOps(Protocol):
    def norm(self, x: Tensor, module: nn.Module) -> Tensor: ...

    def residual_product(self, product: Product, x: Tensor) -> Tensor:
        """A product whose output goes to `add_norm`."""
        ...

    def add_norm(self, x: Tensor, y: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        """x + y and its norm."""
        ...

    def attention(self, layer: FusedLayer, qkv: Tensor, rope: RotaryTable) -> Tensor:
        """Rotate queries and keys, store keys and values in the cache, attend. `[N, H * D]`."""
        ...

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor: ...


class FusedForward:
    """A model prepared for contexts of up to `length` tokens."""

    def __init__(self, model: PreTrainedModel, length: int):
        self.model, self.length = model, length
        self.layers: list[FusedLayer] = []
        self.rope: RotaryTable | None = None
        if self.unsupported_reason() is None:
            self._fuse()

    @property
    def is_fused(self) -> bool:
        return self.rope is not None

    def __call__(self, tokens: Tensor, ops: LayerOps) -> Tensor:
        """Hidden states after the final norm, `[N, E]`."""
        x_NE = self.model.base_model.embed_tokens(tokens)
        h_NE = ops.norm(x_NE, self.layers[0].input_norm)
        for layer in self.layers:
            x_NE, h_NE = self.run_layer(layer, x_NE, h_NE, ops)
        return h_NE

    def run_layer(self, layer: FusedLayer, x_NE: Tensor, h_NE: Tensor, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """Output of a layer and its norm, from the input `x_NE` and its norm `h_NE`. May overwrite the input."""
        assert self.rope is not None
        out = ops.residual_product(layer.out, ops.attention(layer, layer.qkv(h_NE), self.rope))
        x_NE, h_NE = ops.add_norm(x_NE, out, layer.mlp_norm)
        out = ops.residual_product(layer.down, ops.gate(layer.gate_up(h_NE), layer.activation))
        return ops.add_norm(x_NE, out, layer.output_norm)

    def refresh(self) -> bool:
        """Read changed adapters. True if weights moved and were fused again: recorded CUDA graphs are then invalid."""
        products = [product for layer in self.layers for product in layer.products]
        if any(product.has_moved for product in products):
            self._fuse()
            return True
        for product in products:
            if isinstance(product, LoraProduct):
                product.refresh()
        return False

    def unsupported_reason(self) -> str | None:
        name = type(self.model).__name__
        if name not in FAST_MODEL_CLASSES:
            return f"{name} is not one of {', '.join(FAST_MODEL_CLASSES)}"
        rope = (getattr(self.model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        return None if rope in STATIC_ROPE else f"its rotary embedding ({rope}) depends on the length of a sequence"

    def _fuse(self) -> None:
        self.layers = []
        base = self.model.base_model
        output_norms = [*(layer.input_layernorm for layer in base.layers[1:]), base.norm]
        for number, (layer, output_norm) in enumerate(zip(base.layers, output_norms, strict=True)):
            a, mlp = layer.self_attn, layer.mlp
            self.layers.append(
                FusedLayer(
                    number, layer.input_layernorm, make_product(a, *QKV), getattr(a, "q_norm", None),
                    getattr(a, "k_norm", None), make_product(a, "o_proj"), layer.post_attention_layernorm,
                    make_product(mlp, *GATE_UP), mlp.act_fn, make_product(mlp, "down_proj"), output_norm,
                    float(a.scaling), attention_limits(a),
                )
            )  # fmt: skip
        self.rope = RotaryTable.of(self.model, self.length)


class TorchLayerOps:
    def __init__(self, model: PreTrainedModel, attend: AttentionFunction, positions: Tensor):
        layout = attention_layout(model)
        self.attend, self.positions = attend, positions
        self.rotation: tuple[Tensor, Tensor] | None = None
        self.heads, self.key_heads, self.size = layout.heads, layout.key_heads, layout.size

    def norm(self, x: Tensor, module: nn.Module) -> Tensor:
        return norm(module, x)

    def residual_product(self, product: Product, x: Tensor) -> Tensor:
        out: Tensor = product(x)
        return out

    def add_norm(self, x: Tensor, y: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, self.norm(x, module)

    def attention(self, layer: FusedLayer, qkv: Tensor, rope: RotaryTable) -> Tensor:
        qkv_NJD = qkv.view(len(qkv), -1, self.size)
        qk_NJD, v_NKD = qkv_NJD.split([self.heads + self.key_heads, self.key_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk_NJD.split([self.heads, self.key_heads], dim=1)
            qk_NJD = torch.cat([self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)], dim=1)
        if self.rotation is None:
            self.rotation = (rope.cos[self.positions, None], rope.sin[self.positions, None])
        q_NHD, k_NKD = rotate(qk_NJD, *self.rotation).split([self.heads, self.key_heads], dim=1)
        return self.attend(layer.number, q_NHD, k_NKD, v_NKD, layer.scale, layer.limits).flatten(1)

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        out: Tensor = activation(gate) * up
        return out
