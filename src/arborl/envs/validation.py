"""Type checks of observations, steps and metrics. Each error says what was returned and what to return instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from arborl.envs.env import Observation, Step
from arborl.types import Message, Role

NUMBER_TYPES, BOOL_TYPES = (int, float, np.number, np.bool_), (bool, np.bool_)
ROLES = get_args(Role)
GYMNASIUM_STEP_LENGTH = 5


def observation_errors(where: str, observation: Any) -> list[str]:
    if not isinstance(observation, Observation):
        return [f"{where} returned {short_repr(observation)} as observation: return an Observation."]
    found = []
    key, messages = observation.state_key, observation.messages
    if not isinstance(key, str):
        found.append(f"{where} returned state_key={short_repr(key)}: return a str, equal for equal states.")
    if not isinstance(messages, tuple):
        return [*found, f"{where} returned messages as {type(messages).__name__}: return a tuple of Message."]
    for message in messages:
        if not isinstance(message, Message):
            found.append(f"{where} returned {short_repr(message)} among messages: return Message(role, content).")
        elif not isinstance(message.content, str):
            found.append(f"{where} returned a message whose content is {short_repr(message.content)}: return a str.")
        elif message.role not in ROLES:
            found.append(f"{where} returned a message of role {message.role!r}: return one of {', '.join(ROLES)}.")
    return found


def step_errors(step: Any) -> list[str]:
    if isinstance(step, tuple) and len(step) == GYMNASIUM_STEP_LENGTH:
        return [
            f"step() returned {short_repr(step)}: return a Step. (That is Gymnasium's format; "
            "arborl.envs.from_gymnasium wraps such an environment.)"
        ]
    if not isinstance(step, Step):
        return [f"step() returned {short_repr(step)}: return a Step."]
    found = observation_errors("step()", step.observation)
    if not _is_finite(step.reward):
        found.append(f"step() returned reward={short_repr(step.reward)}: return a finite float.")
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(step, name), BOOL_TYPES):
            found.append(f"step() returned {name}={short_repr(getattr(step, name))}: return True or False.")
    if isinstance(step.terminated, BOOL_TYPES) and step.terminated and step.truncated:
        found.append("step() returned both terminated and truncated: return truncated only in a non-final state.")
    return found + number_errors("step()", step.info, "info")


def number_errors(where: str, numbers: Any, name: str) -> list[str]:
    if type(numbers) is not dict and not isinstance(numbers, Mapping):
        return [f"{where} returned {name}={short_repr(numbers)}: return a dict of numbers by name."]
    return [
        f"{where} returned {name}[{key!r}]={short_repr(value)}: return a finite number under a str."
        for key, value in numbers.items()
        if not isinstance(key, str) or not _is_finite(value)
    ]


def _is_finite(value: Any) -> bool:
    return (type(value) is float or isinstance(value, NUMBER_TYPES)) and math.isfinite(value)


def metrics_errors(metrics: Any) -> list[str]:
    """Errors of an episode's metrics: `success` is 0 or 1; `valid` and `effective` are fractions."""
    found = number_errors("metrics()", metrics, "metrics")
    if found:
        return found
    if metrics.get("success", 0) not in (0, 1):
        found.append(
            f"metrics() returned success={short_repr(metrics['success'])}: return 1 for a solved task, else 0."
        )
    for name in ("valid", "effective"):
        if not 0 <= metrics.get(name, 0) <= 1:
            found.append(f"metrics() returned {name}={short_repr(metrics[name])}: return a fraction from 0 to 1.")
    return found


def view_errors(env: Any) -> list[str]:
    found = []
    if not isinstance(text := env.render(), str):
        found.append(f"render() returned {short_repr(text)}: return a str, empty when there is nothing to show.")
    if not isinstance(key := env.state_key(), str):
        found.append(f"state_key() returned {short_repr(key)}: return a str, equal for equal states.")
    return found


def picture_errors(picture: Any) -> list[str]:
    if picture is None or getattr(picture, "mode", None) == "RGB":
        return []
    return [f"picture() returned {short_repr(picture)}: return a PIL image of mode RGB, or None."]


def policy_errors(where: str, text: Any) -> list[str]:
    if text is None or isinstance(text, str):
        return []
    return [f"{where} returned {short_repr(text)}: return the text of a message, or None."]


def short_repr(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"
