"""Calls become token trees: each token of a group once, each sampled token one loss term.

Sort the sequences of all calls (prompt + completion). Neighbours in that order share their longest common prefix, so
one sweep lays the unique tokens out depth first; and the layout depends on the tokens alone, not on who sampled them
in which order. Two siblings that sampled the same token in the same context share its place in the tree and still
have a term each.

Example (one prompt, two completions):
    [1 2 | 3 4], [1 2 | 5]   ->   tokens 1 2 3 4 5   depth 0 1 2 3 2   end 5 5 4 4 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from arborl.tokens import Tokens
from arborl.types import Call, Floats, Forest, Group, Ints, SamplingDistribution, Terms, TokenTree

NOT_NOTED = (np.nan,) * len(SamplingDistribution._fields)


def grow(sequences: Iterable[Sequence[int]]) -> tuple[TokenTree, list[Ints]]:
    """The tree of these sequences, and for each, in their order, the places of its tokens in the tree."""
    rows = [Tokens(sequence) for sequence in sequences]
    tokens: list[Ints] = []
    depth: list[Ints] = []
    paths: dict[object, Ints] = {}
    ends: list[tuple[Ints, int]] = []
    size = 0
    last, path = Tokens(), np.zeros(0, dtype=np.int64)
    for row in _lines(rows):
        shared = last.common(row)
        ends.append((path[shared:], size))  # whatever of the last path is left behind here ends here
        new = np.arange(size, size + len(row) - shared)
        tokens.append(row.array[shared:].astype(np.int64))
        depth.append(np.arange(shared, len(row)))
        size += len(new)
        last, path = row, np.concatenate([path[:shared], new])
        paths[row.line] = path
    ends.append((path, size))
    end = np.zeros(size, dtype=np.int64)
    for places, where in ends:
        end[places] = where
    return TokenTree(_join(tokens), _join(depth), end), [paths[row.line][: len(row)] for row in rows]


def _lines(rows: Iterable[Tokens]) -> list[Tokens]:
    """Of those that share a line the longest, which holds the others; in the order of their tokens."""
    longest: dict[object, Tokens] = {}
    for row in rows:
        if len(row) >= len(longest.setdefault(row.line, row)):
            longest[row.line] = row
    return sorted(longest.values())


def _join(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def plant(groups: Sequence[Group]) -> Forest:
    """One tree a group, from the calls of its surviving episodes, and the terms of all of them.

    Terms come in order of group, episode, call, token, with advantage 0 and weight 0: credit is the algorithm's.
    """
    trees: list[TokenTree] = []
    columns: list[tuple[Ints, ...]] = []
    logprobs: list[float] = []
    drawn: list[SamplingDistribution | None] = []
    raw = episodes = calls = 0
    for group in groups:
        rows = [[call.whole for call in episode.calls if call.trained] for episode in group.valid_episodes]
        tree, paths = grow(row for some in rows for row in some)
        path = iter(paths)
        for episode, some in zip(group.valid_episodes, rows, strict=True):
            raw += _raw(some)
            for call in episode.calls:
                if call.trained:
                    columns.append(_columns(call, next(path), len(trees), episodes, calls))
                    logprobs.extend(call.completion.logprobs)
                    drawn.extend([call.drawn] * len(call.completion.tokens))
                calls += 1
            episodes += 1
        trees.append(tree)
    tree_of, position, token, episode_of, call_of, turn, version = (
        (_join(column) for column in zip(*columns, strict=True)) if columns else (_join(()) for _ in range(7))
    )
    advantage, weight = np.zeros(len(token)), np.zeros(len(token))
    proximal, reference, value, target, after, teacher = (np.full(len(token), np.nan) for _ in range(6))
    old = np.asarray(logprobs, dtype=np.float64)
    terms = Terms(
        tree_of, position, token, old, advantage, weight, episode_of, call_of, turn, version,
        proximal, reference, value, target, after, teacher, _drawn(drawn), np.arange(len(token)),
    )  # fmt: skip
    return Forest(tuple(trees), terms, raw)


def _drawn(notes: Sequence[SamplingDistribution | None]) -> Floats | None:
    """Nothing, where every token was drawn as the run draws: then nothing need be looked up."""
    if not any(notes):
        return None
    return np.asarray([note or NOT_NOTED for note in notes], dtype=np.float64)


def _columns(call: Call, places: Ints, tree: int, episode: int, number: int) -> tuple[Ints, ...]:
    sampled = call.completion.tokens
    count, begin = len(sampled), len(call.prompt)
    if count and begin == 0:
        raise ValueError("a call with an empty prompt cannot be trained: nothing predicts its first token")
    constants = (np.full(count, value, dtype=np.int64) for value in (episode, number, call.turn))
    versions = call.completion.versions or call.completion.version
    return (
        np.full(count, tree, dtype=np.int64),
        places[begin - 1 : begin - 1 + count],
        np.asarray(sampled, dtype=np.int64),
        *constants,
        np.full(count, versions, dtype=np.int64),
    )


def _raw(rows: Sequence[Tokens]) -> int:
    """Tokens of the rows an episode would take without sharing: one row a branch, where each call that another
    call of the same episode extends is part of that other's row."""
    ordered = _lines(rows)
    return sum(
        len(row)
        for row, following in zip(ordered, [*ordered[1:], Tokens()], strict=False)  # none, of an episode of no calls
        if not row.begins(following)
    )
