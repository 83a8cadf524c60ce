"""Whether what an environment returned is of the shape its record promises; each fault names the field.

A fault is a sentence that says what came back and what to return instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from arborl.envs.env import Observation, Step
from arborl.types import Message, Role

NUMBERS, TRUTHS = (int, float, np.number, np.bool_), (bool, np.bool_)
"""NumPy's own count as well: environments compute with it."""
ROLES = get_args(Role)
GYMNASIUM = 5
"""Gymnasium's `step` returns a tuple of this length."""


def faults_of_observation(where: str, observation: Any) -> list[str]:
    """What is wrong with the types of an observation."""
    if not isinstance(observation, Observation):
        return [f"{where} returned {show(observation)} as observation: return an Observation."]
    found = []
    if not isinstance(observation.state_key, str):
        found.append(f"{where} returned state_key={show(observation.state_key)}: return a str, equal for equal states.")
    if not isinstance(observation.messages, tuple):
        return [
            *found,
            f"{where} returned messages as {type(observation.messages).__name__}: return a tuple of Message.",
        ]
    for message in observation.messages:
        if not isinstance(message, Message):
            found.append(f"{where} returned {show(message)} among messages: return Message(role, content).")
        elif not isinstance(message.content, str):
            found.append(f"{where} returned a message whose content is {show(message.content)}: return a str.")
        elif message.role not in ROLES:
            found.append(f"{where} returned a message of role {message.role!r}: return one of {', '.join(ROLES)}.")
    return found


def faults_of_step(step: Any) -> list[str]:
    """What is wrong with the types of a step."""
    if isinstance(step, tuple) and len(step) == GYMNASIUM:
        return [
            f"step() returned {show(step)}: return a Step. (That is Gymnasium's shape; arborl.envs.from_gymnasium "
            "wraps such an environment.)"
        ]
    if not isinstance(step, Step):
        return [f"step() returned {show(step)}: return a Step."]
    found = faults_of_observation("step()", step.observation)
    if not _finite(step.reward):
        found.append(f"step() returned reward={show(step.reward)}: return a finite float.")
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(step, name), TRUTHS):
            found.append(f"step() returned {name}={show(getattr(step, name))}: return True or False.")
    if isinstance(step.terminated, TRUTHS) and step.terminated and step.truncated:
        found.append(
            "step() returned both terminated and truncated: return truncated only when the state was not final."
        )
    return found + faults_of_numbers("step()", step.info, "info")


def faults_of_numbers(where: str, given: Any, name: str) -> list[str]:
    """What is wrong with a mapping of names to numbers."""
    if type(given) is not dict and not isinstance(given, Mapping):
        return [f"{where} returned {name}={show(given)}: return a dict of numbers by name."]
    return [
        f"{where} returned {name}[{key!r}]={show(value)}: return a finite number under a str."
        for key, value in given.items()
        if not isinstance(key, str) or not _finite(value)
    ]


def _finite(value: Any) -> bool:
    return (type(value) is float or isinstance(value, NUMBERS)) and math.isfinite(value)


def faults_of_metrics(metrics: Any) -> list[str]:
    """What is wrong with an episode's numbers; `success` is 0 or 1, shares of messages lie between."""
    found = faults_of_numbers("metrics()", metrics, "metrics")
    if found:
        return found
    if metrics.get("success", 0) not in (0, 1):
        found.append(f"metrics() returned success={show(metrics['success'])}: return 1 for a solved task, else 0.")
    for name in ("valid", "effective"):
        if not 0 <= metrics.get(name, 0) <= 1:
            found.append(f"metrics() returned {name}={show(metrics[name])}: return a share from 0 to 1.")
    return found


def faults_of_looks(env: Any) -> list[str]:
    """What is wrong with the ways an environment shows itself."""
    found = []
    text = env.render()
    if not isinstance(text, str):
        found.append(f"render() returned {show(text)}: return a str, empty when there is nothing to show.")
    key = env.state_key()
    if not isinstance(key, str):
        found.append(f"state_key() returned {show(key)}: return a str, equal for equal states.")
    return found


def faults_of_picture(picture: Any) -> list[str]:
    """What is wrong with a picture of the state."""
    if picture is None or getattr(picture, "mode", None) == "RGB":
        return []
    return [f"picture() returned {show(picture)}: return a PIL image of mode RGB, or None."]


def fault_of_policy(where: str, text: Any) -> list[str]:
    """What is wrong with the text of a player."""
    if text is None or isinstance(text, str):
        return []
    return [f"{where} returned {show(text)}: return the text of a message, or None."]


def show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"
