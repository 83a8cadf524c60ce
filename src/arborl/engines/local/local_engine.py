"""Batched sampling in this process with the learner's weights: nothing is sent, and a GPU holds no second copy.

Requests join and leave at any step. One step runs the model over the new tokens of all running requests, unpadded: the
prompt of a new request, one token of the others. Keys and values stay in blocks, so the next turn of a session computes
only its new tokens and the episodes of a group compute their prompt once.
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

from arborl.chat.json_schema import SchemaCompiler
from arborl.chat.tokenizer import Tokenizer
from arborl.engines.engine import PROBE_SESSION, Engine, TokenListener, Weights
from arborl.engines.engine_requests import StopTextMatcher, check_sampling, read_prompt
from arborl.engines.local.block_pool import BlockPool
from arborl.engines.local.kv_cache import Array, AttentionMetadata, default_kv_tokens
from arborl.engines.local.model_runner import ModelStep, StepOutput
from arborl.engines.local.runner_selection import select_runner
from arborl.engines.local.sampler import LogitEdit, LogitEditor, TopTokens
from arborl.engines.local.scheduler import EngineRequest, InputBatch, Scheduler
from arborl.errors import EngineError, SchemaError
from arborl.models.execution_paths import count_fallbacks
from arborl.spans import add_to_timeline
from arborl.types import Completion, FinishReason, Metrics, Sampling

UPDATE_MODES = ("continue", "finish", "restart")
MAX_GAP_SECONDS, MAX_SPAN_SECONDS = 0.02, 0.5
"""A larger gap between two steps starts a new span of the timeline; so does a longer span."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step: the rows that get a token, with their epochs."""

    row: Array
    epoch: Array
    output: StepOutput


class StepSpan:
    """Joins consecutive steps to one span of the timeline: there are hundreds of steps a second."""

    def __init__(self) -> None:
        self.started = self.ended = 0.0
        self.steps = 0

    def add(self, seconds: float) -> None:
        now = time.time()
        if self.steps and (now - seconds - self.ended > MAX_GAP_SECONDS or now - self.started > MAX_SPAN_SECONDS):
            self.end()
        self.started = self.started if self.steps else now - seconds
        self.ended, self.steps = now, self.steps + 1

    def end(self) -> None:
        if self.steps:
            add_to_timeline("engine", "steps", self.started, self.ended, steps=self.steps)
        self.steps = 0


class LocalEngine(Engine):
    """Batched sampling with a KV cache.

    Args:
        model: may be the learner's; its attention uses `arborl.models.attention`.
        max_requests: requests that run at once; others wait.
        kv_tokens: size of the KV cache in tokens; 0 uses a share of the free memory.
        block_size: tokens of a block; 0 selects 64 on a GPU and a whole sequence on a CPU, where nothing is gathered.
        deterministic: run each request alone and from its start, so that rounding does not depend on other requests.
        update: what happens to running completions when weights change: `continue`, `finish` or `restart`.
        sleep_mode: free the KV cache on the GPU during updates.
        compiled: on a CPU, run steps by compiled code where possible.
        tokenizer: of the model, for requests with a JSON schema.
    """

    can_stream = can_pause = True

    def __init__(
        self,
        model: PreTrainedModel,
        max_context: int = 1024,
        max_requests: int = 256,
        kv_tokens: int = 0,
        block_size: int = 0,
        deterministic: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        update: str = "continue",
        sleep_mode: bool = False,
        compiled: bool = True,
        tokenizer: Tokenizer | None = None,
    ):
        if update not in UPDATE_MODES:
            raise ValueError(f"update={update!r}: give {', '.join(UPDATE_MODES)}")
        if max_requests < 1:
            raise ValueError(f"max_requests={max_requests}: give at least 1")
        self.model, self.max_context, self.decode, self.update = model, max_context, decode, update
        self.schemas = None if tokenizer is None else SchemaCompiler(tokenizer)
        self.vocabulary = int(model.config.vocab_size)  # attribute access of a configuration is slow
        size = min(block_size or (64 if model.device.type == "cuda" else max_context), max_context)
        kv_tokens = kv_tokens or default_kv_tokens(model, max_context)
        if kv_tokens < max_context:
            raise ValueError(f"kv_tokens={kv_tokens} holds no sequence of max_context={max_context}; give more")
        self.pool = BlockPool(-(-kv_tokens // size), size)
        try:
            self.runner = select_runner(model, self.pool, max_context, max_requests, sleep_mode, compiled)
        except ValueError as error:
            raise EngineError(str(error)) from error
        self.batch = InputBatch(1 if deterministic else max_requests, max_context, self.pool.blocks_for(max_context))
        self.counts = dict.fromkeys(("sampled", "read", "reused", "steps", "preempted", "restarted", "seconds"), 0.0)
        copy = self.runner.cache.copy
        self.scheduler = Scheduler(self.pool, self.batch, max_context, not deterministic, copy, self.counts)
        self.version = 0
        self.launched: LaunchedStep | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.worker: asyncio.Task[None] | None = None
        self.closed = False

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        """Sample a continuation of `prompt`; the prefix cache finds earlier turns of the session by their tokens."""
        self._use_loop(asyncio.get_running_loop())
        tokens = read_prompt(prompt, self.vocabulary, self.max_context)
        check_sampling(sampling, edits=True)
        stops, editor = StopTextMatcher.make(self.decode, sampling), self._editor(sampling)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = EngineRequest(tokens, len(tokens), sampling, done, time.perf_counter(), stops, listener, editor)
        self.scheduler.add(request, session == PROBE_SESSION)
        self._start_worker()
        try:
            return await done
        finally:
            self.scheduler.has_cancelled |= done.cancelled()

    def check_request(self, sampling: Sampling) -> None:
        check_sampling(sampling, edits=True)
        self._editor(sampling)

    def _editor(self, sampling: Sampling) -> LogitEditor | None:
        if not sampling.edits_logits:
            return None
        if not sampling.schema:
            return LogitEditor(sampling, None)
        if self.schemas is None:
            raise SchemaError("a JSON schema needs an engine with the tokenizer: LocalEngine(…, tokenizer=…)")
        return LogitEditor(sampling, self.schemas.matcher(sampling.schema, sampling.stop))

    @property
    def shares_weights(self) -> bool:  # type: ignore[override]
        """Whether it samples from the tensors that the learner updates in place."""
        return not self.runner.copies_weights

    @property
    def shares_threads(self) -> bool:  # type: ignore[override]
        """Whether it samples with torch's threads while the learner computes."""
        return self.runner.copies_weights

    @property
    def capacity(self) -> int:
        """Requests of full length that rows and blocks suffice for."""
        return max(1, min(self.batch.count, self.pool.num_blocks // self.pool.blocks_for(self.max_context)))

    @property
    def is_saturated(self) -> bool:
        return self.scheduler.is_saturated

    async def load(self, weights: Weights, version: int) -> None:
        """Copy these weights into the model. Tensors that are the model's own are in place already."""
        was_running = not self.scheduler.is_paused
        if was_running:
            await self.pause()
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                if state[name].data_ptr() != tensor.data_ptr():
                    state[name].copy_(tensor)
        self.scheduler.clear_cache()
        if self.update == "restart" and version != self.version:
            self.scheduler.restart_held()
        self.runner.weights_changed()
        self.runner.cache.wake_up()
        self.version = version
        if was_running:
            self.resume()

    async def pause(self) -> None:
        """Sample nothing until `resume`; with `update=finish`, after the running completions."""
        self._guard(self._read_output)
        self.scheduler.pause(finish=self.update == "finish")
        while self.scheduler.has_work and self.worker is not None and self.loop is asyncio.get_running_loop():
            try:
                self._start_worker()
                await asyncio.wait([self.worker])
            except asyncio.CancelledError:
                self.resume()
                raise

    async def sleep(self) -> None:
        """Free the KV cache. Its contents are stale after the next `load` in any case."""
        if self.runner.cache.can_sleep:
            self.scheduler.clear_cache()
            self.runner.cache.sleep()

    def resume(self) -> None:
        self.runner.cache.wake_up()
        self.scheduler.resume()
        self._start_worker()

    def warm_up(self, sampling: Sampling) -> None:
        self._guard(self._read_output)
        self.runner.warm_up(sampling.truncates or sampling.edits_logits)

    async def close(self) -> None:
        self.closed = True
        self._fail_all("the engine was closed")

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, prefilled (`read`), reused and restarted; preemptions; steps and their
        seconds. Also the hit rate of the prefix cache, the share of used blocks, and the number of fallbacks."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        known = counts["read"] + counts["reused"]
        return {f"engine/{name}": value for name, value in counts.items()} | {
            "engine/hit_rate": counts["reused"] / known if known else 0.0,
            "engine/block_usage": self.pool.num_used / self.pool.num_blocks,
            "engine/fallbacks": float(count_fallbacks(self.model, "engine")),
        }

    # ------------------------------------------------------------------------------------------ worker

    def _use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the engine to this event loop; requests of a loop that has ended cannot be answered."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        if self.loop is loop:
            return
        if self.loop is not None and self.loop.is_running():
            raise EngineError("the engine runs in another event loop; make one engine per thread")
        if self.scheduler.has_work or self.scheduler.held:
            self._fail_all("the engine continued in another event loop")
        self.loop, self.worker = loop, None

    def _start_worker(self) -> None:
        if self.scheduler.has_work and (self.worker is None or self.worker.done()) and self.loop is not None:
            self.worker = self.loop.create_task(self._work()) if self.loop.is_running() else None

    async def _work(self) -> None:
        loop, span = asyncio.get_running_loop(), StepSpan()
        try:
            while self.scheduler.has_work and self.loop is loop:
                await asyncio.sleep(0)  # episodes that just got a completion send their next request for this step
                started = time.perf_counter()
                self._guard(self._step)
                seconds = time.perf_counter() - started
                self.counts["seconds"] += seconds
                span.add(seconds)
        except BaseException:  # cancelled, or the process ends
            if self.loop is loop:
                self._fail_all("the engine was stopped")
            raise
        finally:
            span.end()

    def _step(self) -> None:
        self.scheduler.drop_finished(self.version)
        self.scheduler.admit()
        launched = self._launch()
        self._read_output()
        self.launched = launched
        if not self.runner.runs_ahead:
            self._read_output()

    def _guard(self, work: Callable[[], None]) -> None:
        """Fail all requests if a step raises: invalid requests were refused before, or failed alone."""
        try:
            work()
        except Exception as error:
            self._fail_all(f"{type(error).__name__}: {error}", error)
            self.runner.cache.clear()

    def _fail_all(self, reason: str, cause: Exception | None = None) -> None:
        self.launched = None
        self.scheduler.fail_all(reason, cause)

    # ------------------------------------------------------------------------------------------ one step

    def _launch(self) -> LaunchedStep | None:
        """Launch the forward pass over the new tokens; rows whose last token is computed sample the next one."""
        batch = self.batch
        self.scheduler.allocate_next()
        running = self.scheduler.running
        row = np.fromiter(running, np.int64, len(running))
        row = row[batch.length[row] < batch.limit[row]]
        edits = dict[int, LogitEdit]()
        if batch.has_edits[row].any():
            row, edits = self._edit_rows(row)
        if not len(row):
            return None
        new = batch.length[row] - batch.computed[row]
        order = np.argsort(new > 1, kind="stable")  # decode before prefill
        row, new = row[order], new[order]
        budget = self.runner.token_budget(int(new.sum()))
        taken = np.minimum(new, np.maximum(budget - (np.cumsum(new) - new), 0))
        chosen = np.flatnonzero(taken)
        chosen = chosen[np.argsort(taken[chosen] > 1, kind="stable")]  # rows with one token first, truncated ones too
        row, taken = row[chosen], taken[chosen]
        starts = batch.computed[row]
        ends = starts + taken
        sampled = np.flatnonzero(ends == batch.length[row])
        sampling_rows = row[sampled]
        metadata = AttentionMetadata(starts, ends, batch.tables[row])
        tokens = self._new_tokens(row, starts, ends)
        output = self.runner.launch(ModelStep(tokens, metadata, sampled, batch.sampling(sampling_rows, edits)))
        batch.computed[row] = ends
        batch.length[sampling_rows] += 1
        batch.sample_index[sampling_rows] = np.arange(len(sampling_rows))
        for index in np.flatnonzero(taken > 1):
            at = int(row[index])
            table = self.scheduler.block_table(running[at])
            self.pool.publish(table, batch.tokens[at, : min(ends[index], batch.known[at])])
        self.counts["read"] += float(taken.sum())
        self.counts["steps"] += 1
        return LaunchedStep(sampling_rows, batch.epoch[sampling_rows], output)

    def _edit_rows(self, row: Array) -> tuple[Array, dict[int, LogitEdit]]:
        """The rows of the next step, and the edits of their logits. Where edits depend on a token that the launched
        step samples, the row waits for the following step, and the others run ahead. A schema that allows no token
        fails its own request."""
        batch, edits, waiting = self.batch, dict[int, LogitEdit](), set[int]()
        for number in row[batch.has_edits[row]].tolist():
            request = self.scheduler.running[number]
            assert request.editor is not None
            if batch.length[number] > batch.known[number]:
                waiting.add(number)
                continue
            try:
                edits[number] = request.editor.edit(batch.tokens[number, request.prompt : batch.known[number]])
            except SchemaError as error:
                self.scheduler.fail(request, str(error), error)
                waiting.add(number)
        return row[~np.isin(row, list(waiting))], edits

    def _new_tokens(self, row: Array, starts: Array, ends: Array) -> NDArray[np.int32]:
        """The new tokens of these rows; -1 - i stands for the i-th token that the launched step samples."""
        batch, counts = self.batch, ends - starts
        single = int((counts == 1).sum())
        first = batch.tokens[row[:single], starts[:single]]
        is_pending = starts[:single] >= batch.known[row[:single]]
        first = np.where(is_pending, -1 - batch.sample_index[row[:single]], first)
        rest = (batch.tokens[r, a:b] for r, a, b in zip(row[single:], starts[single:], ends[single:], strict=True))
        return np.concatenate([first, *rest]).astype(np.int32)

    def _read_output(self) -> None:
        if self.launched is None:
            return
        launched, self.launched = self.launched, None
        tokens, logprobs = launched.output.wait()
        batch, running = self.batch, self.scheduler.running
        valid = batch.epoch[launched.row] == launched.epoch  # the other requests have left
        row, tokens, logprobs = launched.row[valid], tokens[valid], logprobs[valid]
        known = batch.known[row]
        batch.tokens[row, known] = tokens
        batch.logprobs[row, known] = logprobs
        batch.versions[row, known] = self.version
        batch.known[row] += 1
        self.counts["sampled"] += len(row)
        not_finite = ~np.isfinite(logprobs)
        for number in row[not_finite]:
            self.scheduler.fail(running[number], "the model's output for this prompt is not finite (NaN or infinite)")
        stopped = (batch.stops[row] == tokens[:, None]).any(1)
        for index in np.flatnonzero(batch.has_stop_texts[row] & ~stopped & ~not_finite):
            stopped[index] = self._stop_text_reached(running[row[index]])
        if (listening := batch.has_listener[row] & ~not_finite).any():
            top = launched.output.top
            top = top and (top[0][valid][listening], top[1][valid][listening])
            self._notify(row[listening], tokens[listening], logprobs[listening], top)
        for index in np.flatnonzero(stopped | (batch.known[row] >= batch.limit[row])):
            if (request := running.get(row[index])) is not None:  # it may have failed above
                self.scheduler.complete(
                    request, FinishReason.STOP if stopped[index] else FinishReason.LENGTH, self.version
                )
        if not_finite.any():  # its keys are not finite either, and would spoil the next sequence in the block
            self.scheduler.clear_cache()
            self.runner.cache.clear()

    def _notify(self, row: Array, tokens: Array, logprobs: NDArray[np.float64], top: TopTokens | None) -> None:
        """Call the listeners of these rows. An error of a listener fails its own request."""
        for index, number in enumerate(row.tolist()):
            if (request := self.scheduler.running.get(number)) is None or request.listener is None:
                continue
            count, likeliest = request.listener.top, tuple[tuple[int, float], ...]()
            if top is not None and count:
                likeliest = tuple(zip(top[0][index, :count].tolist(), top[1][index, :count].tolist(), strict=True))
            try:
                request.listener(int(tokens[index]), float(logprobs[index]), likeliest)
            except Exception as error:
                self.scheduler.fail(request, f"its listener failed: {type(error).__name__}: {error}", error)

    def _stop_text_reached(self, request: EngineRequest) -> bool:
        """Whether the last token completed a stop text. An error of `decode` fails this request alone."""
        assert request.stop_texts is not None
        sampled = self.batch.tokens[request.row, request.prompt : self.batch.known[request.row]]
        try:
            return request.stop_texts.reached(sampled.tolist())
        except EngineError as error:
            self.scheduler.fail(request, str(error), error)
            return False
