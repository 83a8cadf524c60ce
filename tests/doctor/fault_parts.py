"""Parts with a fault, and small models with one: what the doctor must find."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arborl
from arborl.envs.env import Env, Observation, Step
from arborl.models.model_files import SEEDLING_DIR
from arborl.types import Message


class Yes(Env):
    """Pays for yes, or always the same."""

    def __init__(self, pays: bool = True, opening: str = "Say yes.", turns: int = 1):
        self.pays, self.opening, self.turns, self.done = pays, opening, turns, 0

    async def reset(self, task, seed):
        self.done = 0
        return Observation((Message("user", f"{self.opening} ({task.seed})"),))

    async def step(self, action):
        self.done += 1
        paid = float(self.pays and "yes" in action.content.lower())
        return Step(Observation((Message("user", "Again."),)), paid, terminated=self.done >= self.turns)


class Broken(Yes):
    """Every other task breaks it, or every one."""

    def __init__(self, always: bool = False):
        super().__init__()
        self.always, self.breaks = always, False

    async def reset(self, task, seed):
        self.breaks = self.always or task.seed % 2 == 0
        return await super().reset(task, seed)

    async def step(self, action):
        if self.breaks:
            raise ValueError("thin ice")
        return await super().step(action)


class Forgetful(Yes):
    """Returns another first observation at every reset with the same seed."""

    opened = 0

    async def reset(self, task, seed):
        Forgetful.opened += 1
        return Observation((Message("user", f"Say yes. ({Forgetful.opened})"),))


@arborl.reward
def nothing(episode) -> float:
    """The same for everything."""
    return 0.0


@arborl.reward
def not_a_number(episode) -> float:
    """Sometimes."""
    return float("nan") if episode.seed % 2 else 1.0


@arborl.tool
def divide(number: int) -> float:
    """Divide by zero.

    Args:
        number: any.
    """
    return number / 0


# ------------------------------------------------------------------------------------------------ models

Change = Callable[[str], str]


def model(folder: Path, template: Change = str, **files: Callable[[dict[str, Any]], None]) -> Path:
    """The embedded model with another template, or other settings in its files.

    Args:
        template: its own template to another.
        files: the name of a JSON file to what is changed in it.
    """
    folder.mkdir(parents=True)
    for path in SEEDLING_DIR.iterdir():
        if path.suffix == ".json" and path.stem in files:
            settings = json.loads(path.read_text())
            files[path.stem](settings)
            (folder / path.name).write_text(json.dumps(settings))
        elif path.name == "chat_template.jinja":
            own = path.read_text()
            changed = template(own)
            assert changed != own or template is str
            (folder / path.name).write_text(changed)
        elif path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def swap(old: str, new: str) -> Change:
    return lambda text: text.replace(old, new)


def begin(settings: dict[str, Any]) -> None:
    settings["bos_token"] = "<|endoftext|>"


def begin_added(settings: dict[str, Any]) -> None:
    settings |= {"bos_token": "<|endoftext|>", "add_bos_token": True}


def lower(settings: dict[str, Any]) -> None:
    settings["normalizer"] = {"type": "Lowercase"}


def few(settings: dict[str, Any]) -> None:
    settings["vocab_size"] = 1


CONTENT = "(message.content or '')"
NO_THOUGHTS = "((message.content or '').split('</think>')[-1])"
AGAIN = "{%- if message.role == 'assistant' %}{{- ' ' }}{%- endif %}\n{{- '<|im_end|>\\n' }}"
"""Appends a space to every reply, so that later prompts differ from the sampled text."""
