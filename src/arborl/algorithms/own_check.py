"""Whether an advantage and a loss of one's own do what they should: tried on a small batch before anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from arborl.algorithms.own import Own, OwnAdvantage, OwnLoss
from arborl.algorithms.token_losses import Said, TermBatch
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.errors import ConfigError
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, Task, Terms, Turn

T = TypeVar("T")
CLOSE = 1e-6
"""How far a token's loss may differ when other tokens are looked at beside it."""


def check_advantage(own: OwnAdvantage, config: AlgorithmConfig) -> None:
    """ConfigError where it does not give a finite number for each token."""
    groups = small_groups()
    terms, memory = small_terms(groups), dict[str, object]()
    with np.errstate(all="ignore"):
        found, target = tried(own, lambda: own(groups, terms, config, memory))
    for column in (found, target):
        if column is not None and not np.isfinite(column).all():
            raise own.wrong(
                "gives numbers that are not finite for a small batch, in which one group has a single episode and in "
                "one all rewards are alike"
            )
    try:
        json.dumps(memory)
    except TypeError as error:
        raise own.wrong(f"puts something into `memory` that JSON has no form for ({error})") from error


def check_loss(own: OwnLoss, config: AlgorithmConfig) -> None:
    """ConfigError where it does not give a finite loss with a gradient for each token, from that token alone."""
    terms = columns(small_terms(small_groups()))
    size = len(terms.old_M)
    new_M = (terms.old_M + 0.1 * torch.linspace(-1, 1, size, dtype=torch.float64)).requires_grad_()
    entropy_M = torch.linspace(0.5, 1.5, size, dtype=torch.float64).requires_grad_()
    said = Said(new_M, entropy_M)
    loss_M, _ = tried(own, lambda: own(said, terms, config))
    if not torch.isfinite(loss_M).all():
        raise own.wrong("gives a loss that is not finite for a small batch")
    if not loss_M.requires_grad:
        raise own.wrong("gives a loss without a gradient: it must be computed from `new` (or `entropy`), with torch")
    given = [
        gradient
        for gradient in torch.autograd.grad(loss_M.sum(), [new_M, entropy_M], allow_unused=True)
        if gradient is not None
    ]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in given):
        raise own.wrong("has a gradient that is not finite on a small batch")
    if not any(bool(gradient.any()) for gradient in given):
        raise own.wrong("has a gradient of 0 everywhere on a small batch")
    for rows in (torch.arange(size // 2), torch.arange(size // 2, size)):
        part = TermBatch(*(None if one is None else one[rows] for one in _all(terms)))  # type: ignore[arg-type]
        beside = Said(new_M[rows], entropy_M[rows])
        alone_M, _ = tried(own, partial(own, beside, part, config))
        if not torch.allclose(alone_M, loss_M[rows], rtol=CLOSE, atol=CLOSE):
            raise own.wrong(
                "gives a token another loss when other tokens are beside it (a mean over the batch?). Batches are cut "
                "into pieces, so a token's loss must follow from that token; what is normalised goes into the advantage"
            )


def tried(own: Own, work: Callable[[], T]) -> T:
    """What it gives; whatever it raises is said with what is expected."""
    try:
        return work()
    except ConfigError:
        raise
    except Exception as error:
        raise own.wrong(f"failed on a small batch: {type(error).__name__}: {error}") from error


def small_groups() -> list[Group]:
    """Episodes of one and two turns: groups of three and of two, one whose rewards are all alike, and one episode
    alone."""
    made = []
    for number, rewards in enumerate(((1.0, 0.0, 0.25), (0.5, 2.0), (1.0, 1.0), (1.0,))):
        task, episodes = Task(f"small-{number}"), []
        for place, reward in enumerate(rewards):
            calls: list[Call] = []
            prompt: tuple[int, ...] = (1, 2 + number)
            for turn in range(1 + place % 2):
                tokens = tuple(range(5, 6 + place + turn))
                logprobs = tuple(-0.5 - 0.1 * token for token in tokens)
                calls.append(Call(prompt, Completion(tokens, logprobs, FinishReason.STOP), turn))
                prompt = (*prompt, *tokens, 3)
            turns = [Turn(Message("assistant", "…"), reward=0.0) for _ in calls]
            one = Episode(f"small-{number}#{place}", task, turns=turns, calls=calls, rewards={"r": reward})
            episodes.append(one)
        made.append(Group(task, episodes))
    return made


def small_terms(groups: list[Group]) -> Terms:
    """The terms of these groups, as a learner would have filled them."""
    rows: list[tuple[int, ...]] = []
    logprobs: list[float] = []
    episodes = calls = 0
    for number, group in enumerate(groups):
        for episode in group.valid_episodes:
            for call in episode.calls:
                said = call.completion
                rows += [(number, n, token, episodes, calls, call.turn) for n, token in enumerate(said.tokens)]
                logprobs += said.logprobs
                calls += 1
            episodes += 1
    tree, position, token, of, call_of, turn = (np.array(column) for column in zip(*rows, strict=True))
    old, size = np.array(logprobs), len(rows)
    advantage, weight, none = np.linspace(1, -1, size), np.full(size, 1 / size), np.full(size, np.nan)
    known = (old - 0.01, old - 0.2, np.linspace(0, 1, size), np.zeros(size), none, old - 0.3)
    return Terms(tree, position, token, old, advantage, weight, of, call_of, turn, np.zeros_like(turn), *known)


def columns(terms: Terms) -> TermBatch:
    """As tensors in float64."""
    names = {"old": "logprob", "group": "tree"}
    fields = [field.name.removesuffix("_M") for field in dataclasses.fields(TermBatch) if field.name != "sequence_M"]
    return TermBatch(*(torch.from_numpy(getattr(terms, names.get(name, name))) for name in fields))


def _all(terms: TermBatch) -> list[Tensor | None]:
    return [getattr(terms, field.name) for field in dataclasses.fields(terms)]
