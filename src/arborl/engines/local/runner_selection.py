"""Selects the fastest model runner of a device whose results match the library's for the present weights.

A sample text runs as a conversation does: most of it as a prompt, then some tokens, then one, over cache blocks in
non-consecutive order. See `models/path_check.py` for the comparison.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from arborl.engines.local.block_pool import BlockPool
from arborl.engines.local.cpu_runner import CpuModelRunner, unsupported_reason
from arborl.engines.local.fused_forward import FusedForward, LayerOps
from arborl.engines.local.kv_cache import AttentionMetadata, KVCache
from arborl.engines.local.model_runner import ModelRunner, ModelStep, TorchModelRunner
from arborl.engines.local.sampler import SamplingBatch
from arborl.models.attention import CausalAttention, attention_layout, library_hidden_states, logits
from arborl.models.execution_paths import FastPath, first_line, record_path, report_fallback
from arborl.models.path_check import (
    LAYERS,
    InputRecorder,
    Outputs,
    check_case,
    difference,
    error,
    layer_cases,
    sample_tokens,
    spread,
)

SUPPORTED = "docs/models.md lists the supported models."
TOKENS = 72
"""Tokens of the sample text: more than one block of a GPU's cache."""
MAX_COMPILED_ERROR = 0.01
"""Allowed error of the compiled step. Its float32 rounding errors stay far smaller through all layers, so it is
compared as a whole."""


class LayeredModelRunner(Protocol):
    model: PreTrainedModel
    forward: FusedForward
    cache: KVCache

    def layer_ops(self, step: ModelStep, prefill: bool) -> LayerOps: ...


def select_runner(
    model: PreTrainedModel, pool: BlockPool, context: int, requests: int, sleep_mode: bool, compiled: bool
) -> ModelRunner:
    """CUDA graphs on a GPU, compiled code on a CPU; torch elsewhere, and for attention with windows or capped scores,
    which neither supports."""
    device = model.device.type
    if device == "cuda" and (reason := _no_graphs_reason(model, context)) is None:
        from arborl.engines.local.cuda_graph_runner import CudaGraphModelRunner

        graphs = CudaGraphModelRunner(model, pool.num_blocks, pool.block_size, context, requests, sleep_mode)
        record_path(model, "engine", "CUDA graphs")
        _check_layers(graphs, context, "fused kernels")
        return graphs
    if device == "cuda":
        report_fallback(model, FastPath.SAMPLING_GRAPHS, str(reason), SUPPORTED)
    forward = FusedForward(model, context)
    if device == "cpu" and compiled and (runner := _compiled_runner(forward, pool, context)) is not None:
        record_path(model, "engine", "compiled steps")
        return runner
    torch_runner = TorchModelRunner(forward, pool.num_blocks, pool.block_size, sleep_mode)
    _check_layers(torch_runner, context, "joined products")
    return torch_runner


def _no_graphs_reason(model: PreTrainedModel, context: int) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not attention_layout(model).is_plain(context):
        return "its attention has a window shorter than sampling.max_context, or capped scores"
    return None


def _check_layers(runner: LayeredModelRunner, context: int, title: str) -> None:
    """Fall back to the library's layers if the runner's do not support the model or do not match."""
    model, forward = runner.model, runner.forward
    if not forward.is_fused:
        report_fallback(model, FastPath.SAMPLING_LAYERS, str(forward.unsupported_reason()), SUPPORTED)
        return
    try:
        reason = layers_mismatch(runner, context)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a patched library or a kernel's compiler may fail in any way
        reason = first_line(error)
    if reason is None:
        record_path(model, "engine", title)
    else:
        forward.layers, forward.rope = [], None
        report_fallback(model, FastPath.SAMPLING_LAYERS, reason)


def _compiled_runner(forward: FusedForward, pool: BlockPool, context: int) -> CpuModelRunner | None:
    model, reason = forward.model, unsupported_reason(forward, context)
    if reason is None:
        runner = CpuModelRunner(forward, pool.num_blocks, pool.block_size, context)
        reason = compiled_step_mismatch(runner, context)
        if reason is None:
            return runner
    report_fallback(model, FastPath.SAMPLING_COMPILED, reason, SUPPORTED)
    return None


# ------------------------------------------------------------------------------------------------ comparison


def sample_steps(tokens: list[int], block_size: int, context: int) -> list[ModelStep]:
    """Steps of one sequence: a prompt, some tokens, one token. The last token of each step is sampled from; the blocks
    are not consecutive."""
    count = len(tokens)
    cuts = sorted({0, max(1, count - 9), count - 1, count} - {-1})
    used = -(-count // block_size)
    table = np.zeros((1, -(-context // block_size)), dtype=np.int32)
    table[0, :used] = np.arange(used)[::-1]
    one, zero = np.ones(1), np.zeros(1, dtype=np.int64)
    sampling = SamplingBatch(one, zero, one, 0 * one, 0 * one)
    return [
        ModelStep(
            np.array(tokens[start:end], np.int32),
            AttentionMetadata(np.array([start]), np.array([end]), table),
            zero,
            sampling,
        )
        for start, end in pairwise(cuts)
    ]


@torch.inference_mode()
def layers_mismatch(runner: LayeredModelRunner, context: int) -> str | None:
    model, forward = runner.model, runner.forward
    tokens = sample_tokens(model, min(TOKENS, context))
    steps = sample_steps(tokens, runner.cache.block_size, context)
    blocks = steps[0].metadata.tables[0, : -(-len(tokens) // runner.cache.block_size)]
    try:
        for case in layer_cases(model, tokens, range(len(tokens)), CausalAttention()):
            layer, outs, norms = forward.layers[case.number], [], []
            for number, step in enumerate(steps):
                ops = runner.layer_ops(step, prefill=number == 0)
                x_NE = case.x[int(step.metadata.starts[0]) : int(step.metadata.ends[0])].clone()
                y_NE, h_NE = forward.run_layer(layer, x_NE, ops.norm(x_NE, layer.input_norm), ops)
                outs.append(y_NE)
                norms.append((h_NE, layer.output_norm(y_NE)))
            cached = runner.cache.keys[case.number][
                torch.from_numpy(blocks).long().to(model.device)
            ]  # [blocks, K, P, D]
            keys = cached.transpose(1, 2).flatten(0, 1)[: len(tokens)].flatten(1)
            reason = check_case(case, {"output": difference(torch.cat(outs), case.x), "key": keys})
            gap = float(error(*(torch.cat(part) for part in zip(*norms, strict=True))).max())
            if reason is not None or not gap <= 0.05:
                return reason or f"the norm after a layer differs by {gap:.1e}"
    finally:
        runner.cache.clear(len(blocks))
    return None


@torch.inference_mode()
def compiled_step_mismatch(runner: CpuModelRunner, context: int) -> str | None:
    """How the compiled step differs from the library's code; None if it matches."""
    model = runner.model
    tokens = sample_tokens(model, min(TOKENS, context))
    steps = sample_steps(tokens, runner.cache.block_size, context)
    blocks = steps[0].metadata.tables[0, : -(-len(tokens) // runner.cache.block_size)]
    recorder = InputRecorder(CausalAttention())
    hidden_NE = library_hidden_states(model, torch.tensor(tokens), torch.arange(len(tokens)), recorder)
    last = [int(step.metadata.ends[0]) - 1 for step in steps]
    exact: Outputs = {"logits": logits(model, hidden_NE[last])}
    actual: Outputs = {}
    try:
        rows = [runner.run_step(step, np.zeros(1, np.int64))[2] for step in steps]
        actual["logits"] = torch.from_numpy(np.concatenate(rows))
        for layer in spread(len(recorder.inputs), LAYERS):
            exact[f"key of layer {layer}"] = recorder.inputs[layer][0][1].flatten(1)
            keys = runner.cache.keys[layer, blocks][..., : runner.cache.block_size]  # [blocks, K, D, P]
            keys = keys.transpose(0, 3, 1, 2).reshape(len(blocks) * runner.cache.block_size, -1)
            actual[f"key of layer {layer}"] = torch.from_numpy(keys[: len(tokens)])
    finally:
        runner.cache.clear(len(blocks))
    gap, name = max((float(error(actual[name], exact[name]).max()), name) for name in exact)
    return None if gap <= MAX_COMPILED_ERROR else f"{name} differ by {gap:.1e}"
