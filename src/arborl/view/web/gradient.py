"""The tokens that moved the weights most in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from arborl.rollout.term_store import Columns, gradient_norms
from arborl.types import Episode
from arborl.view.web.words import Decode, pieces

AROUND = 24
"""Tokens shown before one, and half as many behind it."""
COUNTED = 400
"""Of the strongest, how many are added up by what they say."""


def strongest(
    terms: Columns, episodes_of: Callable[[Sequence[int]], Mapping[int, Episode]], decode: Decode | None, most: int
) -> dict[str, Any]:
    """The tokens that pushed hardest, each with its numbers and what stood around it; and sums by token and episode.

    Args:
        terms: of the step.
        episodes_of: the episodes of some lines of the step's file.
        most: tokens to show.
    """
    push = np.nan_to_num(gradient_norms(terms["pull"], terms["logprob"]))
    total = float(terms["pushed"])
    order = np.argsort(-push, kind="stable")
    loudest = order[: max(most, COUNTED)]
    lines, whose = np.unique(terms["episode"], return_inverse=True)
    sums = np.bincount(whose, push, minlength=len(lines))
    best = np.argsort(-sums, kind="stable")[:12]
    episodes = episodes_of([*terms["episode"][loudest].tolist(), *lines[best].tolist()])
    tokens: list[dict[str, Any]] = []
    by_text: dict[str, dict[str, float]] = defaultdict(lambda: {"push": 0.0, "pull": 0.0, "count": 0})
    for row in loudest.tolist():
        found = _sampled(terms, row, episodes.get(int(terms["episode"][row])))
        if found is None:
            continue
        told = by_text[pieces([found[1]], decode)[0]]
        told["push"] += float(push[row])
        told["pull"] += float(terms["pull"][row])
        told["count"] += 1
        if len(tokens) < most:
            share = float(push[row]) / total if total else 0.0
            tokens.append(_shown(terms, row, found[0], decode) | {"push": float(push[row]), "share": share})
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
             "id": episode.id if (episode := episodes.get(int(lines[n]))) else None}
            for n in best.tolist()
        ],
    }  # fmt: skip


def _half(falling: Any, total: float) -> int | None:
    """How many tokens it takes for half of the push; None where so many were not kept."""
    reached = np.flatnonzero(np.cumsum(falling) >= total / 2)
    return int(reached[0]) + 1 if len(reached) and total > 0 else None


def _sampled(terms: Columns, row: int, episode: Episode | None) -> tuple[Episode, int] | None:
    """The episode and the token of a row; None where the episode file is not the one that the terms speak of."""
    call, index = int(terms["call"][row]), int(terms["index"][row])
    if episode is None or call >= len(episode.calls) or index >= len(episode.calls[call].completion.tokens):
        return None
    return episode, episode.calls[call].completion.tokens[index]


def _shown(terms: Columns, row: int, episode: Episode, decode: Decode | None) -> dict[str, Any]:
    """A token with its numbers and what stands around it."""
    call, index, line = (int(terms[name][row]) for name in ("call", "index", "episode"))
    said = episode.calls[call].completion
    before = [*episode.calls[call].prompt[-AROUND:], *said.tokens[:index]][-AROUND:]
    after = said.tokens[index + 1 : index + 1 + AROUND // 2]
    numbers = {name: float(terms[name][row]) for name in ("advantage", "weight", "ratio", "loss", "pull", "entropy")}
    return {
        "line": line, "call": call, "index": index, "id": episode.id, "reward": episode.reward,
        "token": said.tokens[index], "text": pieces([said.tokens[index]], decode)[0],
        "before": decode(before) if decode else "", "after": decode(after) if decode else "",
        "logprob": said.logprobs[index], "now": float(terms["logprob"][row]), **numbers,
    }  # fmt: skip
