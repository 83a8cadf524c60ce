"""Worker extension of vLLM that loads weights in place.

It does not import arborl, because vLLM may live in another environment. `engine=vllm` uses it; start a CPU server with
(see docs/engines.md):

    PYTHONPATH=<this folder> python -m vllm.entrypoints.openai.api_server --worker-extension-cls arborl_vllm.Extension …
"""

from __future__ import annotations

import base64
import math
import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch


class Extension:
    def arborl_present(self) -> bool:
        return True

    def arborl_load_shared(self, path: str, table: list[list[Any]]) -> None:
        """Load weights from shared memory: `[name, dtype, shape, offset]` each."""
        self._arborl_reload(weights_iterator=shared_tensors(path, table))

    def arborl_reads_gpu(self, uuid: str, handles: list[list[Any]], values: list[float]) -> bool:
        """Whether this process can read a tensor with these values that another process has on a GPU."""
        try:
            ((_, tensor),) = open_handles(uuid, handles)
            return bool(tensor.tolist() == values)
        except Exception:  # another GPU, another container, another version of torch, no permission
            return False

    def arborl_load_handles(self, uuid: str, handles: list[list[Any]]) -> None:
        """Load weights that another process has on the same GPU."""
        self._arborl_reload(weights_iterator=open_handles(uuid, handles))
        torch.cuda.synchronize()  # the other process may change them after the response

    def arborl_reload(self, weights_path: str) -> None:
        self._arborl_reload(weights_path=weights_path)

    def _arborl_reload(self, **source: Any) -> None:
        """vLLM's reload, and a step that it omits: on a CPU a head tied to the embedding keeps a packed copy of the old
        weights."""
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.reload_weights(**source)
        head = getattr(runner.get_model(), "lm_head", None)
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def shared_tensors(path: str, table: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the shared memory, which must not change until they are read."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
    for name, dtype, shape, offset in table:
        count, kind = math.prod(shape), getattr(torch, dtype)
        yield name, torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)


def open_handles(uuid: str, handles: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of another process on the same GPU: `[name, size, stride, offset, dtype, storage]` each, see
    `engines/remote/weight_sync.py: cuda_handles`."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    gpus = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    for name, size, stride, offset, dtype, storage in handles:
        unpacked = [base64.b64decode(one) if isinstance(one, str) else one for one in storage]
        yield name, rebuild_cuda_tensor(
            torch.Tensor, torch.Size(size), tuple(stride), offset, torch.UntypedStorage, getattr(torch, dtype),
            gpus[uuid], *unpacked,
        )  # fmt: skip
