"""Parts by name: a short name of a literal table, `package.module:attribute`, or `FILE.py:attribute`.

Nothing registers itself on import; a table can be listed without importing its parts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from arborl.errors import ConfigError, UnknownPartError, did_you_mean

OBJECT_PREFIX = "object:"
"""Prefix of the names of Python objects that cannot be imported."""
PART_NAME = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*|[^:\s][^:\r\n]*\.py):([^\W\d][\w./\-]*)")


def parse_part_name(text: str) -> tuple[str, str] | None:
    """Module and attribute of `package.module:attribute`, or path and attribute of `FILE.py:attribute`; None of any
    other text.

    All imports of parts and the trust check of configurations use this function; a text that it rejects is never
    imported. Ids of Gymnasium, such as `package.module:Maze-v0`, are part names too.

    >>> parse_part_name("my_pkg.envs:Maze"), parse_part_name("~/my-project/rewards.py:score")
    (('my_pkg.envs', 'Maze'), ('~/my-project/rewards.py', 'score'))
    >>> [parse_part_name(text) for text in ("envs:", "my-envs:Maze", "envs:1", "envs:Maze\\n", "envs")]
    [None, None, None, None, None]
    """
    found = PART_NAME.fullmatch(text)
    return None if found is None or text.startswith(OBJECT_PREFIX) else (found[1], found[2])


class _CurrentFolder:
    """Whether parts are searched in the current folder; it joins `sys.path` when the first part is loaded."""

    searched = False


def search_current_folder() -> None:
    """Also search parts in the current folder, as `python -m` does.

    It joins `sys.path` only when a part is loaded, so that a module there cannot shadow one that a command imports
    before it has checked its configuration.
    """
    _CurrentFolder.searched = True


def add_current_folder() -> None:
    """Add the current folder to `sys.path` if `search_current_folder` was called."""
    if _CurrentFolder.searched and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


class Registry(Mapping[str, Any]):
    """Maps a short name or `module:attribute` to an object.

    Example:
        ENVS = Registry("environment", {"frozen_lake": "arborl.envs.games.frozen_lake:FrozenLake"})
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
                f"Known: {', '.join(self.table)}; or write your own as 'package.module:attribute'."
            )
        return load(self.table.get(name, name), self.kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def build(self, name: str, args: Mapping[str, Any], where: str) -> Any:
        """Call the part with `args`, after checking every key; `where` is the path of `args` in the configuration."""
        return call_checked(self[name], args, where)


def load(path: str, kind: str = "object") -> Any:
    """Import `package.module:attribute` or `FILE.py:attribute`."""
    if path.startswith(OBJECT_PREFIX):
        attribute = path.removeprefix(OBJECT_PREFIX)
        raise UnknownPartError(
            f"the {kind} {attribute!r} was given to the run as a Python object that cannot be imported. Use the run "
            "from Python with the object (run.evaluate(), or arborl.run(resume=…)), or put it into a module and write "
            f"'package.module:{attribute}'."
        )
    parsed = parse_part_name(path)
    if parsed is None:
        raise UnknownPartError(
            f"{path!r} (wanted as {kind}) is not the name of a part. Write package.module:attribute, or "
            "FILE.py:attribute."
        )
    module_name, attribute = parsed
    if module_name.endswith(".py") and not (file := Path(module_name).expanduser()).is_file():
        start = "" if file.is_absolute() else f" in {Path.cwd()}, where relative paths start"
        raise UnknownPartError(f"{path!r} (wanted as {kind}): there is no file {module_name}{start}.")
    if module_name.partition(".")[0] != "arborl":
        add_current_folder()
    try:
        found = _file_module(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownPartError(
            f"cannot import {module_name!r} for the {kind} {path!r}: {error}. "
            "Is the package installed, or its folder on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise UnknownPartError(
            f"importing {module_name!r} for the {kind} {path!r} failed: {_error_location(error)}"
        ) from error
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
    if _is_standard_library(found):
        raise UnknownPartError(
            f"{path!r} is part of Python and cannot be the {kind}. Write your own function or class around it."
        )
    return found


def _file_module(path: str) -> ModuleType:
    """The module of a file; the same for all names of the file."""
    file = Path(path).expanduser().resolve()
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _is_standard_library(found: Any) -> bool:
    """Whether a function or class belongs to the standard library, by its file."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return False
    name = getattr(found, "__module__", None) or type(found).__module__
    if str(name).partition(".")[0] not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return file is None or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _error_location(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = [(Path(frame.filename).name, frame.lineno) for frame in last]
    if isinstance(error, SyntaxError):
        where = [(Path(error.filename or "").name, error.lineno)]
    place = "".join(f" ({name}, line {number})" for name, number in where)
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}{place}"


def call_checked(part: Any, args: Mapping[str, Any], where: str) -> Any:
    """Call `part(**args)`; an unknown argument is an error that lists the known ones."""
    check_arguments(part, args, where)
    try:
        return part(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def check_arguments(part: Any, args: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError unless `part` accepts these arguments and none is missing; it is not called."""
    if not callable(part):
        raise ConfigError(
            f"{where}: is a {type(part).__name__} object. Write its class, or a function that returns one."
        )
    bare = inspect.isclass(part) and part.__init__ is object.__init__  # its signature accepts anything
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
    """The name without the module: `package.module:Maze` -> `Maze`."""
    return name.rpartition(":")[2]


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name, or `name-2`, `name-3`, … if it is taken."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
