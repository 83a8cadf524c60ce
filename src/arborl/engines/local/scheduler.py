"""Selects the requests of the next forward pass.

A waiting request is admitted when a row of the batch and enough KV-cache blocks are available. Every request ends by
`complete` with its sampled tokens or by `fail` with its own error; both free its row and blocks and affect no other
request. Without memory the youngest request is preempted: it waits again, keeps its tokens and continues with the same
ones, because sampling depends only on seed and position.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arborl.engines.engine import TokenListener, completion_versions
from arborl.engines.engine_requests import LARGEST_ID, StopTextMatcher
from arborl.engines.local.block_pool import BlockPool, BlockTable, Tokens
from arborl.engines.local.kv_cache import Array
from arborl.engines.local.sampler import LogitEdit, LogitEditor, SamplingBatch, uniform_numbers
from arborl.errors import EngineError, SchemaError
from arborl.types import Completion, FinishReason, Metrics, Sampling

MIN_SHARED = 16
"""A request waits one step for a sibling's prefill if that saves more than this many tokens."""
HEADROOM = 64
"""An admitted request needs blocks for this many further tokens; otherwise it would soon be preempted."""
NO_LOGPROBS, NO_VERSIONS = np.zeros(0), np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class EngineRequest:
    tokens: Tokens
    """The prompt, and the tokens sampled before the last preemption."""
    prompt: int
    sampling: Sampling
    done: asyncio.Future[Completion]
    started: float
    stop_texts: StopTextMatcher | None = None
    listener: TokenListener | None = None
    editor: LogitEditor | None = None
    logprobs: NDArray[np.float64] = field(default_factory=lambda: NO_LOGPROBS)
    versions: NDArray[np.int64] = field(default_factory=lambda: NO_VERSIONS)
    """Of the tokens sampled before the last preemption, as `logprobs`."""
    row: int = -1
    table: BlockTable | None = None


class InputBatch:
    """The running requests as columns, so that a step has no loop over requests. Between two steps:

    | column | meaning | invariant |
    |---|---|---|
    | `prompt` | tokens of the prompt | 1 <= prompt <= known |
    | `known` | tokens known to the host: the prompt and the output of finished steps | known <= limit |
    | `length` | tokens including the one that a launched step samples | known <= length <= known + 1 |
    | `computed` | tokens whose keys and values are computed once the launched step ends | computed <= length |
    | `limit` | maximum length | prompt < limit |
    | `num_blocks` | allocated blocks | computed <= num_blocks * block size; the blocks of `tables[row]` are distinct |
    | `sample_index` | index among the tokens sampled by the launched step | read where length > known |
    | `epoch` | number of requests that left the row; output of a launched step is for one epoch | increases |
    """

    def __init__(self, count: int, context: int, num_blocks: int):
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.tokens = np.zeros((count, context), dtype=np.int32)
        self.logprobs = np.zeros((count, context))
        self.versions = np.zeros((count, context), dtype=np.int64)
        self.tables = np.zeros((count, num_blocks), dtype=np.int32)
        self.stops = np.full((count, 1), -1, dtype=np.int32)
        self.prompt, self.known, self.length, self.computed, self.limit, self.num_blocks = (
            np.zeros(count, dtype=np.int64) for _ in range(6)
        )
        self.seed = np.zeros(count, dtype=np.uint64)
        self.temperature, self.top_p, self.min_p = (np.zeros(count) for _ in range(3))
        self.top_k, self.sample_index, self.top, self.epoch = (np.zeros(count, dtype=np.int64) for _ in range(4))
        self.has_stop_texts, self.has_listener, self.has_edits = (np.zeros(count, dtype=bool) for _ in range(3))

    def add(self, request: EngineRequest, cached: int, context: int) -> int:
        """Put a request with `cached` computed tokens into a free row."""
        row, sampling, size = self.free.pop(), request.sampling, len(request.tokens)
        self.tokens[row, :size] = request.tokens
        self.logprobs[row, request.prompt : size] = request.logprobs
        self.versions[row, request.prompt : size] = request.versions
        self.prompt[row], self.known[row], self.length[row], self.computed[row] = request.prompt, size, size, cached
        self.limit[row] = min(request.prompt + sampling.max_tokens, context)
        self.seed[row] = np.uint64(int(sampling.seed) & 0xFFFFFFFFFFFFFFFF)
        self.temperature[row], self.top_k[row] = sampling.temperature, min(sampling.top_k, LARGEST_ID)
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        if len(sampling.stop) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(sampling.stop)), -1, dtype=np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop)] = sampling.stop
        self.has_stop_texts[row] = request.stop_texts is not None
        self.has_listener[row] = request.listener is not None
        self.has_edits[row] = request.editor is not None
        self.top[row] = 0 if request.listener is None else request.listener.top
        return row

    def remove(self, row: int) -> None:
        self.free.append(row)
        self.num_blocks[row] = 0
        self.epoch[row] += 1

    def reset(self) -> None:
        self.free = list(range(self.count - 1, -1, -1))
        self.num_blocks[:] = 0
        self.epoch += 1

    def sampling(self, rows: Array, edits: Mapping[int, LogitEdit]) -> SamplingBatch:
        """The parameters of the next token of these rows; `edits` by row of this batch."""
        uniform = uniform_numbers(self.seed[rows], self.length[rows] - self.prompt[rows])
        top = int(self.top[rows].max(initial=0))
        chosen = {index: edits[row] for index, row in enumerate(rows.tolist()) if row in edits} if edits else {}
        return SamplingBatch(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], uniform, top, chosen
        )  # fmt: skip


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        batch: InputBatch,
        context: int,
        reuse: bool,
        copy: Callable[[int, int, int], None],
        counts: Metrics,
    ):
        self.pool, self.batch, self.context, self.reuse, self.copy = pool, batch, context, reuse, copy
        self.counts = counts
        self.waiting: deque[EngineRequest] = deque()
        self.held: deque[EngineRequest] = deque()
        """Requests that wait for `resume`."""
        self.is_paused = False
        self.running: dict[int, EngineRequest] = {}
        """By row, in order of admission."""
        self.has_cancelled = False
        self.has_deadlines = False
        self.out_of_blocks = False
        """The first waiting request did not fit when last tried."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def is_saturated(self) -> bool:
        return bool(self.waiting) and (self.out_of_blocks or len(self.waiting) > len(self.batch.free))

    def add(self, request: EngineRequest, while_paused: bool = False) -> None:
        """Queue a request; it waits for `resume` if paused, unless `while_paused`."""
        self.has_deadlines |= request.sampling.seconds is not None
        (self.held if self.is_paused and not while_paused else self.waiting).append(request)

    def pause(self, finish: bool) -> None:
        """Hold all requests until `resume`; with `finish` only those that have sampled nothing yet."""
        self.is_paused = True
        if not finish:
            for request in reversed(list(self.running.values())):
                self._preempt(request)
        started = [request for request in self.waiting if finish and len(request.tokens) > request.prompt]
        self.held.extendleft(request for request in reversed(self.waiting) if request not in started)
        self.waiting = deque(started)

    def resume(self) -> None:
        self.is_paused = False
        self.waiting.extend(self.held)
        self.held.clear()

    def restart_held(self) -> None:
        for request in self.held:
            self.counts["restarted"] += len(request.tokens) - request.prompt
            request.tokens = request.tokens[: request.prompt]
            request.logprobs, request.versions = request.logprobs[:0], request.versions[:0]

    # ------------------------------------------------------------------------------------------ admission

    def admit(self) -> None:
        """Admit waiting requests in order while rows and blocks last; one whose prefix a sibling is about to compute
        waits a step."""
        prefixes: set[tuple[int, bytes]] = set()
        later: list[EngineRequest] = []
        self.out_of_blocks = False
        try:
            while self.waiting and self.batch.free and not self.out_of_blocks:
                request = self.waiting.popleft()
                if not request.done.done():
                    later.append(request)  # until it is admitted
                    if self._try_admit(request, prefixes):
                        later.pop()
        finally:
            self.waiting.extendleft(reversed(later))

    def _try_admit(self, request: EngineRequest, prefixes: set[tuple[int, bytes]]) -> bool:
        table = self.pool.match_prefix(request.tokens[:-1], self.reuse)
        key = self._prefix_key(request, table)
        sibling_computes = key in prefixes and len(request.tokens) > table.cached + MIN_SHARED
        if sibling_computes or not self._allocate(request, table):
            self.pool.free(table)
            self.out_of_blocks = not sibling_computes
            return False
        prefixes.add(key)
        self._start(request, table)
        return True

    def _prefix_key(self, request: EngineRequest, table: BlockTable) -> tuple[int, bytes]:
        """The cached prefix and `MIN_SHARED` further tokens. Full blocks are identified by the last one, so the cost
        does not grow with the request."""
        full = table.published
        rest = request.tokens[full * self.pool.block_size : table.cached + MIN_SHARED]
        return table.blocks[full - 1].id if full else -1, rest.tobytes()

    def _allocate(self, request: EngineRequest, table: BlockTable) -> bool:
        """Allocate blocks for the request's tokens if `HEADROOM` more would fit."""
        size = len(request.tokens)
        rest = min(HEADROOM, request.prompt + request.sampling.max_tokens - size, self.context - size)
        enough = self.pool.blocks_for(size + rest) - len(table.blocks) <= self.pool.num_available
        return enough and self.pool.extend(table, size)

    def _start(self, request: EngineRequest, table: BlockTable) -> None:
        if table.copy is not None:  # now: the source block may be evicted next
            self.copy(*table.copy)
        row = self.batch.add(request, table.cached, self.context)
        request.row, request.table = row, table
        self._update_table(request)
        self.running[row] = request
        self.counts["reused"] += float(table.cached)

    def _update_table(self, request: EngineRequest) -> None:
        blocks, had = self.block_table(request).blocks, int(self.batch.num_blocks[request.row])
        self.batch.tables[request.row, had : len(blocks)] = [block.id for block in blocks[had:]]
        self.batch.num_blocks[request.row] = len(blocks)

    def block_table(self, request: EngineRequest) -> BlockTable:
        assert request.table is not None
        return request.table

    def allocate_next(self) -> None:
        """Allocate a block for every row whose last one is full; without memory the youngest request is preempted."""
        batch = self.batch
        rows = np.fromiter(self.running, np.int64, len(self.running))
        full = batch.num_blocks[rows] * self.pool.block_size < batch.length[rows]
        for row in rows[full & (batch.length[rows] < batch.limit[rows])].tolist():
            while row in self.running and not self.pool.extend(
                self.block_table(self.running[row]), int(batch.length[row])
            ):
                self._preempt(self.running[next(reversed(self.running))])
            if row in self.running:
                self._update_table(self.running[row])

    # ------------------------------------------------------------------------------------------ completion

    def complete(self, request: EngineRequest, finish: FinishReason, version: int) -> None:
        if not request.done.done():
            sampled, logprobs, versions = self._sampled(request)
            seconds = time.perf_counter() - request.started
            version, mixed = completion_versions(versions.tolist(), version)
            completion = Completion(tuple(sampled.tolist()), tuple(logprobs.tolist()), finish, version, seconds, mixed)
            request.done.set_result(completion)
        self._remove(request)

    def fail(self, request: EngineRequest, reason: str, cause: Exception | None = None) -> None:
        if not request.done.done() and not request.done.get_loop().is_closed():
            # one per request: a shared one would collect the tracebacks of all
            error = SchemaError(reason) if isinstance(cause, SchemaError) else EngineError(reason)
            error.__cause__ = cause
            request.done.set_exception(error)
        self._remove(request)

    def drop_finished(self, version: int) -> None:
        """Remove cancelled requests; complete those whose deadline has passed."""
        if self.has_deadlines:
            now = time.perf_counter()
            for request in (*self.waiting, *self.running.values()):
                limit = request.sampling.seconds
                if limit is not None and now - request.started > limit:
                    self.complete(request, FinishReason.ABORT, version)
                    self.has_cancelled = True
        if self.has_cancelled:
            self.has_cancelled = False
            self.waiting = deque(r for r in self.waiting if not r.done.done())
            for request in [r for r in self.running.values() if r.done.done()]:
                self._remove(request)

    def clear_cache(self) -> None:
        """Empty the prefix cache: preempt all running requests, in their order, and compute their prefixes again."""
        for request in reversed(list(self.running.values())):
            self._preempt(request)
        self.pool.clear_cache()

    def fail_all(self, reason: str, cause: Exception | None = None) -> None:
        """Fail all requests and reset: a step that broke may have left inconsistent state."""
        requests = (*self.waiting, *self.held, *self.running.values())
        self.waiting.clear()
        self.held.clear()
        self.running.clear()
        self.batch.reset()
        self.pool.reset()
        for request in requests:
            request.row, request.table = -1, None
            self.fail(request, reason, cause)

    def _preempt(self, request: EngineRequest) -> None:
        """Move a running request to the front of the queue, with its sampled tokens."""
        sampled, request.logprobs, request.versions = self._sampled(request)
        request.tokens = np.concatenate([request.tokens[: request.prompt], sampled])
        self._remove(request)
        self.waiting.appendleft(request)
        self.counts["preempted"] += 1

    def _sampled(self, request: EngineRequest) -> tuple[Tokens, NDArray[np.float64], NDArray[np.int64]]:
        if (row := request.row) < 0:
            return request.tokens[request.prompt :], request.logprobs, request.versions
        new, batch = slice(request.prompt, int(self.batch.known[row])), self.batch
        return batch.tokens[row, new].copy(), batch.logprobs[row, new].copy(), batch.versions[row, new].copy()

    def _remove(self, request: EngineRequest) -> None:
        """Free row and blocks of a running request; computed blocks stay in the prefix cache."""
        if (row := request.row) < 0:
            return
        table = self.block_table(request)
        computed = min(int(self.batch.computed[row]), int(self.batch.known[row]) - 1)
        self.pool.publish(table, self.batch.tokens[row, : max(computed, 0)])
        self.pool.free(table)
        self.batch.remove(row)
        del self.running[row]
        request.row, request.table = -1, None
