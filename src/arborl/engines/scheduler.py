"""Who is sampled and who waits: requests come in while there is a row and there are pages for them, and leave again.

A request ends in one of two ways, whoever ends it: `answer` with what has been sampled, or `refuse` with an error of
its own. Its row and its pages come back either way, and no other request notices.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from arborl.engines.engine import told
from arborl.engines.pages import Pages, Path, Tokens
from arborl.engines.rows import Request, Rows
from arborl.errors import EngineError
from arborl.types import Completion, FinishReason, Metrics

WORTH_WAITING = 16
"""Tokens a request must save to wait one step for a sibling to read them."""
HEADROOM = 64
"""Tokens a request must find room for, besides those it has, to be let in; else it would soon be put back."""


class Scheduler:
    """The requests of an engine.

    Args:
        pages, rows: what is handed out.
        context: longest prompt and completion together.
        reuse: let requests go on from what others have read.
        copy: gives a page the beginning of another: (from, to, tokens).
        counts: of the engine; tokens reused and requests put back are added.
    """

    def __init__(
        self,
        pages: Pages,
        rows: Rows,
        context: int,
        reuse: bool,
        copy: Callable[[int, int, int], None],
        counts: Metrics,
    ):
        self.pages, self.rows, self.context, self.reuse, self.copy = pages, rows, context, reuse, copy
        self.counts = counts
        self.waiting: deque[Request] = deque()
        self.held: deque[Request] = deque()
        """Those that wait for the engine to be released."""
        self.holding = False
        self.live: dict[int, Request] = {}
        """By row, in the order they came in."""
        self.ended = False
        """Some caller has gone."""
        self.timed = False
        """Some request has had a deadline."""
        self.no_pages = False
        """The first in line found no room when it was last looked at."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.live)

    @property
    def crowded(self) -> bool:
        """Whether requests wait that there is no room for."""
        return bool(self.waiting) and (self.no_pages or len(self.waiting) > len(self.rows.free))

    def add(self, request: Request, passes: bool = False) -> None:
        """Get in line; while all are held only one that `passes` comes in."""
        self.timed |= request.sampling.seconds is not None
        (self.held if self.holding and not passes else self.waiting).append(request)

    # ------------------------------------------------------------------------------------------ holding

    def hold(self, finish: bool) -> None:
        """Until `release` nobody is sampled. Who is live or waits is set aside with what has been sampled; or, to
        `finish`, only who has not begun is."""
        self.holding = True
        if not finish:
            for request in reversed(list(self.live.values())):
                self._put_back(request)
        begun = [request for request in self.waiting if finish and len(request.tokens) > request.prompt]
        self.held.extendleft(request for request in reversed(self.waiting) if request not in begun)
        self.waiting = deque(begun)

    def release(self) -> None:
        """All who were held are in line again, in their order."""
        self.holding = False
        self.waiting.extend(self.held)
        self.held.clear()

    def begin_again(self) -> None:
        """Those who are held sample from their prompt on; what they had is nobody's."""
        for request in self.held:
            self.counts["restarted"] += len(request.tokens) - request.prompt
            request.tokens = request.tokens[: request.prompt]
            request.logprobs, request.versions = request.logprobs[:0], request.versions[:0]

    # ------------------------------------------------------------------------------------------ coming

    def admit(self) -> None:
        """Let waiting requests in, in order, while there is room; one whose prompt a sibling is about to read waits."""
        fresh: set[tuple[int, bytes]] = set()
        later: list[Request] = []
        self.no_pages = False
        try:
            while self.waiting and self.rows.free and not self.no_pages:
                request = self.waiting.popleft()
                if not request.done.done():
                    later.append(request)  # until it is in
                    if self._let_in(request, fresh):
                        later.pop()
        finally:
            self.waiting.extendleft(reversed(later))

    def _let_in(self, request: Request, fresh: set[tuple[int, bytes]]) -> bool:
        path = self.pages.open(request.tokens[:-1], self.reuse)
        key = self._begins_with(request, path)
        sibling_reads = key in fresh and len(request.tokens) > path.found + WORTH_WAITING
        if sibling_reads or not self._fits(request, path):
            self.pages.close(path)
            self.no_pages = not sibling_reads
            return False
        fresh.add(key)
        self._enter(request, path)
        return True

    def _begins_with(self, request: Request, path: Path) -> tuple[int, bytes]:
        """What was found and a little more; full pages are told by the last of them, so that it costs no more than that
        little however long the request is."""
        full = path.published
        rest = request.tokens[full * self.pages.size : path.found + WORTH_WAITING]
        return path.nodes[full - 1].page if full else -1, rest.tobytes()

    def _fits(self, request: Request, path: Path) -> bool:
        """Give the path pages for the request's tokens, if there is room for these and a few more."""
        size = len(request.tokens)
        rest = min(HEADROOM, request.prompt + request.sampling.max_tokens - size, self.context - size)
        enough = self.pages.needed(size + rest) - len(path.nodes) <= self.pages.room
        return enough and self.pages.extend(path, size)

    def _enter(self, request: Request, path: Path) -> None:
        if path.copy is not None:  # at once: the page it is taken from may be given away next
            self.copy(*path.copy)
        row = self.rows.enter(request, path.found, self.context)
        request.row, request.path = row, path
        self._note_pages(request)
        self.live[row] = request
        self.counts["reused"] += float(path.found)

    def _note_pages(self, request: Request) -> None:
        nodes, had = self.path(request.row, request).nodes, int(self.rows.pages[request.row])
        self.rows.tables[request.row, had : len(nodes)] = [node.page for node in nodes[had:]]
        self.rows.pages[request.row] = len(nodes)

    def path(self, row: int, request: Request | None = None) -> Path:
        """The pages of a row."""
        path = (request or self.live[row]).path
        assert path is not None
        return path

    def make_room(self) -> None:
        """A page for every row that has filled its last one; where there is none, the youngest is put back."""
        rows = self.rows
        live = np.fromiter(self.live, np.int64, len(self.live))
        short = (rows.pages[live] * self.pages.size < rows.length[live]) & (rows.length[live] < rows.limit[live])
        for row in live[short].tolist():
            while row in self.live and not self.pages.extend(self.path(row), int(rows.length[row])):
                self._put_back(self.live[next(reversed(self.live))])
            if row in self.live:
                self._note_pages(self.live[row])

    # ------------------------------------------------------------------------------------------ going

    def answer(self, request: Request, finish: FinishReason, version: int) -> None:
        """Tell the caller what has been sampled, unless it has gone, be it in this very turn of the loop."""
        if not request.done.done():
            sampled, logprobs, versions = self._sampled(request)
            seconds = time.perf_counter() - request.began
            version, mixed = told(versions.tolist(), version)
            said = Completion(tuple(sampled.tolist()), tuple(logprobs.tolist()), finish, version, seconds, mixed)
            request.done.set_result(said)
        self._leave(request)

    def refuse(self, request: Request, why: str, cause: Exception | None = None) -> None:
        """Tell the caller, if there is one, what went wrong with its request."""
        if not request.done.done() and not request.done.get_loop().is_closed():
            error = EngineError(why)  # each its own: one that several raise would collect the traces of all
            error.__cause__ = cause
            request.done.set_exception(error)
        self._leave(request)

    def drop_ended(self, version: int) -> None:
        """Let go of requests whose caller has gone, and answer those whose time is up."""
        if self.timed:
            now = time.perf_counter()
            for request in (*self.waiting, *self.live.values()):
                limit = request.sampling.seconds
                if limit is not None and now - request.began > limit:
                    self.answer(request, FinishReason.ABORT, version)
                    self.ended = True
        if self.ended:
            self.ended = False
            self.waiting = deque(r for r in self.waiting if not r.done.done())
            for request in [r for r in self.live.values() if r.done.done()]:
                self._leave(request)

    def read_again(self) -> None:
        """What has been read no longer counts: all who are live wait again, in their order."""
        for request in reversed(list(self.live.values())):
            self._put_back(request)
        self.pages.forget()

    def drop_all(self, why: str, cause: Exception | None = None) -> None:
        """Everybody is refused. What went before may have been left half-done, so nothing of it is kept."""
        requests = (*self.waiting, *self.held, *self.live.values())
        self.waiting.clear()
        self.held.clear()
        self.live.clear()
        self.rows.vacate()
        self.pages.reset()
        for request in requests:
            request.row, request.path = -1, None
            self.refuse(request, why, cause)

    def _put_back(self, request: Request) -> None:
        """The request waits again, in front, with what it has sampled. Chance depends on seed and position alone, so it
        goes on with the tokens it would have had."""
        sampled, request.logprobs, request.versions = self._sampled(request)
        request.tokens = np.concatenate([request.tokens[: request.prompt], sampled])
        self._leave(request)
        self.waiting.appendleft(request)
        self.counts["paused"] += 1

    def _sampled(self, request: Request) -> tuple[Tokens, NDArray[np.float64], NDArray[np.int64]]:
        """What has been sampled, its log-probabilities and versions: as they are in its row, if it is in one."""
        if (row := request.row) < 0:
            return request.tokens[request.prompt :], request.logprobs, request.versions
        new, rows = slice(request.prompt, int(self.rows.known[row])), self.rows
        return rows.tokens[row, new].copy(), rows.logprobs[row, new].copy(), rows.versions[row, new].copy()

    def _leave(self, request: Request) -> None:
        """Give row and pages back, if it has any; what has been read stays findable."""
        if (row := request.row) < 0:
            return
        path = self.path(row, request)
        read = min(int(self.rows.filled[row]), int(self.rows.known[row]) - 1)
        self.pages.publish(path, self.rows.tokens[row, : max(read, 0)])
        self.pages.close(path)
        self.rows.leave(row)
        del self.live[row]
        request.row, request.path = -1, None
