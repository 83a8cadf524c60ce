"""Token trees: each token of a group is stored once, and each sampled token is one term of the loss.

The sequences of all calls (prompt + completion) are sorted. Neighbours share their longest common prefix, so one pass
lays out the unique tokens depth first. The layout depends on the tokens alone. Two episodes that sampled the same token
in the same context share its node and have one term each.

Example (one prompt, two completions):
    [1 2 | 3 4], [1 2 | 5]   ->   tokens 1 2 3 4 5   depth 0 1 2 3 2   end 5 5 4 4 5

`downsample_branches` trains on some branches of an episode. The weights of the kept branches are scaled so that the
expected gradient of an episode (`random`) or its total weight (`last`) stays the same:

    kept   = algorithm.keep(groups)
    terms  = algorithm.credit(kept, look(build_token_trees(kept)))      # credit sees every branch
    forest, terms, metrics = downsample_branches(kept, terms, most=2, how="random", seed=seed)
    learner.update(forest.trees, terms, algorithm)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from arborl.seeds import generator
from arborl.tokens import Tokens
from arborl.types import Call, Episode, Floats, Forest, Group, Ints, Metrics, SamplingDistribution, Terms, TokenTree

UNKNOWN_DISTRIBUTION = (np.nan,) * len(SamplingDistribution._fields)
SchemaMasks = Callable[[Call], Iterable[bytes]]
"""The tokens that a call's schema allowed at each of its sampled tokens (`SchemaMatcher.allowed`)."""
DownsampleMode = Literal["last", "random"]


def tree_of_sequences(sequences: Iterable[Sequence[int]]) -> tuple[TokenTree, list[Ints]]:
    """The token tree of these sequences, and for each sequence the nodes of its tokens."""
    rows = [Tokens(sequence) for sequence in sequences]
    tokens: list[Ints] = []
    depth: list[Ints] = []
    paths: dict[object, Ints] = {}
    ends: list[tuple[Ints, int]] = []
    size = 0
    last, path = Tokens(), np.zeros(0, dtype=np.int64)
    for row in _longest_sequences(rows):
        shared = last.common(row)
        ends.append((path[shared:], size))  # subtrees of the last path that end here
        new = np.arange(size, size + len(row) - shared)
        tokens.append(row.array[shared:].astype(np.int64))
        depth.append(np.arange(shared, len(row)))
        size += len(new)
        last, path = row, np.concatenate([path[:shared], new])
        paths[row.line] = path
    ends.append((path, size))
    end = np.zeros(size, dtype=np.int64)
    for nodes, where in ends:
        end[nodes] = where
    return TokenTree(_concatenate(tokens), _concatenate(depth), end), [paths[row.line][: len(row)] for row in rows]


def _longest_sequences(rows: Iterable[Tokens]) -> list[Tokens]:
    """Of the sequences that share storage the longest, which contains the others; sorted by tokens."""
    longest: dict[object, Tokens] = {}
    for row in rows:
        if len(row) >= len(longest.setdefault(row.line, row)):
            longest[row.line] = row
    return sorted(longest.values())


def _concatenate(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def build_token_trees(groups: Sequence[Group], schema_masks: SchemaMasks | None = None) -> Forest:
    """One tree for each group, from the calls of its surviving episodes, and the terms of all of them. Terms are in the
    order of group, episode, call, token. Advantage and weight are 0; the algorithm sets them."""
    trees: list[TokenTree] = []
    position: list[Ints] = []
    token: list[Ints] = []
    numbers: list[tuple[int, int, int, int]] = []  # of each trained call: its tree, its episode, the call, its turn
    logprobs: list[float] = []
    versions: list[int] = []
    drawn: list[SamplingDistribution | None] = []
    raw = episodes = calls = 0
    for group in groups:
        rows = [[call.whole for call in episode.calls if call.trained] for episode in group.valid_episodes]
        tree, paths = tree_of_sequences(row for some in rows for row in some)
        path = iter(paths)
        for episode, some in zip(group.valid_episodes, rows, strict=True):
            raw += _unshared_tokens(some)
            row = iter(some)
            for number, call in enumerate(episode.calls, start=calls):
                if call.trained:
                    begin, completion = len(call.prompt), call.completion
                    count = len(completion.tokens)
                    if count and begin == 0:
                        raise ValueError(
                            "a call with an empty prompt cannot be trained: nothing predicts its first token"
                        )
                    numbers.append((len(trees), episodes, number, call.turn))
                    position.append(next(path)[begin - 1 : begin - 1 + count])
                    token.append(next(row).array[begin:].astype(np.int64))
                    logprobs.extend(completion.logprobs)
                    versions.extend(completion.versions or [completion.version] * count)
                    drawn.extend([call.drawn] * count)
            calls += len(episode.calls)
            episodes += 1
        trees.append(tree)
    constants = np.array(numbers, dtype=np.int64).reshape(-1, 4).repeat([len(one) for one in token], axis=0)
    tree_of, episode_of, call_of, turn = np.ascontiguousarray(constants.T)
    old, version = np.array(logprobs, dtype=np.float64), np.array(versions, dtype=np.int64)
    advantage, weight = np.zeros(len(old)), np.zeros(len(old))
    proximal, reference, value, target, after, teacher = (np.full(len(old), np.nan) for _ in range(6))
    terms = Terms(
        tree_of, _concatenate(position), _concatenate(token), old, advantage, weight,
        episode_of, call_of, turn, version, proximal, reference, value, target, after, teacher,
        _distributions(drawn), np.arange(len(old)), _allowed_tokens(groups, schema_masks),
    )  # fmt: skip
    return Forest(tuple(trees), terms, raw)


def _allowed_tokens(groups: Sequence[Group], schema_masks: SchemaMasks | None) -> NDArray[np.object_] | None:
    """`Terms.allowed`; None if no trained call has a schema. Equal masks are one object."""
    calls = [call for group in groups for episode in group.valid_episodes for call in episode.calls if call.trained]
    if not any(call.schema for call in calls):
        return None
    if schema_masks is None:
        raise ValueError("calls with a JSON schema are trained with the masks of their tokens: give schema_masks")
    masks: list[bytes | None] = []
    known: dict[bytes, bytes] = {}
    for call in calls:
        found = schema_masks(call) if call.schema else [None] * len(call.completion.tokens)
        masks.extend(None if mask is None else known.setdefault(mask, mask) for mask in found)
    column = np.empty(len(masks), dtype=object)
    column[:] = masks
    return column


def _distributions(drawn: Sequence[SamplingDistribution | None]) -> Floats | None:
    """None if every token was sampled from the run's distribution."""
    if not any(drawn):
        return None
    return np.asarray([one or UNKNOWN_DISTRIBUTION for one in drawn], dtype=np.float64)


def _unshared_tokens(rows: Sequence[Tokens]) -> int:
    """Tokens of an episode without sharing between episodes: one sequence for each branch."""
    ordered = _longest_sequences(rows)
    following = [*ordered[1:], Tokens()]
    return sum(len(row) for row, after in zip(ordered, following, strict=False) if not row.begins(after))


def branch_factors(weights: Sequence[float], most: int, how: DownsampleMode, rng: np.random.Generator) -> Floats:
    """Factor of each branch, 0 if it is dropped; `weights` are the weights of the branches in the loss. `random` keeps
    the last branch and samples the others; the factor is 1 / probability, so the expectation is unchanged. `last` keeps
    the latest branches, scaled to the total weight."""
    branches = len(weights)
    if branches <= most:
        return np.ones(branches)
    out = np.zeros(branches)
    if how == "last":
        kept = sum(weights[-most:])
        out[-most:] = sum(weights) / kept if kept > 0 else 1.0
        return out
    if most == 1:  # always keeping the last would be biased: any one is sampled
        out[int(rng.integers(branches))] = branches
        return out
    out[-1] = 1.0
    out[rng.choice(branches - 1, size=most - 1, replace=False)] = (branches - 1) / (most - 1)
    return out


def downsample_branches(
    groups: Sequence[Group], terms: Terms, most: int, how: DownsampleMode, seed: int
) -> tuple[Forest, Terms, Metrics]:
    """The trees of the kept branches, their terms with scaled weights, and metrics. Other columns are unchanged."""
    if most < 1:
        raise ValueError(f"most={most}: give 1 or more")
    if how not in ("last", "random"):
        raise ValueError(f"how={how!r}: give last or random")
    calls = sum(len(episode.calls) for group in groups for episode in group.valid_episodes)
    weight_C = np.bincount(terms.call, terms.weight, minlength=calls).astype(np.float64)
    kept: list[Group] = []
    factor_C: list[float] = []
    dropped = 0
    for group in groups:
        episodes = []
        for episode in group.valid_episodes:
            rng = generator(seed, group.task.id, episode.id, episode.seed)
            weights = weight_C[len(factor_C) : len(factor_C) + len(episode.calls)]
            factors, num_dropped = _call_factors(episode, weights, most, how, rng)
            factor_C += factors
            dropped += num_dropped
            kept_calls = [
                dataclasses.replace(call, schema="") if call.schema else call  # its masks are in the terms already
                for call, factor in zip(episode.calls, factors, strict=True)
                if factor > 0
            ]
            episodes.append(dataclasses.replace(episode, calls=kept_calls))
        kept.append(Group(group.task, episodes, group.greedy))
    forest = build_token_trees(kept)
    factor_M = np.asarray(factor_C)[terms.call] if len(terms) else np.zeros(0)
    rows: Ints = np.flatnonzero(factor_M > 0)
    old, new = terms.pick(rows), forest.terms
    weight = old.weight * factor_M[rows]
    placed = dataclasses.replace(old, tree=new.tree, position=new.position, call=new.call, weight=weight)
    metrics = {
        "rollout/downsampled_branches": float(dropped),
        "rollout/downsampled_terms": float(len(terms) - len(placed)),
    }
    return dataclasses.replace(forest, terms=placed), placed, metrics


def _call_factors(
    episode: Episode, weight_C: Floats, most: int, how: DownsampleMode, rng: np.random.Generator
) -> tuple[list[float], int]:
    """The factor of each call, and the number of dropped branches. Branches without trained tokens do not count."""
    branch_C = episode.branches
    weight_B = np.bincount(branch_C, weight_C)
    pairs = zip(branch_C, episode.calls, strict=True)
    trained = sorted({branch for branch, call in pairs if call.trained and call.completion.tokens})
    factors = branch_factors(weight_B[trained].tolist(), most, how, rng).tolist()
    factor_of = dict(zip(trained, factors, strict=True))
    return [factor_of.get(branch, 0.0) for branch in branch_C], max(len(trained) - most, 0)
