"""The token tree of a group, and where two of its episodes diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arborl.rollout.token_trees import tree_of_sequences
from arborl.types import Episode, Ints
from arborl.view.web.token_text import Decode, pieces

MAX_TEXT = 600
"""Characters of a segment's text."""
MAX_ALTERNATIVES = 8


def tree_of(episodes: Sequence[Episode], decode: Decode | None) -> dict[str, Any]:
    """The tree as segments without a fork, in depth-first order, and where the calls of each episode end."""
    calls = [(number, at, call) for number, episode in enumerate(episodes) for at, call in enumerate(episode.calls)]
    tree, paths = tree_of_sequences(call.whole for _, _, call in calls)
    size = len(tree)
    if not size:
        return {"tokens": 0, "raw": 0, "stretches": [], "calls": []}
    sampled_by: list[set[int]] = [set() for _ in range(size)]
    for (number, _, call), path in zip(calls, paths, strict=True):
        for place in path[len(call.prompt) :].tolist():
            sampled_by[place].add(number)
    forks = np.ones(size, dtype=bool)  # whether a segment begins there
    forks[1:] = (np.diff(tree.depth) != 1) | (np.diff(tree.end) != 0)
    begins = np.flatnonzero(forks)
    ends = np.append(begins[1:], size)
    of_place = np.repeat(np.arange(len(begins)), ends - begins)
    parents = _parents(tree.depth, begins, of_place)
    stretches = [
        {
            "parent": parent,
            "depth": int(tree.depth[begin]),
            "length": int(end - begin),
            "text": _text(tree.tokens[begin:end].tolist(), decode),
            "sampled": _runs(sampled_by[begin:end]),
        }
        for begin, end, parent in zip(begins.tolist(), ends.tolist(), parents, strict=True)
    ]
    reached = [
        {"episode": number, "call": at, "stretch": int(of_place[path[-1]]) if len(path) else 0,
         "at": int(tree.depth[path[-1]]) + 1 if len(path) else 0, "prompt": len(call.prompt)}
        for (number, at, call), path in zip(calls, paths, strict=True)
    ]  # fmt: skip
    return {"tokens": size, "raw": sum(len(path) for path in paths), "stretches": stretches, "calls": reached}


def _parents(depth: Ints, begins: Ints, of_place: Ints) -> list[int]:
    """The parent of each segment; -1 for a root."""
    parents, path = list[int](), list[tuple[int, int]]()
    for number, begin in enumerate(begins.tolist()):
        while path and path[-1][0] >= depth[begin]:
            path.pop()
        parents.append(path[-1][1] if path else -1)
        path.append((int(depth[begin]), number))
    return parents


def _runs(sampled_by: Sequence[set[int]]) -> list[list[Any]]:
    """Sampled parts of a segment: start, length and episodes."""
    runs: list[list[Any]] = []
    for at, episodes in enumerate(sampled_by):
        if not episodes:
            continue
        if runs and runs[-1][0] + runs[-1][1] == at and runs[-1][2] == sorted(episodes):
            runs[-1][1] += 1
        else:
            runs.append([at, 1, sorted(episodes)])
    return runs


def _text(tokens: Sequence[int], decode: Decode | None) -> str:
    if decode is None:
        return f"{len(tokens)} tokens"
    text = decode(tokens)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} … {text[-MAX_TEXT // 2 :]}"


def alternatives_of(
    episodes: Sequence[Episode], own: int, decode: Decode | None
) -> list[dict[int, list[dict[str, Any]]]]:
    """For each call of episode `own`: tokens at which other episodes sampled another token in the same context."""
    calls = [(number, call) for number, episode in enumerate(episodes) for call in episode.calls]
    _, paths = tree_of_sequences(call.whole for _, call in calls)
    chosen: dict[int, dict[int, list[tuple[int, float]]]] = {}
    placed = []
    for (number, call), path in zip(calls, paths, strict=True):
        begin = len(call.prompt)
        before = [int(path[at - 1]) if at else -1 for at in range(begin, len(path))]
        placed.append(before)
        for place, token, logprob in zip(before, call.completion.tokens, call.completion.logprobs, strict=True):
            chosen.setdefault(place, {}).setdefault(token, []).append((number, logprob))
    found = []
    for (number, call), before in zip(calls, placed, strict=True):
        if number != own:
            continue
        others: dict[int, list[dict[str, Any]]] = {}
        for at, (place, token) in enumerate(zip(before, call.completion.tokens, strict=True)):
            choices = chosen[place]
            if len(choices) > 1:
                others[at] = [
                    _alternative(other, samples, decode) for other, samples in choices.items() if other != token
                ][:MAX_ALTERNATIVES]
        found.append(others)
    return found


def _alternative(token: int, samples: Sequence[tuple[int, float]], decode: Decode | None) -> dict[str, Any]:
    return {
        "id": token,
        "text": pieces([token], decode)[0],
        "logprob": samples[0][1],
        "episodes": sorted({number for number, _ in samples}),
    }


def divergence(one: Episode, other: Episode) -> Mapping[str, Any]:
    """Where two episodes diverge: call, prompt or sampled part, and token."""
    for number, (mine, theirs) in enumerate(zip(one.calls, other.calls, strict=False)):
        for part, left, right in (
            ("read", list(mine.prompt), list(theirs.prompt)),
            ("sampled", list(mine.completion.tokens), list(theirs.completion.tokens)),
        ):
            if left != right:
                same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
                return {"call": number, "part": part, "token": min(len(left), len(right)) if same is None else same}
    if len(one.calls) != len(other.calls):
        return {"call": min(len(one.calls), len(other.calls)), "part": "end", "token": 0}
    return {"call": None, "part": "never", "token": 0}
