"""Sampling by vLLM, in a process of its own with its own copy of the weights.

That process may belong to another environment (`engine.python`): what vLLM pins need not be what a run uses. It is
asked through a socket, and given weights through shared memory; where the model has adapters, only these after the
first time. An update waits for nobody: requests under way stop between two tokens, go on with the new weights, and say
which of their tokens are from which. The other side is `vllm_side/main.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from arborl.engines.cache import default_kv_tokens, token_bytes
from arborl.engines.checks import check_sampling, read_prompt
from arborl.engines.copies import PROMPT, Probe, adapters, label_of, params, versions_of, whole
from arborl.engines.draw_tokens import StopTexts
from arborl.engines.engine import Weights, told
from arborl.engines.padded_heads import PaddedHeads, head_size
from arborl.engines.shared_memory import SharedMemory
from arborl.engines.vllm_process import Process, Said
from arborl.errors import EngineError
from arborl.models.lora import has_lora
from arborl.types import Completion, FinishReason, Metrics, Sampling

log = logging.getLogger(__name__)

START = 900.0
"""Seconds that vLLM may take to start: on a GPU it compiles."""
UPDATE = 600.0
"""Seconds that an update may take."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's kernels for CPUs have."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that it makes room for."""
WHOLE_PROMPTS = {"enable_chunked_prefill": False}
"""On a CPU: vLLM 0.32 ends itself when a request with a seed is read in parts (its generator cannot be set back)."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VllmEngine:
    """vLLM in a process of its own.

    Args:
        model: the learner's; its weights are sent.
        max_context: longest prompt and completion together.
        max_requests: requests sampled at once; others wait their turn.
        kv_tokens: tokens whose keys and values are kept; 0 takes a share of the memory.
        dtype: what it computes in; `auto` is the model's.
        python: the interpreter that has vLLM; without one, this.
        args: further arguments of vLLM's `AsyncEngineArgs`.
        sampling: how the run draws tokens, for the probe after an update.
        sleeps: give its memory back while the learner works (a GPU that both share).
        decode: token ids to text, for stop texts.
    """

    follows_weights = proves_weights = True

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
        sleeps: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        self.model, self.max_context, self.decode, self.sleeps = model, max_context, decode, sleeps
        self.vocabulary = int(model.config.vocab_size)
        self.dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        self.run = uuid.uuid4().hex[:8]
        """In the labels of our versions: nobody else's weights carry it."""
        self.version = 0
        self.loaded = self.asleep = self.closed = False
        self.counts = dict.fromkeys(("sampled", "requests"), 0.0)
        self.gap = self.update_seconds = 0.0
        """Of the last update: how far its probe was off, and how long it took."""
        self.heads, about = self._described(model)
        self.folder = Path(tempfile.mkdtemp(prefix="arborl-vllm-"))
        self.memory: SharedMemory | None = None
        try:
            (self.folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
            self.memory = SharedMemory()
            self.process = Process(python or sys.executable)
            tokens = kv_tokens or default_kv_tokens(model, max_context)
            each = token_bytes(model) * (self.heads.large / self.heads.small if self.heads else 1)
            lora = {"enable_lora": True, "max_lora_rank": _rank(model), "max_loras": 1} if has_lora(model) else {}
            on_cpu = model.device.type == "cpu"
            settings = {
                "model": str(self.folder),
                "load_format": "dummy",  # all weights come from the learner, on one way
                "skip_tokenizer_init": True,
                "dtype": self.dtype,
                "max_model_len": max_context,
                "max_num_seqs": max_requests,
                "kv_cache_memory_bytes": int(max(tokens, 2 * max_context) * each),
                "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from
                "worker_extension_cls": "arborl_vllm.Extension",
                "generation_config": "vllm",
                "enable_prefix_caching": True,
                "disable_log_stats": True,
                "enforce_eager": on_cpu,  # compiling takes longer than small runs do
                **(WHOLE_PROMPTS | {"max_num_batched_tokens": max(4096, max_context)} if on_cpu else {}),
                "enable_sleep_mode": sleeps and model.device.type == "cuda",
                **lora,
                **(args or {}),
            }
            self.probe = Probe(model, sampling or Sampling(), str(settings["dtype"]))
            self._started = self.process.wait("start", START, args=settings)
            log.info("vLLM %s is ready, process %d", self._started.get("vllm"), self.process.child.pid)
        except BaseException:
            self._clean()
            raise

    @staticmethod
    def _described(model: PreTrainedModel) -> tuple[PaddedHeads | None, dict[str, Any]]:
        """The model's `config.json`, with larger heads where vLLM has no kernel for its own."""
        about = json.loads(model.config.to_json_string(use_diff=False))
        about.pop("quantization_config", None)
        about["architectures"] = [type(model).__name__]
        size = head_size(about)
        if model.device.type != "cpu" or size in CPU_HEADS:
            return None, about
        larger = next((large for large in CPU_HEADS if large > size and large % 2 == 0), None)
        if larger is None:
            raise EngineError(f"vLLM has no kernel for heads of {size} on a CPU")
        heads = PaddedHeads(size, larger)
        try:
            return heads, heads.config(about)
        except ValueError as error:
            raise EngineError(f"vLLM has no kernel for heads of {size} on a CPU, and {error}") from error

    # ------------------------------------------------------------------------------------------ as an engine

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of `prompt`; vLLM finds the session's earlier turns by their tokens."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        tokens = read_prompt(prompt, self.vocabulary, self.max_context)
        check_sampling(sampling)
        if sampling.stop_texts and self.decode is None:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        if not self.loaded:
            await self.load(self.model.state_dict(), self.version)
        if self.asleep:
            await self._wake()
        began = time.perf_counter()
        said, cut = await self._sample(tokens.tolist(), sampling)
        return self._completion(said, cut, time.perf_counter() - began)

    async def _sample(self, prompt: list[int], sampling: Sampling) -> tuple[Said, bool]:
        """All that was sampled, and whether a stop text ended it."""
        stops = StopTexts(self.decode, sampling.stop_texts) if self.decode and sampling.stop_texts else None
        how = params(sampling, self.max_context, len(prompt))
        asked = self.process.ask("generate", prompt=prompt, sampling=how, stream=stops is not None)
        until = None if sampling.seconds is None else time.perf_counter() + sampling.seconds
        found: Said = {"tokens": [], "logprobs": []}
        kept: int | None = None
        aborted = False
        try:
            while True:
                left = None if until is None or aborted else max(0.0, until - time.perf_counter())
                try:
                    piece = await asyncio.wait_for(asked.next(), left)
                except TimeoutError:
                    aborted = True
                    self.process.tell("abort", which=asked.number)
                    continue
                for token, logprob in zip(piece["tokens"], piece["logprobs"], strict=True):
                    found["tokens"].append(token)
                    found["logprobs"].append(logprob)
                    if kept is None and stops is not None and self._said_it(stops, found["tokens"]):
                        kept = len(found["tokens"])
                        self.process.tell("abort", which=asked.number)
                if piece.get("done"):
                    break
        finally:
            if not asked.over:  # whoever asked is gone
                self.process.tell("abort", which=asked.number)
                asked.forget()
        count = len(found["tokens"]) if kept is None else kept
        found = {name: values[:count] for name, values in found.items()}
        return {**found, "finish": piece["finish"], "spans": piece["spans"]}, kept is not None

    @staticmethod
    def _said_it(stops: StopTexts, sampled: list[int]) -> bool:
        try:
            return stops.reached(sampled)
        except Exception as error:  # turning tokens into text is not our code: where it breaks, this request fails
            raise EngineError(f"decode failed on its tokens: {type(error).__name__}: {error}") from error

    def _completion(self, said: Said, cut: bool, seconds: float) -> Completion:
        spans = [(label_of(label, self.run), begin, end) for label, begin, end in said["spans"]]
        known = [(version, begin, end) for version, begin, end in spans if version is not None]
        versions = versions_of(known, len(said["tokens"]))
        if len(versions) != len(said["tokens"]):
            raise EngineError(f"vLLM sampled from weights that are not ours: {said['spans']}")
        if not all(logprob == logprob and logprob != float("-inf") for logprob in said["logprobs"]):
            raise EngineError("the model's output for this prompt is not finite (NaN or infinite)")
        self.counts["sampled"] += len(said["tokens"])
        self.counts["requests"] += 1
        finish = FinishReason.STOP if cut else FINISH.get(said["finish"], FinishReason.ABORT)
        version, mixed = told(versions, self.version)
        return Completion(tuple(said["tokens"]), tuple(said["logprobs"]), finish, version, seconds, mixed)

    async def load(self, weights: Weights, version: int) -> None:
        """Send the weights, and see that they have arrived."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        began = time.perf_counter()
        given = dict(weights)
        first = not self.loaded
        if first:
            given = dict(self.model.state_dict()) | given
        if self.asleep:
            await self._wake()
        asked: dict[str, Any] = {"version": f"{self.run}:{version}"}
        with tempfile.TemporaryDirectory(prefix="arborl-adapter-", dir=self.folder) as folder:
            if first or (given and not has_lora(self.model)):
                asked |= await asyncio.to_thread(self._in_memory, given)
            if given and has_lora(self.model):
                asked["adapter"] = str(self._in_folder(given, Path(folder)))
            said = await self.process.answer("load", UPDATE, **asked)
        if said["version"] != asked["version"]:
            raise EngineError(f"vLLM was given weights {asked['version']} and says that it has {said['version']}")
        self.loaded, self.version = True, version
        if given:
            await self._check(given)
        self.update_seconds = time.perf_counter() - began

    def _in_memory(self, weights: Weights) -> dict[str, Any]:
        assert self.memory is not None
        sent = whole(weights)
        if self.heads is not None:
            sent = {name: self.heads.tensor(name, tensor) for name, tensor in sent.items()}
        return {"table": self.memory.write(sent, getattr(torch, self.dtype)), "path": str(self.memory.path)}

    def _in_folder(self, weights: Weights, folder: Path) -> Path:
        from arborl.models.lora import save_adapter

        sent = adapters(weights)
        if self.heads is not None:
            sent = {name: self.heads.tensor(name, tensor) for name, tensor in sent.items()}
        save_adapter(self.model, folder, {name: tensor.detach().cpu().contiguous() for name, tensor in sent.items()})
        return folder

    async def _check(self, weights: Weights) -> None:
        said, cut = await self._sample(list(PROMPT), self.probe.question)
        self.gap = self.probe.check(self._completion(said, cut, 0.0), weights, "vLLM")
        self.counts["sampled"] -= len(said["tokens"])
        self.counts["requests"] -= 1

    async def sleep(self) -> None:
        """Give memory back until the next update or request; only where `sleeps`, and nothing is being sampled."""
        if self.sleeps and not self.closed and not self.asleep:
            await self.process.answer("sleep", UPDATE)
            self.asleep = True

    async def _wake(self) -> None:
        await self.process.answer("wake", UPDATE)
        self.asleep = False

    async def close(self) -> None:
        """Whoever still waits is told; the process ends."""
        self.closed = True
        await asyncio.to_thread(self._clean)

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, requests; and of the last update its seconds and its probe."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        return {f"engine/{name}": value for name, value in counts.items()} | {
            "engine/update_seconds": self.update_seconds,
            "engine/probe_gap": self.gap,
        }

    def __del__(self) -> None:
        if hasattr(self, "folder"):
            self._clean()

    def _clean(self) -> None:
        if (process := getattr(self, "process", None)) is not None:
            process.end("the engine was closed")
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _rank(model: PreTrainedModel) -> int:
    ranks = [config.r for config in model.peft_config.values()]
    found = next((rank for rank in RANKS if rank >= max(ranks)), None)
    if found is None:
        raise EngineError(f"model.lora.rank={max(ranks)}: vLLM takes {RANKS[-1]} at most")
    return found
