"""The fused kernels between a layer's products, and behind the last, give what torch gives, in value and gradient."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import Function
from torch.nn.functional import rms_norm, silu
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arborl.learner.attention import fused_layers
from arborl.learner.attention.fused_layers import FUSED_OPS, fused_head
from arborl.learner.attention.kernel_attention import TritonTreeAttention
from arborl.learner.attention.path_selection import DENSE, ExecutionPath, path_error, sample_micro_batch
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.attention.tree_plan import Tile, Tiles
from arborl.learner.core.memory_plan import model_sizes
from arborl.learner.core.tree_forward import _unfused_head, compute_outputs
from arborl.models.attention import ATTENTION_NAME, attention_layout
from arborl.models.fast_forward import prepare, rotated_heads, run_layer, signed_sin
from arborl.models.sampling import DistributionParams
from arborl.types import Sampling

pytest.importorskip("triton")

WIDE = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter has no arithmetic for it


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """Against float64."""
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((ours.double() - theirs).norm()) <= bound * float(theirs.norm())


def both(fused, plain, given: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Value and gradients of a function of these; the plain one in float64."""
    results = []
    for function, kind in ((fused, dtype), (plain, torch.float64)):
        inputs = [x.detach().to(kind).requires_grad_() for x in given]
        outs = function(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        slopes = [torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64) for out in outs]
        total = sum((out.flatten() * slope.to(out.dtype)).sum() for out, slope in zip(outs, slopes, strict=True))
        results.append([*(out.detach() for out in outs), *torch.autograd.grad(total, inputs)])
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, dtype)


class Kernels(Function):
    """A kernel and its backward kernel, on a CPU too: there `FUSED_OPS` has compiled code instead."""

    @staticmethod
    def forward(ctx, run, run_back, *given):
        outs, ctx.kept = run(*given)
        ctx.run_back = run_back
        return outs

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.run_back(ctx.kept, *grads)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize(("count", "width"), [(1, 12), (7, 40), (40, 576), (1100, 64)])
def test_norms(device, dtype, count, width, monkeypatch):
    from arborl.learner.attention import layer_kernels

    monkeypatch.setattr(layer_kernels, "REDUCING_PROGRAMS", 6)
    torch.manual_seed(0)
    x, weight = torch.randn(count, width, device=device).to(dtype), torch.randn(width, device=device).to(dtype)

    def run(x, w):
        out, each = layer_kernels.norm(x, w, 1e-5)
        return out, (x, w, each)

    def back(kept, grad):
        return layer_kernels.norm_backward(*kept, grad.contiguous())

    both(lambda x, w: Kernels.apply(run, back, x, w), lambda x, w: rms_norm(x, (width,), w, 1e-5), [x, weight], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(3, 1, 8), (4, 2, 40), (2, 2, 64), (14, 2, 64)])
def test_heads_are_normed_and_rotated(device, dtype, normed, heads, key_heads, size, monkeypatch):
    from arborl.learner.attention import layer_kernels

    monkeypatch.setattr(layer_kernels, "REDUCING_PROGRAMS", 3)
    torch.manual_seed(0)
    qkv = torch.randn(7, heads + 2 * key_heads, size, device=device).to(dtype)
    weights = [torch.randn(size, device=device).to(dtype) for _ in range(2)]
    angle = torch.randn(7, 1, size // 2, device=device)
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(dtype), signed_sin(torch.cat([angle.sin()] * 2, -1)).to(dtype)

    def run(qkv, *weights):
        q, k = weights if weights else (None, None)
        wider = torch.cat([qkv, qkv], 1)[:, : qkv.shape[1]]  # rows of a wider tensor
        return layer_kernels.rotated_heads(wider, q, k, cos, sin, key_heads, 1e-6), (wider, q, k)

    def back(kept, *grads):
        to_qkv, to_weights = layer_kernels.rotated_heads_backward(*grads, *kept, cos, sin, 1e-6)
        return to_qkv, *(to_weights if kept[1] is not None else ())

    def plain(qkv, *weights):
        norms = tuple(SimpleNamespace(weight=w, eps=1e-6) for w in weights) if weights else None
        return rotated_heads(qkv, norms, key_heads, cos.double(), sin.double())

    both(lambda *given: Kernels.apply(run, back, *given), plain, [qkv, *(weights if normed else [])], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("width", [12, 1500])
def test_gates(device, dtype, width):
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(5, width, device=device).to(dtype) for _ in range(2))
    both(lambda g, u: FUSED_OPS.gated(torch.nn.SiLU(), g, u), lambda g, u: silu(g) * u, [gate, up], dtype)


def test_another_activation_than_the_kernels_own_is_left_to_torch(device):
    gate, up = torch.randn(2, 5, 12, device=device)
    torch.testing.assert_close(FUSED_OPS.gated(torch.nn.Tanh(), gate, up), gate.tanh() * up)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("vocabulary", [50, 9000])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("heats", [(0.7,), (0.5, 1.0, 2.0, 1.0, 0.3)], ids=str)
def test_logprob_and_entropy_of_terms_at_any_temperature(device, dtype, vocabulary, entropy, heats):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, device=device).to(dtype), torch.randn(vocabulary, 8, device=device).to(dtype)
    token = torch.randint(0, vocabulary, (5,), device=device)
    shape = DistributionParams.of([Sampling(temperature=heat) for heat in heats], device)

    def fused(x, w):
        logprob, spread = fused_head(lambda h: h @ w.T, x, token, shape, entropy)
        return (logprob, spread) if entropy else logprob

    def plain(x, w):
        logprob, spread = _unfused_head(lambda h: h @ w.T, None, x, token, shape, entropy)
        return (logprob, spread) if entropy else logprob

    both(fused, plain, [hidden, weight], dtype)


def test_logits_far_apart_and_tokens_that_are_impossible(device):
    logit = torch.tensor([[1e4, -1e4, 0.0], [float("-inf"), 0.0, 0.0]], device=device)
    token, shape = torch.tensor([1, 2], device=device), DistributionParams.of([Sampling()], device)
    logprob, spread = fused_head(lambda x: x, logit, token, shape, True)
    torch.testing.assert_close(logprob.cpu(), torch.tensor([-2e4, -0.6931472]))
    torch.testing.assert_close(spread.cpu(), torch.tensor([0.0, 0.6931472]))


def test_a_model_runs_through_them_as_without(device, tiny_llama, caplog):
    model = copy.deepcopy(tiny_llama).float().to(device)
    assert path_error(model, ExecutionPath("causal", fused=True)) is None
    assert path_error(model, ExecutionPath("blocks", fused=True)) is None


@pytest.mark.parametrize("how", [Sampling(temperature=0.8), Sampling(top_k=5)], ids=["whole", "truncated"])
def test_whatever_was_sampled_from(device, tiny_llama, how):
    model = copy.deepcopy(tiny_llama).float().to(device)
    batch = sample_micro_batch(model, False, 12)
    ours, theirs = (
        compute_outputs(model, batch, how, way) for way in (ExecutionPath("blocks", fused=True, recompute=True), DENSE)
    )
    torch.testing.assert_close(ours.logprob_M, theirs.logprob_M, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy_M, theirs.entropy_M, rtol=1e-4, atol=1e-4)


KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
}


def layer_of(kind, device):
    """A layer of a model, its inputs over a small tree, and attention by the kernels and by dense masks."""
    torch.manual_seed(0)
    cls, config, more = KINDS[kind]
    sizes = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "head_dim": 16}
    model = cls(config(**sizes | {"num_attention_heads": 6, "num_key_value_heads": 2} | more)).eval().to(device)
    model.set_attn_implementation(ATTENTION_NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    layer = model.base_model.layers[1]
    prepare(layer)
    batch = sample_micro_batch(model, False, 20)
    x = torch.randn(len(batch), 48, device=device, requires_grad=True)
    cos, sin = model.base_model.rotary_emb(x[None], torch.as_tensor(batch.depth, device=device)[None])
    kernel = TritonTreeAttention(batch, device)
    kernel.prepare(attention_layout(model).windows, 2, 16, torch.float32, Tiles(*[Tile(16, 16, 4, 1)] * 3))
    return model, layer, x, cos[0, :, None], signed_sin(sin[0, :, None]), kernel, DenseAttention(batch, device)


def gpu_functions(monkeypatch):
    """The functions of a layer on a GPU, on a CPU too."""
    from arborl.learner.attention import layer_kernels

    def heads(qkv, norms, key_heads, cos, sin):
        weights = (None, None) if norms is None else tuple(norm.weight for norm in norms)
        return fused_layers._RotatedHeads.apply(qkv, *weights, cos, sin, key_heads, 1e-6)

    monkeypatch.setattr(fused_layers, "_kernels", lambda x: layer_kernels)
    return FUSED_OPS._replace(heads=heads)


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_of_a_layer_are_those_of_torchs_operations(device, kind, monkeypatch):
    ops = gpu_functions(monkeypatch)
    _, layer, x, cos, sin, kernel, dense = layer_of(kind, device)
    results = []
    for attend, functions in ((kernel, ops), (dense, None)):
        out = run_layer(layer, x, cos, sin, attend, ops=functions)
        slope = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
        results.append([out.detach(), *torch.autograd.grad((out * slope).sum(), (x, *layer.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).norm()) <= 2e-5 * float(theirs.norm()) + 1e-6


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_keeps_as_many_bytes_for_its_backward_pass_as_the_memory_forecast_counts(device, kind, monkeypatch):
    ops, kept = gpu_functions(monkeypatch), {}
    model, layer, x, cos, sin, attend, _ = layer_of(kind, device)
    not_counted = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), cos, sin, attend.plans[None][0])
    }

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_layer(layer, x, cos, sin, attend, ops=ops)
    bytes_per_token = sum(size for address, size in kept.items() if address not in not_counted) / len(x)
    small = 4 * (model.config.num_attention_heads + 2)  # per token: sums of attention, scales of two norms
    assert bytes_per_token - small == model_sizes(model).layer(uses_fused_layers=True)
