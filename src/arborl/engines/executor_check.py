"""Whether an executor computes what the library computes, for the weights at hand; see `models/path_check.py`.

A sample text is run as a conversation is: most of it as a prompt, then some tokens, then one, over pages of the cache
that do not lie in order."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.engines.cache import Cache, Reading
from arborl.engines.cpu_step import CpuExecutor
from arborl.engines.draw_tokens import Draws
from arborl.engines.executor import Step
from arborl.engines.forward import Forward, Ops
from arborl.models.attention import Causal, library_hidden_states, logits
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

TOKENS = 72
"""Of the sample: more than a page of a GPU's cache."""
COMPILED = 0.01
"""Error of the compiled step that is allowed. It runs in float32, where errors of rounding stay far smaller through all
layers, so it is compared as a whole."""


class LayeredExecutor(Protocol):
    """An executor whose layers can be run one by one."""

    model: PreTrainedModel
    forward: Forward
    cache: Cache

    def ops(self, step: Step, reads: bool) -> Ops: ...


def sample_steps(tokens: list[int], page_size: int, context: int) -> list[Step]:
    """A prompt, some further tokens, and one more, of one sequence; the last token of each samples. Its pages do not
    lie in order."""
    count = len(tokens)
    cuts = sorted({0, max(1, count - 9), count - 1, count} - {-1})
    used = -(-count // page_size)
    table = np.zeros((1, -(-context // page_size)), dtype=np.int32)
    table[0, :used] = np.arange(used)[::-1]
    one, none = np.ones(1), np.zeros(1, dtype=np.int64)
    steps = []
    for start, end in pairwise(cuts):
        reading = Reading(np.array([start]), np.array([end]), table)
        steps.append(
            Step(np.array(tokens[start:end], np.int32), reading, none, Draws(one, none, one, 0 * one, 0 * one))
        )
    return steps


@torch.inference_mode()
def why_layers_are_wrong(executor: LayeredExecutor, context: int) -> str | None:
    """Why this executor's layers give other numbers than the library's; None where they do not."""
    model, forward = executor.model, executor.forward
    tokens = sample_tokens(model, min(TOKENS, context))
    steps = sample_steps(tokens, executor.cache.size, context)
    pages = steps[0].reading.tables[0, : -(-len(tokens) // executor.cache.size)]
    try:
        for case in layer_cases(model, tokens, range(len(tokens)), Causal()):
            block, outs, norms = forward.blocks[case.number], [], []
            for number, step in enumerate(steps):
                ops = executor.ops(step, reads=number == 0)
                x_NE = case.x[int(step.reading.starts[0]) : int(step.reading.ends[0])].clone()
                y_NE, h_NE = forward.layer(block, x_NE, ops.norm(x_NE, block.before), ops)
                outs.append(y_NE)
                norms.append((h_NE, block.after(y_NE)))
            keys = _keys(executor.cache, case.number, pages, len(tokens))
            why = check_case(case, {"output": difference(torch.cat(outs), case.x), "key": keys})
            why = why or _why_norms_differ(*(torch.cat(some) for some in zip(*norms, strict=True)))
            if why is not None:
                return why
    finally:
        executor.cache.clear(len(pages))
    return None


def _why_norms_differ(found: Tensor, library: Tensor) -> str | None:
    """What a layer hands to the next one, beside the library's norm of the same output."""
    gap = float(error(found, library).max())
    return None if gap <= 0.05 else f"the norm after a layer differs by {gap:.1e}"


def _keys(cache: Cache, layer: int, table: np.ndarray, count: int) -> Tensor:
    pages = cache.keys[layer][torch.from_numpy(table).long().to(cache.keys.device)]  # [pages, K, P, D]
    return pages.transpose(1, 2).flatten(0, 1)[:count].flatten(1)


@torch.inference_mode()
def why_compiled_is_wrong(executor: CpuExecutor, context: int) -> str | None:
    """Why the compiled step gives other numbers than the library's code; None where it does not."""
    model = executor.model
    tokens = sample_tokens(model, min(TOKENS, context))
    steps = sample_steps(tokens, executor.cache.size, context)
    pages = steps[0].reading.tables[0, : -(-len(tokens) // executor.cache.size)]
    recorder = InputRecorder(Causal())
    place = torch.arange(len(tokens))
    hidden_NE = library_hidden_states(model, torch.tensor(tokens), place, recorder)
    last = [int(step.reading.ends[0]) - 1 for step in steps]
    exact: Outputs = {"logits": logits(model, hidden_NE[last])}
    found: Outputs = {}
    try:
        found["logits"] = torch.cat([torch.from_numpy(_logits(executor, step)) for step in steps])
        for layer in spread(len(recorder.inputs), LAYERS):
            exact[f"key of layer {layer}"] = recorder.inputs[layer][0][1].flatten(1)
            found[f"key of layer {layer}"] = _compiled_keys(executor, layer, pages, len(tokens))
    finally:
        executor.cache.clear(len(pages))
    gap, name = max((float(error(found[name], exact[name]).max()), name) for name in exact)
    return None if gap <= COMPILED else f"{name} differ by {gap:.1e}"


def _logits(executor: CpuExecutor, step: Step) -> np.ndarray:
    found = executor.run_step(step, with_logits=True)[2]
    assert found is not None
    return found


def _compiled_keys(executor: CpuExecutor, layer: int, table: np.ndarray, count: int) -> Tensor:
    cache = executor.cache
    pages = cache.keys[layer, table][..., : cache.size]  # [pages, K, D, P]
    return torch.from_numpy(pages.transpose(0, 3, 1, 2).reshape(len(table) * cache.size, -1)[:count])
