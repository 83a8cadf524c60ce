"""Which executor a model has on its device."""

from __future__ import annotations

from importlib.util import find_spec

from transformers import PreTrainedModel

from arborl.engines.cpu_step import CpuExecutor, fits
from arborl.engines.executor import Executor, TorchExecutor
from arborl.engines.forward import Forward
from arborl.engines.pages import Pages
from arborl.models.attention import layout


def executor_for(
    model: PreTrainedModel, pages: Pages, context: int, requests: int, lends: bool, compiled: bool
) -> Executor:
    """Fused kernels and CUDA graphs where there is a GPU for them, compiled code on a CPU where there is a compiler;
    torch everywhere else, and for attention within bounds, which neither knows."""
    if model.device.type == "cuda" and find_spec("triton") is not None and layout(model).plain(context):
        from arborl.engines.cuda_graphs import GraphExecutor

        return GraphExecutor(model, pages.count, pages.size, context, requests, lends)
    forward = Forward(model, context)
    if compiled and fits(forward, context):
        return CpuExecutor(forward, pages.count, pages.size, context)
    return TorchExecutor(forward, pages.count, pages.size, lends)
