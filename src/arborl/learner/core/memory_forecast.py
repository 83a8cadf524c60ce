"""Forecast of a run's GPU memory, and settings that fit: arithmetic over the shapes of a model, without torch.

N tokens per forward pass; E hidden size, Q and K sizes of all query and all key heads, F feed-forward size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from arborl.config.run_config import LearnerConfig

GIB = 2**30
OFFLOAD_CHUNK = 2**28  # offloaded master weights that are on the device at once: 3 GiB with their moments
BYTES_PER_LOGIT = 64
"""On a GPU, one logit per this many bytes of its memory: in bfloat16 1/32 of it, and as much for gradients."""
MAX_LOGITS = 2**31 - 1  # in one tensor, whose numbers 32 bits can index
UNFUSED_HEAD_FACTOR = 4  # an unfused head takes this many times as many bytes per logit, so its chunks are smaller
LARGE_MICRO_BATCH_SIZES = (65_536, 32_768)
"""Tokens per micro-batch that are tried first on a GPU with fused layers, if they leave the KV cache its full size. The
host launches the kernels of a micro-batch in a time that does not depend on its size; with a small model that takes
longer than the GPU needs for 16,384 tokens, and a large model does not fit."""
MICRO_BATCH_SIZES = (16_384, 8_192, 4_096, 2_048)  # then these, fastest first
MIN_CACHED_SEQUENCES = 64
"""With fewer sequences of full length in the engine's KV cache, sampling loses more time than the learner would with
smaller micro-batches or gradient checkpointing."""
LIBRARY_BYTES = int(1.5 * GIB)  # memory of CUDA libraries, and fragmentation


class ModelNeeds(Protocol):
    """The needs of an algorithm that take memory."""

    @property
    def value(self) -> bool: ...

    @property
    def reference(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ModelSizes:
    weights: int  # bytes, including adapters
    parameters: int
    trained: int
    coarse: int  # trained parameters in bfloat16 or float16
    largest: int  # numbers of the largest trained tensor
    item: int  # bytes of an activation
    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    head_norms: bool = False  # whether queries and keys are normalized, as in Qwen3
    rank: int = 0  # LoRA rank; 0 without adapters
    lean: bool = True  # whether layers run in Arbor's own code, which is fused on a GPU

    def optimizer(self, master: bool) -> int:
        """Bytes of master copies and of AdamW's two moments."""
        coarse = 12 if master else 4
        return coarse * self.coarse + 8 * (self.trained - self.coarse)

    def gradients(self, master: bool) -> int:
        return (4 if master else 2) * self.coarse + 4 * (self.trained - self.coarse)

    def layer(self, uses_fused_layers: bool, fused_norms: bool = True) -> int:
        """Bytes per token that one layer keeps for its backward pass. Fused layers keep the inputs of matrix products
        and norms, each once."""
        e, q, k, f, item = self.hidden, self.queries, self.keys, self.inner, self.item
        adapters = 7 * 4 * self.rank
        if uses_fused_layers:
            return item * (4 * e + 2 * q + 2 * k + 3 * f + (q + 2 * k if self.head_norms else 0)) + adapters
        scaled = not (fused_norms or self.rank)
        norms = 4 * e if scaled else 2 * e
        attention = 3 * (q + k) + (q + k if self.head_norms and scaled else 0)
        kept = item * (norms + attention + 3 * f)
        if self.rank and item < 4 and not self.lean:  # each of peft's adapters keeps a float32 copy of its input
            return kept + 4 * (5 * e + q + f) + adapters
        return kept + item * (2 * e + f) + adapters

    def activations(self, tokens: int, recompute: bool, uses_fused_layers: bool, fused_norms: bool = True) -> int:
        """Bytes that a forward pass keeps, plus those of one layer's backward pass."""
        layer, edge = self.layer(uses_fused_layers, fused_norms), self.item * self.hidden
        kept = self.layers * edge + layer if recompute else self.layers * layer
        under_way = self.item * (2 * self.inner + 2 * self.queries + 2 * self.keys + 4 * self.hidden)
        return tokens * (kept + 2 * edge + under_way)


def uses_fused_layers(sizes: ModelSizes, config: LearnerConfig, cuda: bool) -> bool:
    return cuda and sizes.lean and config.attention in ("auto", "kernel", "causal")


def logit_rows(memory: int, vocabulary: int, uses_fused_layers: bool) -> int:
    logits = min(memory // BYTES_PER_LOGIT, MAX_LOGITS)
    return max(1, logits // (1 if uses_fused_layers else UNFUSED_HEAD_FACTOR) // vocabulary)


def learner_sizes(sizes: ModelSizes, sharded: bool) -> ModelSizes:
    """The sizes of the model as the learner runs it: sharded models run in the library's code."""
    return replace(sizes, lean=sizes.lean and not sharded)


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes of device memory at the peak of an update."""

    weights: int
    optimizer: int
    gradients: int
    others: int  # reference model, critic and teacher
    activations: int
    logits: int
    kv: int
    beside: int = 0
    kv_freed: bool = False  # the engine frees its KV cache while the learner works

    @property
    def staying(self) -> int:
        """Bytes that are always allocated."""
        return self.weights + self.optimizer + self.others + self.beside

    @property
    def learning(self) -> int:
        """Bytes that only an update allocates."""
        return self.gradients + self.activations + self.logits

    @property
    def total(self) -> int:
        both = max(self.learning, self.kv) if self.kv_freed else self.learning + self.kv
        return self.staying + both


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    tokens: int  # per micro-batch
    recompute: bool
    kv_tokens: int  # tokens of the engine's KV cache
    forecast: MemoryForecast
    limit: int  # bytes that the run may use
    summary: str = ""  # forecast and plan in one line
    warning: str = ""  # what to change if the plan does not fit

    @property
    def fits(self) -> bool:
        return self.forecast.total <= self.limit

    def settings(self, config: LearnerConfig) -> LearnerConfig:
        return config.model_copy(update={"micro_batch_tokens": self.tokens, "recompute": self.recompute})


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Tries settings, fastest first."""

    sizes: ModelSizes
    config: LearnerConfig
    needs: ModelNeeds
    context: int  # tokens of the longest branch, which is never split
    limit: int
    kv_token: int  # bytes of a token in the engine's KV cache; 0 without a local engine
    kv_wanted: int  # tokens of the KV cache that the engine would like
    kv_least: int  # with fewer tokens the engine loses more time than a slower learner does
    kv_floor: int  # the engine cannot run with fewer tokens
    logit_rows: int  # maximum number of rows of logits in memory at once
    cuda: bool = True
    truncates: bool = False  # whether sampling truncates the vocabulary (top-k, top-p, min-p)
    can_free_kv: bool = False  # whether the engine can free its memory while the learner works

    @property
    def uses_fused_layers(self) -> bool:
        return uses_fused_layers(self.sizes, self.config, self.cuda)

    def forecast(self, tokens: int, recompute: bool, kv_tokens: int, kv_freed: bool = False) -> MemoryForecast:
        sizes, master, offload = self.sizes, self.config.master == "float32", self.config.offload
        models = 2 if self.needs.value and self.config.has_separate_critic else 1
        longest = max(tokens, self.context)
        optimizer = models * sizes.optimizer(master)
        activations = models * sizes.activations(longest, recompute, self.uses_fused_layers, self.cuda)
        # The fused head holds a logit and its gradient; the unfused head has float32 copies. Truncation needed 28 bytes
        # when all logits were sorted; now they are an upper bound.
        logit = (2 * sizes.item if self.uses_fused_layers else sizes.item + 16) + (28 if self.truncates else 0)
        logits = min(longest, self.logit_rows) * sizes.vocabulary * logit
        gradients = models * sizes.gradients(master)
        copied = self.needs.reference and not sizes.rank and offload != "all"
        ranks, others = self.config.ranks, sizes.weights * (int(copied) + models - 1)
        if self.config.sharded:  # the learner's shard, in addition to the engine's whole weights
            optimizer, gradients, others = optimizer // ranks, gradients // ranks, others // ranks
            masters = 4 * sizes.coarse if master and self.config.strategy == "fsdp2" else 0
            others += models * (sizes.weights - (2 * sizes.coarse if masters else 0)) // ranks
            if self.config.strategy == "fsdp2":  # gathered while they run: two layers, embedding and head
                others += sizes.item * 2 * (sizes.largest + sizes.parameters // max(1, sizes.layers))
            if offload == "all":  # stepped in host memory
                optimizer = gradients = 0
            elif offload == "optimizer":  # only moments are in host memory
                optimizer, others = optimizer - models * masters // ranks, others + models * masters // ranks
        if offload != "none":  # chunks arrive for a step after activations are freed
            each = 12
            if offload == "all":  # gradients arrive with each chunk
                each, optimizer, gradients = 16, optimizer + gradients, 0
            brought = min(optimizer, each * max(OFFLOAD_CHUNK, sizes.largest))
            optimizer = max(0, brought - activations - logits)
        return MemoryForecast(
            weights=sizes.weights,
            optimizer=optimizer,
            gradients=gradients,
            others=others,
            activations=activations,
            logits=logits,
            kv=kv_tokens * self.kv_token,
            beside=LIBRARY_BYTES if self.cuda else 0,
            kv_freed=kv_freed,
        )

    def plan(self) -> MemoryPlan:
        """The first settings that fit with `kv_least` tokens in the KV cache, large micro-batches with `kv_wanted`;
        otherwise the smallest, with the rest for the cache. Freeing the cache during updates costs a fraction of a
        second per step, less than gradient checkpointing."""
        if self.uses_fused_layers and not self.config.micro_batch_tokens and self.config.recompute is not True:
            for tokens in LARGE_MICRO_BATCH_SIZES:
                plan = self._with(tokens, False, self.kv_wanted, False)
                if plan.fits:
                    return plan
        candidates, lending = list(self._candidates()), (False, True) if self.can_free_kv else (False,)
        for tokens, recompute in candidates:
            for kv_freed in lending:
                plan = self._with(tokens, recompute, self.kv_least, kv_freed)
                if plan.fits:
                    return plan
        tokens, recompute = min(candidates, key=lambda one: self.forecast(one[0], one[1], 0).total)
        return self._with(tokens, recompute, self.kv_floor, lending[-1])

    def _with(self, tokens: int, recompute: bool, least: int, kv_freed: bool) -> MemoryPlan:
        alone = self.forecast(tokens, recompute, 0, kv_freed)
        room = (self.limit - (alone.staying if kv_freed else alone.total)) // max(self.kv_token, 1)
        kv = min(self.kv_wanted, max(room, least))
        return MemoryPlan(tokens, recompute, kv, self.forecast(tokens, recompute, kv, kv_freed), self.limit)

    def _candidates(self) -> Iterator[tuple[int, bool]]:
        """Micro-batches of 4,096 tokens come before gradient checkpointing, which costs a third more work; smaller ones
        leave a GPU idle. A 4B model on an H200, 46k tokens: 3.0 s with 8,192, 3.2 s with 4,096, 3.6 s with 16,384 and
        checkpointing."""
        requested, setting = self.config.micro_batch_tokens, self.config.recompute
        shorter = [tokens for tokens in MICRO_BATCH_SIZES[1:] if tokens * 2 > self.context]
        sizes = [requested] if requested else [MICRO_BATCH_SIZES[0], *shorter]
        if setting is not True:
            yield from ((tokens, False) for tokens in (sizes[:3] if setting == "auto" else sizes))
        if setting is not False:
            yield from ((tokens, True) for tokens in sizes)
