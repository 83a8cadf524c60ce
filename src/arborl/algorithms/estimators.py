"""Every advantage behind one signature: groups and their terms in, one number a term out.

Thin: each reads the batch's ledger, calls the pure function that knows the formula (`advantages.py`, `turns.py`), and
spreads the answer over terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arborl.algorithms import advantages, turns
from arborl.algorithms.ledger import Ledger, kl_costs
from arborl.algorithms.votes import whitened
from arborl.config.algorithm import AlgorithmConfig
from arborl.types import Floats, Group, Terms

Memory = dict[str, Any]
"""What an algorithm remembers from step to step, as JSON."""

Credit = tuple[Floats, Floats | None]
"""Advantage of every term, and what the critic should have said there where there is one."""

Advantage = Callable[[Sequence[Group], Terms, AlgorithmConfig, Memory], Credit]


def ledger_of(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Ledger:
    """The batch's rewards; a KL penalty in the reward has the coefficient that `memory` holds, if it does."""
    return Ledger(groups, terms, kl_costs(terms, config.kl, memory.get("kl_coef", config.kl.coef)))


def _over_branches(ledger: Ledger, advantage_E: Floats, config: AlgorithmConfig) -> Floats:
    """An episode's advantage at each of its terms, by its branches' shares."""
    share_C: list[float] = []  # of every call of the batch
    for episode in ledger.episodes:
        if config.split == "broadcast":
            share_C += [1.0] * len(episode.calls)
            continue
        found = episode.branches
        parts = advantages.split_shares(max(found, default=0) + 1, config.split, config.split_ratio)
        share_C += [float(parts[branch]) for branch in found]
    return np.asarray(advantage_E[ledger.terms.episode] * np.array(share_C)[ledger.terms.call], dtype=np.float64)


def _flat(groups: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *groups])


def per_episode(rule: Callable[[Ledger, AlgorithmConfig, Memory], Sequence[Floats]]) -> Advantage:
    """An advantage that is one number an episode, from a rule that gives them group by group."""

    def credit(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
        ledger = ledger_of(groups, terms, config, memory)
        found = _flat(rule(ledger, config, memory))
        return (_over_branches(ledger, found, config) if len(terms) else np.zeros(0)), None

    return credit


def _rewards(ledger: Ledger) -> list[Floats]:
    return ledger.by_group(ledger.reward_E)


def _remax(ledger: Ledger, config: AlgorithmConfig, memory: Memory) -> list[Floats]:
    greedy = [group.greedy for group in ledger.groups]
    if any(reward is None for reward in greedy):
        raise ValueError("remax compares with a greedy episode, and a group has none; `keep` leaves such groups out")
    return advantages.remax(_rewards(ledger), [float(reward) for reward in greedy if reward is not None])


def role_of(group: Group) -> str:
    """Whose baseline a group shares: its source, and the field `role` of its task where there is one."""
    return f"{group.task.source}/{group.task.fields.get('role', '')}"


def _rae(ledger: Ledger, config: AlgorithmConfig, memory: Memory) -> list[Floats]:
    roles = [role_of(group) for group in ledger.groups]
    found, after = advantages.rae(_rewards(ledger), roles, memory.get("baselines", {}), config.baseline_decay)
    memory["baselines"] = after
    return found


def _starpo(ledger: Ledger, config: AlgorithmConfig, memory: Memory) -> list[Floats]:
    returns = turns.trajectory_returns(ledger.turns, config.gamma)
    return advantages.grpo(ledger.by_group(returns), std=config.std)


def per_turn(rule: Callable[[Ledger, AlgorithmConfig], Floats]) -> Advantage:
    """An advantage that is one number a turn, from a rule that gives them for all turns of the batch."""

    def credit(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
        ledger = ledger_of(groups, terms, config, memory)
        return (ledger.per_term(rule(ledger, config)) if len(terms) else np.zeros(0)), None

    return credit


def _returns(ledger: Ledger, gamma: float) -> Floats:
    return _flat([turns.discounted(rewards, gamma) for rewards in ledger.turns])


def _gigpo(ledger: Ledger, config: AlgorithmConfig) -> Floats:
    returns = _returns(ledger, config.gamma)
    states = (ledger.episode_N, ledger.state_N)
    return turns.gigpo(ledger.reward_E, ledger.group_E, returns, *states, config.std, config.step_weight)


def _step_reinforce(ledger: Ledger, config: AlgorithmConfig) -> Floats:
    returns, group_N = _returns(ledger, config.gamma), ledger.group_E[ledger.episode_N]
    return turns.step_reinforce(returns, ledger.episode_N, group_N, config.baseline, config.std)


def _turn_discounted(ledger: Ledger, config: AlgorithmConfig) -> Floats:
    found = _flat(advantages.grpo(_rewards(ledger), std=config.std))
    return _flat([turns.turn_discounted(a, len(t), config.gamma) for a, t in zip(found, ledger.turns, strict=True)])


def _reinforce_plus_plus(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
    ledger = ledger_of(groups, terms, config, memory)
    return turns.reinforce_plus_plus(ledger.reward_M, terms.episode), None


def _reinforce_plus_plus_baseline(
    groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory
) -> Credit:
    """The group's mean is taken off the reward, not off the KL penalty, which stays each token's own."""
    ledger = ledger_of(groups, terms, config, memory)
    compared = _flat(advantages.grpo(ledger.by_group(ledger.reward_E + ledger.cost_E)))
    reward_M = -ledger.cost_M
    for episode, rows in ledger.rows.items():
        reward_M[rows[-1]] += compared[episode]
    return turns.reinforce_plus_plus(reward_M, terms.episode, centre=False), None


def _gae(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
    """A step is a token, or a turn: then the critic is asked at the turn's first token, and all its tokens share."""
    ledger = ledger_of(groups, terms, config, memory)
    advantage, target = np.zeros(len(terms)), np.zeros(len(terms))
    for rows in ledger.rows.values():
        if config.gae_level == "token":
            starts, step = np.arange(len(rows)), np.arange(len(rows))
        else:
            _, starts, step = np.unique(terms.turn[rows], return_index=True, return_inverse=True)
        rewards = np.bincount(step, ledger.reward_M[rows]).astype(np.float64)
        found = turns.gae(rewards, terms.value[rows][starts], config.gamma, config.gae_lambda)
        advantage[rows], target[rows] = found[0][step], found[1][step]
    return (whitened(advantage, terms.episode) if config.whiten else advantage), target


ADVANTAGES: dict[str, Advantage] = {
    "grpo": per_episode(lambda ledger, config, memory: advantages.grpo(_rewards(ledger), config.baseline, config.std)),
    "rloo": per_episode(lambda ledger, config, memory: advantages.rloo(_rewards(ledger))),
    "reinforce": per_episode(lambda ledger, config, memory: advantages.reinforce(_rewards(ledger))),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": per_episode(_remax),
    "gae": _gae,
    "opo": per_episode(
        lambda ledger, config, memory: advantages.opo(_rewards(ledger), ledger.by_group(ledger.length_E))
    ),
    "maxrl": per_episode(lambda ledger, config, memory: advantages.maxrl(_rewards(ledger))),
    "gdpo": per_episode(
        lambda ledger, config, memory: advantages.gdpo(ledger.named, config.reward_weights, config.whiten)
    ),
    "gigpo": per_turn(_gigpo),
    "starpo": per_episode(_starpo),
    "step_reinforce": per_turn(_step_reinforce),
    "turn_discounted": per_turn(_turn_discounted),
    "rae": per_episode(_rae),
}
"""Name to advantage; the settings each reads are in `arborl.config.presets`."""
