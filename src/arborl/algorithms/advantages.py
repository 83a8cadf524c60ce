"""The table of advantages: each maps groups and their terms to one number per term.

Each entry computes the batch's rewards as arrays, calls a function of `episode_advantages.py` or `turn_advantages.py`,
and assigns the result to terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arborl.algorithms import episode_advantages, turn_advantages
from arborl.algorithms.reward_arrays import RewardArrays, kl_costs
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.types import Floats, Group, Terms

Memory = dict[str, Any]  # what an algorithm keeps from step to step, as JSON

Credit = tuple[Floats, Floats | None]  # the advantage of every term, and the critic's target if there is a critic

Advantage = Callable[[Sequence[Group], Terms, AlgorithmConfig, Memory], Credit]


def arrays_of(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> RewardArrays:
    """The batch's rewards; the coefficient of a KL penalty in the reward is that in `memory`, if it has one."""
    return RewardArrays(groups, terms, kl_costs(terms, config.kl, memory.get("kl_coef", config.kl.coef)))


def over_branches(arrays: RewardArrays, advantage_E: Floats, config: AlgorithmConfig) -> Floats:
    """An episode's advantage at each of its terms, times the share of the term's branch."""
    share_C: list[float] = []  # of every call of the batch
    for episode in arrays.episodes:
        if config.split == "broadcast":
            share_C += [1.0] * len(episode.calls)
            continue
        found = episode.branches
        parts = episode_advantages.split_shares(max(found, default=0) + 1, config.split, config.options.split_ratio)
        share_C += [float(parts[branch]) for branch in found]
    return np.asarray(advantage_E[arrays.terms.episode] * np.array(share_C)[arrays.terms.call], dtype=np.float64)


def _flat(groups: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *groups])


def per_episode(rule: Callable[[RewardArrays, AlgorithmConfig, Memory], Sequence[Floats]]) -> Advantage:
    """An advantage with one number per episode, from a function that returns them per group."""

    def credit(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
        arrays = arrays_of(groups, terms, config, memory)
        found = _flat(rule(arrays, config, memory))
        return (over_branches(arrays, found, config) if len(terms) else np.zeros(0)), None

    return credit


def _rewards(arrays: RewardArrays) -> list[Floats]:
    return arrays.by_group(arrays.reward_E)


def _remax(arrays: RewardArrays, config: AlgorithmConfig, memory: Memory) -> list[Floats]:
    greedy = [group.greedy for group in arrays.groups]
    if any(reward is None for reward in greedy):
        raise ValueError("remax compares with a greedy episode, and a group has none; `keep` leaves such groups out")
    return episode_advantages.remax(_rewards(arrays), [float(reward) for reward in greedy if reward is not None])


def role_of(group: Group) -> str:
    """The key of the baseline that a group shares: its source, and its task's field `role`."""
    return f"{group.task.source}/{group.task.fields.get('role', '')}"


def _rae(arrays: RewardArrays, config: AlgorithmConfig, memory: Memory) -> list[Floats]:
    roles = [role_of(group) for group in arrays.groups]
    found, after = episode_advantages.rae(
        _rewards(arrays), roles, memory.get("baselines", {}), config.options.baseline_decay
    )
    memory["baselines"] = after
    return found


def _starpo(arrays: RewardArrays, config: AlgorithmConfig, memory: Memory) -> list[Floats]:
    returns = turn_advantages.trajectory_returns(arrays.turns, config.gamma)
    return episode_advantages.grpo(arrays.by_group(returns), std=config.std)


def per_turn(rule: Callable[[RewardArrays, AlgorithmConfig], Floats]) -> Advantage:
    """An advantage with one number per turn, from a function that returns them for all turns of the batch."""

    def credit(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
        arrays = arrays_of(groups, terms, config, memory)
        return (arrays.per_term(rule(arrays, config)) if len(terms) else np.zeros(0)), None

    return credit


def _returns(arrays: RewardArrays, gamma: float) -> Floats:
    return _flat([turn_advantages.discounted(rewards, gamma) for rewards in arrays.turns])


def _gigpo(arrays: RewardArrays, config: AlgorithmConfig) -> Floats:
    returns = _returns(arrays, config.gamma)
    states = (arrays.episode_N, arrays.state_N)
    return turn_advantages.gigpo(
        arrays.reward_E, arrays.group_E, returns, *states, config.std, config.options.step_weight
    )


def _step_reinforce(arrays: RewardArrays, config: AlgorithmConfig) -> Floats:
    returns, group_N = _returns(arrays, config.gamma), arrays.group_E[arrays.episode_N]
    return turn_advantages.step_reinforce(returns, arrays.episode_N, group_N, config.options.baseline, config.std)


def _turn_discounted(arrays: RewardArrays, config: AlgorithmConfig) -> Floats:
    found = _flat(episode_advantages.grpo(_rewards(arrays), std=config.std))
    return _flat(
        [turn_advantages.turn_discounted(a, len(t), config.gamma) for a, t in zip(found, arrays.turns, strict=True)]
    )


def _reinforce_plus_plus(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
    rewards = arrays_of(groups, terms, config, memory).reward_M
    return turn_advantages.reinforce_plus_plus(rewards, terms.episode), None


def _reinforce_plus_plus_baseline(
    groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory
) -> Credit:
    """The group's mean is subtracted from the reward, not from the KL penalty, which belongs to its token."""
    arrays = arrays_of(groups, terms, config, memory)
    compared = _flat(episode_advantages.grpo(arrays.by_group(arrays.reward_E + arrays.cost_E)))
    reward_M = -arrays.cost_M
    for episode, rows in arrays.rows.items():
        reward_M[rows[-1]] += compared[episode]
    return turn_advantages.reinforce_plus_plus(reward_M, terms.episode, centre=False), None


def _gae(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
    """A step is a token or a turn; in a turn the critic's value is that of its first token, and all tokens share the
    advantage. After the last step the value is 0, or for a truncated episode the critic's estimate (`terms.after`)."""
    arrays = arrays_of(groups, terms, config, memory)
    advantage, target, reward_M = np.zeros(len(terms)), np.zeros(len(terms)), arrays.reward_M
    for rows in arrays.rows.values():
        if config.options.gae_level == "token":
            starts, step = np.arange(len(rows)), np.arange(len(rows))
        else:
            _, starts, step = np.unique(terms.turn[rows], return_index=True, return_inverse=True)
        rewards = np.bincount(step, reward_M[rows]).astype(np.float64)
        ahead = float(np.nan_to_num(terms.after[rows[-1]])) if config.options.bootstrap else 0.0
        found = turn_advantages.gae(rewards, terms.value[rows][starts], config.gamma, config.options.gae_lambda, ahead)
        advantage[rows], target[rows] = found[0][step], found[1][step]
    return advantage, target


ADVANTAGES: dict[str, Advantage] = {
    "grpo": per_episode(
        lambda arrays, config, memory: episode_advantages.grpo(_rewards(arrays), config.options.baseline, config.std)
    ),
    "rloo": per_episode(lambda arrays, config, memory: episode_advantages.rloo(_rewards(arrays))),
    "reinforce": per_episode(lambda arrays, config, memory: episode_advantages.reinforce(_rewards(arrays))),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": per_episode(_remax),
    "gae": _gae,
    "opo": per_episode(
        lambda arrays, config, memory: episode_advantages.opo(_rewards(arrays), arrays.by_group(arrays.length_E))
    ),
    "maxrl": per_episode(lambda arrays, config, memory: episode_advantages.maxrl(_rewards(arrays))),
    "pass_k": per_episode(lambda arrays, config, memory: episode_advantages.pass_k(_rewards(arrays), config.std)),
    "gdpo": per_episode(
        lambda arrays, config, memory: episode_advantages.gdpo(arrays.named(), config.options.reward_weights)
    ),
    "gigpo": per_turn(_gigpo),
    "starpo": per_episode(_starpo),
    "step_reinforce": per_turn(_step_reinforce),
    "turn_discounted": per_turn(_turn_discounted),
    "rae": per_episode(_rae),
}  # the settings that each reads are in `arborl.config.algorithm_config`
