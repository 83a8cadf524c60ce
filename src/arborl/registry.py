"""Parts by name: a short one from a literal table in the part's room, or `package.module:attribute`.

Nothing registers itself on import: a table can be listed, and grepped, without importing what it names.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError, UnknownPartError, did_you_mean

OBJECT_PREFIX = "object:"
"""In front of the names of parts that were given as Python objects, and that nothing can be imported by."""
PART_NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d][\w./\-]*)")


def parse_part_name(text: str) -> tuple[str, str] | None:
    """Module and attribute of `package.module:attribute`; None of any other text.

    Every import of a part goes through this function, and so does the check of a stranger's configuration. A text that
    it refuses is never imported. Ids of Gymnasium, such as `package.module:Maze-v0`, are part names too.

    >>> parse_part_name("my_pkg.envs:Maze")
    ('my_pkg.envs', 'Maze')
    >>> [parse_part_name(text) for text in ("envs:", "my-envs:Maze", "envs:1", "envs:Maze\\n", "envs")]
    [None, None, None, None, None]
    """
    found = PART_NAME.fullmatch(text)
    return None if found is None or text.startswith(OBJECT_PREFIX) else (found[1], found[2])


class _CurrentFolder:
    """Whether parts are also searched in the current folder; it is put on `sys.path` when the first part is loaded."""

    searched = False


def search_current_folder() -> None:
    """Search parts in the current folder too, as `python -m` would. It joins `sys.path` only when a part is loaded, so
    that a module there cannot take the place of one that a command imports before it has read its configuration."""
    _CurrentFolder.searched = True


def add_current_folder() -> None:
    """Put the current folder on `sys.path` now, where `search_current_folder` was called."""
    if _CurrentFolder.searched and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


class Registry(Mapping[str, Any]):
    """Short name or `module:attribute` -> object.

    Example:
        ENVS = Registry("environment", {"frozen_lake": "arborl.envs.frozen_lake:FrozenLake"})
        ENVS["frozen_lake"]        # the class
        ENVS["my_pkg.envs:Maze"]   # yours, no registration needed
    """

    def __init__(self, kind: str, table: dict[str, str]):
        self.kind = kind
        self.table = table

    def __getitem__(self, name: str) -> Any:
        if name not in self.table and ":" not in name:
            raise UnknownPartError(
                f"no {self.kind} is called {name!r}.{did_you_mean(name, self.table)} "
                f"Known: {', '.join(self.table)}; or give your own as 'package.module:attribute'."
            )
        return load(self.table.get(name, name), self.kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def build(self, name: str, args: Mapping[str, Any], where: str) -> Any:
        """Call the part with `args`, after checking every key against its signature.

        Args:
            name: short name or `module:attribute`.
            args: keyword arguments, as a configuration gave them.
            where: path of `args` in the configuration, for the error message.
        """
        return call_checked(self[name], args, where)


def load(path: str, kind: str = "object") -> Any:
    """Import `package.module:attribute`."""
    if path.startswith(OBJECT_PREFIX):
        attribute = path.removeprefix(OBJECT_PREFIX)
        raise UnknownPartError(
            f"the {kind} {attribute!r} was given to the run as a Python object that cannot be imported by a name. Go "
            "on from Python with the object at hand (run.evaluate(), or arborl.run(resume=…)), or put it into a module "
            f"and give 'package.module:{attribute}'."
        )
    parsed = parse_part_name(path)
    if parsed is None:
        raise UnknownPartError(f"{path!r} (wanted as {kind}) is not a part's name. Write package.module:attribute.")
    module_name, attribute = parsed
    if module_name.partition(".")[0] != "arborl":
        add_current_folder()
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownPartError(
            f"cannot import {module_name!r} for the {kind} {path!r}: {error}. "
            "Is the package installed, or its folder on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise UnknownPartError(f"importing {module_name!r} for the {kind} {path!r} failed: {_told(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            raise UnknownPartError(
                f"{module_name!r} has no {attribute!r} (wanted as {kind}).{did_you_mean(part, names)}"
            )
        found = getattr(found, part)
        if inspect.ismodule(found):
            raise UnknownPartError(
                f"{path!r} (wanted as {kind}): {part!r} is a module. Write {found.__name__}:ATTRIBUTE."
            )
    if _is_pythons_own(found):
        raise UnknownPartError(
            f"{path!r} is Python's own, and no {kind}. Write a function or a class of your own around it."
        )
    return found


def _is_pythons_own(found: Any) -> bool:
    """Whether a function or class comes with Python. A module of one's own may have the name of one of Python's, so its
    file decides."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return False
    name = getattr(found, "__module__", None) or type(found).__module__
    if str(name).partition(".")[0] not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return file is None or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _told(error: Exception) -> str:
    """What went wrong, and in which line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = [(Path(frame.filename).name, frame.lineno) for frame in last]
    if isinstance(error, SyntaxError):
        where = [(Path(error.filename or "").name, error.lineno)]
    place = "".join(f" ({name}, line {number})" for name, number in where)
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}{place}"


def call_checked(part: Any, args: Mapping[str, Any], where: str) -> Any:
    """`part(**args)`, where an argument it does not take is an error that lists what it takes."""
    check_arguments(part, args, where)
    try:
        return part(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def check_arguments(part: Any, args: Mapping[str, Any], where: str) -> None:
    """That `part` takes these arguments by name and has all that it needs; it is not called."""
    if not callable(part):
        what = type(part).__name__
        raise ConfigError(
            f"{where}: an object of {what} is there already; give the class, or a function that makes one."
        )
    bare = inspect.isclass(part) and part.__init__ is object.__init__  # whose signature says it takes anything
    parameters = {} if bare else inspect.signature(part).parameters
    known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in args:
            if key not in known:
                takes = ", ".join(known) or "no arguments"
                raise ConfigError(f"{where}.{key}: unknown argument.{did_you_mean(key, known)} It takes: {takes}.")
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in args:
            raise ConfigError(f"{where}.{name}: is missing. Write {where}.{name}=VALUE.")


def short_name(name: str) -> str:
    """What a part is called where its module does not matter: `package.module:Maze` -> `Maze`."""
    return name.rpartition(":")[2]


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name, or where it is taken `name-2`, `name-3`, …"""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
