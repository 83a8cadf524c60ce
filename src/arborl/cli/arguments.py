"""Positional arguments of a verb: one file or folder, and `a.b=c` settings, in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from arborl.errors import ConfigError, did_you_mean

LEVEL = "Log lines on standard error: debug, info, warning or error. run.log has more."


def _leveled(name: str | None) -> str | None:
    if name is not None:
        from arborl.track.logs import show_level

        show_level(name)
    return name


LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help=LEVEL, callback=_leveled, show_default=False),
]
"""An option of every verb that runs something."""


def split(arguments: Sequence[str], options: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Paths and settings.

    Example:
        split(["run.yaml", "learner.lr=1e-4", "~data"])     # (["run.yaml"], ["learner.lr=1e-4", "~data"])

    Args:
        arguments: as typed.
        options: the verb's own options, for the message about one that it does not have.
    """
    paths, settings = [], []
    for argument, after in zip(arguments, (*arguments[1:], ""), strict=False):
        if argument.startswith("-"):
            raise ConfigError(_unknown_option(argument, after, options))
        is_setting = "=" in argument or (argument.startswith("~") and not argument.startswith("~/"))
        if is_setting and not os.path.isfile(argument):  # a path may hold `=` too
            settings.append(argument)
        else:
            paths.append(argument)
    return paths, settings


def one_path(paths: Sequence[str], what: str) -> str | None:
    """The only path, if any."""
    if len(paths) < 2:
        return paths[0] if paths else None
    # Among several, the one that looks least like a file is the setting that lost its `=`.
    kept = next((path for path in paths if os.path.exists(path)), None)
    kept = kept or next((path for path in paths if path.endswith(".yaml")), paths[0])
    other = next(path for path in paths if path is not kept)
    raise ConfigError(f"{other!r}: the {what} is {kept!r} already, and a setting is written {other}=VALUE.")


def _unknown_option(argument: str, after: str, options: Sequence[str]) -> str:
    """What to write instead, where it was meant as a setting: `--seed 7`, `--learner.lr=1e-4`, `--lr 1e-4`."""
    from arborl.config.load_config import find_setting

    name, equals, value = argument.partition("=")
    key = name.lstrip("-")
    if equals and key not in [option.lstrip("-") for option in options]:
        return f"{argument!r}: a setting has no dashes. Write {key}={value}."
    known = find_setting(key)
    if known is not None:
        value = after if after and not after.startswith("-") and "=" not in after else "VALUE"
        return f"{name}: a setting has no dashes. Write {known}={value}."
    return f"{name}: unknown option.{did_you_mean(name, options)} Known: {', '.join(options) or 'none'}."
