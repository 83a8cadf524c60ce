"""The base of every section, and what turns a mistake in one into a line that says what to write instead."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from arborl.config.secrets import masked
from arborl.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """A section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
    )

    shorthand: ClassVar[str] = ""
    """The key that a bare string stands for (`env: frozen_lake` is short for `env: {name: frozen_lake}`), if any."""

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, given: Any) -> Any:
        return spelt_out(cls, given)


def _one_or_more_texts(given: Any) -> Any:
    texts = (given,) if isinstance(given, str) else given
    if isinstance(texts, list | tuple) and "" in texts:
        raise ValueError("an empty text is written at once and would end every completion. Leave it out.")
    return texts


StopTexts = Annotated[tuple[str, ...], BeforeValidator(_one_or_more_texts)]
"""Texts that end a completion; one alone need not be a list."""

C = TypeVar("C", bound=Config)
Loc = tuple[int | str, ...]


def spelt_out(model: type[Config], given: Any) -> Any:
    """A bare string as the section it is short for; anything else unchanged."""
    if model.shorthand and isinstance(given, str | os.PathLike):
        return {model.shorthand: os.fspath(given)}
    return given


def section(model: type[Config], key: str) -> type[Config] | None:
    """The model of `key` when it is a section of `model`."""
    field = model.model_fields.get(key)
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Config) else None


def element(model: type[Config], key: str) -> type[Config] | None:
    """The model of the elements when `key` of `model` is a list of sections."""
    field = model.model_fields.get(key)
    found = (
        [arg for arg in get_args(field.annotation) if isinstance(arg, type) and issubclass(arg, Config)]
        if field
        else []
    )
    return found[0] if found else None


def paths(model: type[Config], prefix: str = "") -> Iterator[str]:
    """Every key of the tree, dotted: `learner`, `learner.lr`, …"""
    for key in model.model_fields:
        yield prefix + key
        if inner := section(model, key):
            yield from paths(inner, f"{prefix}{key}.")


def validate(model: type[C], data: Any) -> C:
    """`data` as a `model`, or a `ConfigError` with one line for each mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, model)) from error


# ------------------------------------------------------------------------------------------------ what is wrong


def explain(error: ValidationError, model: type[Config]) -> str:
    """One line for each mistake, `path: what is wrong and what to write`.

    Example:
        lr: unknown key. Did you mean 'learner.lr'?
        trainer.steps: must be a whole number >= 1, given 0.
    """
    lines = []
    for found in error.errors():
        path, what = ".".join(map(str, found["loc"])), _what(found, model)
        lines.append(f"{path}: {what}" if path else what)
    return "\n".join(lines)


def suggest(key: str, model: type[Config], above: Loc = ()) -> str:
    """` Did you mean …?` for an unknown `key` below `above`: the same key elsewhere, or a near one."""
    everywhere = list(paths(model))
    level = _model_at(model, above)
    here = list(level.model_fields) if level else []
    prefix = "".join(f"{part}." for part in above)
    same = [path for path in everywhere if path.rpartition(".")[2] == key]
    if 1 <= len(same) <= 3:
        return f" Did you mean {' or '.join(map(repr, same))}?"
    if near := difflib.get_close_matches(key, here, n=1, cutoff=0.6):
        return f" Did you mean {prefix + near[0]!r}?"
    leaves = {path.rpartition(".")[2]: path for path in reversed(everywhere)}
    if near := difflib.get_close_matches(key, leaves, n=1, cutoff=0.7):
        return f" Did you mean {leaves[near[0]]!r}?"
    return f" Known here: {', '.join(here)}." if here else ""


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "tuple": "a list",
    "dict": "a section of keys and values",
    "model": "a section of keys and values",
}


def _what(found: Any, model: type[Config]) -> str:
    loc, given = found["loc"], found["input"]
    kind = found["type"].partition("_")[0]
    if found["type"] == "extra_forbidden":
        return f"unknown key.{suggest(str(loc[-1]), model, loc[:-1])}"
    if found["type"] == "missing":
        return "is missing."
    if found["type"] == "too_long":
        return f"must have {found['ctx']['max_length']} items, given {_short(given)}."
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    if found["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", found["ctx"]["expected"])
        return f"must be one of {', '.join(choices)}; given {_short(given)}.{did_you_mean(str(given), choices)}"
    if kind in ("int", "float", "greater", "less"):
        field = _field_at(model, loc)
        whole = kind == "int" or (field is not None and int in (field.annotation, *get_args(field.annotation)))
        return f"must be {_KINDS['int' if whole else 'float']}{_range(field)}, given {_short(given)}."
    if kind == "tuple" and isinstance(given, str):
        return f"must be a list, given {given!r}. Write {loc[-1]}=[{given}]."
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, given {_short(given)}."
    return f"{found['msg']}, given {_short(given)}."


def _short(given: Any) -> str:
    text = "null" if given is None else repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


def _range(field: FieldInfo | None) -> str:
    """` > 0 and < 1`, from the field's bounds."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in (field.metadata if field else ())
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _model_at(model: type[Config], loc: Loc) -> type[Config] | None:
    here: type[Config] | None = model
    for part in loc:
        if isinstance(part, str) and here is not None:
            here = section(here, part) or element(here, part)
    return here


def _field_at(model: type[Config], loc: Loc) -> FieldInfo | None:
    """The field of the last key in `loc`; an index below it is about the same field."""
    keys = [index for index, part in enumerate(loc) if isinstance(part, str)]
    if not keys:
        return None
    above = _model_at(model, loc[: keys[-1]])
    return above.model_fields.get(str(loc[keys[-1]])) if above else None


# ------------------------------------------------------------------------------------------------ as a file


def dump_yaml(config: Config) -> str:
    """The whole tree, defaults included, as YAML that `load` reads back to an equal `config`. Secrets are masked."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(masked(plain(config)))))


def plain(config: Config) -> dict[str, Any]:
    """The whole tree in what JSON and YAML have: `validate` makes an equal `config` of it."""
    tree: dict[str, Any] = _plain(config.model_dump(), "")
    return tree


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{path}: an object of type {type(value).__name__} cannot be written to a file. "
        "Give a number, text, a list or a section."
    )


def _escaped(value: Any) -> Any:
    """The same with `${` escaped: in a resolved tree it is text, and no reference to another key."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
