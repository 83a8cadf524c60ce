"""A layer as one autograd function gives what the layer gives by torch's operations, in value and gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
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

from arborl.config.run_config import LoraConfig
from arborl.learner.attention import fused_layers, path_selection
from arborl.learner.attention.kernel_attention import TritonTreeAttention
from arborl.learner.attention.path_selection import ExecutionPath, path_error, sample_micro_batch
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.attention.tree_plan import Tile, Tiles
from arborl.learner.attention.whole_layer import whole_layer
from arborl.learner.core.memory_plan import model_sizes
from arborl.models.attention import ATTENTION_NAME, CausalAttention, attention_layout
from arborl.models.fast_forward import prepare, run_layer, signed_sin
from arborl.models.lora import add_lora

pytest.importorskip("triton")

SMALL = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "gelu": (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu"}),
}


def model_of(kind: str):
    cls, config, more = KINDS[kind]
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "head_dim": 16}
    model = cls(config(**sizes | {"num_attention_heads": 6, "num_key_value_heads": 2} | more)).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            assert parameter.requires_grad, name
    return model


def inputs_of(model, device, dtype, kernel: bool):
    """A layer's input, cosines, sines, and attention over a small tree."""
    batch = sample_micro_batch(model, False, 20)
    x = torch.randn(len(batch), model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    cos, sin = model.base_model.rotary_emb(x.to(device, dtype)[None], torch.as_tensor(batch.depth, device=device)[None])
    attend = TritonTreeAttention(batch, device) if kernel else DenseAttention(batch, device)
    if kernel:
        attend.prepare(attention_layout(model).windows, 2, 16, dtype, SMALL)
    return x.to(device, dtype).requires_grad_(), cos[0, :, None], signed_sin(sin[0, :, None]), attend


def value_and_gradients(layer, run, x_NE):
    out = run(x_NE)
    slope = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad((out * slope).sum(), (x_NE, *parameters))
    return dict(zip(("out", "x", *names), (out.detach(), *found), strict=True))


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("llama", False), ("qwen2", False), ("qwen3", False), ("mistral", False), ("llama", True), ("qwen3", True)],
)
def test_value_and_all_gradients_are_those_of_the_layer(device, kind, recompute):
    model = model_of(kind).to(device)
    layer = model.base_model.layers[1]
    prepare(layer)
    x, cos, sin, attend = inputs_of(model, device, torch.float32, kernel=True)
    run = partial(whole_layer, layer, cos=cos, sin=sin, attend=attend)
    ours = value_and_gradients(layer, partial(checkpoint, run, use_reentrant=False) if recompute else run, x)
    x, cos, sin, dense = inputs_of(model, device, torch.float32, kernel=False)
    theirs = value_and_gradients(layer, lambda x: run_layer(layer, x, cos, sin, dense), x)
    for name, mine in ours.items():
        assert float((mine - theirs[name]).norm()) <= 2e-5 * float(theirs[name].norm()) + 1e-6, name


@pytest.mark.parametrize("kind", ["llama with biases", "gelu", "adapters", "frozen", "other attention"])
def test_other_layers_are_left_to_the_single_operations(device, kind):
    model = model_of(kind if kind in KINDS else "llama").to(device)
    if kind == "adapters":
        pytest.importorskip("peft")
        add_lora(model, LoraConfig(rank=2))
    layer = model.base_model.layers[1]
    if kind == "frozen":
        layer.mlp.up_proj.requires_grad_(False)
    prepare(layer)
    x, cos, sin, attend = inputs_of(model, device, torch.float32, kernel=True)
    assert whole_layer(layer, x, cos, sin, CausalAttention() if kind == "other attention" else attend) is None
    with torch.no_grad():
        assert (whole_layer(layer, x, cos, sin, attend) is not None) == (kind in ("frozen", "other attention"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_it_keeps_as_many_bytes_for_its_backward_pass_as_the_memory_forecast_counts(device, kind):
    model = model_of(kind).to(device)
    layer, kept = model.base_model.layers[1], {}
    prepare(layer)
    x, cos, sin, attend = inputs_of(model, device, torch.float32, kernel=True)
    not_counted = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), cos, sin, attend.plans[None][0])
    }

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = whole_layer(layer, x, cos, sin, attend)
    bytes_per_token = sum(size for address, size in kept.items() if address not in not_counted) / len(out)
    small = 4 * (model.config.num_attention_heads + 2)  # per token: sums of attention, scales of two norms
    assert bytes_per_token - small == model_sizes(model).layer(uses_fused_layers=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_on_a_gpu_use_it_and_pass_the_check(kind, dtype, monkeypatch):
    model, used = model_of(kind).to("cuda", dtype), []

    def counted(*given):
        out = whole_layer(*given)
        used.append(out is not None)
        return out

    ops = fused_layers.FUSED_OPS._replace(whole_layer=counted)
    monkeypatch.setattr(path_selection, "FUSED_OPS", ops)
    assert path_error(model, ExecutionPath("kernel", fused=True)) is None
    assert used == [False, True] * 3  # each of the three layers, with and without a recorder of keys


@pytest.mark.parametrize("wrong", ["nothing", "output", "gradient"])
def test_the_check_of_a_model_includes_it(device, wrong, monkeypatch):
    model = model_of("llama").to(device)

    def make_attention(model, batch, path):
        if path.attention != "kernel":
            return DenseAttention(batch, device)
        attend = TritonTreeAttention(batch, device)
        attend.prepare([], 2, 16, torch.float32, SMALL)
        return attend

    def defective(layer, x, *given):
        out = whole_layer(layer, x, *given)
        if out is None or wrong == "nothing":
            return out
        return out + 0.1 * (out - x) if wrong == "output" else out.detach() + 0.9 * (out - out.detach())

    monkeypatch.setattr(path_selection, "_make_attention", make_attention)
    monkeypatch.setattr(path_selection, "FUSED_OPS", fused_layers.FUSED_OPS._replace(whole_layer=defective))
    assert (path_error(model, ExecutionPath("kernel", fused=True)) is None) == (wrong == "nothing")
