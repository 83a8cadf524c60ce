"""Sampling in this process, with the learner's own weights: nothing to send, and on a GPU no second copy.

Requests come and go at any step. One step runs the model once over the new tokens of all live requests (a whole prompt
for one that has just come, one token for the others), unpadded. What was read stays in pages (`pages.py`), so the next
turn of a session reads only what is new, and the siblings of a group read their prompt once. When the pages run out,
the youngest request is put back to wait and goes on later, with the same tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from arborl.engines.cache import Array, Reading, default_kv_tokens
from arborl.engines.checks import check_sampling, read_prompt
from arborl.engines.draw_tokens import StopTexts, Top
from arborl.engines.engine import PROBE, Listener, Weights
from arborl.engines.executor import Sampled, Step
from arborl.engines.executors import executor_for
from arborl.engines.pages import Pages
from arborl.engines.rows import Request, Rows
from arborl.engines.scheduler import Scheduler
from arborl.errors import EngineError
from arborl.models.fallbacks import fallbacks
from arborl.spans import add_to_timeline
from arborl.types import Completion, FinishReason, Metrics, Sampling

UPDATES = ("continue", "finish", "restart")
APART, LONG = 0.02, 0.5
"""Seconds: steps further apart are two slices of the timeline, and no slice is longer."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that has been launched: the rows that get a token, and who was in them."""

    row: Array
    tenant: Array
    outcome: Sampled


class Stretch:
    """Steps that follow each other closely, as one slice of the timeline: there are hundreds a second."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.steps = 0

    def add(self, seconds: float) -> None:
        """A step of so many seconds has just ended."""
        now = time.time()
        if self.steps and (now - seconds - self.ended > APART or now - self.began > LONG):
            self.end()
        self.began = self.began if self.steps else now - seconds
        self.ended, self.steps = now, self.steps + 1

    def end(self) -> None:
        if self.steps:
            add_to_timeline("engine", "steps", self.began, self.ended, steps=self.steps)
        self.steps = 0


class LocalEngine:
    """Batched sampling with a cache.

    Args:
        model: shared with the learner, or not; its attention goes through `arborl.models.attention`.
        max_context: longest prompt and completion together.
        max_requests: requests sampled at once; others wait their turn.
        kv_tokens: tokens whose keys and values are kept; 0 takes a share of the free memory.
        page_size: tokens a page; 0 chooses: a whole sequence on a CPU (attention then needs no gathering), 64 on a GPU.
        deterministic: run each request alone and from its start, so that not even rounding depends on its neighbours.
        decode: token ids to text, for stop texts.
        update: what becomes of a completion that new weights find half-way: it goes on (`continue`), is first brought
            to its end (`finish`), or begins again (`restart`).
        lends: give the memory of keys and values back to the GPU while the learner works: nothing that was read
            outlives an update.
        compiled: on a CPU, run steps by compiled code where that can be had; otherwise with torch.
    """

    follows_weights = True
    streams = True

    def __init__(
        self,
        model: PreTrainedModel,
        max_context: int = 1024,
        max_requests: int = 256,
        kv_tokens: int = 0,
        page_size: int = 0,
        deterministic: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        update: str = "continue",
        lends: bool = False,
        compiled: bool = True,
    ):
        if update not in UPDATES:
            raise ValueError(f"update={update!r}: give {', '.join(UPDATES)}")
        if max_requests < 1:
            raise ValueError(f"max_requests={max_requests}: give at least 1")
        self.model, self.max_context, self.deterministic, self.decode = model, max_context, deterministic, decode
        self.vocabulary = int(model.config.vocab_size)  # the library looks long for what a configuration holds
        kind = model.device.type
        size = min(page_size or (64 if kind == "cuda" else max_context), max_context)
        kv_tokens = kv_tokens or default_kv_tokens(model, max_context)
        if kv_tokens < max_context:
            raise ValueError(f"kv_tokens={kv_tokens} holds no sequence of max_context={max_context}; give more")
        self.pages = Pages(-(-kv_tokens // size), size)
        try:
            self.executor = executor_for(model, self.pages, max_context, max_requests, lends, compiled)
        except ValueError as error:
            raise EngineError(str(error)) from error
        self.rows = Rows(1 if deterministic else max_requests, max_context, self.pages.needed(max_context))
        self.update = update
        self.counts = dict.fromkeys(("sampled", "read", "reused", "steps", "paused", "restarted", "seconds"), 0.0)
        copy = self.executor.cache.copy
        self.scheduler = Scheduler(self.pages, self.rows, max_context, not deterministic, copy, self.counts)
        self.version = 0
        self.flight: Flight | None = None
        """A launched step whose outcome has not been looked at."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where requests come from."""
        self.worker: asyncio.Task[None] | None = None
        self.closed = False

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, heard: Listener | None = None
    ) -> Completion:
        """Sample a continuation of `prompt`; the session's earlier turns are found by their tokens."""
        self._serve(asyncio.get_running_loop())
        tokens = read_prompt(prompt, self.vocabulary, self.max_context)
        check_sampling(sampling)
        if sampling.stop_texts and self.decode is None:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        stops = StopTexts(self.decode, sampling.stop_texts) if self.decode and sampling.stop_texts else None
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(tokens, len(tokens), sampling, done, time.perf_counter(), stops, heard)
        self.scheduler.add(request, session == PROBE)
        self._wake()
        try:
            return await done
        finally:
            self.scheduler.ended |= done.cancelled()

    @property
    def shared(self) -> bool:
        """Whether it samples from the memory that the learner writes into, and has to be held while that learns."""
        return not self.executor.own_weights

    @property
    def threaded(self) -> bool:
        """Whether it samples with torch's threads while the learner computes with them."""
        return self.executor.own_weights

    @property
    def capacity(self) -> int:
        """Requests of full length that there are rows and pages for."""
        return max(1, min(self.rows.count, self.pages.count // self.pages.needed(self.max_context)))

    @property
    def crowded(self) -> bool:
        """Whether requests wait that there is no room for: it is better not to begin further episodes now."""
        return self.scheduler.crowded

    async def load(self, weights: Weights, version: int) -> None:
        """Take these weights. Tensors that are the model's own are already in place."""
        alone = not self.scheduler.holding
        if alone:
            await self.hold()
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.scheduler.read_again()  # what has been read was read with other weights
        if self.update == "restart" and version != self.version:
            self.scheduler.begin_again()
        self.executor.weights_changed()
        self.executor.cache.take()
        self.version = version
        if alone:
            self.release()

    async def hold(self) -> None:
        """Sample nothing more, for the weights are about to change where they are, until `release`."""
        self._guard(self._land)
        self.scheduler.hold(finish=self.update == "finish")
        while self.scheduler.busy and self.worker is not None and self.loop is asyncio.get_running_loop():
            try:
                self._wake()
                await asyncio.wait([self.worker])
            except asyncio.CancelledError:
                self.release()
                raise

    async def sleep(self) -> None:
        """It is held, and will be given weights before it samples again: what it has read is of no more use."""
        if self.executor.cache.lends:
            self.scheduler.read_again()
            self.executor.cache.give_back()

    def release(self) -> None:
        """Sample again, those first who were held."""
        self.executor.cache.take()
        self.scheduler.release()
        self._wake()

    def _wake(self) -> None:
        """Somebody is at work where there is some."""
        if self.scheduler.busy and (self.worker is None or self.worker.done()) and self.loop is not None:
            self.worker = self.loop.create_task(self._work()) if self.loop.is_running() else None

    def warm(self, sampling: Sampling) -> None:
        """Compile and record all that sampling this way can need, so that no step has to."""
        self._guard(self._land)
        self.executor.warm(sampling.truncates)

    async def close(self) -> None:
        """Whoever still waits is told; the worker finds nothing to do and ends."""
        self.closed = True
        self._drop_all("the engine was closed")

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, read, reused, and begun again for an update; requests put back; steps
        and their seconds."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        known = counts["read"] + counts["reused"]
        return {f"engine/{name}": value for name, value in counts.items()} | {
            "engine/hit_rate": counts["reused"] / known if known else 0.0,
            "engine/pages_held": self.pages.held / self.pages.count,
            "engine/fallbacks": float(fallbacks(self.model, "engine")),
        }

    # ------------------------------------------------------------------------------------------ at work

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in this event loop. Requests of one that has ended nobody can answer."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        if self.loop is loop:
            return
        if self.loop is not None and self.loop.is_running():
            raise EngineError("the engine is at work in another event loop; give each thread an engine of its own")
        if self.scheduler.busy or self.scheduler.held:
            self._drop_all("the engine went on in another event loop")
        self.loop, self.worker = loop, None

    async def _work(self) -> None:
        """consumes: `waiting`     produces: each request's completion     waits for: nothing; ends when idle."""
        loop, stretch = asyncio.get_running_loop(), Stretch()
        try:
            while self.scheduler.busy and self.loop is loop:
                await asyncio.sleep(0)  # let episodes that just got their answer ask again, so they join this step
                began = time.perf_counter()
                self._guard(self._step)
                took = time.perf_counter() - began
                self.counts["seconds"] += took
                stretch.add(took)
        except BaseException:  # it was cancelled, or the process is to end
            if self.loop is loop:
                self._drop_all("the engine was stopped")
            raise
        finally:
            stretch.end()

    def _step(self) -> None:
        self.scheduler.drop_ended(self.version)
        self.scheduler.admit()
        launched = self._launch()
        self._land()
        self.flight = launched
        if not self.executor.ahead:
            self._land()

    def _guard(self, work: Callable[[], None]) -> None:
        """What breaks here is nobody's own: what belongs to one request was refused at the door, or ends that one."""
        try:
            work()
        except Exception as error:
            self._drop_all(f"{type(error).__name__}: {error}", error)
            self.executor.cache.clear()

    def _drop_all(self, why: str, cause: Exception | None = None) -> None:
        """Nobody is left waiting, and the next request finds an empty engine."""
        self.flight = None
        self.scheduler.drop_all(why, cause)

    # ------------------------------------------------------------------------------------------ one step

    def _launch(self) -> Flight | None:
        """Start reading each live request's new tokens, and sampling where the end is reached."""
        rows = self.rows
        self.scheduler.make_room()
        live = self.scheduler.live
        row = np.fromiter(live, np.int64, len(live))
        row = row[rows.length[row] < rows.limit[row]]
        if not len(row):
            return None
        unread = rows.length[row] - rows.filled[row]
        order = np.argsort(unread > 1, kind="stable")  # those that sample before those that read
        row, unread = row[order], unread[order]
        most = self.executor.at_once(int(unread.sum()))
        taken = np.minimum(unread, np.maximum(most - (np.cumsum(unread) - unread), 0))
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
            self.pages.publish(self.scheduler.path(here), rows.tokens[here, : min(ends[index], rows.known[here])])
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

    def _land(self) -> None:
        """Look at what the launched step sampled."""
        if self.flight is None:
            return
        flight, self.flight = self.flight, None
        tokens, logprobs = flight.outcome.wait()
        rows = self.rows
        here = rows.tenant[flight.row] == flight.tenant  # the others have left meanwhile
        row, tokens, logprobs = flight.row[here], tokens[here], logprobs[here]
        known = rows.known[row]
        rows.tokens[row, known] = tokens
        rows.logprobs[row, known] = logprobs
        rows.versions[row, known] = self.version
        rows.known[row] += 1
        self.counts["sampled"] += len(row)
        live, spoilt = self.scheduler.live, ~np.isfinite(logprobs)
        for number in row[spoilt]:
            self.scheduler.refuse(live[number], "the model's output for this prompt is not finite (NaN or infinite)")
        stopped = (rows.stops[row] == tokens[:, None]).any(1)
        for index in np.flatnonzero(rows.listens[row] & ~stopped & ~spoilt):
            stopped[index] = self._said_it(live[row[index]])
        if (heard := rows.heard[row] & ~spoilt).any():
            top = flight.outcome.top
            self._tell(row[heard], tokens[heard], logprobs[heard], top and (top[0][here][heard], top[1][here][heard]))
        for index in np.flatnonzero(stopped | (rows.known[row] >= rows.limit[row])):
            if (request := live.get(row[index])) is not None:  # one that was refused has left
                self.scheduler.answer(
                    request, FinishReason.STOP if stopped[index] else FinishReason.LENGTH, self.version
                )
        if spoilt.any():  # so are its keys, and a page that holds them would spoil the next sequence in it
            self.scheduler.read_again()
            self.executor.cache.clear()

    def _tell(self, row: Array, tokens: Array, logprobs: NDArray[np.float64], top: Top | None) -> None:
        """Those who listen hear their tokens. One whose listener breaks fails alone."""
        for index, number in enumerate(row.tolist()):
            if (request := self.scheduler.live.get(number)) is None or request.heard is None:
                continue
            count, likeliest = request.heard.top, tuple[tuple[int, float], ...]()
            if top is not None and count:
                likeliest = tuple(zip(top[0][index, :count].tolist(), top[1][index, :count].tolist(), strict=True))
            try:
                request.heard(int(tokens[index]), float(logprobs[index]), likeliest)
            except Exception as error:
                self.scheduler.refuse(request, f"its listener failed: {type(error).__name__}: {error}", error)

    def _said_it(self, request: Request) -> bool:
        """Whether a stop text has been written. Turning tokens into text is not our code: where it breaks, this request
        fails, and no other."""
        assert request.stop_texts is not None
        said = self.rows.tokens[request.row, request.prompt : self.rows.known[request.row]]
        try:
            return request.stop_texts.reached(said.tolist())
        except Exception as error:
            self.scheduler.refuse(request, f"decode failed on its tokens: {type(error).__name__}: {error}", error)
            return False
