"""The application: what a browser may ask for, and the door in front of it.

Everything is read, nothing is changed. Names of runs, files and columns that come from a browser are looked up in what
was found on disk; none becomes a path or a part of a question. What episodes hold is sent as JSON and put into the page
as text: it may be hostile.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from arborl.errors import ConfigError
from arborl.rollout.term_store import TermStore
from arborl.tools.gate import Gate, HalfOpen
from arborl.track.folder_files import MAX_INT, Unreadable, entries_of, read_bytes, read_json
from arborl.types import Episode
from arborl.view.web import folders, metrics, search
from arborl.view.web.episode import calls_of, parsed, told
from arborl.view.web.gradient import strongest
from arborl.view.web.group import parting, rivals_of, tree_of
from arborl.view.web.index import EpisodeIndex, delete_unused, user_cache
from arborl.view.web.token_text import Decode, decoder_of

FIRST_LOOK = 0.4
"""Seconds that a page of episodes waits for the index; then it shows what is there."""
MAX_PICTURE = 2**26
"""Bytes of a moving picture."""
TERMS = re.compile(r"step-(\d{1,12})\.npz", re.ASCII)
MOST_RUNS = 40
"""Runs side by side."""
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Names = Annotated[list[str], Query(max_length=MOST_RUNS)]


class RunCache:
    """What is open of the runs: their indices, their tokenizers."""

    def __init__(self, runs: folders.RunFolders):
        self.runs = runs
        self._indices: dict[str, EpisodeIndex] = {}
        self._decoders: dict[str, Decode] = {}
        self._lock = threading.Lock()

    def folder(self, run: str) -> Path:
        try:
            return self.runs[run]
        except KeyError:
            raise HTTPException(404, f"no run is called {run!r} here") from None

    def index(self, run: str) -> EpisodeIndex:
        """The run's index, as far as it comes within a moment."""
        index = self._index(run)
        index.begin()
        index.wait(FIRST_LOOK)
        return index

    def at(self, run: str, kind: str, step: int) -> EpisodeIndex:
        """The run's index, up to date at least in this step."""
        index = self._index(run)
        index.ensure(kind, step)
        return index

    def _index(self, run: str) -> EpisodeIndex:
        folder = self.folder(run)
        with self._lock:
            return self._indices.setdefault(run, EpisodeIndex(folder))

    def decoder(self, run: str) -> Decode | None:
        folder = self.folder(run)
        if run not in self._decoders and (found := decoder_of(folder)) is not None:
            self._decoders[run] = found
        return self._decoders.get(run)

    def episodes(self, run: str, kind: str, step: int, lines: Sequence[int]) -> dict[int, Episode]:
        """Some episodes of a step, by their line; without those that are not there, or are none. Where a single one was
        asked for, it is said why."""
        found: dict[int, Episode] = {}
        for line, read in self.at(run, kind, step).lines(kind, step, lines).items():
            try:
                found[line] = parsed(read, f"{run}: {kind}, step {step}, line {line + 1}")
            except (ConfigError, ValueError) as error:  # or the file has changed under the index
                if len(lines) == 1:
                    raise HTTPException(409, str(error)) from None
        return found

    def episode(self, run: str, kind: str, step: int, line: int) -> Episode:
        found = self.episodes(run, kind, step, [line])
        if line not in found:
            raise HTTPException(404, f"{run} has no episode {line} in step {step} ({kind})")
        return found[line]

    def group(self, run: str, kind: str, step: int, line: int) -> list[dict[str, Any]]:
        """The rows of the episodes of the same task, this one among them, in their order."""
        with self.at(run, kind, step).reading() as rows:
            asked = "SELECT tree FROM episodes WHERE kind = ? AND step = ? AND line = ?"
            tree = rows.execute(asked, (kind, step, line)).fetchone()
            if tree is None:
                raise HTTPException(404, f"{run} has no episode {line} in step {step} ({kind})")
            asked = f"{search.ROWS} WHERE kind = ? AND step = ? AND tree = ? ORDER BY line"
            return [dict(row) for row in rows.execute(asked, (kind, step, tree["tree"]))]

    def siblings(self, run: str, kind: str, step: int, line: int) -> tuple[list[dict[str, Any]], dict[int, Episode]]:
        """The group's rows and episodes, as far as both are there: files may be replaced at any moment."""
        rows = self.group(run, kind, step, line)
        read = self.episodes(run, kind, step, [line, *(row["line"] for row in rows)])
        read |= {} if line in read else {line: self.episode(run, kind, step, line)}  # it says why not
        return [row for row in rows if row["line"] in read], read


def make_app(root: Path) -> FastAPI:
    """The viewer of the runs in a folder, as an ASGI application."""
    app = FastAPI(title="Arbor's viewer", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.half_open = HalfOpen()
    delete_unused(user_cache())
    shelf = RunCache(folders.RunFolders(root))
    _add_runs(app, shelf)
    _add_episodes(app, shelf)
    _add_reading(app, shelf)
    _add_files(app, shelf)

    @app.exception_handler(OSError)
    async def unreadable(request: Request, error: OSError) -> Response:
        return JSONResponse({"detail": f"cannot be read: {error}"}, 500)

    @app.exception_handler(Unreadable)
    async def refused(request: Request, error: Unreadable) -> Response:
        return JSONResponse({"detail": str(error)}, 409)

    @app.exception_handler(OverflowError)
    async def too_large(request: Request, error: OverflowError) -> Response:
        return JSONResponse({"detail": "a number is too large"}, 422)

    @app.middleware("http")
    async def headed(request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        answer.headers.update(HEADERS)
        return answer

    app.add_middleware(Gate, key=None, max_body=4096)
    return app


def _add_runs(app: FastAPI, shelf: RunCache) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        """Every run, with where it stands."""
        found = []
        for name, folder in shelf.runs.all().items():
            rows, problem = metrics.read_rows(folder)
            last = rows[-1] if rows else {}
            shown = {name: last.get(name) for name in ("reward/mean", "episode/success")}
            row = {"run": name, **folders.standing(folder), "step": last.get("step", 0), "last": shown}
            row["problems"] += [problem] if problem else []
            found.append(row)
        return answer({"root": str(shelf.runs.root), "runs": found})

    @app.get("/api/differences")
    def differences(run: Names) -> Response:
        """Settings that these runs do not share, and those that they do."""
        differ, same = folders.differences([folders.read_config(shelf.folder(name)) for name in run])
        return answer({"runs": run, "differ": differ, "same": same})

    @app.get("/api/names")
    def names(run: Names) -> Response:
        """What was measured in these runs."""
        return answer(
            list(dict.fromkeys(n for name in run for n in metrics.names_of(metrics.rows_of(shelf.folder(name)))))
        )

    @app.get("/api/series")
    def series(run: Names, name: Annotated[list[str], Query(max_length=400)]) -> Response:
        """Numbers of these runs, to be drawn."""
        return answer({one: metrics.series(metrics.rows_of(shelf.folder(one)), name) for one in run})

    @app.get("/api/pulse")
    def pulse(run: Annotated[list[str], Query(max_length=MOST_RUNS)] = []) -> Response:  # noqa: B006
        """Another answer, whenever there is something new to see."""
        known = shelf.runs.all()
        found: dict[str, Any] = {"": [len(known)]}
        for name in run:
            if name in known:
                newest = max((file.changed for file in EpisodeIndex(known[name]).files()), default=0)
                state = folders.standing(known[name])["state"]
                found[name] = [*metrics.stamp_of(known[name]), newest, state]
        return answer(found)


def _add_episodes(app: FastAPI, shelf: RunCache) -> None:
    @app.get("/api/episodes")
    def episodes(
        run: str, asked: Annotated[search.EpisodeFilter, Depends()], order: str = "-step",
        first: int = 0, count: int = 50, facets: bool = False,
    ) -> Response:  # fmt: skip
        """A page of the run's episodes."""
        index = shelf.index(run)
        with index.reading() as rows:
            found = search.page(rows, asked, order, first, count)
            found |= {"facets": search.facets(rows)} if facets else {}
        return answer(found | {"indexed": index.done})

    @app.get("/api/steps")
    def steps(run: str) -> Response:
        """Steps whose terms were kept."""
        found = (TERMS.fullmatch(entry.name) for entry in entries_of(shelf.folder(run) / "terms"))
        return answer(sorted(int(name[1]) for name in found if name))


def _add_reading(app: FastAPI, shelf: RunCache) -> None:
    @app.get("/api/episode")
    def episode(run: str, kind: str, step: int, line: int) -> Response:
        """One episode, token by token."""
        (rows, read), decode = shelf.siblings(run, kind, step, line), shelf.decoder(run)
        found, own = read[line], list(read).index(line)
        terms = TermStore(shelf.folder(run) / "terms").read(step) if kind == "train" else None
        calls = calls_of(found, decode, terms, line)
        for call, rivals in zip(calls, rivals_of([*read.values()], own, decode), strict=True):
            call["rivals"] = rivals
        here = {"run": run, "kind": kind, "step": step, "line": line, "decoded": decode is not None}
        gifs = _gifs_of(shelf.folder(run), kind, step, found.id)
        return answer(told(found) | here | {"calls": calls, "group": rows, "terms": terms is not None, "frames": gifs})

    @app.get("/api/group")
    def group(run: str, kind: str, step: int, line: int) -> Response:
        """The tree of the episode's group."""
        rows, read = shelf.siblings(run, kind, step, line)
        lengths = [[len(call.prompt) + len(call.completion.tokens) for call in one.calls] for one in read.values()]
        window = folders.look_up(folders.read_config(shelf.folder(run)), "sampling.max_context")
        tree = tree_of([*read.values()], shelf.decoder(run))
        return answer(tree | {"group": rows, "lengths": lengths, "window": window})

    @app.get("/api/parting")
    def parted(run: str, kind: str, step: int, line: int, other: int) -> Response:
        """Where two episodes of a step part."""
        return answer(parting(shelf.episode(run, kind, step, line), shelf.episode(run, kind, step, other)))

    @app.get("/api/gradient")
    def gradient(run: str, step: int, most: Annotated[int, Query(ge=1, le=500)] = 100) -> Response:
        """The tokens that moved the weights most in a step."""
        terms = TermStore(shelf.folder(run) / "terms").read(step)
        if terms is None:
            raise HTTPException(404, f"{run} has kept no terms of step {step}; track.terms says how many are kept")
        ask = partial(shelf.episodes, run, "train", step)
        return answer(strongest(terms, ask, shelf.decoder(run), most) | {"step": step})


def _gifs_of(folder: Path, kind: str, step: int, episode: str) -> list[str]:
    """Pictures that say that they are of this episode."""
    try:
        named = read_json(folder / "frames" / "episodes.json")
        mine = {f"frames/{file}" for file, about in named.items() if about == [kind, step, episode]}
    except (OSError, Unreadable, AttributeError):
        return []
    return [name for name in folders.pictures(folder) if name in mine]


def _add_files(app: FastAPI, shelf: RunCache) -> None:
    static = {path.name: path for path in files("arborl.view.web").joinpath("static").iterdir() if path.is_file()}

    @app.get("/")
    def page() -> Response:
        return Response(static["index.html"].read_bytes(), media_type="text/html")

    @app.get("/static/{name}")
    def asset(name: str) -> Response:
        if name not in static:
            raise HTTPException(404, "no such file")
        return Response(static[name].read_bytes(), media_type=TYPES[Path(name).suffix])

    @app.get("/api/frames")
    def frames(run: str) -> Response:
        """Moving pictures of the run."""
        return answer(list(folders.pictures(shelf.folder(run))))

    @app.get("/frame")
    def frame(run: str, name: str) -> Response:
        found = folders.pictures(shelf.folder(run)).get(name)
        if found is None:
            raise HTTPException(404, "no such picture")
        return Response(read_bytes(found, MAX_PICTURE), media_type="image/gif")

    @app.get("/api/raw")
    def raw(run: str, kind: str, step: int, line: int) -> Response:
        """The episode's line as it is in the file."""
        found = shelf.at(run, kind, step).lines(kind, step, [line])
        if line not in found:
            raise HTTPException(404, "no such episode")
        return Response(found[line], media_type="text/plain; charset=utf-8")


def answer(value: Any) -> Response:
    """JSON for a browser: a number that is not finite is null, and half a character is spelt out."""
    return Response(json.dumps(finite(value), allow_nan=False, separators=(",", ":")), media_type="application/json")


def finite(value: Any) -> Any:
    """The same with null for what is no number, or too large a one, and text for what JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
        return None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return str(value)
