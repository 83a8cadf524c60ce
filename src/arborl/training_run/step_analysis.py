"""Questions about a replayed step: what a sampled token contributed, and what the step would be without an episode.

A token is addressed by EPISODE:CALL:INDEX: the id of its episode, the number of the model call in it and of the token
in the completion, both from 0. The gradient is that of the loss of the whole batch at the weights before the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arborl.errors import ConfigError, did_you_mean
from arborl.rollout.accounting import NOT_SELECTED, TRAINED, episode_key
from arborl.rollout.term_store import gradient_norms
from arborl.training_run.step_replay import ReplayedUpdate, StepReplayer, finite
from arborl.types import Episode, Floats, Group, Ints

if TYPE_CHECKING:  # needs torch
    from torch import Tensor

    from arborl.trainer.training_batch import TrainingBatch

Gradient = Mapping[str, "Tensor"]
CONTEXT_TOKENS = 24
"""Tokens before an explained one that are shown."""


@dataclass(frozen=True, slots=True)
class EpisodePlace:
    number: int
    """Of the episode in the step."""
    group: Group
    episode: Episode


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A sampled token of an update. Numbers of the learner are None if it was not trained."""

    address: str
    text: str
    token: int
    version: int
    sampling_logprob: float | None
    logprob: float | None
    ratio: float | None
    clipped: bool | None
    """None for losses without clipping."""
    advantage: float | None
    weight: float | None
    loss: float | None
    entropy: float | None
    pull: float | None
    """Derivative of the loss with respect to the log-probability: negative if the token became more likely."""
    logit_share: float | None
    """Its share of the sum of gradient norms over all tokens, each with respect to the token's own logits."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class TokenExplanation:
    row: TokenRow
    context: str
    """Text before the token."""
    not_trained: str
    """Why it is no term of the loss; empty if it is one."""
    reference_logprob: float | None
    value: float | None
    target: float | None
    gradient_norm: float | None
    """Norm of the gradient of its term with respect to the weights of the policy."""
    gradient_share: float | None
    """Its part of the step's gradient: projection on it, divided by its norm. The shares of all tokens sum to 1."""
    advantage: dict[str, Any]
    """Where the advantage came from: estimator, rewards of the episode and of its group."""

    def as_json(self) -> dict[str, Any]:
        return self.row.as_json() | {
            "context": self.context,
            "not_trained": self.not_trained or None,
            "reference_logprob": self.reference_logprob,
            "value": self.value,
            "target": self.target,
            "gradient_norm": self.gradient_norm,
            "gradient_share": self.gradient_share,
            "advantage_from": self.advantage,
        }


class TokenExplainer:
    """Explains tokens of the step that was replayed."""

    def __init__(self, replayer: StepReplayer):
        from arborl.trainer.hooks import term_places

        self.replayer, self.done = replayer, replayer.done
        self.places = episode_places(self.done)
        batch, self.rows = self.done.batch, dict[tuple[int, int, int], int]()
        if batch.terms.place is not None and len(batch.terms):
            columns = term_places(batch.groups, self.done.groups)
            keys = zip(*(column[batch.terms.place].tolist() for column in columns), strict=True)
            self.rows = {key: row for row, key in enumerate(keys)}
        self.shares = self._logit_shares()
        self._gradient: dict[str, Tensor] | None = None

    def tokens(self, episode_id: str) -> list[TokenRow]:
        """All sampled tokens of an episode."""
        place = find_episode(self.places, episode_id)
        return [
            self._row(place, call, index)
            for call, one in enumerate(place.episode.calls)
            for index in range(len(one.completion.tokens))
        ]

    def token(self, episode_id: str, call: int, index: int) -> TokenExplanation:
        place = find_episode(self.places, episode_id)
        _check_index(place.episode, call, index)
        row, terms = self.rows.get((place.number, call, index)), self.done.batch.terms
        norm, share = self._gradient_of(row) if row is not None else (None, None)

        def column(name: str) -> float | None:
            return finite(getattr(terms, name)[row]) if row is not None else None

        one = place.episode.calls[call]
        before = [*one.prompt, *one.completion.tokens[:index]][-CONTEXT_TOKENS:]
        return TokenExplanation(
            self._row(place, call, index),
            self._decode(before),
            "" if row is not None else self._why_not_trained(place, call),
            column("reference"),
            column("value"),
            column("target"),
            norm,
            share,
            self._advantage_origin(place, one.turn),
        )

    def _row(self, place: EpisodePlace, call: int, index: int) -> TokenRow:
        completion, row = place.episode.calls[call].completion, self.rows.get((place.number, call, index))
        terms, log, logged = self.done.batch.terms, self.done.log, dict[str, float | None]()
        for name in ("logprob", "ratio", "clipped", "loss", "entropy", "pull"):
            known = row is not None and log is not None and terms.place is not None
            logged[name] = finite(float(getattr(log, name)[terms.place[row]])) if known else None  # type: ignore[index]
        clipped, versions = logged.pop("clipped"), completion.versions
        return TokenRow(
            address=f"{place.episode.id}:{call}:{index}",
            text=self._decode([completion.tokens[index]]),
            token=int(completion.tokens[index]),
            version=versions[index] if versions else completion.version,
            sampling_logprob=finite(completion.logprobs[index]),
            clipped=None if clipped is None else clipped > 0,
            advantage=finite(terms.advantage[row]) if row is not None else None,
            weight=finite(terms.weight[row]) if row is not None else None,
            logit_share=finite(self.shares[row]) if row is not None else None,
            **logged,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.replayer.parts.renderer.tokenizer.decode([int(token) for token in tokens])

    def _logit_shares(self) -> Floats:
        log, place = self.done.log, self.done.batch.terms.place
        if log is None or place is None:
            return np.zeros(0)
        norms = np.nan_to_num(gradient_norms(log.pull, log.logprob))[place]
        return norms / max(norms.sum(), 1e-300)

    def _gradient_of(self, row: int) -> tuple[float, float | None]:
        """Norm of the gradient of one term, and its share of the gradient of the step."""
        replayer, batch = self.replayer, self.done.batch
        if self._gradient is None:
            replayer.restore()
            self._gradient = policy_gradient(replayer, batch)
        terms = batch.terms
        weight = np.where(np.arange(len(terms)) == row, terms.weight, 0.0)
        alone = dataclasses.replace(terms, weight=weight).pick(terms.tree == terms.tree[row])
        gradient = policy_gradient(replayer, dataclasses.replace(batch, terms=alone))
        whole = dot(self._gradient, self._gradient)
        return math.sqrt(dot(gradient, gradient)), dot(gradient, self._gradient) / whole if whole else None

    def _why_not_trained(self, place: EpisodePlace, call: int) -> str:
        episode = place.episode
        if episode.failure is not None:
            return f"the episode failed: {episode.failure}"
        if not episode.calls[call].trained:
            return "calls of this kind are not trained"
        why = self.done.batch.outcomes.get(episode_key(episode), NOT_SELECTED)
        if why == TRAINED:
            return "left out by learner.max_samples_per_trajectory, or its group has a loss that is not finite"
        return f"dropped by the algorithm: {why}"

    def _advantage_origin(self, place: EpisodePlace, turn: int) -> dict[str, Any]:
        config, episode, group = self.replayer.parts.config.algorithm, place.episode, place.group
        own = config.by_source.get(group.task.source, config)
        rewards = {one.id: finite(one.reward) for one in group.valid_episodes}
        known = [reward for reward in rewards.values() if reward is not None]
        turns = episode.turns
        return {
            "estimator": own.advantage,
            "reward": finite(episode.reward),
            "rewards": {name: finite(value) for name, value in episode.rewards.items()},
            "turn_reward": finite(turns[turn].reward) if 0 <= turn < len(turns) else None,
            "task": group.task.id,
            "group_rewards": rewards,
            "group_mean": float(np.mean(known)) if known else None,
            "group_std": float(np.std(known)) if known else None,
            "greedy": finite(group.greedy),
        }


def parse_address(text: str, ids: Sequence[str]) -> tuple[str, int | None, int | None]:
    """Episode, call and index of `EPISODE:CALL:INDEX`; without call and index for `EPISODE`, which may contain `:`."""
    if text in ids:
        return text, None, None
    parts = text.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return parts[0], int(parts[1]), int(parts[2])
    return text, None, None


def episode_places(done: ReplayedUpdate) -> list[EpisodePlace]:
    episodes = [(group, episode) for group in done.groups for episode in group.episodes]
    return [EpisodePlace(number, group, episode) for number, (group, episode) in enumerate(episodes)]


def find_episode(places: Sequence[EpisodePlace], episode_id: str) -> EpisodePlace:
    found = [place for place in places if place.episode.id == episode_id]
    if not found:
        ids = [place.episode.id for place in places]
        some = ", ".join(ids[:4]) + (", …" if len(ids) > 4 else "")
        raise ConfigError(
            f"{episode_id!r}: no such episode in this step.{did_you_mean(episode_id, ids)} It has {len(ids)}: {some}."
        )
    return found[0]


def _check_index(episode: Episode, call: int, index: int) -> None:
    if call >= len(episode.calls):
        raise ConfigError(f"{episode.id}:{call}:{index}: the episode has {len(episode.calls)} calls, from 0.")
    count = len(episode.calls[call].completion.tokens)
    if index >= count:
        raise ConfigError(f"{episode.id}:{call}:{index}: call {call} sampled {count} tokens, from 0.")


# ------------------------------------------------------------------------------------------------ gradients


def policy_gradient(replayer: StepReplayer, batch: TrainingBatch) -> dict[str, Tensor]:
    """The gradient of the batch's loss with respect to the policy, at the current weights."""
    from arborl.learner.core.update_metrics import drop_groups, non_finite_terms

    parts = replayer.parts
    terms, _ = drop_groups(batch.terms, non_finite_terms(batch.terms), batch.episode_ids)
    if parts.algorithm.needs.anchor:  # the weights have not moved: the pass computes its own anchor
        terms = dataclasses.replace(terms, proximal=np.full(len(terms), np.nan))

    def run() -> dict[str, Tensor]:
        learner = parts.learner
        learner.optimizer.zero_grad()
        learner.backward(batch.forest.trees, terms, parts.algorithm)
        gradients = learner.gradients()
        learner.optimizer.zero_grad()
        return {name: gradient for name, gradient in gradients.items() if name.startswith("model.")}

    return replayer.run_in_thread(run)


def dot(one: Gradient, other: Gradient) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def cosine(one: Gradient, other: Gradient) -> float | None:
    """None if one of them is 0."""
    size = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / size if size else None


# ------------------------------------------------------------------------------------------------ without episodes


@dataclass(frozen=True, slots=True)
class ChangedAdvantage:
    """Mean advantage of an episode's tokens; None if it is not trained."""

    episode: str
    task: str
    reward: float
    recorded: float | None
    without: float | None


@dataclass(frozen=True, slots=True)
class StepWithout:
    """The step as it was, and as it would be without some episodes."""

    episodes: list[str]
    numbers: dict[str, tuple[float | None, float | None]]
    """Loss, gradient norm, terms, groups and length of the update: as it was, and without the episodes."""
    gradient_cosine: float | None
    update_cosine: float | None
    """Between the changes of the weights."""
    advantages: list[ChangedAdvantage]
    """Of the other episodes of their groups, and of all others that changed."""

    def as_json(self) -> dict[str, Any]:
        return {
            "episodes": self.episodes,
            "numbers": {name: {"recorded": old, "without": new} for name, (old, new) in self.numbers.items()},
            "gradient_cosine": self.gradient_cosine,
            "update_cosine": self.update_cosine,
            "advantages": [dataclasses.asdict(one) for one in self.advantages],
        }


def step_without(replayer: StepReplayer, episodes: Sequence[str]) -> StepWithout:
    """What the replayed step would have been without these episodes. The learner is then in that state."""
    base, places = replayer.done, episode_places(replayer.done)
    removed = [find_episode(places, episode_id) for episode_id in episodes]
    replayer.restore()
    before = _policy_weights(replayer)
    gradient = policy_gradient(replayer, base.batch)
    replayer.update_without(())
    after = _policy_weights(replayer)
    other = replayer.update_without(episodes)
    after_other = _policy_weights(replayer)
    replayer.restore()
    gradient_other = policy_gradient(replayer, other.batch)
    updates = [{name: state[name] - before[name] for name in before} for state in (after, after_other)]
    lengths = [math.sqrt(dot(update, update)) for update in updates]
    names = {"loss": "policy/loss", "grad_norm": "learner/grad_norm", "terms": "learner/terms"}
    names |= {"groups": "learner/groups", "reward": "reward/mean"}
    numbers = {
        name: (finite(base.metrics.get(key)), finite(other.metrics.get(key)))
        for name, key in names.items()
        if key in base.metrics or key in other.metrics
    }
    numbers["update_norm"] = (lengths[0], lengths[1])
    touched = {id(place.group) for place in removed}
    return StepWithout(
        list(episodes), numbers, cosine(gradient, gradient_other), cosine(updates[0], updates[1]),
        _changed_advantages(places, base.batch, other.batch, episodes, touched),
    )  # fmt: skip


def _changed_advantages(
    places: Sequence[EpisodePlace], base: TrainingBatch, other: TrainingBatch, removed: Sequence[str], touched: set[int]
) -> list[ChangedAdvantage]:
    old, new = mean_advantages(base), mean_advantages(other)
    rows = []
    for place in places:
        key = place.episode.id
        if key not in removed and (id(place.group) in touched or old.get(key) != new.get(key)):
            reward = place.episode.reward
            rows.append(ChangedAdvantage(key, place.group.task.id, reward, old.get(key), new.get(key)))
    return rows


def mean_advantages(batch: TrainingBatch) -> dict[str, float]:
    """Mean advantage of the tokens of each trained episode."""
    count: Ints = np.bincount(batch.terms.episode, minlength=len(batch.episode_ids))
    total = np.bincount(batch.terms.episode, batch.terms.advantage, minlength=len(batch.episode_ids))
    rows = zip(batch.episode_ids, total.tolist(), count.tolist(), strict=True)
    return {name: whole / number for name, whole, number in rows if number}


def _policy_weights(replayer: StepReplayer) -> dict[str, Tensor]:
    learner = replayer.parts.learner
    state = {name: values["value"] for name, values in learner.strategy.state(learner)}
    return {name: value.clone() for name, value in state.items() if name.startswith("model.")}
