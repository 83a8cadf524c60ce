"""On a GPU, engine kernels are accepted for all weights in every precision and rejected if they are wrong."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))
from test_path_check import CONTEXT, DTYPES, KINDS, flipped_rotation, model_of, shifted_position, smollm2

from arborl.engines.local import LocalEngine
from arborl.engines.local.kv_cache import AttentionMetadata
from arborl.engines.local.model_runner import ModelStep
from arborl.engines.local.runner_selection import layers_mismatch
from arborl.engines.local.sampler import SamplingBatch
from arborl.learner.attention.path_selection import ExecutionPath, path_error
from arborl.models.execution_paths import count_fallbacks

pytest.importorskip("triton", reason="engine_kernels need Triton")
from arborl.engines.local import engine_kernels
from arborl.learner.attention import tree_kernels

pytestmark = pytest.mark.gpu


def engine_check(model) -> str | None:
    from arborl.engines.local.cuda_graph_runner import CudaGraphModelRunner

    return layers_mismatch(CudaGraphModelRunner(model, 8, 32, CONTEXT, 16), CONTEXT)


def learner_check(model) -> str | None:
    ways = (ExecutionPath("kernel"), ExecutionPath("kernel", fused=True))
    return next((why for way in ways if (why := path_error(model, way)) is not None), None)


CHECKS = (engine_check, learner_check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["random", "outliers"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_kernels_are_accepted(device, kind, weights, dtype, check):
    assert check(model_of(kind, dtype, weights).to(device)) is None


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_runs_on_all_fast_paths(device, dtype, adapters):
    model = smollm2(dtype, adapters).to(device)
    LocalEngine(model, 512, 64)
    assert count_fallbacks(model, "engine") == 0
    assert learner_check(model) is None


BUSY = 2_000_000_000
"""Clock cycles, about a second: work of others that is queued on the GPU before ours."""


def test_a_busy_gpu_does_not_change_the_verdict(device):
    from arborl.engines.local.cuda_graph_runner import CudaGraphModelRunner

    executor = CudaGraphModelRunner(model_of("llama", "bfloat16").to(device), 8, 32, CONTEXT, 16)
    assert layers_mismatch(executor, CONTEXT) is None
    torch.cuda._sleep(BUSY)
    assert layers_mismatch(executor, CONTEXT) is None


def test_steps_that_sample_nothing_reach_a_busy_gpu_unchanged(device):
    """Such steps have no outcome that the host waits for, so many of them are queued."""
    from arborl.engines.local.cuda_graph_runner import CudaGraphModelRunner

    executor = CudaGraphModelRunner(model_of("llama", "bfloat16").to(device), 8, 32, CONTEXT, 16)
    executor.warm_up(False)
    table = np.arange(CONTEXT // 32, dtype=np.int32)[None]
    none = np.zeros(0)
    pieces = [
        ModelStep(np.full(5, i, np.int32), AttentionMetadata(np.array([5 * i]), np.array([5 * i + 5]), table),
                  none.astype(np.int64),
             SamplingBatch(none, none.astype(np.int64), none, none, none))
        for i in range(8)
    ]  # fmt: skip
    keys = []
    for busy in (False, True):
        executor.cache.clear(4)
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(BUSY)
        for piece in pieces:
            executor.launch(piece)
            if not busy:
                torch.cuda.synchronize()
        keys.append(executor.cache.keys[:, :4].clone())
    assert torch.equal(*keys)
    assert keys[0].abs().sum() > 0


def wrong_scale(patch):
    for name in ("decode_attention", "prefill_attention"):
        real = getattr(engine_kernels, name)
        patch.setattr(engine_kernels, name, lambda *given, real=real: real(*given[:-1], 1.25 * given[-1]))


def swapped_heads(patch):
    real = engine_kernels.rotate_store
    patch.setattr(engine_kernels, "rotate_store", lambda *given: real(*given)[:, [2, 1, 0, 3]].contiguous())


def missing_norm(patch):
    patch.setattr(
        engine_kernels, "add_norm", lambda x, y, weight, eps: (x.add_(y if y.dim() == 2 else y.sum(0)), x * weight)
    )


def wrong_mask(patch):
    """A token does not see itself."""
    real = engine_kernels.decode_attention
    patch.setattr(engine_kernels, "decode_attention", lambda *given: real(*given[:5], given[5] - 1, *given[6:]))


def dropped_bias(patch):
    from arborl.models import fused_linear

    patch.setattr(fused_linear.FusedLinear, "__call__", lambda self, x: torch.nn.functional.linear(x, self.weight))


DEFECTS = (flipped_rotation, shifted_position, wrong_scale, swapped_heads, missing_norm, wrong_mask, dropped_bias)


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["random", "outliers"])
def test_wrong_sampling_kernels_are_rejected(device, weights, dtype, defect, monkeypatch):
    if defect is wrong_mask and weights == "outliers" and dtype != "float32":
        pytest.skip("nearly all attention goes to one token: rounding changes more than one token that is not seen")
    model = model_of("qwen2", dtype, weights).to(device)
    defect(monkeypatch)
    assert engine_check(model) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", ["scale", "heads", "mask", "gradient"])
def test_wrong_tree_kernels_are_rejected(device, wrong, dtype, monkeypatch):
    model = model_of("llama", dtype).to(device)
    forward, backward = tree_kernels.forward, tree_kernels.backward

    def bent(q, k, v, plan, sizes, scale, *rest):
        if wrong == "scale":
            scale = 1.25 * scale
        if wrong == "heads":
            q = q[:, [2, 1, 0, 3]].contiguous()
        return forward(q, k, v, plan, sizes, scale, *rest)

    def other_gradient(*given):
        to_q, to_k, to_v = backward(*given)
        return to_q, to_k, 0.5 * to_v

    if wrong == "gradient":
        monkeypatch.setattr(tree_kernels, "backward", other_gradient)
    elif wrong == "mask":
        from arborl.learner.attention.kernel_attention import TritonTreeAttention

        real = TritonTreeAttention.__init__

        def ahead(self, batch, device):
            real(self, dataclasses.replace(batch, end=batch.end.clip(max=len(batch.end) - 1)), device)

        monkeypatch.setattr(TritonTreeAttention, "__init__", ahead)
    else:
        monkeypatch.setattr(tree_kernels, "forward", bent)
    assert path_error(model, ExecutionPath("kernel")) is not None
