"""The tokens with the largest gradient in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from arborl.rollout.term_store import Columns, gradient_norms
from arborl.types import Episode
from arborl.view.web.token_text import Decode, pieces

NUM_CONTEXT = 24
"""Context tokens before a token; half as many after it."""
NUM_SUMMED = 400
"""Largest tokens that are summed by text."""


def strongest(
    terms: Columns, episodes_of: Callable[[Sequence[int]], Mapping[int, Episode]], decode: Decode | None, most: int
) -> dict[str, Any]:
    """The `most` tokens with the largest gradient, with numbers and context; and sums by text and episode."""
    push = np.nan_to_num(gradient_norms(terms["pull"], terms["logprob"]))
    total = float(terms["pushed"])
    order = np.argsort(-push, kind="stable")
    largest = order[: max(most, NUM_SUMMED)]
    lines, owner = np.unique(terms["episode"], return_inverse=True)
    sums = np.bincount(owner, push, minlength=len(lines))
    pulls = np.bincount(owner, np.nan_to_num(terms["pull"]), minlength=len(lines))
    best = np.argsort(-sums, kind="stable")[:12]
    episodes = episodes_of([*terms["episode"][largest].tolist(), *lines[best].tolist()])
    tokens: list[dict[str, Any]] = []
    by_text: dict[str, dict[str, float]] = defaultdict(lambda: {"push": 0.0, "pull": 0.0, "count": 0})
    for row in largest.tolist():
        found = _sampled(terms, row, episodes.get(int(terms["episode"][row])))
        if found is None:
            continue
        sums_of_text = by_text[pieces([found[1]], decode)[0]]
        sums_of_text["push"] += float(push[row])
        sums_of_text["pull"] += float(terms["pull"][row])
        sums_of_text["count"] += 1
        if len(tokens) < most:
            share = float(push[row]) / total if total else 0.0
            tokens.append(_shown(terms, row, found[0], decode) | {"push": float(push[row]), "share": share})
    top_texts = sorted(by_text.items(), key=lambda one: -one[1]["push"])[:16]
    return {
        "of": int(terms["of"]),
        "kept": len(push),
        "pushed": total,
        "clipped": int((terms["pull"] == 0).sum()),
        "half": _half(push[order], total),
        "tokens": tokens,
        "by_text": [{"text": text, **numbers} for text, numbers in top_texts],
        "by_episode": [
            {"line": int(lines[n]), "push": float(sums[n]), "pull": float(pulls[n]),
             "share": float(sums[n]) / total if total else 0.0,
             "id": episode.id if (episode := episodes.get(int(lines[n]))) else None}
            for n in best.tolist()
        ],
    }  # fmt: skip


def _half(falling: Any, total: float) -> int | None:
    """Number of tokens with half of the total; None if fewer were stored."""
    reached = np.flatnonzero(np.cumsum(falling) >= total / 2)
    return int(reached[0]) + 1 if len(reached) and total > 0 else None


def _sampled(terms: Columns, row: int, episode: Episode | None) -> tuple[Episode, int] | None:
    """Episode and token of a row; None if the episode file does not match the terms."""
    call, index = int(terms["call"][row]), int(terms["index"][row])
    if episode is None or call >= len(episode.calls) or index >= len(episode.calls[call].completion.tokens):
        return None
    return episode, episode.calls[call].completion.tokens[index]


def _shown(terms: Columns, row: int, episode: Episode, decode: Decode | None) -> dict[str, Any]:
    """A token with its numbers and context."""
    call, index, line = (int(terms[name][row]) for name in ("call", "index", "episode"))
    completion = episode.calls[call].completion
    before = [*episode.calls[call].prompt[-NUM_CONTEXT:], *completion.tokens[:index]][-NUM_CONTEXT:]
    after = completion.tokens[index + 1 : index + 1 + NUM_CONTEXT // 2]
    numbers = {name: float(terms[name][row]) for name in ("advantage", "weight", "ratio", "loss", "pull", "entropy")}
    return {
        "line": line, "call": call, "index": index, "id": episode.id, "reward": episode.reward,
        "token": completion.tokens[index], "text": pieces([completion.tokens[index]], decode)[0],
        "before": decode(before) if decode else "", "after": decode(after) if decode else "",
        "logprob": completion.logprobs[index], "now": float(terms["logprob"][row]), **numbers,
    }  # fmt: skip
