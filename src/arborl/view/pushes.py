"""The tokens that moved the weights most in a run's last step, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import exp
from pathlib import Path
from typing import Any

from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.term_store import TermStore
from arborl.types import Episode
from arborl.view.transcript import Decode
from arborl.view.web.gradient import strongest

SHOWN = 15


def pushes_of(folder: Path, decode: Decode | None) -> str:
    """A table, where the run has kept what became of its tokens."""
    steps = [path for path in EpisodeStore(folder / "episodes").paths() if _terms(folder, path).exists()]
    terms = TermStore(folder / "terms").read(_step(steps[-1])) if steps else None
    if terms is None:
        return ""

    def some(lines: Sequence[int]) -> Mapping[int, Episode]:
        wanted = set(lines)
        return {n: one for n, one in enumerate(EpisodeStore.read(steps[-1])) if n in wanted}

    found = strongest(terms, some, decode, SHOWN)
    if not found["tokens"]:
        return ""
    head = "".join(
        f"<th>{name}</th>" for name in ("push", "token", "way", "probability", "advantage", "ratio", "episode")
    )
    rows = "".join(_row(token) for token in found["tokens"])
    half = f"Half of the push came from {found['half']:,} of {found['of']:,} tokens. " if found["half"] else ""
    hint = "Push: the size of the loss's gradient at the outputs that predict a token, |d loss / d log p| (1 - p)."
    return (
        f"<h2>Why the last gradient</h2><p class=hint>Step {_step(steps[-1])}. {half}{hint}</p>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    )


def _row(token: Mapping[str, Any]) -> str:
    way = "likelier" if token["pull"] < 0 else "less likely"
    cells = (
        f"{token['share']:.1%}", f"<code>{escape(token['text'])}</code>", way, f"{exp(min(token['now'], 0.0)):.0%}",
        f"{token['advantage']:.3g}", f"{token['ratio']:.3f}", escape(token["id"]),
    )  # fmt: skip
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _terms(folder: Path, episodes: Path) -> Path:
    return TermStore(folder / "terms").path(_step(episodes))
