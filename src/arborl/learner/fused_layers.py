"""The kernels of `layer_kernels.py` as operations that torch differentiates: layers as they are, without its compiler.

Norms are not among them: torch has a fused one.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel

from arborl.models.attention import raw_read_out
from arborl.models.lean import Ops, gated, is_lean
from arborl.models.sampling import Shape

SILU = ("SiLU", "SiLUActivation")


def fusing_fits(model: PreTrainedModel) -> bool:
    """Whether these can take part in running this model here."""
    on_gpu = model.device.type == "cuda" and find_spec("triton") is not None
    return on_gpu and model.dtype != torch.float64 and is_lean(model)


class _Turn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from arborl.learner import layer_kernels

        ctx.save_for_backward(cos, sin)
        return layer_kernels.turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from arborl.learner import layer_kernels

        cos, sin = ctx.saved_tensors
        return layer_kernels.turn(grads[0], cos, sin, back=True), None, None


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from arborl.learner import layer_kernels

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return layer_kernels.gate(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from arborl.learner import layer_kernels

        gate, up = ctx.saved_tensors
        return layer_kernels.gate_backward(gate, up, grads[0].contiguous())


class _Say(Function):
    @staticmethod
    def forward(ctx: Any, logit_MV: Tensor, token_M: Tensor, heat_M: Tensor) -> tuple[Tensor, Tensor]:
        from arborl.learner import layer_kernels

        logit_MV, token_M = logit_MV.contiguous(), token_M.contiguous()
        logprob, entropy, lse = layer_kernels.say(logit_MV, token_M, heat_M)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logit_MV, token_M, heat_M, entropy, lse)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from arborl.learner import layer_kernels

        logit_MV, token_M, heat_M, entropy_M, lse_M = ctx.saved_tensors
        to_logprob, to_entropy = (None if grad is None else grad.contiguous() for grad in grads)
        if to_logprob is None:
            to_logprob = torch.zeros_like(lse_M)
        known = (logit_MV, token_M, heat_M, entropy_M, lse_M)
        return layer_kernels.say_backward(*known, to_logprob, to_entropy), None, None


def _gated(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return _Gate.apply(gate, up) if type(act).__name__ in SILU else gated(act, gate, up)


FUSED = Ops(_Turn.apply, _gated)


def fused_head(head: Any, hidden_ME: Tensor, token_M: Tensor, shape: Shape, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, for a shape that keeps the whole vocabulary, of logits that nothing caps."""
    heat_M = shape.temperature_B.float().expand(len(token_M)).contiguous()
    logprob_M, entropy_M = _Say.apply(raw_read_out(head, None, hidden_ME), token_M, heat_M)
    return logprob_M, entropy_M if entropy else entropy_M.detach()
