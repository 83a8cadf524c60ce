"""The tokens that moved the weights most in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from arborl.rollout.term_store import Columns, pushes
from arborl.types import Episode
from arborl.view.web.words import Decode, pieces

AROUND = 24
"""Tokens shown before one, and half as many behind it."""


def strongest(
    terms: Columns, episode_at: Callable[[int], Episode | None], decode: Decode | None, most: int
) -> dict[str, Any]:
    """The tokens that pushed hardest, each with its numbers and what stood around it; and sums by token and episode.

    Args:
        terms: of the step.
        episode_at: the episode of a line of the step's file.
        most: tokens to show.
    """
    push = np.nan_to_num(pushes(terms["pull"], terms["logprob"]))
    total = float(terms["pushed"])
    order = np.argsort(-push, kind="stable")
    episodes: dict[int, Episode | None] = {}
    tokens: list[dict[str, Any]] = []
    by_text: dict[str, dict[str, float]] = defaultdict(lambda: {"push": 0.0, "pull": 0.0, "count": 0})
    for row in order[: max(most, 400)].tolist():
        line = int(terms["episode"][row])
        if line not in episodes:
            episodes[line] = episode_at(line)
        shown = _token(terms, row, episodes[line], decode)
        if shown is None:
            continue
        told = by_text[shown["text"]]
        told["push"] += float(push[row])
        told["pull"] += float(terms["pull"][row])
        told["count"] += 1
        if len(tokens) < most:
            tokens.append(shown | {"push": float(push[row]), "share": float(push[row]) / total if total else 0.0})
    lines, at = np.unique(terms["episode"], return_inverse=True)
    sums = np.bincount(at, push, minlength=len(lines))
    best = np.argsort(-sums, kind="stable")[:12]
    loud = sorted(by_text.items(), key=lambda one: -one[1]["push"])[:16]
    return {
        "of": int(terms["of"]),
        "kept": len(push),
        "pushed": total,
        "clipped": int((terms["pull"] == 0).sum()),
        "half": _half(push[order], total),
        "tokens": tokens,
        "by_text": [{"text": text, **numbers} for text, numbers in loud],
        "by_episode": [
            {"line": int(lines[n]), "push": float(sums[n]), "share": float(sums[n]) / total if total else 0.0,
             "id": episode.id if (episode := episode_at(int(lines[n]))) else None}
            for n in best.tolist()
        ],
    }  # fmt: skip


def _half(falling: Any, total: float) -> int | None:
    """How many tokens it takes for half of the push; None where so many were not kept."""
    reached = np.flatnonzero(np.cumsum(falling) >= total / 2)
    return int(reached[0]) + 1 if len(reached) and total > 0 else None


def _token(terms: Columns, row: int, episode: Episode | None, decode: Decode | None) -> dict[str, Any] | None:
    call, index, line = (int(terms[name][row]) for name in ("call", "index", "episode"))
    if episode is None or call >= len(episode.calls) or index >= len(episode.calls[call].completion.tokens):
        return None
    said = episode.calls[call].completion
    before = [*episode.calls[call].prompt[-AROUND:], *said.tokens[:index]][-AROUND:]
    after = said.tokens[index + 1 : index + 1 + AROUND // 2]
    numbers = {name: float(terms[name][row]) for name in ("advantage", "weight", "ratio", "loss", "pull", "entropy")}
    return {
        "line": line, "call": call, "index": index, "id": episode.id, "reward": episode.reward,
        "token": said.tokens[index], "text": pieces([said.tokens[index]], decode)[0],
        "before": "".join(pieces(before, decode)), "after": "".join(pieces(after, decode)),
        "logprob": said.logprobs[index], "now": float(terms["logprob"][row]), **numbers,
    }  # fmt: skip
