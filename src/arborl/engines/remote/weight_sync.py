"""What engines with a copy of the weights are sent at an update, and how the update is verified.

A failed update is silent: sampling continues from the old weights or from half of the new ones, and the run learns
less. After every update the copy therefore samples a few tokens, and its log-probabilities must equal the learner's.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel

from arborl.engines.engine import Engine, Weights
from arborl.engines.engine_requests import StopTextMatcher, check_sampling, read_prompt
from arborl.engines.remote.replicas import WeightMismatch
from arborl.errors import EngineError, disk_error_reason
from arborl.models.attention import CausalAttention, library_hidden_states, logits
from arborl.models.lora import ADAPTER_NAME, ADAPTER_PREFIX, export_merged, has_lora
from arborl.models.sampling import DistributionParams, sampling_logprobs
from arborl.types import Completion, Metrics, Sampling

Decode = Callable[[Sequence[int]], str]
PROBE_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
PROBE_TOKENS = 8
MAX_LOGPROB_GAP = {"float32": 1e-3, "float64": 1e-3}
"""Allowed mean difference of log-probabilities, by the precision of the copy."""
MAX_COARSE_GAP = 0.25
FOLDER_PREFIX = "arborl-weights-"
LOCK_NAME = f".held-{socket.gethostname()}"
"""Locked while the folder's process lives. The host is in the name because some shared file systems keep locks
local."""


def base_weights(weights: Weights) -> dict[str, Tensor]:
    """The model's weights under the names of its files, each tensor once, without adapters."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if "lora_" in name or (place in seen and tensor.numel()):
            continue
        seen.add(place)
        found[name.replace(".base_layer.", ".")] = tensor
    return found


def adapter_weights(weights: Weights) -> dict[str, Tensor]:
    """The adapters under the names of peft's files."""
    return {
        f"{ADAPTER_PREFIX}{name.replace(f'.{ADAPTER_NAME}.', '.')}": tensor
        for name, tensor in weights.items()
        if "lora_" in name
    }


def cuda_handles(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """What another process on the same GPU needs to read these tensors in place (CUDA IPC), as JSON values. They must
    not be freed or changed until it has read them. The counterpart is `vllm_worker/arborl_vllm.py: open_handles`."""
    rows = []
    for name, tensor in tensors.items():
        _, (_, size, stride, offset, _, dtype, _, *storage) = reduce_tensor(tensor.detach())
        packed = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in storage]
        rows.append([name, list(size), list(stride), offset, str(dtype).removeprefix("torch."), packed])
    return rows


class _NextTokenLogits(nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens_N: Tensor) -> Tensor:
        positions_N = torch.arange(len(tokens_N), device=tokens_N.device)
        return logits(self.model, library_hidden_states(self.model, tokens_N, positions_N, CausalAttention()))


class SyncedEngine(Engine):
    """An engine with its own copy of the weights, which is verified after every update."""

    verifies_weights = True

    def __init__(
        self, model: PreTrainedModel, max_context: int, decode: Decode | None, dtype: str, sampling: Sampling | None
    ):
        self.model, self.max_context, self.decode = model, max_context, decode
        self.vocabulary = int(model.config.vocab_size)
        self.dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        self.probe = WeightProbe(model, sampling or Sampling(), self.dtype)
        self.run = uuid.uuid4().hex[:8]
        """Prefix of this run's weight labels."""
        self.version = 0
        self.closed = False
        self.counts = dict.fromkeys(("sampled", "requests"), 0.0)
        self.gap = self.update_seconds = 0.0
        """Of the last update: the probe's difference and the duration."""

    def check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed; make another")

    def checked_prompt(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The prompt of a valid request; raises EngineError otherwise."""
        self.check_open()
        tokens = read_prompt(prompt, self.vocabulary, self.max_context)
        check_sampling(sampling)
        StopTextMatcher.make(self.decode, sampling)
        return tokens.tolist()

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled and requests; of the last update its duration and the probe's
        difference."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        update = {"engine/update_seconds": self.update_seconds, "engine/probe_gap": self.gap}
        return {f"engine/{name}": value for name, value in counts.items()} | update


@dataclass(slots=True)
class WeightProbe:
    model: PreTrainedModel
    sampling: Sampling
    dtype: str

    @property
    def question(self) -> Sampling:
        """Sampling parameters of the probe, whose prompt is `PROBE_PROMPT`."""
        return replace(self.sampling, max_tokens=PROBE_TOKENS, stop=(), stop_texts=(), seed=7, seconds=None)

    @torch.no_grad()
    def expected(self, tokens: tuple[int, ...], weights: Weights) -> list[float]:
        """Log-probabilities of `tokens` after `PROBE_PROMPT` by the model with these weights."""
        device = self.model.device
        input_N = torch.tensor([*PROBE_PROMPT, *tokens[:-1]], device=device)
        state = self.model.state_dict()
        changed = {f"model.{name}": t for name, t in weights.items() if state[name].data_ptr() != t.data_ptr()}
        scorer = _NextTokenLogits(self.model)  # unchanged tensors are used in place
        logits_NV = functional_call(scorer, changed, (input_N,), tie_weights=False) if changed else scorer(input_N)
        logits_NV = logits_NV[len(PROBE_PROMPT) - 1 :]
        token_N = torch.tensor(tokens, device=device)
        logprob_NV = sampling_logprobs(logits_NV, DistributionParams.of([self.sampling], device), token_N)
        return [float(x) for x in logprob_NV.gather(1, token_N[:, None])[:, 0]]

    def check(self, completion: Completion, weights: Weights, name: str, hint: str = "") -> float:
        """The mean difference of log-probabilities; raises WeightMismatch if it exceeds rounding errors."""
        if not completion.tokens:
            raise WeightMismatch(f"{name} sampled nothing for a request of {PROBE_TOKENS} tokens")
        expected = self.expected(completion.tokens, weights)
        gap = sum(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) / len(expected)
        allowed = MAX_LOGPROB_GAP.get(self.dtype, MAX_COARSE_GAP)
        if not gap <= allowed:
            raise WeightMismatch(
                f"{name} does not match the learner's model: after an update the log-probabilities of {len(expected)} "
                f"tokens differ by {gap:.2g} on average; {allowed:g} is allowed for {self.dtype}. It samples from "
                f"other weights or from another distribution.{hint}"
            )
        return gap


def label_version(label: str, run: str) -> int | None:
    """The version in a label `run:version` of this run; None for any other label."""
    prefix, _, version = label.rpartition(":")
    return int(version) if prefix == run and version.lstrip("-").isdigit() else None


def span_versions(spans: list[tuple[str, int, int]], count: int, run: str) -> list[int]:
    """The version of each of `count` tokens, from labelled spans; shorter if some labels are not of this run."""
    labelled = [(label_version(label, run), begin, min(end, count)) for label, begin, end in spans]
    return [version for version, begin, end in labelled if version is not None for _ in range(begin, end)]


def sampling_params(sampling: Sampling, context: int, prompt: int) -> Mapping[str, object]:
    """vLLM's `SamplingParams` as a dict; stop texts are detected by the engine."""
    return {
        "max_tokens": min(sampling.max_tokens, context - prompt),
        "temperature": float(sampling.temperature),
        "top_k": int(sampling.top_k) if 0 < sampling.top_k < 2**31 else 0,
        "top_p": float(sampling.top_p),
        "min_p": float(sampling.min_p),
        "seed": int(sampling.seed) % 2**63,
        "stop_token_ids": [int(token) for token in sampling.stop],
    }


class WeightFiles:
    """The newest weights as files for servers, in Hugging Face format. Folders of killed runs are removed first."""

    def __init__(self, model: PreTrainedModel, root: Path | None):
        self.model = model
        try:
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(root or Path(tempfile.gettempdir()))
            self.home, self.lock = _make_folder(root)
        except OSError as error:
            raise EngineError(f"engine.args.weights_dir={root}: cannot be written: {error.strerror}") from error
        self.close = finalize(self, shutil.rmtree, self.home, ignore_errors=True)  # at the latest when Python ends
        self.folder: Path | None = None
        self.written = 0

    def write(self, weights: Weights, version: int) -> Path:
        """Write a folder with these weights. `remove_others` removes the one before it."""
        self.written += 1  # a version may be written twice
        folder = self.home / f"{self.written:06}-version-{version}"
        try:
            if has_lora(self.model):
                export_merged(self.model, folder)
            else:
                folder.mkdir()
                self.model.config.save_pretrained(folder)
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in base_weights(weights).items()}
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except Exception as error:
            if (reason := disk_error_reason(error)) is None:
                raise
            raise EngineError(f"weights for the servers cannot be written to {folder}: {reason}") from error
        self.folder = folder
        return folder

    def remove_others(self, folder: Path) -> None:
        for other in self.home.glob("*-version-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


def _make_folder(root: Path | None) -> tuple[Path, FileLock]:
    """A new folder. It gets its final name after it is locked, so no other run takes it for an abandoned one."""
    made = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}", dir=root))
    made.chmod(0o755)  # a server may run as another user
    lock = FileLock(made / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except (NotImplementedError, Timeout):  # a file system without locks: its folders never count as abandoned
        (made / LOCK_NAME).unlink(missing_ok=True)
    return made.rename(made.with_name(made.name[1:])), lock


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = folder / LOCK_NAME
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not lock.exists():
                continue  # another user's folder may contain a link to anything, and a lock writes to its file
            with FileLock(lock, timeout=0, mode=0o644):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, NotImplementedError, Timeout):  # locked, or removed meanwhile
            continue
