"""Generates the page of all settings: `python -m arborl.config.config_page > docs/configuration.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from arborl.config.config_base import Config, KeysOf, item_model, section_model
from arborl.config.run_config import RunConfig
from arborl.config.tool_config import SparseConfig

HEAD = """# Configuration

All settings with their defaults. A file is YAML with these keys; the command line has `a.b=c`, Python
`arborl.run(**{"a.b": c})`. A bare string for a section with a `name` sets the name: `env=frozen_lake`. `tools.N` is an
item of the list `tools`, counted from 0; a single item needs no list. `steps` is short for `trainer.steps`.
Files may have a `defaults:` list, as in Hydra. An unknown key is an error.
A configuration is code: `package.module:attribute` is imported and called; see [resume.md](resume.md).

This page is generated: `python -m arborl.config.config_page > docs/configuration.md`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section("", RunConfig)]) + "\n"


def _section(path: str, model: type[Config]) -> Iterator[str]:
    fields = model.model_fields.items()
    sections = {
        name: found for name, field in fields if (found := section_model(model, name)) and not _overrides(field)
    }
    inner = [(name, found) for name, _ in fields if (found := sections.get(name) or _optional(model, name))]
    inner += [(f"{name}.N", found) for name, field in fields if (found := _item(field))]
    if path:
        yield f"\n## {path}\n"
        yield f"{_text(model.__doc__)}\n"
    yield "| key | default | |\n|---|---|---|"
    for name, field in fields:
        if name not in sections:
            above = [path] if path else []
            key = ".".join([*above, *(["sources", "NAME"] if name in model.unlisted else []), name])
            yield f"| `{key}` | {_default(field)} | {_text(field.description)} |"
    for name, found in inner:
        if name.removesuffix(".N") not in model.unlisted:
            yield from _section(f"{path}.{name}" if path else name, found)


def _overrides(field: FieldInfo) -> bool:
    """Whether the keys are those of another section."""
    return any(isinstance(rule, KeysOf) and rule.overrides for rule in field.metadata)


def _item(field: FieldInfo) -> type[Config] | None:
    """The class of the items of a list of sections."""
    inside = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    return next((one for one in inside if isinstance(one, type) and issubclass(one, Config)), None)


def _optional(model: type[Config], name: str) -> type[Config] | None:
    """The class of an optional section inside a list item."""
    return item_model(model, name) if issubclass(model, SparseConfig) else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None or value == "":
        return "none"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(getattr(item, 'name', item)) for item in value)}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _text(words: str | None) -> str:
    return " ".join((words or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
