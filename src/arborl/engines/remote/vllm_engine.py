"""Sampling by vLLM in a process of its own, with its own copy of the weights.

The process may belong to another environment (`engine.args.python`), because vLLM pins versions of other packages.
Requests go through a socket and weights through shared memory; with LoRA, only the adapters after the first update.
An update waits for no request: running ones pause between two tokens, continue with the new weights, and report which
tokens each version sampled. `vllm_worker/vllm_main.py` is the other side.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.engines.engine import TokenListener, Weights, completion_versions
from arborl.engines.engine_requests import StopTextMatcher
from arborl.engines.local.kv_cache import default_kv_tokens, token_bytes
from arborl.engines.remote.padded_heads import PaddedHeads, head_size
from arborl.engines.remote.replicas import run_blocking
from arborl.engines.remote.vllm_process import Response, VllmProcess
from arborl.engines.remote.weight_sync import (
    PROBE_PROMPT,
    Decode,
    SyncedEngine,
    adapter_weights,
    base_weights,
    cuda_handles,
    sampling_params,
    span_versions,
)
from arborl.errors import EngineError
from arborl.models.lora import has_lora
from arborl.types import Completion, FinishReason, Sampling

log = logging.getLogger(__name__)

START_SECONDS = 900.0
"""Timeout of vLLM's start: on a GPU it compiles."""
UPDATE_SECONDS = 600.0
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes of vLLM's CPU kernels."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ALIGNMENT = 64

TableRow = tuple[str, str, list[int], int]
"""Name, dtype, shape, offset in bytes."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine(SyncedEngine):
    """vLLM in a process of its own.

    Args:
        max_requests: requests that run at once; others wait.
        kv_tokens: size of the KV cache in tokens; 0 uses a share of the memory.
        python: the interpreter that has vLLM; by default this one.
        args: further arguments of vLLM's `AsyncEngineArgs`.
        sampling: the run's sampling parameters, for the probe after an update.
        sleep_mode: use vLLM's sleep mode during updates, on a GPU that learner and engine share.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_context: int = 1024,
        max_requests: int = 256,
        kv_tokens: int = 0,
        dtype: str = "auto",
        python: str | None = None,
        args: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        sleep_mode: bool = False,
        decode: Decode | None = None,
    ):
        super().__init__(model, max_context, decode, dtype, sampling)
        self.sleep_mode, self.loaded, self.is_asleep = sleep_mode, False, False
        self.heads, config = _vllm_config(model)
        self.folder = Path(tempfile.mkdtemp(prefix="arborl-vllm-"))
        self.memory: SharedWeights | None = None
        self.process: VllmProcess | None = None
        self.gpu: str | None = None
        """The GPU on which vLLM reads the learner's weights in place; None: they are copied through host memory."""
        try:
            (self.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            self.memory = SharedWeights()
            self.process = VllmProcess(python or sys.executable)
            engine_args = self._engine_args(max_requests, kv_tokens) | dict(args or {})
            self.probe.dtype = str(engine_args["dtype"])
            started = run_blocking(self.process.call("start", START_SECONDS, args=engine_args))
            self.gpu = run_blocking(self._shared_gpu())
            how = "through host memory" if self.gpu is None else "on the GPU"
            log.info("vLLM %s is ready, process %d; weights %s", started.get("vllm"), self.process.child.pid, how)
        except BaseException:
            self._clean()
            raise

    def _engine_args(self, max_requests: int, kv_tokens: int) -> dict[str, Any]:
        model, context = self.model, self.max_context
        tokens = kv_tokens or default_kv_tokens(model, context)
        bytes_per_token = token_bytes(model) * (self.heads.large / self.heads.small if self.heads else 1)
        on_cpu = model.device.type == "cpu"
        args = {
            "model": str(self.folder),
            "load_format": "dummy",  # all weights come from the learner
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "max_model_len": context,
            "max_num_seqs": max_requests,
            "kv_cache_memory_bytes": int(max(tokens, 2 * context) * bytes_per_token),
            "logprobs_mode": "processed_logprobs",  # of the sampling distribution
            "worker_extension_cls": "arborl_vllm.Extension",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "enforce_eager": on_cpu,  # compilation takes longer than small runs
            "enable_sleep_mode": self.sleep_mode and model.device.type == "cuda",
        }
        if on_cpu:  # vLLM 0.32 fails when a request with a seed is prefilled in chunks (its generator cannot be reset)
            args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, context)}
        if has_lora(model):
            args |= {"enable_lora": True, "max_lora_rank": _max_rank(model), "max_loras": 1}
        return args

    async def _shared_gpu(self) -> str | None:
        """The learner's GPU if vLLM can read tensors on it."""
        if self.model.device.type != "cuda":
            return None
        gpu = str(torch.cuda.get_device_properties(self.model.device).uuid)
        probe = torch.arange(1.0, 65.0, device=self.model.device)
        try:
            handles = cuda_handles({"probe": probe})
        except RuntimeError:  # the allocator or the system does not support it
            return None
        torch.cuda.synchronize(self.model.device)
        args = {"gpu": gpu, "handles": handles, "values": probe.tolist()}
        response = await self._process.call("reads_gpu", UPDATE_SECONDS, **args)
        return gpu if response["reads"] else None

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        tokens = self.checked_prompt(prompt, sampling)
        if not self.loaded:
            await self.load(self.model.state_dict(), self.version)
        if self.is_asleep:
            await self._wake_up()
        started = time.perf_counter()
        response, stopped = await self._sample(tokens, sampling)
        return self._completion(response, stopped, time.perf_counter() - started)

    async def _sample(self, prompt: list[int], sampling: Sampling) -> tuple[Response, bool]:
        """The sampled tokens, and whether a stop text ended them."""
        process = self._process
        stops = StopTextMatcher.make(self.decode, sampling)
        params = sampling_params(sampling, self.max_context, len(prompt))
        response = process.request("generate", prompt=prompt, sampling=params, stream=stops is not None)
        deadline = None if sampling.seconds is None else time.perf_counter() + sampling.seconds
        tokens, logprobs = list[int](), list[float]()
        stop_at: int | None = None
        aborted = False
        try:
            while True:
                left = None if deadline is None or aborted else max(0.0, deadline - time.perf_counter())
                try:
                    part = await asyncio.wait_for(response.next(), left)
                except TimeoutError:
                    aborted = True
                    process.notify("abort", which=response.number)
                    continue
                for token, logprob in zip(part["tokens"], part["logprobs"], strict=True):
                    tokens.append(token)
                    logprobs.append(logprob)
                    if stop_at is None and stops is not None and stops.reached(tokens):
                        stop_at = len(tokens)
                        process.notify("abort", which=response.number)
                if part.get("done"):
                    break
        finally:
            if not response.is_done:  # the caller was cancelled
                process.notify("abort", which=response.number)
                response.forget()
        kept = {"tokens": tokens[:stop_at], "logprobs": logprobs[:stop_at]}
        return {**kept, "finish": part["finish"], "spans": part["spans"]}, stop_at is not None

    def _completion(self, response: Response, stopped: bool, seconds: float) -> Completion:
        tokens, logprobs = response["tokens"], response["logprobs"]
        versions = span_versions(response["spans"], len(tokens), self.run)
        if len(versions) != len(tokens):
            raise EngineError(f"vLLM sampled from weights of another run: {response['spans']}")
        if any(math.isnan(logprob) or logprob == -math.inf for logprob in logprobs):
            raise EngineError("the model's output for this prompt is not finite (NaN or infinite)")
        self.counts["sampled"] += len(tokens)
        self.counts["requests"] += 1
        finish = FinishReason.STOP if stopped else FINISH.get(response["finish"], FinishReason.ABORT)
        version, mixed = completion_versions(versions, self.version)
        return Completion(tuple(tokens), tuple(logprobs), finish, version, seconds, mixed)

    async def load(self, weights: Weights, version: int) -> None:
        self.check_open()
        started = time.perf_counter()
        sent = dict(weights)
        first = not self.loaded
        if first:
            sent = dict(self.model.state_dict()) | sent
        if self.is_asleep:
            await self._wake_up()
        args: dict[str, Any] = {"version": f"{self.run}:{version}"}
        with tempfile.TemporaryDirectory(prefix="arborl-adapter-", dir=self.folder) as folder:
            if first or (sent and not has_lora(self.model)):
                tensors = self._padded(base_weights(sent))  # read by vLLM until it responds
                args |= await asyncio.to_thread(self._share, tensors)
            if sent and has_lora(self.model):
                args["adapter"] = str(self._save_adapter(sent, Path(folder)))
            response = await self._process.call("load", UPDATE_SECONDS, **args)
        if response["version"] != args["version"]:
            raise EngineError(f"vLLM was given weights {args['version']} and reports {response['version']}")
        self.loaded, self.version = True, version
        if sent:
            await self._verify(sent)
        self.update_seconds = time.perf_counter() - started

    def _share(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Where vLLM finds these tensors, as arguments of its `load`."""
        if self.gpu is not None and all(tensor.device == self.model.device for tensor in tensors.values()):
            torch.cuda.synchronize(self.model.device)
            return {"gpu": self.gpu, "handles": cuda_handles(tensors)}
        assert self.memory is not None
        return {"table": self.memory.write(tensors, getattr(torch, self.dtype)), "path": str(self.memory.path)}

    def _save_adapter(self, weights: Weights, folder: Path) -> Path:
        from arborl.models.lora import save_adapter

        tensors = self._padded(adapter_weights(weights))
        save_adapter(self.model, folder, {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        return folder

    def _padded(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.heads is None:
            return tensors
        return {name: self.heads.tensor(name, tensor) for name, tensor in tensors.items()}

    async def _verify(self, weights: Weights) -> None:
        response, stopped = await self._sample(list(PROBE_PROMPT), self.probe.question)
        self.gap = self.probe.check(self._completion(response, stopped, 0.0), weights, "vLLM")
        self.counts["sampled"] -= len(response["tokens"])
        self.counts["requests"] -= 1

    async def sleep(self) -> None:
        """Free device memory until the next update or request; only with `sleep_mode`."""
        if self.sleep_mode and not self.closed and not self.is_asleep:
            await self._process.call("sleep", UPDATE_SECONDS)
            self.is_asleep = True

    async def _wake_up(self) -> None:
        await self._process.call("wake_up", UPDATE_SECONDS)
        self.is_asleep = False

    @property
    def _process(self) -> VllmProcess:
        assert self.process is not None
        return self.process

    async def close(self) -> None:
        self.closed = True
        await asyncio.to_thread(self._clean)

    def __del__(self) -> None:
        if hasattr(self, "process"):  # not if the constructor failed early
            self._clean()

    def _clean(self) -> None:
        if self.process is not None:
            self.process.end("the engine was closed")
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        shutil.rmtree(self.folder, ignore_errors=True)


class SharedWeights:
    """Memory that another process may map, overwritten at every update. Where the system supports it the memory has no
    name in a file system, so a killed process leaves nothing behind."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("arborl-weights")
            self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # valid in other processes while this one lives
        else:
            descriptor, name = tempfile.mkstemp(prefix="arborl-weights-")  # readable by this user only
            self.path = Path(name)
        self.file, self.size = os.fdopen(descriptor, "r+b"), 0
        self.memory: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[TableRow]:
        """Copy the tensors, in `dtype` if given; returns their places."""
        table: list[TableRow] = []
        end = 0
        for name, tensor in tensors.items():
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            table.append((name, str(target).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * target.itemsize // ALIGNMENT) * ALIGNMENT
        memory = self._resize(max(end, ALIGNMENT))
        for (_, dtype_name, shape, begin), tensor in zip(table, tensors.values(), strict=True):
            if tensor.numel():
                view = torch.frombuffer(
                    memory, dtype=getattr(torch, dtype_name), count=tensor.numel(), offset=begin
                ).view(shape)
                view.copy_(tensor.detach())
                del view  # the memory cannot be closed while a view exists
        return table

    def _resize(self, size: int) -> mmap.mmap:
        if self.memory is None or self.size < size:
            if self.memory is not None:
                self.memory.close()
            self.file.truncate(size)
            self.memory, self.size = mmap.mmap(self.file.fileno(), size), size
        return self.memory

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        self.file.close()
        if not hasattr(os, "memfd_create"):
            self.path.unlink(missing_ok=True)


def _vllm_config(model: PreTrainedModel) -> tuple[PaddedHeads | None, dict[str, Any]]:
    """The model's `config.json`, with larger heads if vLLM has no kernel for its head size."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    size = head_size(config)
    if model.device.type != "cpu" or size in CPU_HEAD_SIZES:
        return None, config
    larger = next((large for large in CPU_HEAD_SIZES if large > size and large % 2 == 0), None)
    if larger is None:
        raise EngineError(f"vLLM has no kernel for heads of {size} on a CPU")
    heads = PaddedHeads(size, larger)
    try:
        return heads, heads.config(config)
    except ValueError as error:
        raise EngineError(f"vLLM has no kernel for heads of {size} on a CPU, and {error}") from error


def _max_rank(model: PreTrainedModel) -> int:
    rank = max(config.r for config in model.peft_config.values())
    found = next((maximum for maximum in LORA_RANKS if maximum >= rank), None)
    if found is None:
        raise EngineError(f"model.lora.rank={rank}: vLLM supports at most {LORA_RANKS[-1]}")
    return found
