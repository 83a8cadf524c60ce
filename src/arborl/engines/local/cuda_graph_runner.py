"""Steps on a GPU: Triton kernels over the KV cache, in CUDA graphs.

Each new token of a step is a row: one of a sequence that decodes, many of a sequence with a new observation. Keys and
values are stored before attention, so a token sees earlier tokens of the same step. A graph is recorded for a number of
rows (a bucket), by `warm_up` or at first use, and contains the whole step: input tokens, model, sampler, output tokens.
It binds addresses, so weights that change in place take effect at once. The inputs of a step travel in two small arrays
and its outputs in two more; the next step is launched before this one's output is read. Steps with more tokens than the
largest bucket run without a graph.

N tokens, R rows, S sequences, B rows of the bucket.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from arborl.engines.local import engine_kernels
from arborl.engines.local.fused_forward import FusedForward, FusedLayer, Product, RotaryTable
from arborl.engines.local.kv_cache import AttentionMetadata, KVCache
from arborl.engines.local.model_runner import FinishedOutput, ModelStep, StepOutput
from arborl.engines.local.sampler import SamplingBatch, TopTokens, redraw
from arborl.engines.local.shared_prefix import PrefixGrouping
from arborl.engines.local.step_buffers import BUCKETS, StepBuffers, StepInputs, copy_to_device, reachable_buckets
from arborl.models.attention import (
    NO_LIMITS,
    AttentionLimits,
    attention_layout,
    library_hidden_states,
    logit_cap,
    raw_head_logits,
)
from arborl.models.execution_paths import FastPath, first_line, report_fallback
from arborl.models.fast_forward import epsilon

log = logging.getLogger(__name__)
T = TypeVar("T")
PRODUCT_PARTS, SPLIT_ROWS = 2, 256
"""Parts of a product with few outputs, which alone does not fill a GPU; in steps of at most so many rows
(`docs/results/engine.md`)."""


def can_split(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is computed in parts: in 16 bits, for few rows, if its parts begin at multiples of 16 bytes."""
    return x.element_size() == 2 and len(x) <= SPLIT_ROWS and weight.shape[1] % (8 * PRODUCT_PARTS) == 0


class TritonLayerOps(ABC):
    def __init__(self, cache: KVCache, heads: int, position_N: Tensor, slot_N: Tensor, table: Tensor):
        self.cache, self.heads = cache, heads
        self.position_N, self.slot_N, self.table = position_N, slot_N, table

    def norm(self, x: Tensor, module: nn.Module) -> Tensor:
        return engine_kernels.norm(x, module.weight, epsilon(module))  # type: ignore[arg-type]

    def residual_product(self, product: Product, x: Tensor) -> Tensor:
        if type(product) is nn.Linear and product.bias is None and can_split(x, product.weight):
            return engine_kernels.product_in_parts(x, product.weight, PRODUCT_PARTS)
        out: Tensor = product(x)
        return out

    def add_norm(self, x: Tensor, y: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        return engine_kernels.add_norm(x, y, module.weight, epsilon(module))  # type: ignore[arg-type]

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        if isinstance(activation, nn.SiLU | SiLUActivation):
            return engine_kernels.gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        out: Tensor = activation(gate) * up
        return out

    def attention(self, layer: FusedLayer, qkv: Tensor, rope: RotaryTable) -> Tensor:
        keys, values = self.cache.keys[layer.number], self.cache.values[layer.number]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm.weight, layer.k_norm.weight, epsilon(layer.q_norm))
        q_NHD = engine_kernels.rotate_store(
            qkv, rope.cos, rope.sin, self.position_N, self.slot_N, keys, values, self.heads, norms  # type: ignore[arg-type]
        )  # fmt: skip
        return self.attend(q_NHD, keys, values, layer.scale).flatten(1)

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, limits: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        """Attention for the library's layers, which rotate queries and keys themselves. Models with windows or capped
        scores do not use this runner (`select_runner`)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        block_N, offset_N = self.slot_N.long() // self.cache.block_size, self.slot_N.long() % self.cache.block_size
        keys[block_N, :, offset_N] = k_NKD
        values[block_N, :, offset_N] = v_NKD
        return self.attend(q_NHD.contiguous(), keys, values, scale)

    @abstractmethod
    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention over one layer's cache."""


class DecodeLayerOps(TritonLayerOps):
    """One query per program."""

    def __init__(self, cache: KVCache, heads: int, inputs: StepInputs):
        super().__init__(cache, heads, inputs.position, inputs.slot, inputs.table)
        self.sequence = inputs.sequence
        self.shared = engine_kernels.SharedPrefix(inputs.group_blocks, inputs.group_rows, inputs.shared)

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return engine_kernels.decode_attention(
            q_NHD, keys, values, self.table, self.sequence, self.position_N, self.shared, scale
        )


class PrefillLayerOps(TritonLayerOps):
    """Tiles of queries of one sequence, for many new tokens."""

    def __init__(self, cache: KVCache, heads: int, step: ModelStep, device: torch.device):
        metadata, tile = step.metadata, engine_kernels.TILE_QUERIES
        tiles_R = -(-metadata.counts // tile)
        row_T = np.repeat(np.arange(len(tiles_R)), tiles_R)
        first_T = (np.arange(len(row_T)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)) * tile
        columns = (
            metadata.positions, metadata.slots(cache.block_size), row_T, first_T,
            np.cumsum(metadata.counts) - metadata.counts, metadata.starts, metadata.ends, metadata.tables.reshape(-1),
        )  # fmt: skip
        position, slot, row, first, begin, start, end, table = copy_to_device(columns, device)
        super().__init__(cache, heads, position, slot, table.view(metadata.tables.shape))
        self.tiles, self.rows = (row, first), (begin, start, end)

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return engine_kernels.prefill_attention(q_NHD, keys, values, self.table, self.tiles, *self.rows, scale)


@dataclass(frozen=True, slots=True)
class PendingOutput:
    token: Tensor
    logprob: Tensor
    event: torch.cuda.Event
    top: TopTokens | None = None

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        self.event.synchronize()
        return self.token.numpy().copy(), self.logprob.numpy().astype(np.float64)


class CudaGraphModelRunner:
    """Steps on a GPU. The cache has one spare block, which the padding rows of a bucket write to."""

    runs_ahead = True
    copies_weights = False
    max_tokens = 16384
    """Maximum new tokens of a step, so that prefill does not delay decoding for long."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        block_size: int,
        context: int,
        requests: int,
        sleep_mode: bool = False,
    ):
        self.model, self.spare_slot = model, num_blocks * block_size
        self.cache = KVCache(model, num_blocks + 1, block_size, sleep_mode)
        self.forward = FusedForward(model, context)
        layout = attention_layout(model)
        self.heads, self.group_size = layout.heads, engine_kernels.max_group_rows(layout.heads, layout.key_heads)
        self.table_blocks = -(-context // block_size)
        self.requests = requests
        self.buckets = sorted({*BUCKETS, requests})
        self.buffers = StepBuffers.make(self._layout(self.buckets[-1], StepInputs.size), requests, model.device)
        self.prefix_grouping = PrefixGrouping(self.group_size)
        self.host_views: dict[tuple[int, int], StepInputs] = {}
        """By buffer and bucket: views of the pinned host memory."""
        self.copied = (torch.cuda.Event(), torch.cuda.Event())
        """By buffer: the device has copied it, and the host may write it again."""
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        """By bucket, and by whether the graph ends with logits instead of sampled tokens."""
        self.logits: Tensor | None = None
        """Output of graphs that end with logits."""
        self.memory_pool = torch.cuda.graph_pool_handle()
        self.buffer = 0
        """Index of the host buffer in use, 0 or 1."""
        self.is_broken = False
        """Recording failed for this model: all steps run without graphs."""

    @torch.inference_mode()
    def launch(self, step: ModelStep) -> StepOutput:
        self.buffer ^= 1
        count = len(step.sampled)
        rows, top = step.sampling.redrawn_rows(), None
        with_logits = bool(len(rows))
        in_graph = len(step.tokens) <= self.buckets[-1] and not self.is_broken
        logits_BV = self._replay(step, with_logits) if in_graph else self._run_eager(step, with_logits)
        if not count:
            return FinishedOutput(np.zeros(0, np.int64), np.zeros(0))
        buffers = self.buffers
        if with_logits:
            assert logits_BV is not None
            logits_RV = logits_BV[torch.from_numpy(rows).to(logits_BV.device)].float()
            top = redraw(logits_RV, rows, step.sampling, buffers.token, buffers.logprob)
        token, logprob = buffers.host_outputs[self.buffer]
        token[:count].copy_(buffers.token[:count], non_blocking=True)
        logprob[:count].copy_(buffers.logprob[:count], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingOutput(token[:count], logprob[:count], event, top)

    def token_budget(self, tokens: int) -> int:
        """Tokens that fill a few graphs are split among these."""
        largest = self.buckets[-1]
        return largest if tokens <= 4 * largest and not self.is_broken else self.max_tokens

    def weights_changed(self) -> None:
        if self.forward.refresh():
            self.graphs.clear()

    @torch.inference_mode()
    def warm_up(self, truncates: bool) -> None:
        """Compile all kernels and record the graphs of all possible steps, the largest first: the others then fit into
        its memory."""
        started = time.perf_counter()
        buckets = reachable_buckets(self.buckets, self.requests * self.table_blocks * self.cache.block_size)
        self._run_eager(self._padding_step(), truncates)
        for bucket in reversed(buckets):
            if (bucket, truncates) not in self.graphs and not self.is_broken:
                self._record(bucket, truncates)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        log.info("engine warm-up took %.1f s: %d graphs of up to %d tokens", seconds, len(self.graphs), buckets[-1])

    # ------------------------------------------------------------------------------------------ graphs

    def _replay(self, step: ModelStep, with_logits: bool) -> Tensor | None:
        count = len(step.tokens)
        bucket = next(b for b in self.buckets if b >= count)
        if (bucket, with_logits) not in self.graphs:
            self._record(bucket, with_logits)
            if self.is_broken:
                return self._run_eager(step, with_logits)
        self._send_step(step, bucket)
        self.graphs[bucket, with_logits].replay()
        return self.logits

    def _send_step(self, step: ModelStep, bucket: int) -> None:
        """Copy the inputs of a step to the device, in the layout of a bucket."""
        count = len(step.tokens)
        metadata, counts = step.metadata, step.metadata.counts
        inputs = self._host_inputs(bucket)
        self._pad(inputs, count, len(counts))
        size, positions, sequence = self.cache.block_size, metadata.positions, np.repeat(np.arange(len(counts)), counts)
        inputs.tokens[:count], inputs.position[:count], inputs.sequence[:count] = step.tokens, positions, sequence
        inputs.slot[:count] = metadata.tables[sequence, positions // size] * size + positions % size
        inputs.table[: len(counts)] = metadata.tables
        inputs.last[: len(step.sampled)] = (np.cumsum(counts) - 1)[step.sampled]
        groups = self.prefix_grouping.of_step(metadata.tables, metadata.starts, counts, size)
        inputs.shared[:count] = groups.shared_R
        used = len(groups.blocks_M)
        inputs.group_blocks[:used], inputs.group_rows[:used] = groups.blocks_M, groups.rows_MB
        self._send_sampling(step.sampling, bucket)

    def layer_ops(self, step: ModelStep, prefill: bool) -> TritonLayerOps:
        """The operations of a step, for checks: of a prefill, or as in a graph."""
        if prefill:
            return PrefillLayerOps(self.cache, self.heads, step, self.model.device)
        bucket = len(step.tokens)
        self.buffer ^= 1
        self._send_step(step, bucket)
        return DecodeLayerOps(self.cache, self.heads, self._inputs(self.buffers.inputs, bucket))

    def _layout(self, rows: int, of: Callable[..., T]) -> T:
        return of(rows, min(rows, self.requests), self.group_size, self.table_blocks)

    def _inputs(self, flat: Any, rows: int) -> StepInputs:
        return self._layout(rows, partial(StepInputs.of, flat))

    def _host_inputs(self, rows: int) -> StepInputs:
        """The host buffer of this step. Its copy of two steps ago may be pending: the host waits for no output of steps
        that sample nothing."""
        self.copied[self.buffer].synchronize()
        key = (self.buffer, rows)
        if key not in self.host_views:
            self.host_views[key] = self._inputs(self.buffers.host_inputs[self.buffer][0].numpy(), rows)
        return self.host_views[key]

    def _pad(self, inputs: StepInputs, rows: int, sequences: int) -> None:
        """Fill unused rows: they write to the spare block, attend to one token and are in no prefix group."""
        inputs.tokens[rows:], inputs.position[rows:], inputs.slot[rows:], inputs.shared[rows:] = (
            0,
            0,
            self.spare_slot,
            0,
        )
        inputs.sequence[rows:] = len(inputs.table) - 1
        inputs.table[sequences:] = self.spare_slot // self.cache.block_size
        inputs.group_blocks[:] = inputs.last[:] = 0

    def _send_sampling(self, sampling: SamplingBatch, rows: int) -> None:
        """Copy the host's inputs of a step of `rows` rows to the device; padding rows sample arbitrary tokens."""
        host, host_floats = self.buffers.host_inputs[self.buffer]
        count, inputs, floats = len(sampling.temperature_B), self._host_inputs(rows), host_floats.numpy()
        greedy = sampling.temperature_B == 0
        inputs.greedy[count:] = floats[:, count:] = 1
        inputs.greedy[:count] = greedy
        floats[0, :count] = np.where(greedy, 1.0, sampling.temperature_B)
        floats[1, :count] = sampling.uniform_B
        size = self._layout(rows, StepInputs.size)
        self.buffers.inputs[:size].copy_(host[:size], non_blocking=True)
        self.buffers.floats.copy_(host_floats, non_blocking=True)
        self.copied[self.buffer].record()

    def _record(self, bucket: int, with_logits: bool) -> None:
        """Run once to compile, then record. All rows are padding and write to the spare block only."""
        self._pad(self._inputs(self.buffers.inputs, bucket), 0, 0)
        token, logprob = self.buffers.token.clone(), self.buffers.logprob.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._graph_body(bucket, with_logits)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=self.memory_pool):
                self._graph_body(bucket, with_logits)
        except RuntimeError as error:
            report_fallback(self.model, FastPath.SAMPLING_GRAPHS, first_line(error))
            self.is_broken = True
            return
        finally:
            self.buffers.token.copy_(token)
            self.buffers.logprob.copy_(logprob)
        self.graphs[bucket, with_logits] = graph

    def _graph_body(self, bucket: int, with_logits: bool) -> None:
        """The step; its results stay in buffers only, so all graphs share one memory pool."""
        inputs = self._inputs(self.buffers.inputs, bucket)
        ops = DecodeLayerOps(self.cache, self.heads, inputs)
        tokens = engine_kernels.input_tokens(inputs.tokens, self.buffers.token)
        hidden_NE = self._hidden_states(tokens, inputs.position, ops)
        logits_BV = self._logits(hidden_NE.index_select(0, inputs.last))
        if with_logits:
            if self.logits is None:  # in the run before the first recording
                self.logits = logits_BV.new_zeros(self.requests, logits_BV.shape[1])
            self.logits[: len(logits_BV)].copy_(logits_BV)
        self._sample(logits_BV, inputs.greedy)

    def _sample(self, logits_BV: Tensor, greedy: Tensor) -> None:
        buffers = self.buffers
        temperature, uniform = buffers.floats[:, : len(logits_BV)]
        engine_kernels.sample_logits(logits_BV, temperature, greedy, uniform, buffers.token, buffers.logprob)

    def _logits(self, hidden_BE: Tensor) -> Tensor:
        return raw_head_logits(self.model.get_output_embeddings(), logit_cap(self.model), hidden_BE)

    def _hidden_states(self, tokens: Tensor, position_N: Tensor, ops: TritonLayerOps) -> Tensor:
        if self.forward.is_fused:
            return self.forward(tokens, ops)
        return library_hidden_states(self.model, tokens, position_N.long(), ops)

    # ------------------------------------------------------------------------------------------ without a graph

    def _run_eager(self, step: ModelStep, with_logits: bool) -> Tensor:
        device = self.model.device
        ops = PrefillLayerOps(self.cache, self.heads, step, device)
        last = np.cumsum(step.metadata.counts)[step.sampled] - 1
        tokens, last_B = copy_to_device([step.tokens, last], device)
        hidden_NE = self._hidden_states(engine_kernels.input_tokens(tokens, self.buffers.token), ops.position_N, ops)
        count = len(last)
        logits_BV = self._logits(hidden_NE[last_B.long()])
        if count:
            self._send_sampling(step.sampling, count)
            self._sample(logits_BV, self._inputs(self.buffers.inputs, count).greedy)
        return logits_BV

    def _padding_step(self) -> ModelStep:
        """One sequence in the spare block."""
        count, zero = min(self.cache.block_size, 2 * engine_kernels.TILE_QUERIES), np.zeros(1, dtype=np.int64)
        tables = np.full((1, self.table_blocks), self.spare_slot // self.cache.block_size, dtype=np.int32)
        sampling = SamplingBatch(np.ones(1), zero, np.ones(1), np.zeros(1), np.zeros(1))
        return ModelStep(np.zeros(count, np.int32), AttentionMetadata(zero, zero + count, tables), zero, sampling)
