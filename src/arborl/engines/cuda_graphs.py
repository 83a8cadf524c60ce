"""Running steps on a GPU: fused kernels over paged keys and values, in CUDA graphs.

In a step each new token is a row: one for a conversation that is being sampled, many for one that has just got its
observation. Its key and value are stored before anybody looks, so a token sees those before it in the same step. A
graph is recorded for a number of rows (a bucket), by `warm` or at its first use, and holds the whole step: tokens in,
model, sampler, tokens out. It binds addresses, not values: weights that change in place are used at once. All that a
step needs from the host travels in two small arrays, and its outcome in two more, so the next step is launched before
this one is looked at. Steps that bring more tokens than any bucket has are launched piece by piece.

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

from arborl.engines import kernels, token_kernels
from arborl.engines.cache import Cache, Reading
from arborl.engines.draw_tokens import Draws, Top, draw
from arborl.engines.executor import Ready, Sampled, Step
from arborl.engines.forward import Block, Forward, Rope
from arborl.engines.sent import BUCKETS, Buffers, Sent, reachable, sent_at_once
from arborl.engines.shared_prefix import Bundling
from arborl.models.attention import FREE, Bounds, layout, library_hidden_states, logit_cap, raw_read_out
from arborl.models.fallbacks import FastPath, first_line, report_fallback
from arborl.models.lean import epsilon

log = logging.getLogger(__name__)
T = TypeVar("T")


class TritonOps(ABC):
    """The operations between the products."""

    def __init__(self, cache: Cache, heads: int, position_N: Tensor, slot_N: Tensor, table: Tensor):
        self.cache, self.heads = cache, heads
        self.position_N, self.slot_N, self.table = position_N, slot_N, table

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

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        """The same for the library's own code, which has turned queries and keys already. No window is shorter than the
        context, and no score is capped: others do not come here (`local.executor_for`)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        page_N, place_N = self.slot_N.long() // self.cache.size, self.slot_N.long() % self.cache.size
        keys[page_N, :, place_N] = k_NKD
        values[page_N, :, place_N] = v_NKD
        return self.attend(q_NHD.contiguous(), keys, values, scale)

    @abstractmethod
    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Over what one layer's cache holds now."""


class DecodeOps(TritonOps):
    """Each token looks for itself."""

    def __init__(self, cache: Cache, heads: int, sent: Sent):
        super().__init__(cache, heads, sent.position, sent.slot, sent.table)
        self.sequence, self.shared = sent.sequence, kernels.Shared(sent.shared, sent.member, sent.own)

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return kernels.decode(q_NHD, keys, values, self.table, self.sequence, self.position_N, self.shared, scale)


class ReadOps(TritonOps):
    """The tokens of a sequence look in tiles of some: for many of them."""

    def __init__(self, cache: Cache, heads: int, step: Step, device: torch.device):
        reading = step.reading
        tiles_R = -(-reading.counts // kernels.QUERIES)
        row_T = np.repeat(np.arange(len(tiles_R)), tiles_R)
        first_T = (np.arange(len(row_T)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)) * kernels.QUERIES
        columns = (
            reading.positions, reading.slots(cache.size), row_T, first_T, np.cumsum(reading.counts) - reading.counts,
            reading.starts, reading.ends, reading.tables.reshape(-1),
        )  # fmt: skip
        position, slot, row, first, begin, start, end, table = sent_at_once(columns, device)
        super().__init__(cache, heads, position, slot, table.view(reading.tables.shape))
        self.tiles, self.rows = (row, first), (begin, start, end)

    def attend(self, q_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return kernels.read(q_NHD, keys, values, self.table, self.tiles, *self.rows, scale)


@dataclass(frozen=True, slots=True)
class Coming:
    """An outcome that is being computed."""

    token: Tensor
    logprob: Tensor
    event: torch.cuda.Event
    top: Top | None = None

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        self.event.synchronize()
        return self.token.numpy().copy(), self.logprob.numpy().astype(np.float64)


class GraphExecutor:
    """Steps on a GPU. The cache has one page more than is handed out, for what the padding rows of a bucket write."""

    ahead = True
    own_weights = False
    many = 16384
    """New tokens a step may bring in all: so few that those who sample need not wait long for those who read."""

    def __init__(
        self, model: PreTrainedModel, pages: int, page_size: int, context: int, requests: int, lends: bool = False
    ):
        self.model, self.spare = model, pages * page_size
        self.cache = Cache(model, pages + 1, page_size, lends)
        self.forward = Forward(model, context)
        self.heads = layout(model).heads
        self.members = kernels.members_for(self.heads, layout(model).key_heads)
        self.table_pages = -(-context // page_size)
        self.requests = requests
        self.buckets = sorted({*BUCKETS, requests})
        self.buffers = Buffers.make(self._layout(self.buckets[-1], Sent.size), requests, model.device)
        self.bundling = Bundling(self.members)
        self.stations: dict[tuple[int, int], Sent] = {}
        """By turn and bucket: where the host writes what it sends."""
        self.copied = (torch.cuda.Event(), torch.cuda.Event())
        """By turn: the device has copied what was sent, and the host's memory may be written again."""
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        """By bucket, and by whether they leave the drawing of tokens to what follows."""
        self.logits: Tensor | None = None
        """Where graphs of that kind leave what is drawn from."""
        self.pool = torch.cuda.graph_pool_handle()
        self.turn = 0
        self.broken = False
        """Recording has failed for this model: everything is launched piece by piece."""

    @torch.inference_mode()
    def launch(self, step: Step) -> Sampled:
        self.turn ^= 1
        count = len(step.sampled)
        truncates, top = step.draws.apart, None
        in_graph = len(step.tokens) <= self.buckets[-1] and not self.broken
        logits_BV = self._replay(step, truncates) if in_graph else self._read(step, truncates)
        if not count:
            return Ready(np.zeros(0, np.int64), np.zeros(0))
        buffers = self.buffers
        if truncates:
            assert logits_BV is not None
            token_B, logprob_B, top = draw(logits_BV[:count].float(), step.draws)
            buffers.token[:count], buffers.logprob[:count] = token_B, logprob_B
        token, logprob = buffers.taken[self.turn]
        token[:count].copy_(buffers.token[:count], non_blocking=True)
        logprob[:count].copy_(buffers.logprob[:count], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Coming(token[:count], logprob[:count], event, top)

    def at_once(self, tokens: int) -> int:
        """What fills a few graphs is divided among these."""
        largest = self.buckets[-1]
        return largest if tokens <= 4 * largest and not self.broken else self.many

    def weights_changed(self) -> None:
        if self.forward.refresh():
            self.graphs.clear()

    @torch.inference_mode()
    def warm(self, truncates: bool) -> None:
        """Compile all kernels and record the graphs of all steps there can be, the largest first: the others then find
        room in its memory."""
        began = time.perf_counter()
        wanted = reachable(self.buckets, self.requests * self.table_pages * self.cache.size)
        self._read(self._padding_step(), truncates)
        for bucket in reversed(wanted):
            if (bucket, truncates) not in self.graphs and not self.broken:
                self._record(bucket, truncates)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        log.info("sampling is warm after %.1f s: %d graphs of up to %d tokens", seconds, len(self.graphs), wanted[-1])

    # ------------------------------------------------------------------------------------------ in a graph

    def _replay(self, step: Step, truncates: bool) -> Tensor | None:
        count = len(step.tokens)
        bucket = next(b for b in self.buckets if b >= count)
        if (bucket, truncates) not in self.graphs:
            self._record(bucket, truncates)
            if self.broken:
                return self._read(step, truncates)
        self._fill(step, bucket)
        self.graphs[bucket, truncates].replay()
        return self.logits

    def _fill(self, step: Step, bucket: int) -> None:
        """Send the device what this step is, in a bucket of so many rows."""
        count = len(step.tokens)
        reading, counts = step.reading, step.reading.counts
        sent = self._station(bucket)
        self._pad(sent, count, len(counts))
        size, positions, sequence = self.cache.size, reading.positions, np.repeat(np.arange(len(counts)), counts)
        sent.fed[:count], sent.position[:count], sent.sequence[:count] = step.tokens, positions, sequence
        sent.slot[:count] = reading.tables[sequence, positions // size] * size + positions % size
        sent.table[: len(counts)] = reading.tables
        sent.last[: len(step.sampled)] = (np.cumsum(counts) - 1)[step.sampled]
        found = self.bundling.of_step(reading.tables, reading.starts, counts, size)
        sent.own[:count] = found.own_R
        sent.shared[: len(found.pages_M)], sent.member[: len(found.pages_M)] = found.pages_M, found.rows_MB
        self._send(step.draws, bucket)

    def ops(self, step: Step, reads: bool) -> TritonOps:
        """What runs between the products of a step, for checks: as a prompt is read, or as in a graph."""
        if reads:
            return ReadOps(self.cache, self.heads, step, self.model.device)
        bucket = len(step.tokens)
        self.turn ^= 1
        self._fill(step, bucket)
        return DecodeOps(self.cache, self.heads, self._sent(self.buffers.whole, bucket))

    def _layout(self, rows: int, of: Callable[..., T]) -> T:
        return of(rows, min(rows, self.requests), self.members, self.table_pages)

    def _sent(self, flat: Any, rows: int) -> Sent:
        return self._layout(rows, partial(Sent.of, flat))

    def _station(self, rows: int) -> Sent:
        """Where the host writes what it sends this time. The copy from two steps ago may still be pending: steps that
        sample nothing have no outcome that the host waits for."""
        self.copied[self.turn].synchronize()
        key = (self.turn, rows)
        if key not in self.stations:
            self.stations[key] = self._sent(self.buffers.sent[self.turn][0].numpy(), rows)
        return self.stations[key]

    def _pad(self, sent: Sent, rows: int, sequences: int) -> None:
        """From there on, rows that write to the spare page and look at one token, nobody cares whose; no bundles."""
        sent.fed[rows:], sent.position[rows:], sent.slot[rows:], sent.own[rows:] = 0, 0, self.spare, 0
        sent.sequence[rows:] = len(sent.table) - 1
        sent.table[sequences:] = self.spare // self.cache.size
        sent.shared[:] = sent.last[:] = 0

    def _send(self, draws: Draws, rows: int) -> None:
        """The host's numbers for a step of `rows` rows; those that are padding draw something or other."""
        whole, real = self.buffers.sent[self.turn]
        count, sent, heat_chance = len(draws.temperature_B), self._station(rows), real.numpy()
        greedy = draws.temperature_B == 0
        sent.greedy[count:] = heat_chance[:, count:] = 1
        sent.greedy[:count] = greedy
        heat_chance[0, :count] = np.where(greedy, 1.0, draws.temperature_B)
        heat_chance[1, :count] = draws.uniform_B
        size = self._layout(rows, Sent.size)
        self.buffers.whole[:size].copy_(whole[:size], non_blocking=True)
        self.buffers.real.copy_(real, non_blocking=True)
        self.copied[self.turn].record()

    def _record(self, bucket: int, truncates: bool) -> None:
        """Run once to compile what is needed, then record. Its rows are padding: they write to the spare page only."""
        self._pad(self._sent(self.buffers.whole, bucket), 0, 0)
        token, logprob = self.buffers.token.clone(), self.buffers.logprob.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._body(bucket, truncates)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=self.pool):
                self._body(bucket, truncates)
        except RuntimeError as error:
            report_fallback(self.model, FastPath.SAMPLING_GRAPHS, first_line(error))
            self.broken = True
            return
        finally:
            self.buffers.token.copy_(token)
            self.buffers.logprob.copy_(logprob)
        self.graphs[bucket, truncates] = graph

    def _body(self, bucket: int, truncates: bool) -> None:
        """Nothing it makes is kept but what it leaves in buffers: all graphs then share one memory."""
        sent = self._sent(self.buffers.whole, bucket)
        ops = DecodeOps(self.cache, self.heads, sent)
        hidden_NE = self._hidden(token_kernels.feed(sent.fed, self.buffers.token), sent.position, ops)
        logits_BV = self._logits(hidden_NE.index_select(0, sent.last))
        if truncates:
            if self.logits is None:  # in the run before the first recording
                self.logits = logits_BV.new_zeros(self.requests, logits_BV.shape[1])
            self.logits[: len(logits_BV)].copy_(logits_BV)
        else:
            self._sample(logits_BV, sent.greedy)

    def _sample(self, logits_BV: Tensor, greedy: Tensor) -> None:
        buffers = self.buffers
        heat, uniform = buffers.real[:, : len(logits_BV)]
        token_kernels.sample(logits_BV, heat, greedy, uniform, buffers.token, buffers.logprob)

    def _logits(self, hidden_BE: Tensor) -> Tensor:
        """As the head gives them; the sampler adds up in float32."""
        return raw_read_out(self.model.get_output_embeddings(), logit_cap(self.model), hidden_BE)

    def _hidden(self, tokens: Tensor, position_N: Tensor, ops: TritonOps) -> Tensor:
        if self.forward.fused:
            return self.forward(tokens, ops)
        return library_hidden_states(self.model, tokens, position_N.long(), ops)

    # ------------------------------------------------------------------------------------------ many tokens

    def _read(self, step: Step, truncates: bool) -> Tensor:
        device = self.model.device
        ops = ReadOps(self.cache, self.heads, step, device)
        last = np.cumsum(step.reading.counts)[step.sampled] - 1
        fed, last_B = sent_at_once([step.tokens, last], device)
        hidden_NE = self._hidden(token_kernels.feed(fed, self.buffers.token), ops.position_N, ops)
        count = len(last)
        logits_BV = self._logits(hidden_NE[last_B.long()])
        if count and not truncates:
            self._send(step.draws, count)
            self._sample(logits_BV, self._sent(self.buffers.whole, count).greedy)
        return logits_BV

    def _padding_step(self) -> Step:
        """One sequence in the spare page that nobody cares for."""
        count, none = min(self.cache.size, 2 * kernels.QUERIES), np.zeros(1, dtype=np.int64)
        tables = np.full((1, self.table_pages), self.spare // self.cache.size, dtype=np.int32)
        draws = Draws(np.ones(1), none, np.ones(1), np.zeros(1), np.zeros(1))
        return Step(np.zeros(count, np.int32), Reading(none, none + count, tables), none, draws)
