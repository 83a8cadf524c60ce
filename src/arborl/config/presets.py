"""Presets of algorithms, and which settings each advantage and loss reads. Plain tables, no code."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"std": "group"},
    "dr_grpo": {"aggregation": "fixed"},
    "dapo": {"std": "group", "clip_high": 0.28, "aggregation": "token"},
    "bnpo": {"std": "group", "aggregation": "token"},
    "gspo": {"loss": "gspo", "std": "group"},
    "cispo": {"loss": "cispo", "std": "group", "aggregation": "token"},
    "sapo": {"loss": "sapo", "std": "group"},
    "topr": {"loss": "topr", "std": "group"},
    "decoupled_ppo": {"loss": "decoupled_ppo", "std": "group"},
    "rloo": {"advantage": "rloo"},
    "reinforce": {"advantage": "reinforce", "loss": "pg"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "aggregation": "token"},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "aggregation": "token"},
    "remax": {"advantage": "remax", "loss": "pg"},
    "ppo": {"advantage": "gae", "whiten": True, "aggregation": "token"},
    "a2c": {"advantage": "gae", "loss": "a2c", "aggregation": "token"},
    "trpo": {"loss": "trpo", "std": "group"},
    "opo": {"advantage": "opo", "loss": "pg", "aggregation": "token"},
    "maxrl": {"advantage": "maxrl"},
    "gdpo": {"advantage": "gdpo", "whiten": True},
    "gigpo": {"advantage": "gigpo"},
    "starpo": {"advantage": "starpo"},
    "step_reinforce": {"advantage": "step_reinforce", "loss": "pg"},
    "turn_discounted": {"advantage": "turn_discounted"},
    "rae": {"advantage": "rae", "loss": "pg"},
    "dpo": {"loss": "dpo"},
    "ipo": {"loss": "ipo"},
    "kto": {"loss": "kto"},
    "sft": {"loss": "sft"},
    "distill": {"loss": "distill"},
}
"""Name to settings; whatever a preset does not say is the default."""

BY_ADVANTAGE: dict[str, dict[str, Any]] = {
    "gigpo": {"gamma": 0.95, "std": "none"},
    "step_reinforce": {"gamma": 0.95, "std": "none"},
    "turn_discounted": {"gamma": 0.9, "std": "none"},
    "starpo": {"std": "group"},
}
"""Defaults that hold wherever this advantage is chosen."""

BY_LOSS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_high": 4.0},
}
"""Defaults that hold wherever this loss is chosen: a sequence's ratio moves less than a token's."""

_SPLIT = frozenset({"split"})
_GROUP = frozenset({"skip_zero_variance"})

ADVANTAGE_READS: dict[str, frozenset[str]] = {
    "grpo": _SPLIT | _GROUP | {"baseline", "std"},
    "rloo": _SPLIT | _GROUP,
    "reinforce": _SPLIT,
    "reinforce_plus_plus": frozenset(),
    "reinforce_plus_plus_baseline": _GROUP,
    "remax": _SPLIT,
    "gae": frozenset({"gamma", "gae_lambda", "gae_level", "bootstrap", "value"}),
    "opo": _SPLIT | _GROUP,
    "maxrl": _SPLIT | _GROUP,
    "gdpo": _SPLIT | _GROUP | {"reward_weights"},
    "gigpo": _GROUP | {"std", "gamma", "step_weight"},
    "starpo": _SPLIT | _GROUP | {"std", "gamma"},
    "step_reinforce": _GROUP | {"baseline", "std", "gamma"},
    "turn_discounted": _GROUP | {"std", "gamma"},
    "rae": _SPLIT | {"baseline_decay"},
}
"""What each advantage reads, besides what every algorithm does."""

COMPARES = frozenset(name for name, reads in ADVANTAGE_READS.items() if "skip_zero_variance" in reads)
"""Advantages that compare the episodes of a group."""

_POLICY = frozenset({"advantage", "advantage_clip", "whiten", "aggregation", "entropy_coef", "staleness_decay", "kl"})
_RATIO = _POLICY | {"importance_weights", "anchor"}
_PAIRS = frozenset({"beta", "pairs", "min_gap"})

GIVEN_LOSSES = frozenset({"sft", "dpo", "ipo", "kto"})
"""Losses that can do without anything sampled."""

LOSS_READS: dict[str, frozenset[str]] = {
    "ppo": _RATIO | {"clip_low", "clip_high", "dual_clip"},
    "gspo": _RATIO | {"clip_low", "clip_high", "sequence"},
    "cispo": _RATIO | {"clip_high"},
    "sapo": _RATIO | {"tau_positive", "tau_negative"},
    "topr": _RATIO,
    "a2c": _POLICY | {"importance_weights"},
    "pg": _POLICY | {"importance_weights"},
    "decoupled_ppo": _POLICY | {"clip_low", "clip_high", "behaviour_cap"},
    "trpo": _RATIO | {"trust_region"},
    "dpo": _PAIRS,
    "ipo": _PAIRS,
    "kto": frozenset({"beta", "reward_threshold"}),
    "sft": frozenset({"reward_threshold", "aggregation"}),
    "distill": frozenset({"aggregation", "teacher"}),
}
"""What each loss reads; one without `advantage` reads none of an advantage's settings either."""

OWN_ADVANTAGE = _SPLIT | _GROUP | {"value", "args"}
OWN_LOSS = _RATIO | {"args"}
"""What those read that are functions of a user's own, `package.module:function`."""
