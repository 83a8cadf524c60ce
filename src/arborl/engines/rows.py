"""The requests being sampled, as columns: a step then costs no loop over requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arborl.engines.cache import Array
from arborl.engines.checks import LARGEST_ID
from arborl.engines.draw_tokens import Draws, StopTexts, uniforms
from arborl.engines.engine import Listener
from arborl.engines.pages import Path, Tokens
from arborl.types import Completion, Sampling

NO_LOGPROBS, NO_VERSIONS = np.zeros(0), np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate` on its way."""

    tokens: Tokens
    """Prompt, and what had been sampled when it was last put back."""
    prompt: int
    sampling: Sampling
    done: asyncio.Future[Completion]
    began: float
    stop_texts: StopTexts | None = None
    heard: Listener | None = None
    logprobs: NDArray[np.float64] = field(default_factory=lambda: NO_LOGPROBS)
    versions: NDArray[np.int64] = field(default_factory=lambda: NO_VERSIONS)
    """Of what had been sampled by then, as the log-probabilities."""
    row: int = -1
    path: Path | None = None


class Rows:
    """One row a live request. `check` holds live rows to this table, between two steps:

    | column | what it counts | always |
    |---|---|---|
    | `prompt` | tokens the caller gave | 1 <= prompt <= known |
    | `known` | tokens this process has seen: the prompt, and what landed steps sampled | known <= limit |
    | `length` | tokens there are, counting the one that a launched step will sample | known <= length <= known + 1 |
    | `filled` | tokens whose keys and values are in the pages, or will be once the launched step is done | <= length |
    | `limit` | tokens it may come to | prompt < limit |
    | `pages` | pages it holds | filled <= pages * size; the first `pages` of `tables[row]` are theirs, all different |
    | `lane` | which of the launched step's sampled tokens is this row's | read where length > known |
    | `tenant` | how many requests have left the row: what was launched for one is not given to the next | grows |
    """

    def __init__(self, count: int, context: int, pages: int):
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.tokens = np.zeros((count, context), dtype=np.int32)
        self.logprobs = np.zeros((count, context))
        self.versions = np.zeros((count, context), dtype=np.int64)
        self.tables = np.zeros((count, pages), dtype=np.int32)
        self.stops = np.full((count, 1), -1, dtype=np.int32)
        self.prompt, self.known, self.length, self.filled, self.limit, self.pages = (
            np.zeros(count, dtype=np.int64) for _ in range(6)
        )
        """Of each sequence: tokens of the prompt; tokens this process has seen; tokens there are, counting one that a
        launched step will sample; tokens read; tokens it may come to; pages it has."""
        self.seed = np.zeros(count, dtype=np.uint64)
        self.temperature, self.top_p, self.min_p = (np.zeros(count) for _ in range(3))
        self.top_k = np.zeros(count, dtype=np.int64)
        self.lane = np.zeros(count, dtype=np.int64)
        """Which of the launched step's sampled tokens is this row's."""
        self.listens = np.zeros(count, dtype=bool)
        """Whether a text may end it."""
        self.heard = np.zeros(count, dtype=bool)
        """Whether somebody hears its tokens as they are sampled."""
        self.top = np.zeros(count, dtype=np.int64)
        """Likeliest tokens that this listener wants to hear of."""
        self.tenant = np.zeros(count, dtype=np.int64)
        """Changes when a request leaves the row, so that what was launched for it is not given to the next."""

    def enter(self, request: Request, found: int, context: int) -> int:
        row, sampling, size = self.free.pop(), request.sampling, len(request.tokens)
        self.tokens[row, :size] = request.tokens
        self.logprobs[row, request.prompt : size] = request.logprobs
        self.versions[row, request.prompt : size] = request.versions
        self.prompt[row], self.known[row], self.length[row], self.filled[row] = request.prompt, size, size, found
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
        self.listens[row] = request.stop_texts is not None
        self.heard[row] = request.heard is not None
        self.top[row] = 0 if request.heard is None else request.heard.top
        return row

    def check(self, rows: Array, size: int) -> None:
        """Raise AssertionError where these live rows, with pages of `size` tokens, are not as the table says."""
        prompt, known, length = self.prompt[rows], self.known[rows], self.length[rows]
        assert ((prompt >= 1) & (prompt <= known) & (prompt < self.limit[rows])).all(), "prompt"
        assert (known <= self.limit[rows]).all(), "known"
        assert ((known <= length) & (length <= known + 1)).all(), "length"
        assert (self.filled[rows] <= np.minimum(length, self.pages[rows] * size)).all(), "filled"
        for row in rows.tolist():
            own = self.tables[row, : self.pages[row]].tolist()
            assert len(set(own)) == len(own), "pages"
        assert not set(rows.tolist()) & set(self.free), "a live row is free"

    def leave(self, row: int) -> None:
        """The row is free for the next; what was launched for this one is nobody's."""
        self.free.append(row)
        self.pages[row] = 0
        self.tenant[row] += 1

    def vacate(self) -> None:
        """All of them are."""
        self.free = list(range(self.count - 1, -1, -1))
        self.pages[:] = 0
        self.tenant += 1

    def draws(self, rows: Array) -> Draws:
        """How to draw the next token of these rows."""
        chance = uniforms(self.seed[rows], self.length[rows] - self.prompt[rows])
        top = int(self.top[rows].max(initial=0))
        return Draws(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], chance, top)
