"""The viewer's HTTP application and server. It only reads, except for the tags and note of a run (tags.py).

Names from a browser are looked up in what was found on disk; none becomes a path or part of a query. The content of
episodes may be hostile: it is sent as JSON and inserted into the page as text.
"""

from __future__ import annotations

import errno
import json
import math
import re
import socket
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Body, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from arborl.errors import ConfigError
from arborl.rollout.term_store import TermStore
from arborl.tools.remote.http_middleware import PendingConnections, RequestFilter, uvicorn_config
from arborl.track.folder_files import MAX_INT, Unreadable, entries_of, read_bytes, read_json
from arborl.types import Episode
from arborl.view.web import episode_search, folders, run_list, run_page, series
from arborl.view.web.episode import calls_of, episode_as_dict, parsed
from arborl.view.web.gradient import strongest
from arborl.view.web.group import alternatives_of, divergence, tree_of
from arborl.view.web.index import EpisodeIndex, delete_unused, user_cache
from arborl.view.web.tags import FILE as TAGS_FILE
from arborl.view.web.tags import Outdated, parse_tags, write_tags
from arborl.view.web.token_text import Decode, decoder_of

INDEX_SECONDS = 0.4
"""How long a page of episodes waits for the index."""
MAX_PICTURE = 2**26
"""Bytes of a GIF."""
TERMS = re.compile(r"step-(\d{1,12})\.npz", re.ASCII)
MAX_RUNS = 40
"""Runs in one request."""
MAX_REPLAYS = 24
MAX_BODY = 2**16
"""Bytes of a request: tags and note, twice."""
LISTED_FILES = ("metrics.jsonl", "summary.json", "config.yaml", TAGS_FILE)
"""Files that change a run's row in the list."""
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
Names = Annotated[list[str], Query(max_length=MAX_RUNS)]
MetricNames = Annotated[list[str], Query(max_length=400)]


class RunCache:
    """Indices and tokenizers of the runs."""

    def __init__(self, runs: folders.RunFolders):
        self.runs = runs
        self._indices: dict[str, EpisodeIndex] = {}
        self._decoders: dict[str, Decode] = {}
        self._lock = threading.Lock()

    def folder(self, run: str) -> Path:
        try:
            return self.runs[run]
        except KeyError:
            raise HTTPException(404, f"there is no run {run!r}") from None

    def rows(self, run: str) -> folders.Rows:
        """The metrics of the run."""
        return folders.read_rows(self.folder(run))[0]

    def index(self, run: str) -> EpisodeIndex:
        """The run's index, updated for at most `INDEX_SECONDS`."""
        index = self._index(run)
        index.begin()
        index.wait(INDEX_SECONDS)
        return index

    def at(self, run: str, kind: str, step: int) -> EpisodeIndex:
        """The run's index, up to date for this step."""
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
        """Some episodes of a step by line, without missing and damaged ones; a single damaged one raises."""
        found: dict[int, Episode] = {}
        for line, read in self.at(run, kind, step).lines(kind, step, lines).items():
            try:
                found[line] = parsed(read, f"{run}: {kind}, step {step}, line {line + 1}")
            except (ConfigError, ValueError) as error:  # or the file has changed since
                if len(lines) == 1:
                    raise HTTPException(409, str(error)) from None
        return found

    def episode(self, run: str, kind: str, step: int, line: int) -> Episode:
        found = self.episodes(run, kind, step, [line])
        if line not in found:
            raise HTTPException(404, f"{run} has no episode in line {line + 1} of step {step} ({kind})")
        return found[line]

    def group(self, run: str, kind: str, step: int, line: int) -> list[dict[str, Any]]:
        """The rows of the episode's group."""
        with self.at(run, kind, step).reading() as rows:
            query = "SELECT tree FROM episodes WHERE kind = ? AND step = ? AND line = ?"
            tree = rows.execute(query, (kind, step, line)).fetchone()
            if tree is None:
                raise HTTPException(404, f"{run} has no episode in line {line + 1} of step {step} ({kind})")
            query = f"{episode_search.ROWS} WHERE kind = ? AND step = ? AND tree = ? ORDER BY line"
            return [dict(row) for row in rows.execute(query, (kind, step, tree["tree"]))]

    def place(
        self, run: str, step: int, episode: str, kinds: Sequence[str] = ("train", "evaluation")
    ) -> dict[str, Any]:
        """Kind and line of an episode of the step; empty if it is not found."""
        for kind in kinds:
            with self.at(run, kind, step).reading() as rows:
                query = (
                    "SELECT line FROM episodes JOIN names USING (number) WHERE kind = ? AND step = ? AND episode = ?"
                )
                if (found := rows.execute(query, (kind, step, episode)).fetchone()) is not None:
                    return {"kind": kind, "line": found["line"]}
        return {}

    def siblings(self, run: str, kind: str, step: int, line: int) -> tuple[list[dict[str, Any]], dict[int, Episode]]:
        """Rows and episodes of the group, if both exist: files may be replaced at any time."""
        rows = self.group(run, kind, step, line)
        read = self.episodes(run, kind, step, [line, *(row["line"] for row in rows)])
        read |= {} if line in read else {line: self.episode(run, kind, step, line)}  # raises with the cause
        return [row for row in rows if row["line"] in read], read


def make_app(root: Path) -> FastAPI:
    """The viewer of a folder's runs as an ASGI application."""
    app = FastAPI(title="Arbor's viewer", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.half_open = PendingConnections()
    delete_unused(user_cache())
    cache = RunCache(folders.RunFolders(root))
    _add_runs(app, cache)
    _add_charts(app, cache)
    _add_run(app, cache)
    _add_episodes(app, cache)
    _add_reading(app, cache)
    _add_files(app, cache)

    for kind, status in ((OSError, 500), (Unreadable, 409), (OverflowError, 422), (ConfigError, 422)):
        app.add_exception_handler(kind, partial(_error_response, status))

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    app.add_middleware(RequestFilter, key=None, max_body=MAX_BODY)
    return app


async def _error_response(status: int, request: Request, error: Exception) -> Response:
    prefix = "cannot be read: " if isinstance(error, OSError) else ""
    detail = "a number is too large" if isinstance(error, OverflowError) else f"{prefix}{error}"
    return JSONResponse({"detail": detail}, status)


def range_of(axis: series.Axis = "step", low: float | None = None, high: float | None = None) -> series.Range | None:
    """The part of an axis that a chart shows."""
    return None if low is None or high is None else (axis, low, high)


def _add_runs(app: FastAPI, cache: RunCache) -> None:
    @app.get("/api/runs")
    def runs(find: str = "", by: str = "") -> Response:
        """The runs that a filter selects, with their states; `by` is a field or setting to group them by."""
        known = cache.runs.all()
        conditions = run_list.parse_filter(find)
        found = []
        for name, folder in known.items():
            row = run_list.run_row(name, folder)
            if run_list.matches(conditions, row, folder):
                found.append(row | ({"group": run_list.setting_of(by, row, folder)} if by else {}))
        return json_response({"root": str(cache.runs.root), "names": list(known), "runs": found})

    @app.get("/api/varying")
    def varying() -> Response:
        """Keys of settings that differ between the runs."""
        return json_response(run_list.varying_settings(cache.runs.all().values()))

    @app.get("/api/differences")
    def differences(run: Names) -> Response:
        """Settings that differ between runs, and those that do not."""
        differ, same = folders.differences([folders.read_config(cache.folder(name)) for name in run])
        return json_response({"runs": run, "differ": differ, "same": same})

    @app.get("/api/pulse")
    def pulse(run: Annotated[list[str], Query(max_length=MAX_RUNS)] = [], every: bool = False) -> Response:  # noqa: B006
        """Changes whenever there is something new in these runs; with `every`, also in the list of all runs."""
        known = cache.runs.all()
        found: dict[str, Any] = {"": [len(known)]}
        if every:
            stamps = [folders.stamps_of(folder, LISTED_FILES) for folder in known.values()]
            found[""] += [zlib.crc32(repr(stamps).encode())]
        for name in run:
            if name in known:
                newest = max((file.changed for file in EpisodeIndex(known[name]).files()), default=0)
                state = folders.run_state(known[name])["state"]
                others = folders.stamps_of(known[name], (TAGS_FILE, "run.log"))
                found[name] = [*folders.stamp_of(known[name]), newest, state, *others]
        return json_response(found)


def _add_charts(app: FastAPI, cache: RunCache) -> None:
    @app.get("/api/names")
    def names(run: Names) -> Response:
        """Names of the runs' metrics."""
        return json_response(list(dict.fromkeys(n for name in run for n in folders.names_of(cache.rows(name)))))

    @app.get("/api/series")
    def series_of(run: Names, name: MetricNames, within: Annotated[series.Range | None, Depends(range_of)]) -> Response:
        """Metrics of these runs for charts."""
        return json_response({one: series.series(cache.rows(one), name, within) for one in run})

    @app.get("/api/bands")
    def bands(
        run: Names, name: MetricNames, within: Annotated[series.Range | None, Depends(range_of)],
        band: series.Band = "range",
    ) -> Response:  # fmt: skip
        """Runs of equal settings with different seeds, and the mean of their metrics with a band."""
        groups = series.seed_groups({one: folders.read_config(cache.folder(one)) for one in run})
        found = []
        for changes, runs in groups.items():
            means = series.bands([cache.rows(one) for one in runs], name, band, within) if len(runs) > 1 else {}
            seeds = [folders.read_config(cache.folder(one)).get("seed") for one in runs]
            found.append({"changes": changes, "runs": runs, "seeds": seeds, "means": means})
        return json_response(found)


def _add_run(app: FastAPI, cache: RunCache) -> None:
    findings = run_page.FindingsCache()

    @app.get("/api/run")
    def run_facts(run: str) -> Response:
        """One run: state, execution, evaluation, tags."""
        return json_response(run_page.run_facts(run, cache.folder(run)))

    @app.get("/api/settings")
    def settings(run: str) -> Response:
        """The run's settings, and those that differ from the defaults."""
        return json_response(run_page.run_settings(cache.folder(run)))

    @app.get("/api/findings")
    def run_findings(run: str) -> Response:
        """The findings of the doctor, with the places of the episodes that show them."""
        found = [finding.as_json() for finding in findings.of(cache.folder(run))]
        for finding in found:
            for shown in finding["evidence"]:
                shown |= cache.place(run, shown["step"], shown["episode"])
        return json_response(found)

    @app.get("/api/log")
    def log(run: str, find: Annotated[str, Query(max_length=400)] = "", level: str = "") -> Response:
        """The last lines of the run's log."""
        return json_response(run_page.log_tail(cache.folder(run), find, level))

    @app.get("/api/replays")
    def replays(run: str) -> Response:
        """GIFs of the run and their episodes."""
        found = run_page.replays(cache.folder(run))[:MAX_REPLAYS]
        for replay in found:
            if "episode" in replay:
                replay |= cache.place(run, replay["step"], replay["episode"], (replay["kind"],))
        return json_response(found)

    @app.put("/api/tags", dependencies=[Depends(require_own_page)])
    def save_tags(run: str, body: Annotated[dict[str, Any], Body()]) -> Response:
        """Replace the run's tags and note; `before` holds those that the page has read."""
        folder = cache.folder(run)
        try:
            before = parse_tags(body.pop("before", {}))
            write_tags(folder, parse_tags(body), before)
        except Outdated as error:
            raise HTTPException(409, str(error)) from None
        except Unreadable as error:
            raise HTTPException(409, str(error).removeprefix(f"{folder}/")) from None
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        except OSError as error:
            raise HTTPException(403, f"the run folder cannot be written: {error.strerror}") from None
        return json_response(run_page.run_facts(run, folder))


def require_own_page(request: Request) -> None:
    """Refuse a write that no page of this server has sent. `RequestFilter` has checked `Host` and `Origin`; this is for
    requests without `Origin`: a page of another site cannot send JSON without a preflight, which is not answered."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    site = request.headers.get("sec-fetch-site", "same-origin")
    if kind != "application/json" or site != "same-origin":
        raise HTTPException(403, "only pages of the viewer can write")


def _add_episodes(app: FastAPI, cache: RunCache) -> None:
    @app.get("/api/episodes")
    def episodes(
        run: str, filters: Annotated[episode_search.EpisodeFilter, Depends()], order: str = "-step",
        first: int = 0, count: int = 50, facets: bool = False,
    ) -> Response:  # fmt: skip
        """A page of the run's episodes."""
        index = cache.index(run)
        with index.reading() as rows:
            found = episode_search.page(rows, filters, order, first, count)
            found |= {"facets": episode_search.facets(rows)} if facets else {}
        return json_response(found | {"indexed": index.done})

    @app.get("/api/steps")
    def steps(run: str) -> Response:
        """Steps with stored loss terms."""
        found = (TERMS.fullmatch(entry.name) for entry in entries_of(cache.folder(run) / "terms"))
        return json_response(sorted(int(name[1]) for name in found if name))


def _add_reading(app: FastAPI, cache: RunCache) -> None:
    @app.get("/api/episode")
    def episode(run: str, kind: str, step: int, line: int) -> Response:
        """One episode, token by token."""
        (rows, read), decode = cache.siblings(run, kind, step, line), cache.decoder(run)
        found, own = read[line], list(read).index(line)
        terms = TermStore(cache.folder(run) / "terms").read(step) if kind == "train" else None
        calls = calls_of(found, decode, terms, line)
        for call, rivals in zip(calls, alternatives_of([*read.values()], own, decode), strict=True):
            call["rivals"] = rivals
        here = {"run": run, "kind": kind, "step": step, "line": line, "decoded": decode is not None}
        gifs = _gifs_of(cache.folder(run), kind, step, found.id)
        return json_response(
            episode_as_dict(found) | here | {"calls": calls, "group": rows, "terms": terms is not None, "frames": gifs}
        )

    @app.get("/api/group")
    def group(run: str, kind: str, step: int, line: int) -> Response:
        """The tree of the episode's group."""
        rows, read = cache.siblings(run, kind, step, line)
        lengths = [[len(call.prompt) + len(call.completion.tokens) for call in one.calls] for one in read.values()]
        window = folders.look_up(folders.read_config(cache.folder(run)), "sampling.max_context")
        tree = tree_of([*read.values()], cache.decoder(run))
        return json_response(tree | {"group": rows, "lengths": lengths, "window": window})

    @app.get("/api/parting")
    def parted(run: str, kind: str, step: int, line: int, other: int) -> Response:
        """Where two episodes of a step diverge."""
        return json_response(divergence(cache.episode(run, kind, step, line), cache.episode(run, kind, step, other)))

    @app.get("/api/gradient")
    def gradient(run: str, step: int, most: Annotated[int, Query(ge=1, le=500)] = 100) -> Response:
        """The tokens with the largest gradient in a step."""
        terms = TermStore(cache.folder(run) / "terms").read(step)
        if terms is None:
            raise HTTPException(404, f"{run} has no stored terms of step {step}; track.terms sets their number")
        ask = partial(cache.episodes, run, "train", step)
        return json_response(strongest(terms, ask, cache.decoder(run), most) | {"step": step})


def _gifs_of(folder: Path, kind: str, step: int, episode: str) -> list[str]:
    """GIFs of this episode."""
    try:
        named = read_json(folder / "frames" / "episodes.json")
        mine = {f"frames/{file}" for file, about in named.items() if about == [kind, step, episode]}
    except (OSError, Unreadable, AttributeError):
        return []
    return [name for name in folders.pictures(folder) if name in mine]


def _add_files(app: FastAPI, cache: RunCache) -> None:
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
        """GIFs of the run."""
        return json_response(list(folders.pictures(cache.folder(run))))

    @app.get("/frame")
    def frame(run: str, name: str) -> Response:
        found = folders.pictures(cache.folder(run)).get(name)
        if found is None:
            raise HTTPException(404, "no such picture")
        return Response(read_bytes(found, MAX_PICTURE), media_type="image/gif")

    @app.get("/api/raw")
    def raw(run: str, kind: str, step: int, line: int) -> Response:
        """The episode's line as it is in the file."""
        found = cache.at(run, kind, step).lines(kind, step, [line])
        if line not in found:
            raise HTTPException(404, "no such episode")
        return Response(found[line], media_type="text/plain; charset=utf-8")


def json_response(value: Any) -> Response:
    """A JSON response; numbers that are not finite become null."""
    return Response(json.dumps(finite(value), allow_nan=False, separators=(",", ":")), media_type="application/json")


def finite(value: Any) -> Any:
    """A JSON value: null for numbers that are not finite or too large, text for other types."""
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


# ------------------------------------------------------------------------------------------------ server

HOST = "127.0.0.1"
"""Local connections only: the viewer has no authentication."""


class Viewer(uvicorn.Server):
    """Serves the runs of a folder; `on_start` gets the address once the server accepts requests."""

    def __init__(self, root: Path, port: int, on_start: Callable[[str], object] = lambda at: None):
        super().__init__(uvicorn_config(make_app(root), HOST, port, 1))
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.on_start(f"http://{HOST}:{self.servers[0].sockets[0].getsockname()[1]}")


def free_port(port: int, only: bool) -> int:
    """The port; 0 (any) if it is in use and not required."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not only:
                return 0
            raise ConfigError(f"--port {port}: {error.strerror}. Write another port, or 0 for any.") from error
    return port
