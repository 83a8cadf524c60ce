"""Search spaces by name, in the words of the conversational door, and what these words are in a run's configuration."""

from __future__ import annotations

from typing import Any

from arborl.errors import ConfigError, did_you_mean

KEYS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("learner.lr",),
    "num_generations": ("rollout.group_size",),
    "temperature": ("sampling.temperature",),
    "clip_range": ("algorithm.clip_low", "algorithm.clip_high"),
    "kl_penalty": ("algorithm.kl.coef",),
    "max_grad_norm": ("learner.max_grad_norm",),
    "warmup_ratio": ("learner.warmup_ratio",),
}
"""A word -> the keys that it sets."""


def _rate(low: float, high: float) -> dict[str, Any]:
    return {"type": "loguniform", "low": low, "high": high}


def _between(low: float, high: float) -> dict[str, Any]:
    return {"type": "uniform", "low": low, "high": high}


def _one_of(*choices: int) -> dict[str, Any]:
    return {"type": "categorical", "choices": list(choices)}


SPACES: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {
        "learning_rate": _rate(1e-7, 1e-4),
        "num_generations": _one_of(4, 8, 16),
        "temperature": _between(0.5, 1.2),
        "clip_range": _between(0.1, 0.3),
    },
    "full": {
        "learning_rate": _rate(1e-7, 1e-4),
        "num_generations": _one_of(4, 8, 16),
        "temperature": _between(0.5, 1.2),
        "clip_range": _between(0.1, 0.3),
        "kl_penalty": _between(0.0, 0.2),
        "max_grad_norm": _between(0.3, 2.0),
        "warmup_ratio": _between(0.0, 0.2),
    },
    # a helpdesk must stay near the tone it was given: cool sampling, and a hold on the reference
    "customer_service": {
        "learning_rate": _rate(1e-6, 2e-5),
        "num_generations": _one_of(8, 16),
        "temperature": _between(0.6, 1.0),
        "kl_penalty": _between(0.01, 0.1),
    },
    # answers are right or wrong: little heat, and larger groups to tell luck from knowledge
    "technical_support": {
        "learning_rate": _rate(1e-6, 3e-5),
        "num_generations": _one_of(8, 16),
        "temperature": _between(0.4, 0.9),
        "clip_range": _between(0.1, 0.25),
    },
    # many ways lead to a sale: more heat to find them
    "sales": {
        "learning_rate": _rate(1e-6, 5e-5),
        "num_generations": _one_of(8, 16),
        "temperature": _between(0.7, 1.2),
        "kl_penalty": _between(0.0, 0.1),
    },
    "conservative": {
        "learning_rate": _rate(5e-7, 5e-6),
        "num_generations": _one_of(8, 16),
        "temperature": _between(0.7, 1.0),
        "clip_range": _between(0.1, 0.2),
    },
    "aggressive": {
        "learning_rate": _rate(1e-6, 1e-3),
        "num_generations": _one_of(4, 8, 16, 32),
        "temperature": _between(0.5, 1.5),
        "clip_range": _between(0.1, 0.4),
    },
}


def get_search_space(name: str) -> dict[str, dict[str, Any]]:
    """A search space of the library, to use or to change.

    Example:
        space = get_search_space("grpo")
        space["learning_rate"]["high"] = 1e-3      # a copy: the library's stays as it is
    """
    if name not in SPACES:
        raise ConfigError(
            f"no search space is called {name!r}.{did_you_mean(name, SPACES)} Known: {', '.join(SPACES)}."
        )
    return {
        word: {key: list(v) if isinstance(v, list) else v for key, v in domain.items()}
        for word, domain in SPACES[name].items()
    }
