"""Episodes, terms and term batches for the tests of this folder."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from arborl.algorithms import ModelOutputs, TermBatch
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Completion, Episode, Failure, FinishReason, Group, Message, StopReason, Task, Terms, Turn


def counters(algorithm) -> dict[str, float]:
    """What the algorithm says of its last batch, without counters that are 0."""
    return {name: value for name, value in algorithm.metrics().items() if value}


def episode(
    reward: float = 0.0,
    *,
    rewards: dict[str, float] | None = None,
    turns: list[float] | None = None,
    states: list[str] | None = None,
    tokens: int | list[int] = 2,
    failed: bool = False,
    stop: StopReason = StopReason.DONE,
    finish: FinishReason = FinishReason.STOP,
    version: int = 0,
    turn_weight: float | None = None,
) -> Episode:
    """One call a turn, each call going on from the last; `turns` are the environment's rewards, which count whole where
    there is a reward `env`, or by `turn_weight`."""
    given = [0.0] if turns is None else turns
    sizes = [tokens] * len(given) if isinstance(tokens, int) else tokens
    names = states or [""] * len(given)
    calls, prompt = [], (1,)
    for number, size in enumerate(sizes):
        sampled = tuple(range(2, 2 + size))
        calls.append(Call(prompt, Completion(sampled, (-1.0,) * size, finish, version), turn=number))
        prompt = (*prompt, *sampled, 40 + number)
    made = [Turn(Message("assistant"), reward=r, state_key=s) for r, s in zip(given, names, strict=True)]
    earned = rewards if rewards is not None else {"env": sum(given)} if turns is not None else {"r": reward}
    failure = Failure("environment 'x'", "ValueError", "boom") if failed else None
    one = Episode("e", Task("t"), turns=made, calls=calls, rewards=earned, failure=failure, stop=stop)
    one.turn_weight = float("env" in earned) if turn_weight is None else turn_weight
    return one


def group(*episodes: Episode, source: str = "", greedy: float | None = None, role: str | None = None) -> Group:
    return Group(Task("t", source=source, fields={} if role is None else {"role": role}), list(episodes), greedy)


def terms_of(groups: list[Group], seed: int = 0) -> Terms:
    """The groups' terms, every column that a learner fills made up."""
    random, terms = np.random.default_rng(seed), build_token_trees(groups).terms
    made = {name: -random.exponential(1.0, len(terms)) for name in ("logprob", "proximal", "reference", "teacher")}
    return dataclasses.replace(terms, value=random.normal(size=len(terms)), **made)


def batch_of(terms: Terms) -> TermBatch:
    """As a learner would hand it to a loss, in float64."""
    names = {"old": "logprob", "group": "tree"}
    columns = ("old", "advantage", "weight", "episode", "call", "turn", "group", "version")
    known = ("proximal", "reference", "value", "target", "teacher")
    return TermBatch(*(torch.from_numpy(getattr(terms, names.get(name, name))) for name in (*columns, *known)))


def pick(batch: TermBatch, rows: torch.Tensor) -> TermBatch:
    columns = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return TermBatch(*(None if column is None else column[rows] for column in columns))


def model_outputs(logprob: torch.Tensor, seed: int = 0) -> ModelOutputs:
    """A model that says this, with made-up entropies and values that carry gradients."""
    maker = torch.Generator().manual_seed(seed)
    others = [torch.rand(len(logprob), generator=maker, dtype=torch.float64).requires_grad_() for _ in range(2)]
    return ModelOutputs(logprob, *others)


def random_groups(seed: int, groups: int = 3, most: int = 4, source: str = "") -> list[Group]:
    """Groups of 2 to `most` episodes, 1 to 4 turns, a few states that come back."""
    random = np.random.default_rng(seed)
    out = []
    for _ in range(groups):
        episodes = []
        for _ in range(random.integers(2, most + 1)):
            turns = int(random.integers(1, 5))
            earned = random.normal(size=turns).round(3)
            episodes.append(
                episode(
                    rewards={"env": float(earned.sum()), "style": round(random.normal(), 3)},
                    turns=earned.tolist(),
                    states=[str(s) for s in random.choice(["a", "b", "c", ""], turns)],
                    tokens=random.integers(1, 4, turns).tolist(),
                    version=int(random.integers(0, 3)),
                )
            )
        out.append(group(*episodes, source=source, greedy=round(random.normal(), 3)))
    return out
