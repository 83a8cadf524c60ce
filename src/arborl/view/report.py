"""One static page about a run: open it in a browser, send it by mail; it loads nothing from anywhere."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from arborl.errors import DiskWriteError, printable
from arborl.rollout.store import EpisodeStore
from arborl.track.console import measure, shown, span
from arborl.track.folder_files import entries_of, is_regular, read_bytes, replace_file
from arborl.types import Episode
from arborl.view.context_length import context_length, edits_itself
from arborl.view.curve import learning_curve
from arborl.view.health import health
from arborl.view.problems import failures_of, findings_of
from arborl.view.pushes import pushes_of
from arborl.view.sources import composition, sources_of
from arborl.view.transcript import Decode, transcript
from arborl.view.web.folders import flat, look_up, read_config, read_summary

log = logging.getLogger(__name__)

MAX_PICTURE = 2**24
"""Bytes of a picture in the page."""
MOST_GIFS = 24
FACTS = {
    "model": "model.name",
    "algorithm": "algorithm.name",
    "seed": "seed",
    "environment": "env.name",
    "agent": "agent.name",
    "engine": "engine.name",
    "steps": "trainer.steps",
    "tasks a step": "rollout.tasks_per_step",
    "group size": "rollout.group_size",
    "learning rate": "learner.lr",
    "deterministic": "deterministic",
}


def write_report(
    folder: Path,
    decode: Decode | None = None,
    last_steps: int = 2,
    out: Path | None = None,
    pictures: Path | None = None,
) -> Path:
    """Write one page about a run, from whatever its folder holds so far.

    Args:
        folder: of the run, with any of `config.yaml`, `summary.json`, `metrics.jsonl`, `frames/*.gif`, `episodes/`.
        decode: token ids to text, to show how likely each sampled token was; without it, messages only.
        last_steps: how many of the last steps show episodes; each shows its best beside its worst, and one between.
        out: the file; `report.html` in the folder by default.
        pictures: where those that the page is made of are drawn; the run's folder by default.
    """
    config, summary = read_config(folder), read_summary(folder)
    name = config.get("name")
    name, drawn = str(name)[:200] if name else folder.resolve().name, pictures or folder
    metrics = folder / "metrics.jsonl"
    sections: dict[str, Callable[[], str]] = {
        "header": lambda: _header(name, config, summary),
        "held-out tasks": lambda: _outcome(summary),
        "findings": lambda: findings_of(metrics, stopped=bool(summary.get("stopped"))),
        "failures": lambda: failures_of(summary.get("failures"), folder / "episodes", last_steps),
        "learning curve": lambda: _curve(folder, drawn, name, summary),
        "how it went": lambda: _health(folder, drawn),
        "sources": lambda: _sources(folder, drawn, name),
        "context": lambda: _context(folder, drawn, config, last_steps),
        "gradient": lambda: pushes_of(folder, decode),
        "replays": lambda: _gifs(folder / "frames"),
        "episodes": lambda: _episodes(folder / "episodes", decode, last_steps),
        "settings": lambda: _settings(config),
    }
    body = "".join(_section(title, make) for title, make in sections.items())
    return replace_file(out or folder / "report.html", page(name, body).encode("utf-8", "replace"))


def _section(title: str, make: Callable[[], str]) -> str:
    """A part of the page. One that cannot be made of what the folder holds says so in its place, and costs no other."""
    try:
        return make()
    except DiskWriteError:
        raise
    except Exception as error:
        why = f"{title}: {type(error).__name__}: {error}"[:400]
        log.warning("left out of the report: %s", printable(why))
        return f'<div class="notice bad"><b>Not shown</b>{escape(printable(why))}</div>'


def page(name: str, body: str) -> str:
    """A whole document that loads nothing from anywhere."""
    style = files("arborl.view").joinpath("report.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


def _header(name: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    facts = {label: look_up(config, path) for label, path in FACTS.items()}
    if facts["seed"] is None:
        facts["seed"] = summary.get("seed")
    if summary.get("train_seconds") is not None:
        facts["trained in"] = span(summary["train_seconds"])
    items = [f"<span>{escape(label)} <b>{escape(str(v))}</b></span>" for label, v in facts.items() if v is not None]
    return f'<h1>{escape(name)}</h1><p class="facts">{"".join(items)}</p>'


def _outcome(summary: Mapping[str, Any]) -> str:
    rows = {name: summary[name] for name in ("before", "after") if isinstance(summary.get(name), dict)}
    names = shown(*rows.values())
    if not names:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        f'<tr class="{when}"><td>{when}</td>' + "".join(f"<td>{measure(name, row)}</td>" for name in names) + "</tr>"
        for when, row in rows.items()
    )
    return f"<h2>Held-out tasks</h2><table><tr><th></th>{head}</tr>{body}</table>"


def _curve(folder: Path, drawn: Path, name: str, summary: Mapping[str, Any]) -> str:
    metrics = folder / "metrics.jsonl"
    if not os.path.lexists(metrics):
        return ""
    before, after = ((summary.get(when) or {}).get("success") for when in ("before", "after"))
    try:
        picture = learning_curve(metrics, drawn / "curve.png", name, before, after)
    except ValueError as error:  # no step yet
        log.info("no curve in the report: %s", error)
        return ""
    return f'<h2>Learning curve</h2><img alt="success and reward by step" src="{data_uri(picture, "image/png")}">'


def _health(folder: Path, drawn: Path) -> str:
    picture = health(folder / "metrics.jsonl", drawn / "health.png")
    if picture is None:
        return ""
    what = "flat groups, entropy, valid replies, failures, stop reasons by step"
    return f'<h2>How it went</h2><img alt="{what}" src="{data_uri(picture, "image/png")}">'


def _sources(folder: Path, drawn: Path, name: str) -> str:
    if len(sources_of(folder / "metrics.jsonl")) < 2:
        return ""
    picture = composition(folder, drawn / "sources.png", name)
    return f'<h2>Sources</h2><img alt="shares and success by source" src="{data_uri(picture, "image/png")}">'


def _context(folder: Path, drawn: Path, config: Mapping[str, Any], last_steps: int) -> str:
    """Of the last steps, the longest episodes of those whose agents edited their context."""
    store = EpisodeStore(folder / "episodes")
    paths = store.paths()[-last_steps:] if last_steps > 0 else []
    edited = [episode for path in paths for episode in store.read(path) if edits_itself(episode)]
    if not edited:
        return ""
    longest = sorted(edited, key=lambda episode: len(episode.calls))[-4:]
    window = look_up(config, "sampling.max_context")
    picture = context_length(longest, drawn / "context.png", "Length of the context", window)
    return f'<h2>Context</h2><img alt="length of the context by call" src="{data_uri(picture, "image/png")}">'


def _gifs(folder: Path) -> str:
    figures = [
        f'<figure><img alt="replay" src="{data_uri(path, "image/gif")}">'
        f"<figcaption>{escape(path.stem)}</figcaption></figure>"
        for path in sorted(Path(entry.path) for entry in entries_of(folder) if entry.name.endswith(".gif"))[:MOST_GIFS]
        if is_regular(path)
    ]
    return f'<h2>Replays</h2><div class="gifs">{"".join(figures)}</div>' if figures else ""


def _episodes(folder: Path, decode: Decode | None, last_steps: int) -> str:
    store = EpisodeStore(folder)
    paths = store.paths()[-last_steps:] if last_steps > 0 else []
    blocks: list[str] = []
    for path in reversed(paths):
        label = f"step {int(path.stem.removeprefix('step-'))}"
        ends, others = _telling(list(store.read(path)))
        columns = "".join(
            f"<div><h3>{escape(title)} of {label}</h3>{transcript(it, label, decode, opened=not blocks)}</div>"
            for title, it in ends.items()
        )
        blocks += [f'<div class="beside">{columns}</div>'] if columns else []
        blocks += [transcript(it, label, decode) for it in others]
    if not blocks:
        return ""
    hint = "Shade: the less likely a token was when it was sampled, the stronger. Point at one for its log-probability."
    return f"<h2>Episodes</h2>{f'<p class=hint>{hint}</p>' if decode else ''}{''.join(blocks)}"


def _settings(config: Mapping[str, Any]) -> str:
    """Every key, folded."""
    if not config:
        return ""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in flat(config).items())
    return f"<h2>Settings</h2><details><summary>all of them</summary><dl>{rows}</dl></details>"


def _telling(episodes: list[Episode]) -> tuple[dict[str, Episode], list[Episode]]:
    """The best and the worst by reward, to stand beside each other; and one between, and one that failed if any did."""
    ranked = sorted((it for it in episodes if it.failure is None), key=lambda it: it.reward, reverse=True)
    ends = dict(zip(("Best", "Worst"), (ranked[0], ranked[-1]) if len(ranked) > 1 else ranked, strict=False))
    between = [ranked[len(ranked) // 2]] if len(ranked) > 2 else []
    return ends, between + [it for it in episodes if it.failure is not None][:1]


def data_uri(path: Path, kind: str) -> str:
    """A picture as part of a page."""
    return f"data:{kind};base64,{base64.b64encode(read_bytes(path, MAX_PICTURE)).decode('ascii')}"
