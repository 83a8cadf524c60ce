"""Sampling in this process, with the learner's own weights: no second copy, nothing to send.

Requests come and go at any step. One step runs the model once over the new tokens of all live requests (a whole prompt
for one that has just come, one token for the others), unpadded; keys and values of everything read stay in slots, so a
session's next turn reads only what is new, and the siblings of a group read their prompt once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from arborl.engines.cache import Cache, CacheAttend, lane
from arborl.engines.engine import Weights
from arborl.engines.sampling import StopTexts, check_request, draw, uniforms
from arborl.errors import EngineError
from arborl.models.attention import logits
from arborl.models.lean import hidden_states
from arborl.types import Completion, Finish, Metrics, Sampling

READ_AT_ONCE = 4096
"""New tokens a step may bring in all; the rest of a long prompt waits for the next."""
WORTH_WAITING = 16
"""Tokens a request must save to wait one step for a sibling to read them."""


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate` on its way."""

    tokens: list[int]
    """Prompt and what has been sampled."""
    prompt: int
    sampling: Sampling
    done: asyncio.Future[Completion]
    began: float
    stop_texts: StopTexts | None = None
    slot: int = -1
    logprobs: list[float] = field(default_factory=list)


class LocalEngine:
    """Batched sampling with a cache.

    Args:
        model: shared with the learner; its attention goes through `arborl.models.attention`.
        max_context: longest prompt and completion together.
        slots: sequences kept; more live requests than slots wait their turn.
        deterministic: run each request alone and from its start, so that not even rounding depends on its neighbours.
        decode: token ids to text, for stop texts.
    """

    follows_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        max_context: int = 1024,
        slots: int = 128,
        deterministic: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        if slots < 1:
            raise ValueError(f"slots={slots}: give at least 1")
        self.model, self.max_context, self.deterministic = model, max_context, deterministic
        self.decode = decode
        self.groups = model.config.num_attention_heads // model.config.num_key_value_heads
        self.cache = Cache(model, 1 if deterministic else slots, max_context)
        self.version = 0
        self.waiting: list[Request] = []
        self.live: list[Request] = []
        self.worker: asyncio.Task[None] | None = None
        self.clock = 0
        self.counts = {"sampled": 0.0, "read": 0.0, "reused": 0.0, "steps": 0.0, "seconds": 0.0}

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of `prompt`; the session's earlier turns are found by their tokens."""
        check_request(prompt, sampling, self.model.config.vocab_size, self.max_context)
        if sampling.stop_texts and self.decode is None:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        stops = StopTexts(self.decode, sampling.stop_texts) if self.decode and sampling.stop_texts else None
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(list(prompt), len(prompt), sampling, done, time.perf_counter(), stops))
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        return await done

    async def load(self, weights: Weights, version: int) -> None:
        """Take these weights. Tensors that are the model's own are already in place."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self.cache.forget()
        self.version = version

    async def close(self) -> None:
        if self.worker is not None:
            self.worker.cancel()
        for request in (*self.waiting, *self.live):
            request.done.cancel()

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, read and reused, steps and their seconds."""
        counts = dict(self.counts)
        self.counts = dict.fromkeys(counts, 0.0)
        known = counts["read"] + counts["reused"]
        return {f"engine/{name}": value for name, value in counts.items()} | {
            "engine/hit_rate": counts["reused"] / known if known else 0.0
        }

    async def _work(self) -> None:
        """consumes: `waiting`     produces: each request's completion     waits for: nothing; ends when idle."""
        while self.waiting or self.live:
            await asyncio.sleep(0)  # let episodes that just got their answer ask again, so they join this step
            self._drop_ended()
            try:
                self._admit()
                if self.live:
                    self._step()
            except Exception as error:
                self._fail(EngineError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: EngineError) -> None:
        """A step broke: nobody can be left waiting, and what the cache holds is in doubt."""
        for request in (*self.waiting, *self.live):
            if not request.done.done():
                request.done.set_exception(error)
        self.waiting, self.live = [], []
        self.cache.forget()

    def _drop_ended(self) -> None:
        """Let go of requests whose caller has gone, and answer those whose time is up."""
        now = time.perf_counter()
        for request in (*self.waiting, *self.live):
            limit = request.sampling.seconds
            if limit is not None and now - request.began > limit and not request.done.done():
                self._answer(request, Finish.ABORT)
        self.waiting = [r for r in self.waiting if not r.done.done()]
        self.live = [r for r in self.live if not r.done.done()]

    def _admit(self) -> None:
        """Give waiting requests a slot, in order; one whose prompt a new sibling is about to read waits a step."""
        busy = {request.slot for request in self.live}
        fresh: list[np.ndarray] = []
        later: list[Request] = []
        for request in self.waiting:
            if len(busy) == len(self.cache.filled):
                later.append(request)
                continue
            row = np.asarray(request.tokens, dtype=np.int64)
            shared = np.zeros_like(self.cache.filled) if self.deterministic else self.cache.common_prefixes(row[:-1])
            best = int(shared.argmax())
            if any(_shared(row, other) - shared[best] >= WORTH_WAITING for other in fresh):
                later.append(request)
                continue
            request.slot = self._place(best, int(shared[best]), busy)
            busy.add(request.slot)
            self.cache.copy(best, request.slot, int(shared[best]))
            self.cache.tokens[request.slot, : len(row)] = row
            self.counts["reused"] += float(shared[best])
            self.live.append(request)
            if not self.deterministic:
                fresh.append(row)
        self.waiting = later

    def _place(self, best: int, shared: int, busy: set[int]) -> int:
        """The slot to use: the best one itself when free and wholly part of the prompt, else the oldest free one."""
        if best not in busy and shared and shared == self.cache.filled[best]:
            chosen = best
        else:
            chosen = min((s for s in range(len(self.cache.filled)) if s not in busy), key=lambda s: self.cache.used[s])
        self.clock += 1
        self.cache.used[chosen] = self.clock
        return chosen

    @torch.inference_mode()
    def _step(self) -> None:
        """Read each live request's new tokens and sample one more where its end was reached."""
        began = time.perf_counter()
        filled = self.cache.filled
        chunks = [(r, int(filled[r.slot]), len(r.tokens)) for r in self.live]
        chunks.sort(key=lambda chunk: (chunk[2] - chunk[1] > 1, chunk[0].slot))  # one-token rows make the first lane
        budget = READ_AT_ONCE
        taken: list[tuple[Request, int, int]] = []
        for request, start, end in chunks:
            end = min(end, start + budget)
            if end > start:
                taken.append((request, start, end))
                budget -= end - start
        hidden = self._forward(taken)
        for request, _, end in taken:
            filled[request.slot] = end
        ends = np.cumsum([end - start for _, start, end in taken]) - 1
        ready = [i for i, (request, _, end) in enumerate(taken) if end == len(request.tokens)]
        if ready:
            self._sample([taken[i][0] for i in ready], hidden[torch.from_numpy(ends[ready])])
        self.counts["read"] += float(ends[-1] + 1)
        self.counts["steps"] += 1
        self.counts["seconds"] += time.perf_counter() - began

    def _forward(self, taken: list[tuple[Request, int, int]]) -> torch.Tensor:
        device = self.model.device
        slots = np.array([request.slot for request, _, _ in taken])
        starts = np.array([start for _, start, _ in taken])
        counts = np.array([end - start for _, start, end in taken])
        tokens = [token for request, start, end in taken for token in request.tokens[start:end]]
        positions = np.concatenate([np.arange(start, end) for _, start, end in taken])
        lanes, offset = [], 0
        for chosen in (counts == 1, counts > 1):
            if chosen.any():
                lanes.append(lane(self.cache, slots[chosen], starts[chosen], counts[chosen], offset, self.groups))
                offset = lanes[-1].span.stop
        position_N = torch.from_numpy(positions).to(device)
        slot_N = torch.from_numpy(np.repeat(slots, counts)).to(device)
        attend = CacheAttend(self.cache, slot_N, position_N, lanes)
        return hidden_states(self.model, torch.tensor(tokens, device=device), position_N, attend)

    def _sample(self, requests: list[Request], hidden: torch.Tensor) -> None:
        chance = uniforms([r.sampling.seed for r in requests], [len(r.logprobs) for r in requests])
        tokens, logprobs = draw(logits(self.model, hidden), [r.sampling for r in requests], chance)
        self.counts["sampled"] += len(tokens)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            stopped = token in request.sampling.stop or (
                request.stop_texts is not None and request.stop_texts.reached(request.tokens[request.prompt :])
            )
            full = len(request.logprobs) >= request.sampling.max_tokens or len(request.tokens) >= self.max_context
            if stopped or full:
                self.live.remove(request)
                self._answer(request, Finish.STOP if stopped else Finish.LENGTH)
            else:
                self.cache.tokens[request.slot, len(request.tokens) - 1] = token

    def _answer(self, request: Request, finish: Finish) -> None:
        seconds = time.perf_counter() - request.began
        sampled = tuple(request.tokens[request.prompt :])
        request.done.set_result(Completion(sampled, tuple(request.logprobs), finish, self.version, seconds))


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    return int(n if (a[:n] == b[:n]).all() else (a[:n] != b[:n]).argmax())
