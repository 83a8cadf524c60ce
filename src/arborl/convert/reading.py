"""Keys and values out of shell scripts and override lists. A script is read, never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.errors import ConfigError

ASSIGNMENT = re.compile(r"^(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)=(.*)$")
OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_][\w/@-]*(?:\.[\w@/-]+)+)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*))?\}|\$(\w+)")
ARRAY = re.compile(r"^\((.*)\)$", re.DOTALL)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Dotted keys with their values, and the variables of a script.

    Example:
        read(Path("train.sh"))     # ({"data.train_batch_size": 32, …}, {"batch_size": 32, …})
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file.") from error
    return read_script(text, str(path))


def read_script(text: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Overrides and variables of a shell script, or of a plain list of overrides, one or more a line."""
    variables: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for line in _lines(text):
        found = ASSIGNMENT.match(line)
        if found and "." not in line.partition("=")[0]:
            variables[found[1]] = _expand(_unquoted(found[2]), variables)
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{where}: cannot read {line[:60]!r}: {error}") from error
        for word in words:
            if override := OVERRIDE.match(word):
                settings[override[1]] = plain(_expand(override[2], variables))
    return settings, {name: plain(value) for name, value in variables.items()}


def _lines(text: str) -> Iterator[str]:
    """Commands, each on one line: continued lines and arrays over several are joined, comments are left out."""
    joined = re.sub(r"\\\s*\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    joined = re.sub(r"=\(([^)]*)\)", lambda match: "=(" + " ".join(match[1].split()) + ")", joined)
    for line in joined.splitlines():
        if line.strip():
            yield line.strip()


def _unquoted(text: str) -> str:
    text = re.sub(r"""^("[^"]*"|'[^']*'|\([^)]*\)|[^\s#]*).*$""", r"\1", text.strip())
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _expand(text: str, variables: Mapping[str, str]) -> str:
    for _ in range(10):
        changed = VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
        if changed == text:
            break
        text = changed
    return text


def plain(text: str) -> Any:
    """A value as YAML would read it; a shell array as a list.

    Example:
        plain("5e-7")       # 5e-07
        plain("(a b)")      # ['a', 'b']
    """
    if array := ARRAY.match(text):
        return shlex.split(array[1])
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 takes 5e-7 for text
        except ValueError:
            return value
    return text if value is None and text else value
