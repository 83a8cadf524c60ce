"""Which executor a model has on its device: the fastest that has been shown to be right for its weights."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from arborl.engines.cpu_step import CpuExecutor, why_not
from arborl.engines.executor import Executor, TorchExecutor
from arborl.engines.executor_check import LayeredExecutor, why_compiled_is_wrong, why_layers_are_wrong
from arborl.engines.forward import Forward
from arborl.engines.pages import Pages
from arborl.models.attention import layout
from arborl.models.fallbacks import FastPath, first_line, note_path, report_fallback

KINDS = "The kinds that have it are listed in docs/models.md."


def executor_for(
    model: PreTrainedModel, pages: Pages, context: int, requests: int, lends: bool, compiled: bool
) -> Executor:
    """Fused kernels and CUDA graphs where there is a GPU for them, compiled code on a CPU where there is a compiler;
    torch everywhere else, and for attention with windows or capped scores, which neither supports."""
    device = model.device.type
    if device == "cuda" and (why := _why_no_graphs(model, context)) is None:
        from arborl.engines.cuda_graphs import GraphExecutor

        graphs = GraphExecutor(model, pages.count, pages.size, context, requests, lends)
        note_path(model, "engine", "CUDA graphs")
        _settle_layers(graphs, context, "fused kernels")
        return graphs
    if device == "cuda":
        report_fallback(model, FastPath.SAMPLING_GRAPHS, str(why), KINDS)
    forward = Forward(model, context)
    if device == "cpu" and compiled and (found := _compiled(forward, pages, context)) is not None:
        note_path(model, "engine", "compiled steps")
        return found
    executor = TorchExecutor(forward, pages.count, pages.size, lends)
    _settle_layers(executor, context, "joined products")
    return executor


def _why_no_graphs(model: PreTrainedModel, context: int) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not layout(model).plain(context):
        return "its attention has a window shorter than sampling.max_context, or capped scores"
    return None


def _settle_layers(executor: LayeredExecutor, context: int, title: str) -> None:
    """Leave the layers to the library's code where the executor's own are not for this model, or wrong."""
    model, forward = executor.model, executor.forward
    if not forward.fused:
        report_fallback(model, FastPath.SAMPLING_LAYERS, str(forward.why_not()), KINDS)
        return
    try:
        why = why_layers_are_wrong(executor, context)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # code of others may have been changed, and a kernel's compiler may fail, in any way
        why = first_line(error)
    if why is None:
        note_path(model, "engine", title)
    else:
        forward.leave_to_library()
        report_fallback(model, FastPath.SAMPLING_LAYERS, why)


def _compiled(forward: Forward, pages: Pages, context: int) -> CpuExecutor | None:
    model, why = forward.model, why_not(forward, context)
    if why is None:
        executor = CpuExecutor(forward, pages.count, pages.size, context)
        why = why_compiled_is_wrong(executor, context)
        if why is None:
            return executor
    report_fallback(model, FastPath.SAMPLING_COMPILED, why, KINDS)
    return None
