"""Positional arguments and options that commands share: one path and `a.b=c` settings, in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from arborl.errors import ConfigError, did_you_mean

COMMAND_OPTIONS: ContextVar[tuple[str, ...]] = ContextVar("command_options", default=())
"""Options of the running command, for the error about an unknown one."""
SETTINGS: dict[str, Any] = {"ignore_unknown_options": True}
"""Context of commands that accept settings: `split_settings` reports `--a.b=c` and says what to write."""


class SettingsCommand(TyperCommand):
    """A command that accepts `a.b=c` settings."""

    def invoke(self, ctx: Any) -> Any:
        names = (name for param in self.params for name in param.opts if name.startswith("--"))
        COMMAND_OPTIONS.set((*names, "--help"))
        return super().invoke(ctx)


def option(*names: str, **more: Any) -> Any:
    """An option whose default is not shown."""
    return typer.Option(*names, **{"show_default": False, **more})


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def _set_log_level(name: str | None) -> str | None:
    if name is not None:
        from arborl.track.run_log import show_level

        show_level(name)
    return name


LOG_LEVEL_HELP = "Log level on standard error: debug, info, warning or error. run.log has more."
LogLevel = Annotated[str | None, option("--log-level", metavar="LEVEL", help=LOG_LEVEL_HELP, callback=_set_log_level)]
FileAndSettings = Annotated[list[str] | None, argument("FILE a.b=c", "A YAML file, and settings that override it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Trust = Annotated[
    bool, option("--trust", help="Import code and contact servers that a run folder of another user names.")
]


def split_settings(arguments: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Paths and settings: `["run.yaml", "learner.lr=1e-4", "~data"]` has one path and two settings."""
    paths, settings = [], []
    arguments = list(arguments or ())
    for text, following in zip(arguments, (*arguments[1:], ""), strict=False):
        if text.startswith("-"):
            raise ConfigError(_unknown_option(text, following))
        is_setting = "=" in text or (text.startswith("~") and not text.startswith("~/"))
        if is_setting and not os.path.isfile(text):  # a path may contain `=` too
            settings.append(text)
        else:
            paths.append(text)
    return paths, settings


def path_and_settings(
    arguments: Sequence[str] | None, what: str, other: str | None = None
) -> tuple[str | None, list[str]]:
    """At most one path, which may be the value of an option (`other`), and the settings."""
    paths, settings = split_settings(arguments)
    return one_path([*paths, *([other] if other else [])], what), settings


def file_and_settings(
    arguments: Sequence[str] | None, what: str = "file", other: Path | None = None
) -> tuple[Path | None, list[str]]:
    path, settings = path_and_settings(arguments, what, str(other) if other is not None else None)
    return Path(path) if path is not None else None, settings


@contextmanager
def other_systems(file: Path | None) -> Iterator[None]:
    """If a file cannot be loaded because it is one of another system, the error says how to convert it."""
    try:
        yield
    except ConfigError as error:
        from arborl.convert import conversion_advice

        if file is not None and (advice := conversion_advice(file)):
            raise ConfigError(advice) from error
        raise


def check_choice(option_name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{option_name} {value}: must be one of {', '.join(choices)}.{did_you_mean(value, choices)}")


def one_path(paths: Sequence[str], what: str) -> str | None:
    """The only path, or None."""
    if len(paths) < 2:
        return paths[0] if paths else None
    # The path that looks least like a file is probably a setting without its `=`.
    path = next((path for path in paths if os.path.exists(path)), None)
    path = path or next((path for path in paths if path.endswith(".yaml")), paths[0])
    other = next(one for one in paths if one is not path)
    raise ConfigError(f"{other!r}: the {what} is already {path!r}. A setting is written {other}=VALUE.")


def _unknown_option(text: str, following: str) -> str:
    """The error for an unknown option. If it names a setting (`--seed 7`, `--lr 1e-4`), it says how to write that."""
    from arborl.config.load_config import find_setting

    options = COMMAND_OPTIONS.get()
    name, equals, value = text.partition("=")
    key = name.lstrip("-")
    if equals and name not in options:
        return f"{text!r}: a setting has no dashes. Write {key}={value}."
    setting = find_setting(key)
    if setting is not None:
        value = following if following and not following.startswith("-") and "=" not in following else "VALUE"
        return f"{name}: a setting has no dashes. Write {setting}={value}."
    return f"{name}: unknown option.{did_you_mean(name, options)} Known: {', '.join(options)}."
