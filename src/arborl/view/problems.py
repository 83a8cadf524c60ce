"""What went wrong in a run, as HTML: steps in which nothing was learned, and failures by cause, with tracebacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from arborl.failures import Failures, trim_traceback
from arborl.rollout.store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.trainer.diagnosis import Notice, notices

SHOWN = 12
"""Causes of failure that are shown."""


def findings_of(metrics_file: Path, stopped: bool = False) -> str:
    """Steps in which nothing was learned, by likely cause, what went wrong over the steps, and what to try."""
    rows = list(read_metrics(metrics_file)) if os.path.lexists(metrics_file) else []
    steps = sum("episode/count" in row for row in rows)
    shown = ['<div class="notice bad"><b>The run was stopped:</b>nearly every episode failed.</div>'] if stopped else []
    shown += [_finding(found, steps) for found in notices(rows)]
    return f"<h2>What to look at</h2>{''.join(shown)}" if shown else ""


def _finding(found: Notice, steps: int) -> str:
    first, last = found.steps[0], found.steps[-1]
    where = f"step {first}" if first == last else f"{len(found.steps)} of {steps} steps, the last at {last}"
    name = escape(found.rule.short[0].upper() + found.rule.short[1:])
    told = f"{where}; {found.detail}" if found.detail else where
    return f'<div class="notice"><b>{name}</b>({escape(told)}). {escape(found.rule.advice)}</div>'


def failures_of(known: Sequence[dict[str, Any]] | None, episodes: Path, last_steps: int) -> str:
    """Failures by cause, the commonest first, with the traceback of the first of each.

    Args:
        known: what `summary.json` says; of a run that has none yet, the last steps' episodes are looked at.
        episodes: the folder of episode files.
        last_steps: how many.
    """
    failures = Failures()
    if known is not None:
        failures.load_state(known)
    else:
        store = EpisodeStore(episodes)
        for path in store.paths()[-last_steps:] if last_steps > 0 else []:
            failures.add(store.read(path), f"step {int(path.stem.removeprefix('step-'))}")
    blocks: list[str] = []
    for cause in list(failures)[:SHOWN]:
        failure, trace = cause.failure, trim_traceback(cause.failure.traceback)
        shown = f'<pre class="trace">{escape(trace)}</pre>' if trace else ""
        blocks.append(
            f'<details{"" if blocks else " open"}><summary><span class="count">×{cause.count}</span>'
            f"{escape(str(failure))}</summary>"
            f"<p class=hint>first in episode {escape(cause.episode)} of {escape(cause.when)}</p>{shown}</details>"
        )
    more = f"<p class=hint>… and {len(failures) - SHOWN} other causes</p>" if len(failures) > SHOWN else ""
    return f"<h2>Failures</h2>{''.join(blocks)}{more}" if blocks else ""
