"""Parts given as Python objects, and what they are called in a configuration.

An object that can be imported again is called by its import path, so that a run's folder says all there is to say. Any
other is called `object:NAME`, which no library name is like: whoever reads the folder without the object is told so,
instead of getting another part that happens to have the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

from arborl.config.base import Config
from arborl.registry import HANDED_IN, unique

PARTS = ("agent", "env", "engine", "group_filter", "advantage", "loss", "name")
"""Keys, at whatever depth, that hold a part."""
SECTIONS = ("rollout", "track", "algorithm")
"""Keys of sections that hold some of those."""
PLAIN = (str, PathLike, int, float, type(None), Config)


def name_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings with names in place of objects, and the objects by those names."""
    names = Names()
    return names.section(settings), names.objects


class Names:
    """Gives out names, one an object."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def section(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A section, or the whole, whose keys may be dotted."""
        out = dict(given)
        for key, value in given.items():
            kind = str(key).rpartition(".")[2]
            if value is None:
                continue
            if kind in PARTS or (kind in SECTIONS and isinstance(value, Mapping)):
                out[key] = self.part(value)
            elif kind in ("tools", "rewards", "trackers"):
                out[key] = [self.part(one) for one in (value if isinstance(value, list | tuple) else [value])]
            elif kind in ("sources", "agents", "by_source") and isinstance(value, Mapping):
                of = self.data if kind == "sources" else self.part
                out[key] = {name: of(one) for name, one in value.items()}
            elif kind == "data":
                out[key] = self.data(value)
            elif kind in ("rows", "evaluation_rows"):
                out[key] = self.rows(value)
        return out

    def part(self, value: Any) -> Any:
        """Something that a name stands for, alone or in a section."""
        if isinstance(value, Mapping):
            return self.section(value)
        return value if isinstance(value, PLAIN) else self.name(value)

    def data(self, value: Any) -> Any:
        """Where rows come from: a section or a path as they are; a function that gives rows, or the rows."""
        if isinstance(value, Mapping):
            return self.section(value)
        return value if isinstance(value, PLAIN) else {"rows": self.rows(value)}

    def rows(self, value: Any) -> Any:
        if isinstance(value, Iterable) and not isinstance(value, Mapping | str) and not callable(value):
            value = _giving(list(value))
        return self.part(value)

    def name(self, value: Any) -> str:
        """The object's name here; the same one whenever it is asked for."""
        for known, one in self.objects.items():
            if one is value:
                return known
        own = str(getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__))
        name = import_path(value) or unique(f"{HANDED_IN}{own}", self.objects)
        self.objects[name] = value
        return name


def import_path(value: Any) -> str | None:
    """`package.module:attribute`, where it leads to this very object in any process that finds the module."""
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(attribute, str) or module == "__main__" or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return f"{module}:{attribute}" if found is value else None


def _giving(kept: list[Any]) -> Callable[[], list[Any]]:
    def rows() -> list[Any]:
        return kept

    return rows
