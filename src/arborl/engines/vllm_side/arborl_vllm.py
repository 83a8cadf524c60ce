"""What runs inside vLLM's workers: weights arrive in place.

Stands alone: vLLM may live in an environment that has no arborl. `engine=vllm` brings it; a server that one starts by
hand on a CPU is given it (see docs/engines.md):

    PYTHONPATH=<this folder> python -m vllm.entrypoints.openai.api_server --worker-extension-cls arborl_vllm.Extension …
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch


class Extension:
    """Methods that vLLM adds to its workers' own."""

    def arborl_present(self) -> bool:
        return True

    def arborl_take(self, path: str, table: list[list[Any]]) -> None:
        """Weights from shared memory: `[name, dtype, shape, begin]` each."""
        self._arborl_reload(weights_iterator=shared(path, table))

    def arborl_reload(self, weights_path: str) -> None:
        """Weights from a folder."""
        self._arborl_reload(weights_path=weights_path)

    def _arborl_reload(self, **source: Any) -> None:
        """vLLM's own reloading, and what it forgets: on a CPU an output layer that shares the embedding's weights goes
        on with its packed copy of the old ones."""
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.reload_weights(**source)
        head = getattr(runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def shared(path: str, table: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into the file; it must stay as it is until they have been read."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
    for name, dtype, shape, begin in table:
        kind = getattr(torch, dtype)
        count = 1
        for size in shape:
            count *= size
        yield name, torch.frombuffer(memory, dtype=kind, count=count, offset=begin).view(shape)
