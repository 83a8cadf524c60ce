"""Running steps on a GPU: fused kernels over paged keys and values, and CUDA graphs when every row brings one token.

A graph is recorded for a number of rows (a bucket) at its first use and holds the whole step: tokens in, model,
sampler, tokens out. It binds addresses, not values: weights that change in place are used at once. All that a step
needs from the host travels in two small arrays, and its outcome in two more, so the next step is launched before this
one is looked at.

N tokens, R rows, B rows of the bucket.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from arborl.engines import kernels
from arborl.engines.cache import Cache
from arborl.engines.executor import Ready, Sampled, Step
from arborl.engines.forward import Block, Forward, Rope
from arborl.engines.sampling import Draws, draw
from arborl.models.attention import library_hidden_states, logit_cap, raw_read_out
from arborl.models.lean import epsilon

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows a graph may have; a step takes the next larger one."""
FED, POSITION, SLOT, GREEDY, TABLE = range(5)
"""Columns of what the host sends for each row; its pages follow."""
HEAT, UNIFORM = range(2)


class TritonOps:
    """The operations between the products, for rows of one token each (a graph) or of many."""

    def __init__(self, cache: Cache, heads: int, position_N: Tensor, slot_N: Tensor, table: Tensor):
        self.cache, self.heads = cache, heads
        self.position_N, self.slot_N, self.table = position_N, slot_N, table
        self.length_N = position_N + 1

    def norm(self, x: Tensor, module: nn.Module) -> Tensor:
        return kernels.norm(x, module.weight, epsilon(module))  # type: ignore[arg-type]

    def add_norm(self, x: Tensor, y: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        return kernels.add_norm(x, y, module.weight, epsilon(module))  # type: ignore[arg-type]

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        if isinstance(activation, nn.SiLU | SiLUActivation):
            return kernels.gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        out: Tensor = activation(gate) * up
        return out

    def attention(self, block: Block, qkv: Tensor, rope: Rope) -> Tensor:
        keys, values = self.cache.keys[block.number], self.cache.values[block.number]
        norms = None
        if block.q_norm is not None and block.k_norm is not None:
            norms = (block.q_norm.weight, block.k_norm.weight, epsilon(block.q_norm))
        q_NHD = kernels.rotate_store(
            qkv, rope.cos, rope.sin, self.position_N, self.slot_N, keys, values, self.heads, norms  # type: ignore[arg-type]
        )  # fmt: skip
        return self.attend(q_NHD, keys, values, block.scale).flatten(1)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        """The same for the library's own code, which has turned queries and keys already."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        page_N, place_N = self.slot_N.long() // self.cache.size, self.slot_N.long() % self.cache.size
        keys[page_N, :, place_N] = k_NKD
        values[page_N, :, place_N] = v_NKD
        return self.attend(q_NHD.contiguous(), keys, values, scale)

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return kernels.decode(q_NHD, keys, values, self.table, self.length_N, scale)


class ReadOps(TritonOps):
    """Rows that bring any number of tokens."""

    def __init__(self, cache: Cache, heads: int, step: Step, device: torch.device):
        reading = step.reading
        tiles_R = -(-reading.counts // kernels.QUERIES)
        row_T = np.repeat(np.arange(len(tiles_R)), tiles_R)
        first_T = (np.arange(len(row_T)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)) * kernels.QUERIES
        columns = (
            reading.positions, reading.slots(cache.size), row_T, first_T, np.cumsum(reading.counts) - reading.counts,
            reading.starts, reading.ends, reading.tables.reshape(-1),
        )  # fmt: skip
        sent = torch.from_numpy(np.concatenate(columns).astype(np.int32)).to(device)
        position, slot, row, first, begin, start, end, table = sent.split([len(column) for column in columns])
        super().__init__(cache, heads, position, slot, table.view(reading.tables.shape))
        self.tiles, self.rows = (row, first), (begin, start, end)

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return kernels.read(q_NHD, keys, values, self.table, self.tiles, *self.rows, scale)


@dataclass(slots=True)
class Buffers:
    """Fixed memory that the host's numbers for a step arrive in, and its outcome leaves from; each with two stations on
    the host's side, used in turn, so that one can be filled while the other travels."""

    whole: Tensor
    """`[rows, 4 + pages]` int32, on the device."""
    real: Tensor
    """`[rows, 2]` float64."""
    token: Tensor
    logprob: Tensor
    sent: list[tuple[Tensor, Tensor]]
    taken: list[tuple[Tensor, Tensor]]

    @classmethod
    def make(cls, rows: int, pages: int, device: torch.device) -> Buffers:
        def pair(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
            return [tuple(torch.empty_like(x, device="cpu").pin_memory() for x in (first, second)) for _ in range(2)]  # type: ignore[misc]

        whole = torch.zeros(rows, TABLE + pages, dtype=torch.int32, device=device)
        real = torch.ones(rows, 2, dtype=torch.float64, device=device)
        token = torch.zeros(rows, dtype=torch.int64, device=device)
        logprob = torch.zeros(rows, dtype=torch.float32, device=device)
        return cls(whole, real, token, logprob, pair(whole, real), pair(token, logprob))


@dataclass(frozen=True, slots=True)
class Coming:
    """An outcome that is being computed."""

    token: Tensor
    logprob: Tensor
    event: torch.cuda.Event

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        self.event.synchronize()
        return self.token.numpy().copy(), self.logprob.numpy().astype(np.float64)


class GraphExecutor:
    """Steps on a GPU. The cache has one page more than is handed out, for what the padding rows of a bucket write."""

    ahead = True

    def __init__(self, model: PreTrainedModel, pages: int, page_size: int, context: int, requests: int):
        self.model, self.spare = model, pages * page_size
        self.cache = Cache(model, pages + 1, page_size)
        self.forward = Forward(model, context)
        self.heads = model.config.num_attention_heads
        self.buckets = [b for b in BUCKETS if b < requests] + [requests]
        self.buffers = Buffers.make(requests, -(-context // page_size), model.device)
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.turn = 0
        self.broken = False
        """Recording has failed for this model: everything is launched piece by piece."""

    @torch.inference_mode()
    def launch(self, step: Step) -> Sampled:
        self.turn ^= 1
        count = len(step.sampled)
        one_each = len(step.tokens) == len(step.reading.starts) == count
        truncates = step.draws.truncates
        if one_each and not self.broken:
            logits_BV = self._decode(step, truncates)
        else:
            logits_BV = self._read(step, truncates)
        if not count:
            return Ready(np.zeros(0, np.int64), np.zeros(0))
        buffers = self.buffers
        if truncates:
            token_B, logprob_B = draw(logits_BV[:count].float(), step.draws)
            buffers.token[:count], buffers.logprob[:count] = token_B, logprob_B
        token, logprob = buffers.taken[self.turn]
        token[:count].copy_(buffers.token[:count], non_blocking=True)
        logprob[:count].copy_(buffers.logprob[:count], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Coming(token[:count], logprob[:count], event)

    def weights_changed(self) -> None:
        if self.forward.refresh():
            self.graphs.clear()

    # ------------------------------------------------------------------------------------------ one token a row

    def _decode(self, step: Step, truncates: bool) -> Tensor:
        count = len(step.tokens)
        bucket = next(b for b in self.buckets if b >= count)
        if (bucket, truncates) not in self.graphs:
            self._record(bucket, truncates)
            if self.broken:
                return self._read(step, truncates)
        reading = step.reading
        whole, real = (x[:bucket].numpy() for x in self.buffers.sent[self.turn])
        whole[count:, :TABLE] = (0, 0, self.spare, 0)
        whole[count:, TABLE:] = self.spare // self.cache.size
        real[count:] = (1.0, 0.5)
        whole[:count, FED], whole[:count, POSITION] = step.tokens, reading.starts
        whole[:count, SLOT] = reading.slots(self.cache.size)
        whole[:count, TABLE:] = reading.tables
        self._chances(step.draws, whole[:count, GREEDY], real[:count])
        self._send(bucket)
        graph, logits_BV = self.graphs[bucket, truncates]
        graph.replay()
        return logits_BV

    def _send(self, rows: int) -> None:
        whole, real = self.buffers.sent[self.turn]
        self.buffers.whole[:rows].copy_(whole[:rows], non_blocking=True)
        self.buffers.real[:rows].copy_(real[:rows], non_blocking=True)

    @staticmethod
    def _chances(draws: Draws, greedy: NDArray[np.int32], real: NDArray[np.float64]) -> None:
        greedy[:] = draws.temperature_B == 0
        real[:, HEAT] = np.where(draws.temperature_B == 0, 1.0, draws.temperature_B)
        real[:, UNIFORM] = draws.uniform_B

    def _record(self, bucket: int, truncates: bool) -> None:
        """Run once to compile what is needed, then record. Its rows are padding: they write to the spare page only."""
        whole = self.buffers.whole[:bucket]
        whole[:, :TABLE] = torch.tensor([0, 0, self.spare, 0], dtype=torch.int32, device=whole.device)
        whole[:, TABLE:] = self.spare // self.cache.size
        token, logprob = self.buffers.token.clone(), self.buffers.logprob.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._body(bucket, truncates)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=self.pool):
                logits_BV = self._body(bucket, truncates)
        except RuntimeError as error:
            log.warning("%s is run without CUDA graphs: %s", type(self.model).__name__, error)
            self.broken = True
            return
        finally:
            self.buffers.token.copy_(token)
            self.buffers.logprob.copy_(logprob)
        self.graphs[bucket, truncates] = (graph, logits_BV)

    def _body(self, bucket: int, truncates: bool) -> Tensor:
        whole = self.buffers.whole[:bucket]
        tokens = kernels.feed(whole[:, FED].contiguous(), self.buffers.token)
        position, slot = whole[:, POSITION].contiguous(), whole[:, SLOT].contiguous()
        ops = TritonOps(self.cache, self.heads, position, slot, whole[:, TABLE:])
        logits_BV = self._logits(self._hidden(tokens, position, ops))
        if not truncates:
            self._sample(logits_BV)
        return logits_BV

    def _sample(self, logits_BV: Tensor) -> None:
        rows, buffers = len(logits_BV), self.buffers
        heat, uniform = buffers.real[:rows, HEAT].float(), buffers.real[:rows, UNIFORM].contiguous()
        greedy = buffers.whole[:rows, GREEDY].contiguous()
        kernels.sample(logits_BV, heat, greedy, uniform, buffers.token, buffers.logprob)

    def _logits(self, hidden_BE: Tensor) -> Tensor:
        """As the head gives them; the sampler adds up in float32."""
        return raw_read_out(self.model.get_output_embeddings(), logit_cap(self.model), hidden_BE)

    def _hidden(self, tokens: Tensor, position_N: Tensor, ops: TritonOps) -> Tensor:
        if self.forward.fused:
            return self.forward(tokens, ops)
        return library_hidden_states(self.model, tokens, position_N.long(), ops)

    # ------------------------------------------------------------------------------------------ many tokens a row

    def _read(self, step: Step, truncates: bool) -> Tensor:
        device = self.model.device
        ops = ReadOps(self.cache, self.heads, step, device)
        last = np.cumsum(step.reading.counts)[step.sampled] - 1
        sent = np.concatenate([step.tokens, last.astype(np.int32)])
        fed, last_B = torch.from_numpy(sent).to(device).split([len(step.tokens), len(last)])
        hidden_NE = self._hidden(kernels.feed(fed, self.buffers.token), ops.position_N, ops)
        count = len(last)
        logits_BV = self._logits(hidden_NE[last_B.long()])
        if count and not truncates:
            whole, real = (x[:count].numpy() for x in self.buffers.sent[self.turn])
            self._chances(step.draws, whole[:, GREEDY], real)
            self._send(count)
            self._sample(logits_BV)
        return logits_BV
