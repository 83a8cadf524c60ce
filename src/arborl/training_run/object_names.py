"""Names of parts that are given as Python objects.

An object that can be imported is named by its import path. Any other is named `object:NAME`; loading that name without
the object is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

from arborl.config.config_base import Config
from arborl.registry import OBJECT_PREFIX, unique_name

PART_KEYS = ("agent", "env", "engine", "group_filter", "advantage", "loss", "name")
SECTIONS = ("rollout", "track", "algorithm")
PLAIN = (str, PathLike, int, float, type(None), Config)


def name_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = ObjectNames()
    return names.section(settings), names.objects


class ObjectNames:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def section(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A section or the whole configuration; keys may be dotted."""
        out = dict(settings)
        for key, value in settings.items():
            kind = str(key).rpartition(".")[2]
            if value is None:
                continue
            if kind in PART_KEYS or (kind in SECTIONS and isinstance(value, Mapping)):
                out[key] = self.part(value)
            elif kind in ("tools", "rewards", "trackers"):
                out[key] = [self.part(one) for one in (value if isinstance(value, list | tuple) else [value])]
            elif kind in ("sources", "agents", "by_source") and isinstance(value, Mapping):
                convert = self.data if kind == "sources" else self.part
                out[key] = {name: convert(one) for name, one in value.items()}
            elif kind == "data":
                out[key] = self.data(value)
            elif kind in ("rows", "evaluation_rows"):
                out[key] = self.rows(value)
        return out

    def part(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self.section(value)
        return value if isinstance(value, PLAIN) else self.name(value)

    def data(self, value: Any) -> Any:
        """Rows: a section, a path, a function that returns rows, the rows themselves, or splits of rows by name."""
        if isinstance(value, Mapping) and value and all(map(_is_table, value.values())):
            rest = dict(value)
            train = rest.pop("train", None) if "train" in rest else rest.pop(next(iter(rest)))
            held_out = next((rest[name] for name in ("validation", "test") if name in rest), None)
            return {"rows": self.rows(train)} | ({} if held_out is None else {"evaluation_rows": self.rows(held_out)})
        if isinstance(value, Mapping):
            return self.section(value)
        return value if isinstance(value, PLAIN) else {"rows": self.rows(value)}

    def rows(self, value: Any) -> Any:
        is_listed = isinstance(value, Iterable) and not isinstance(value, Mapping | str) and not callable(value)
        if is_listed or _is_table(value):
            value = _rows_function(_list_rows(value))
        return self.part(value)

    def name(self, value: Any) -> str:
        for known, one in self.objects.items():
            if one is value:
                return known
        label = str(getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__))
        name = import_path(value) or unique_name(f"{OBJECT_PREFIX}{label}", self.objects)
        self.objects[name] = value
        return name


def import_path(value: Any) -> str | None:
    """`package.module:attribute` if importing it yields this object; else None."""
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(attribute, str) or module == "__main__" or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return f"{module}:{attribute}" if found is value else None


def _is_table(value: Any) -> bool:
    """Whether it is a table of pandas, Polars, PyArrow or Hugging Face datasets."""
    return isinstance(getattr(value, "columns", getattr(value, "column_names", None)), Iterable)


def _list_rows(value: Any) -> list[Any]:
    """The rows of a list, of an iterator, or of a table; missing values of pandas become None."""
    for method in ("to_pylist", "to_dicts"):  # PyArrow, Polars
        if hasattr(value, method):
            return list(getattr(value, method)())
    if hasattr(value, "notna"):  # pandas
        rows = value.astype(object).where(value.notna(), None).to_dict("records")
        return [{str(name): _plain_cell(cell) for name, cell in row.items()} for row in rows]
    return list(value)


def _plain_cell(cell: Any) -> Any:
    return cell.tolist() if hasattr(cell, "tolist") else cell  # an array of NumPy


def _rows_function(kept: list[Any]) -> Callable[[], list[Any]]:
    def rows() -> list[Any]:
        return kept

    return rows
