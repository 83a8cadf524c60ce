"""The episodes of one task: their tree of tokens, and where two of them part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arborl.rollout.token_trees import tree_of_sequences
from arborl.types import Episode, Ints
from arborl.view.web.words import Decode, pieces

SHOWN = 600
"""Characters of a stretch's text."""
RIVALS = 8
"""Other tokens that are named where siblings chose otherwise."""


def tree_of(episodes: Sequence[Episode], decode: Decode | None) -> dict[str, Any]:
    """The tree as stretches without a fork, in depth-first order, and where the calls of each episode end in it."""
    calls = [(number, at, call) for number, episode in enumerate(episodes) for at, call in enumerate(episode.calls)]
    tree, paths = tree_of_sequences(call.whole for _, _, call in calls)
    size = len(tree)
    if not size:
        return {"tokens": 0, "raw": 0, "stretches": [], "calls": []}
    by_whom: list[set[int]] = [set() for _ in range(size)]
    for (number, _, call), path in zip(calls, paths, strict=True):
        for place in path[len(call.prompt) :].tolist():
            by_whom[place].add(number)
    forks = np.ones(size, dtype=bool)  # whether a stretch begins there
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
            "sampled": _runs(by_whom[begin:end]),
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
    """Of each stretch the one it grows from; -1 at a root. The last stretch of each depth is on the way down."""
    parents, way = list[int](), list[tuple[int, int]]()
    for number, begin in enumerate(begins.tolist()):
        while way and way[-1][0] >= depth[begin]:
            way.pop()
        parents.append(way[-1][1] if way else -1)
        way.append((int(depth[begin]), number))
    return parents


def _runs(by_whom: Sequence[set[int]]) -> list[list[Any]]:
    """Sampled parts of a stretch: where they begin, how long they are, and whose they are."""
    runs: list[list[Any]] = []
    for at, who in enumerate(by_whom):
        if not who:
            continue
        if runs and runs[-1][0] + runs[-1][1] == at and runs[-1][2] == sorted(who):
            runs[-1][1] += 1
        else:
            runs.append([at, 1, sorted(who)])
    return runs


def _text(tokens: Sequence[int], decode: Decode | None) -> str:
    if decode is None:
        return f"{len(tokens)} tokens"
    text = decode(tokens)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def rivals_of(episodes: Sequence[Episode], own: int, decode: Decode | None) -> list[dict[int, list[dict[str, Any]]]]:
    """For each call of an episode, at which of its tokens siblings in the same context sampled another one, and which.

    Args:
        episodes: of the group.
        own: which of them is asked about.
    """
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
                others[at] = [_rival(other, who, decode) for other, who in choices.items() if other != token][:RIVALS]
        found.append(others)
    return found


def _rival(token: int, who: Sequence[tuple[int, float]], decode: Decode | None) -> dict[str, Any]:
    return {
        "id": token,
        "text": pieces([token], decode)[0],
        "logprob": who[0][1],
        "episodes": sorted({number for number, _ in who}),
    }


def parting(one: Episode, other: Episode) -> Mapping[str, Any]:
    """Where two episodes stop being the same: the call, whether in what was read or in what was sampled, and the token.

    Example:
        parting(a, b)      # {"call": 2, "part": "sampled", "token": 5}
    """
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
