"""Sampling in this process, with the learner's own weights: no second copy, nothing to send.

Requests come and go at any step. One step runs the model once over the new tokens of all live requests (a whole prompt
for one that has just come, one token for the others), unpadded. What was read stays in pages (`pages.py`), so the next
turn of a session reads only what is new, and the siblings of a group read their prompt once. When the pages run out,
the youngest request is put back to wait and goes on later, with the same tokens.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from arborl.engines.cache import Array, Reading, token_bytes
from arborl.engines.engine import Weights
from arborl.engines.executor import Executor, Sampled, Step, TorchExecutor
from arborl.engines.pages import Pages, Path
from arborl.engines.rows import Request, Rows
from arborl.engines.sampling import StopTexts, check_request
from arborl.errors import EngineError
from arborl.types import Completion, Finish, Metrics, Sampling

READ_AT_ONCE = {"cpu": 4096, "cuda": 32768}
"""New tokens a step may bring in all; the rest of a long prompt waits for the next."""
WORTH_WAITING = 16
"""Tokens a request must save to wait one step for a sibling to read them."""
HEADROOM = 64
"""Tokens a request must find room for, besides those it has, to be let in; else it would soon be put back."""
SHARE = {"cpu": 0.1, "cuda": 0.3}
"""Part of the memory (of a GPU, of what is free) that pages take when no size is given."""
SEQUENCES = {"cpu": 128, "cuda": 1024}
"""Sequences of full length that pages hold at most when no size is given."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that has been launched: the rows that get a token, and who was in them."""

    row: Array
    tenant: Array
    outcome: Sampled


class LocalEngine:
    """Batched sampling with a cache.

    Args:
        model: shared with the learner; its attention goes through `arborl.models.attention`.
        max_context: longest prompt and completion together.
        max_requests: requests sampled at once; others wait their turn.
        kv_tokens: tokens whose keys and values are kept; 0 takes a share of the free memory.
        page_size: tokens a page; 0 chooses: a whole sequence on a CPU (attention then needs no gathering), 64 on a GPU.
        deterministic: run each request alone and from its start, so that not even rounding depends on its neighbours.
        decode: token ids to text, for stop texts.
    """

    follows_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        max_context: int = 1024,
        max_requests: int = 256,
        kv_tokens: int = 0,
        page_size: int = 0,
        deterministic: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        if max_requests < 1:
            raise ValueError(f"max_requests={max_requests}: give at least 1")
        self.model, self.max_context, self.deterministic, self.decode = model, max_context, deterministic, decode
        kind = model.device.type
        size = min(page_size or (64 if kind == "cuda" else max_context), max_context)
        kv_tokens = kv_tokens or default_kv_tokens(model, max_context)
        if kv_tokens < max_context:
            raise ValueError(f"kv_tokens={kv_tokens} holds no sequence of max_context={max_context}; give more")
        self.pages = Pages(-(-kv_tokens // size), size)
        try:
            self.executor = executor_for(model, self.pages, max_context, max_requests)
        except ValueError as error:
            raise EngineError(str(error)) from error
        self.rows = Rows(1 if deterministic else max_requests, max_context, self.pages.needed(max_context))
        self.read_at_once = READ_AT_ONCE.get(kind, 4096)
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.live: dict[int, Request] = {}
        """By row, in the order they came in."""
        self.flight: Flight | None = None
        """A launched step whose outcome has not been looked at."""
        self.ended = False
        """Some caller has gone."""
        self.timed = False
        """Some request has had a deadline."""
        self.no_pages = False
        """The first in line found no room when it was last looked at."""
        self.worker: asyncio.Task[None] | None = None
        self.counts = dict.fromkeys(("sampled", "read", "reused", "steps", "paused", "seconds"), 0.0)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of `prompt`; the session's earlier turns are found by their tokens."""
        tokens = np.asarray(prompt, dtype=np.int64)
        check_request(tokens, sampling, self.model.config.vocab_size, self.max_context)
        if sampling.stop_texts and self.decode is None:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        stops = StopTexts(self.decode, sampling.stop_texts) if self.decode and sampling.stop_texts else None
        self.timed |= sampling.seconds is not None
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(tokens.astype(np.int32), len(tokens), sampling, done, time.perf_counter(), stops))
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        try:
            return await done
        finally:
            self.ended |= done.cancelled()

    @property
    def crowded(self) -> bool:
        """Whether requests wait that there is no room for: it is better not to begin further episodes now."""
        return bool(self.waiting) and (self.no_pages or len(self.waiting) > len(self.rows.free))

    async def load(self, weights: Weights, version: int) -> None:
        """Take these weights. Tensors that are the model's own are already in place."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self._land()
        for request in reversed(list(self.live.values())):  # what they have read, they read with other weights
            self._put_back(request)
        self.pages.forget()
        self.executor.weights_changed()
        self.version = version

    async def close(self) -> None:
        if self.worker is not None:
            self.worker.cancel()
        for request in (*self.waiting, *self.live.values()):
            request.done.cancel()

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, read and reused, requests put back, steps and their seconds."""
        counts = dict(self.counts)
        self.counts = dict.fromkeys(counts, 0.0)
        known = counts["read"] + counts["reused"]
        return {f"engine/{name}": value for name, value in counts.items()} | {
            "engine/hit_rate": counts["reused"] / known if known else 0.0,
            "engine/pages_held": self.pages.held / self.pages.count,
        }

    async def _work(self) -> None:
        """consumes: `waiting`     produces: each request's completion     waits for: nothing; ends when idle."""
        while self.waiting or self.live:
            await asyncio.sleep(0)  # let episodes that just got their answer ask again, so they join this step
            began = time.perf_counter()
            try:
                self._drop_ended()
                self._admit()
                launched = self._launch()
                self._land()
                self.flight = launched
                if not self.executor.ahead:
                    self._land()
            except Exception as error:
                self._fail(EngineError(f"{type(error).__name__}: {error}"))
            self.counts["seconds"] += time.perf_counter() - began

    def _fail(self, error: EngineError) -> None:
        """A step broke: nobody can be left waiting, and what the cache holds is in doubt."""
        self.flight = None
        for request in (*self.waiting, *self.live.values()):
            if not request.done.done():
                request.done.set_exception(error)
        for request in list(self.live.values()):
            self._leave(request)
        self.waiting.clear()
        self.pages.forget()

    def _drop_ended(self) -> None:
        """Let go of requests whose caller has gone, and answer those whose time is up."""
        if self.timed:
            now = time.perf_counter()
            for request in (*self.waiting, *self.live.values()):
                limit = request.sampling.seconds
                if limit is not None and now - request.began > limit and not request.done.done():
                    self._answer(request, Finish.ABORT)
                    self.ended = True
        if self.ended:
            self.ended = False
            self.waiting = deque(r for r in self.waiting if not r.done.done())
            for request in [r for r in self.live.values() if r.done.done()]:
                self._leave(request)

    # ------------------------------------------------------------------------------------------ coming and going

    def _admit(self) -> None:
        """Let waiting requests in, in order, while there is room; one whose prompt a sibling is about to read waits."""
        fresh: set[bytes] = set()
        later: list[Request] = []
        self.no_pages = False
        while self.waiting and self.rows.free:
            request = self.waiting.popleft()
            path = self.pages.open(request.tokens[:-1], reuse=not self.deterministic)
            key = request.tokens[: path.found + WORTH_WAITING].tobytes()
            if key in fresh and len(request.tokens) > path.found + WORTH_WAITING:
                self.pages.close(path)
                later.append(request)
            elif self._fits(request, path):
                fresh.add(key)
                self._enter(request, path)
            else:
                self.pages.close(path)
                later.append(request)
                self.no_pages = True
                break
        self.waiting.extendleft(reversed(later))

    def _fits(self, request: Request, path: Path) -> bool:
        """Give the path pages for the request's tokens, if there is room for these and a few more."""
        size = len(request.tokens)
        rest = min(HEADROOM, request.prompt + request.sampling.max_tokens - size, self.max_context - size)
        enough = self.pages.needed(size + rest) - len(path.nodes) <= self.pages.room
        return enough and self.pages.extend(path, size)

    def _enter(self, request: Request, path: Path) -> None:
        if path.copy is not None:  # at once: the page it is taken from may be given away next
            self.executor.cache.copy(*path.copy)
        row = self.rows.enter(request, path.found, self.max_context)
        request.row, request.path = row, path
        self._note_pages(request)
        self.live[row] = request
        self.counts["reused"] += float(path.found)

    def _note_pages(self, request: Request) -> None:
        assert request.path is not None
        nodes, had = request.path.nodes, int(self.rows.pages[request.row])
        self.rows.tables[request.row, had : len(nodes)] = [node.page for node in nodes[had:]]
        self.rows.pages[request.row] = len(nodes)

    def _leave(self, request: Request) -> None:
        """Give row and pages back; what has been read stays findable."""
        assert request.path is not None
        row = request.row
        read = min(int(self.rows.filled[row]), int(self.rows.known[row]) - 1)
        self.pages.publish(request.path, self.rows.tokens[row, : max(read, 0)])
        self.pages.close(request.path)
        self.rows.free.append(row)
        self.rows.pages[row] = 0
        self.rows.tenant[row] += 1
        del self.live[row]
        request.row, request.path = -1, None

    def _put_back(self, request: Request) -> None:
        """Out of room: the request waits again, in front, with what it has sampled. Chance depends on seed and position
        alone, so it goes on with the tokens it would have had."""
        row = request.row
        known = int(self.rows.known[row])
        request.tokens = self.rows.tokens[row, :known].copy()
        request.logprobs = self.rows.logprobs[row, request.prompt : known].copy()
        self._leave(request)
        self.waiting.appendleft(request)
        self.counts["paused"] += 1

    def _answer(self, request: Request, finish: Finish) -> None:
        tokens, logprobs = request.tokens, request.logprobs
        if request.row >= 0:
            known = int(self.rows.known[request.row])
            tokens = self.rows.tokens[request.row, :known]
            logprobs = self.rows.logprobs[request.row, request.prompt : known]
        sampled = tuple(tokens[request.prompt :].tolist())
        seconds = time.perf_counter() - request.began
        request.done.set_result(Completion(sampled, tuple(logprobs.tolist()), finish, self.version, seconds))

    # ------------------------------------------------------------------------------------------ one step

    def _launch(self) -> Flight | None:
        """Start reading each live request's new tokens, and sampling where the end is reached."""
        rows = self.rows
        self._make_room()
        row = np.fromiter(self.live, np.int64, len(self.live))
        row = row[rows.length[row] < rows.limit[row]]
        if not len(row):
            return None
        unread = rows.length[row] - rows.filled[row]
        order = np.argsort(unread > 1, kind="stable")  # those that sample before those that read
        row, unread = row[order], unread[order]
        taken = np.minimum(unread, np.maximum(self.read_at_once - (np.cumsum(unread) - unread), 0))
        some = np.flatnonzero(taken)
        some = some[np.argsort(taken[some] > 1, kind="stable")]  # rows that bring one token come first, cut ones too
        row, taken = row[some], taken[some]
        starts = rows.filled[row]
        ends = starts + taken
        sampled = np.flatnonzero(ends == rows.length[row])
        chosen = row[sampled]
        reading = Reading(starts, ends, rows.tables[row])
        outcome = self.executor.launch(Step(self._tokens(row, starts, ends), reading, sampled, rows.draws(chosen)))
        rows.filled[row] = ends
        rows.length[chosen] += 1
        rows.lane[chosen] = np.arange(len(chosen))
        for index in np.flatnonzero(taken > 1):
            here = row[index]
            self.pages.publish(self._path(here), rows.tokens[here, : min(ends[index], rows.known[here])])
        self.counts["read"] += float(taken.sum())
        self.counts["steps"] += 1
        return Flight(chosen, rows.tenant[chosen], outcome)

    def _tokens(self, row: Array, starts: Array, ends: Array) -> NDArray[np.int32]:
        """The new tokens of these rows; one that is still being sampled is named by its place in the launched step."""
        rows, counts = self.rows, ends - starts
        ones = int((counts == 1).sum())
        first = rows.tokens[row[:ones], starts[:ones]]
        first = np.where(starts[:ones] >= rows.known[row[:ones]], -1 - rows.lane[row[:ones]], first)
        rest = (rows.tokens[r, a:b] for r, a, b in zip(row[ones:], starts[ones:], ends[ones:], strict=True))
        return np.concatenate([first, *rest]).astype(np.int32)

    def _make_room(self) -> None:
        """A page for every row that has filled its last one; where there is none, the youngest is put back."""
        rows = self.rows
        live = np.fromiter(self.live, np.int64, len(self.live))
        short = (rows.pages[live] * self.pages.size < rows.length[live]) & (rows.length[live] < rows.limit[live])
        for row in live[short].tolist():
            while row in self.live and not self.pages.extend(self._path(row), int(rows.length[row])):
                self._put_back(self.live[next(reversed(self.live))])
            if row in self.live:
                self._note_pages(self.live[row])

    def _path(self, row: int) -> Path:
        path = self.live[row].path
        assert path is not None
        return path

    def _land(self) -> None:
        """Look at what the launched step sampled."""
        if self.flight is None:
            return
        flight, self.flight = self.flight, None
        tokens, logprobs = flight.outcome.wait()
        rows = self.rows
        here = rows.tenant[flight.row] == flight.tenant  # the others have left meanwhile
        row, tokens = flight.row[here], tokens[here]
        known = rows.known[row]
        rows.tokens[row, known] = tokens
        rows.logprobs[row, known] = logprobs[here]
        rows.known[row] += 1
        self.counts["sampled"] += len(row)
        stopped = (rows.stops[row] == tokens[:, None]).any(1)
        for index in np.flatnonzero(rows.listens[row] & ~stopped):
            stopped[index] = self._said_it(self.live[row[index]])
        for index in np.flatnonzero(stopped | (rows.known[row] >= rows.limit[row])):
            request = self.live[row[index]]
            self._answer(request, Finish.STOP if stopped[index] else Finish.LENGTH)
            self._leave(request)

    def _said_it(self, request: Request) -> bool:
        assert request.stop_texts is not None
        said = self.rows.tokens[request.row, request.prompt : self.rows.known[request.row]]
        return request.stop_texts.reached(said.tolist())


def default_kv_tokens(model: PreTrainedModel, context: int) -> int:
    """A share of the device's memory, and no more than some hundreds of sequences can use."""
    kind = model.device.type
    if kind == "cuda":
        memory = torch.cuda.mem_get_info(model.device)[0]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = int(memory * SHARE.get(kind, 0.1)) // token_bytes(model)
    return max(context, min(share, SEQUENCES.get(kind, 128) * context))


def executor_for(model: PreTrainedModel, pages: Pages, context: int, requests: int) -> Executor:
    """Fused kernels and CUDA graphs where there is a GPU for them; torch everywhere else."""
    if model.device.type == "cuda" and find_spec("triton") is not None:
        from arborl.engines.graphs import GraphExecutor

        return GraphExecutor(model, pages.count, pages.size, context, requests)
    return TorchExecutor(model, pages.count, pages.size, context)
