"""Evaluation results as files: JSON, CSV, HTML, and JSONL with every episode."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError, disk_errors
from arborl.trainer.policy_comparison import PolicyResult, Score, compare_policies

COLUMNS = ("model", "way", "source", "metric", "mean", "low", "high", "tasks", "episodes", "failed")


def results_as_dict(results: Sequence[PolicyResult]) -> dict[str, Any]:
    comparisons = [asdict(pair) for pair in compare_policies(results)]
    return {"results": [_result(one) for one in results], "comparisons": comparisons}


def _result(one: PolicyResult) -> dict[str, Any]:
    found: dict[str, Any] = {"model": one.name, "way": one.decoding} | _counts(one)
    found["scores"] = _scores(one)
    return found | ({"sources": {source: _scores(one, source) for source in one.sources}} if one.sources else {})


def _counts(one: PolicyResult, source: str | None = None) -> dict[str, int]:
    return dict(zip(("tasks", "episodes", "failed"), one.count(source), strict=True))


def _scores(one: PolicyResult, source: str | None = None) -> dict[str, Any]:
    return {name: asdict(score) for name, score in one.scores(source).items()}


def rows(results: Sequence[PolicyResult]) -> Iterator[dict[str, Any]]:
    """One row per metric; `source` is empty for all tasks."""
    for one in results:
        for source in (None, *one.sources):
            about = {"model": one.name, "way": one.decoding, "source": source or ""}
            for name, score in _scores(one, source).items():
                yield about | {"metric": name} | score | _counts(one, source)


def episodes(results: Sequence[PolicyResult]) -> Iterator[dict[str, Any]]:
    """One row per episode with its answer."""
    for one in results:
        for group in one.groups:
            for attempt, episode in enumerate(group.episodes):
                found: dict[str, Any] = {"model": one.name, "way": one.decoding, "task": group.task.id}
                found |= {"source": group.task.source, "fields": dict(group.task.fields)}
                found |= {"attempt": attempt, "reply": episode.answer}
                found |= {"stop": str(episode.stop), "turns": len(episode.turns)}
                if one.judged and episode.failure is None:
                    found |= {"reward": episode.reward, "success": episode.metrics.get("success")}
                yield found | ({"failure": str(episode.failure)} if episode.failure is not None else {})


def results_json(results: Sequence[PolicyResult], replies: bool = False) -> str:
    """The replies, or the metrics, as JSON."""
    data = list(episodes(results)) if replies else results_as_dict(results)
    return json.dumps(data, indent=2, ensure_ascii=False, default=str)


def format_score(score: Score) -> str:
    """A mean and its interval."""
    ends = "" if score.low is None or score.high is None else f" [{score.low:.3g}, {score.high:.3g}]"
    return f"{score.mean:.4g}{ends}"


def _json(results: Sequence[PolicyResult]) -> str:
    return results_json(results) + "\n"


def _jsonl(results: Sequence[PolicyResult]) -> str:
    return "".join(json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in episodes(results))


def _csv(results: Sequence[PolicyResult]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows(results))
    return text.getvalue()


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}th,td{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}@media(prefers-color-scheme:dark)"
    "{body{background:#181818;color:#ddd}th,td{border-color:#444}}"
)


def _html(results: Sequence[PolicyResult]) -> str:
    head = ("model", "way", "source", "metric", "mean", "95 % interval", "tasks", "failed")
    lines = [
        row | {"mean": f"{row['mean']:.4g}", "95 % interval": _ends(row["low"], row["high"])} for row in rows(results)
    ]
    parts = [
        "<!doctype html><meta charset=utf-8><title>Evaluation</title>",
        f"<style>{STYLE}</style><h1>Evaluation</h1>",
        _table(head, lines),
    ]
    if pairs := compare_policies(results):
        head = ("first", "second", "way", "metric", "difference", "95 % interval", "tasks", "p")
        lines = [
            asdict(pair)
            | {"way": pair.decoding, "difference": f"{pair.difference:+.4g}", "p": f"{pair.p:.3g}"}
            | {"95 % interval": _ends(pair.low, pair.high)}
            for pair in pairs
        ]
        parts += ["<h2>Paired comparison</h2>", _table(head, lines)]
    return "\n".join(parts) + "\n"


def _ends(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def _table(head: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(_cell(line[name]) for name in head) + "</tr>\n" for line in lines)
    return f"<table><tr>{top}</tr>\n{body}</table>"


def _cell(value: Any) -> str:
    text = str(value)
    number = text[:1].isdigit() or text[:1] in "+-"
    return f"<td{' class=n' if number else ''}>{html.escape(text)}</td>"


FORMATS: dict[str, Callable[[Sequence[PolicyResult]], str]] = {
    ".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".html": _html,
}  # fmt: skip


def check_output_path(path: Path) -> None:
    """Check the file's suffix and folder before anything runs."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output {path}: unknown suffix. Write one of {', '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {str(path.parent)!r}. Create it, or write another.")


def write_results(results: Sequence[PolicyResult], path: Path) -> None:
    with disk_errors(path):
        path.write_text(FORMATS[path.suffix.lower()](results), encoding="utf-8")
