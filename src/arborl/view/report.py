"""The HTML report of a run: one static page that loads nothing."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import exp
from pathlib import Path
from typing import Any

from arborl.diagnosis.folder_diagnosis import RuleMatch, match_rules
from arborl.errors import DiskWriteError
from arborl.failures import Failures, printable, trim_traceback
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.term_store import TermStore
from arborl.track.console import measure, shown, span
from arborl.track.folder_files import Unreadable, entries_of, is_regular, read_bytes, read_json, replace_file
from arborl.track.jsonl import read_metrics
from arborl.types import Episode
from arborl.view.curve import context_length, edits_itself, learning_curve, plot_health, plot_sources, sources_of
from arborl.view.transcript import Decode, sign_class, signed, transcript
from arborl.view.web.folders import flat, look_up, read_config, read_summary
from arborl.view.web.gradient import strongest

log = logging.getLogger(__name__)

MAX_PICTURE = 2**24
"""Bytes of an image in the page."""
MAX_GIFS = 24
FACTS = {
    "model": "model.name",
    "algorithm": "algorithm.name",
    "seed": "seed",
    "environment": "env.name",
    "agent": "agent.name",
    "engine": "engine.name",
    "steps": "trainer.steps",
    "tasks per step": "rollout.tasks_per_step",
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
    """Write the report of a finished or running run.

    Args:
        decode: token ids to text, to show the probability of each token; without it, messages only.
        last_steps: number of last steps whose episodes are shown: best, worst and one between.
        out: the file; `report.html` in the folder by default.
        pictures: folder for the plots; the run folder by default.
    """
    config, summary = read_config(folder), read_summary(folder)
    name = config.get("name")
    name, drawn = str(name)[:200] if name else folder.resolve().name, pictures or folder
    metrics = folder / "metrics.jsonl"
    sections: dict[str, Callable[[], str]] = {
        "header": lambda: _header(name, config, summary),
        "held-out tasks": lambda: _outcome(summary),
        "findings": lambda: _findings(metrics, summary),
        "failures": lambda: _failures(summary.get("failures"), folder / "episodes", last_steps),
        "learning curve": lambda: _curve(folder, drawn, name, summary),
        "health": lambda: _health(folder, drawn),
        "sources": lambda: _sources(folder, drawn, name),
        "context": lambda: _context(folder, drawn, config, last_steps),
        "gradient": lambda: _gradient_tokens(folder, decode),
        "replays": lambda: _gifs(folder / "frames"),
        "episodes": lambda: _episodes(folder / "episodes", decode, last_steps),
        "settings": lambda: _settings(config),
    }
    body = "".join(_section(title, make) for title, make in sections.items())
    return replace_file(out or folder / "report.html", page(name, body).encode("utf-8", "replace"))


def _section(title: str, make: Callable[[], str]) -> str:
    """One section of the page. A section that fails is replaced by the error."""
    try:
        return make()
    except DiskWriteError:
        raise
    except Exception as error:
        why = f"{title}: {type(error).__name__}: {error}"[:400]
        log.warning("section left out of the report: %s", printable(why))
        return f'<div class="notice bad"><b>Not shown</b>{escape(printable(why))}</div>'


def page(name: str, body: str) -> str:
    """An HTML document that loads nothing."""
    style = files("arborl.view").joinpath("report.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


def html_table(head: Sequence[str], rows: Iterable[Iterable[str]], row_class: str = "") -> str:
    """A table of cells that are HTML already; it scrolls if it is wide."""
    style = f' class="{row_class}"' if row_class else ""
    body = "".join(f"<tr{style}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


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
    alt = "reward by step" if before is None and after is None else "success and reward by step"
    return _figure("Learning curve", alt, picture)


def _figure(title: str, alt: str, picture: Path | None) -> str:
    return f'<h2>{title}</h2><img alt="{alt}" src="{data_uri(picture, "image/png")}">' if picture else ""


def _health(folder: Path, drawn: Path) -> str:
    alt = "zero-variance groups, entropy, valid messages, failures, stop reasons by step"
    return _figure("Health", alt, plot_health(folder / "metrics.jsonl", drawn / "health.png"))


def _sources(folder: Path, drawn: Path, name: str) -> str:
    if len(sources_of(folder / "metrics.jsonl")) < 2:
        return ""
    return _figure("Sources", "shares and success by source", plot_sources(folder, drawn / "sources.png", name))


def _context(folder: Path, drawn: Path, config: Mapping[str, Any], last_steps: int) -> str:
    """Context length of the longest episodes whose agents edited their context."""
    read = _last_episodes(folder / "episodes", last_steps)
    edited = [episode for episodes in read.values() for episode in episodes if edits_itself(episode)]
    if not edited:
        return ""
    longest = sorted(edited, key=lambda episode: len(episode.calls))[-4:]
    window = look_up(config, "sampling.max_context")
    picture = context_length(longest, drawn / "context.png", "Length of the context", window)
    return _figure("Context", "length of the context by call", picture)


def _last_episodes(folder: Path, last_steps: int) -> dict[str, list[Episode]]:
    """The episodes of the last steps, by `step N`."""
    paths = EpisodeStore(folder).paths()[-last_steps:] if last_steps > 0 else []
    return {f"step {_step_of(path)}": list(EpisodeStore.read(path)) for path in paths}


def _gifs(folder: Path) -> str:
    captions = gif_captions(folder)
    figures = [
        f'<figure><img alt="replay" src="{data_uri(path, "image/gif")}">'
        f"<figcaption>{escape(captions.get(path.name, path.stem))}</figcaption></figure>"
        for path in sorted(Path(entry.path) for entry in entries_of(folder) if entry.name.endswith(".gif"))[:MAX_GIFS]
        if is_regular(path)
    ]
    return f'<h2>Replays</h2><div class="gifs">{"".join(figures)}</div>' if figures else ""


def gif_captions(folder: Path) -> dict[str, str]:
    """Id and step of the episode of each GIF that `episodes.json` lists."""
    try:
        listed = read_json(folder / "episodes.json")
        return {file: f"episode {episode} · step {step}" for file, (_, step, episode) in listed.items()}
    except (OSError, Unreadable, AttributeError, TypeError, ValueError):
        return {}


def _episodes(folder: Path, decode: Decode | None, last_steps: int) -> str:
    blocks: list[str] = []
    for label, read in reversed(_last_episodes(folder, last_steps).items()):
        ends, others = _select_episodes(read)
        columns = "".join(
            f"<div><h3>{escape(title)} of {label}</h3>{transcript(it, label, decode, opened=not blocks)}</div>"
            for title, it in ends.items()
        )
        blocks += [f'<div class="beside">{columns}</div>'] if columns else []
        blocks += [transcript(it, label, decode) for it in others]
    if not blocks:
        return ""
    hint = "Shade: low probability. Hover over a token for its log-probability."
    return f"<h2>Episodes</h2>{f'<p class=hint>{hint}</p>' if decode else ''}{''.join(blocks)}"


def _settings(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in flat(config).items())
    return f"<h2>Settings</h2><details><summary>all settings</summary><dl>{rows}</dl></details>"


def _select_episodes(episodes: list[Episode]) -> tuple[dict[str, Episode], list[Episode]]:
    """Best and worst by reward; and one between and one failed episode."""
    ranked = sorted((it for it in episodes if it.failure is None), key=lambda it: it.reward, reverse=True)
    ends = dict(zip(("Best", "Worst"), (ranked[0], ranked[-1]) if len(ranked) > 1 else ranked, strict=False))
    between = [ranked[len(ranked) // 2]] if len(ranked) > 2 else []
    return ends, between + [it for it in episodes if it.failure is not None][:1]


def data_uri(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(read_bytes(path, MAX_PICTURE)).decode('ascii')}"


MAX_CAUSES = 12
"""Failure causes in the report."""


def _findings(metrics_file: Path, summary: Mapping[str, Any]) -> str:
    """Why the run was stopped, its rollbacks, and the rules that hold for it, with advice."""
    rows = list(read_metrics(metrics_file)) if os.path.lexists(metrics_file) else []
    steps = sum("episode/count" in row for row in rows)
    shown = [_notice("The run was stopped:", _stop_reason(summary), "bad")] if summary.get("stopped") else []
    for back in summary.get("rollbacks", ()):
        what = f" to step {back.get('to')} after the alarm {back.get('alarm')} at step {back.get('step')}"
        shown.append(_notice("Rolled back", f"{what} ({back.get('detail')})."))
    shown += [_finding(match, steps) for match in match_rules(rows)]
    return f"<h2>Findings</h2>{''.join(shown)}" if shown else ""


def _stop_reason(summary: Mapping[str, Any]) -> str:
    alarm = summary.get("alarm")
    if not alarm:
        return "nearly every episode failed."
    return f"alarm {alarm.get('name')} at step {alarm.get('step')}: {alarm.get('detail')}."


def _notice(title: str, text: str, kind: str = "") -> str:
    return f'<div class="notice{f" {kind}" if kind else ""}"><b>{escape(title)}</b>{escape(text)}</div>'


def _finding(match: RuleMatch, steps: int) -> str:
    first, last = match.steps[0], match.steps[-1]
    where = f"step {first}" if first == last else f"{len(match.steps)} of {steps} steps, the last at {last}"
    name = escape(match.rule.summary[0].upper() + match.rule.summary[1:])
    detail = f"{where}; {match.detail}" if match.detail else where
    return f'<div class="notice"><b>{name}</b>({escape(detail)}). {escape(match.rule.advice)}</div>'


def _failures(known: Sequence[dict[str, Any]] | None, episodes: Path, last_steps: int) -> str:
    """Failures by cause, most frequent first: those of `summary.json`, or of the last steps of a running run."""
    failures = Failures()
    if known is not None:
        failures.load_state(known)
    else:
        for label, read in _last_episodes(episodes, last_steps).items():
            failures.add(read, label)
    blocks: list[str] = []
    for cause in list(failures)[:MAX_CAUSES]:
        failure, trace = cause.failure, trim_traceback(cause.failure.traceback)
        shown = f'<pre class="trace">{escape(trace)}</pre>' if trace else ""
        blocks.append(
            f'<details{"" if blocks else " open"}><summary><span class="count">×{cause.count}</span>'
            f"{escape(str(failure))}</summary>"
            f"<p class=hint>first in episode {escape(cause.episode)} of {escape(cause.when)}</p>{shown}</details>"
        )
    more = f"<p class=hint>… and {len(failures) - MAX_CAUSES} other causes</p>" if len(failures) > MAX_CAUSES else ""
    return f"<h2>Failures</h2>{''.join(blocks)}{more}" if blocks else ""


MAX_TOKENS = 15


def _gradient_tokens(folder: Path, decode: Decode | None) -> str:
    """The tokens with the largest gradient of the last step, if the run stored its loss terms."""
    store = TermStore(folder / "terms")
    steps = [path for path in EpisodeStore(folder / "episodes").paths() if store.path(_step_of(path)).exists()]
    terms = store.read(_step_of(steps[-1])) if steps else None
    if terms is None:
        return ""

    def read_episodes(lines: Sequence[int]) -> Mapping[int, Episode]:
        wanted = set(lines)
        return {n: one for n, one in enumerate(EpisodeStore.read(steps[-1])) if n in wanted}

    found = strongest(terms, read_episodes, decode, MAX_TOKENS)
    if not found["tokens"]:
        return ""
    columns = ("gradient", "token", "direction", "probability", "advantage", "ratio", "episode")
    table = html_table(columns, map(_token_row, found["tokens"]))
    half = f"Half of the gradient comes from {found['half']:,} of {found['of']:,} tokens. " if found["half"] else ""
    hint = "Gradient: the size of the loss's gradient at the outputs that predict a token, |d loss / d log p| (1 - p)."
    step = _step_of(steps[-1])
    return f"<h2>Tokens with the largest gradient</h2><p class=hint>Step {step}. {half}{hint}</p>{table}"


def _token_row(token: Mapping[str, Any]) -> tuple[str, ...]:
    direction = "▲ likelier" if token["pull"] < 0 else "▼ less likely" if token["pull"] > 0 else "unchanged"
    return (
        f"{token['share']:.1%}", f"<code>{escape(token['text'])}</code>", direction,
        f"{exp(min(token['now'], 0.0)):.0%}",
        f'<span class="{sign_class(token["advantage"])}">{signed(token["advantage"])}</span>',
        f"{token['ratio']:.3f}", escape(token["id"]),
    )  # fmt: skip


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
