"""Base class of all configuration sections, and readable messages for validation errors."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)  # fmt: skip
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from arborl.config.other_frameworks import SETTING_OF
from arborl.config.secrets import mask_secrets
from arborl.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """One section of settings: frozen; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
    )

    shorthand: ClassVar[str] = ""
    """Key that a bare string sets: `env: frozen_lake` means `env: {name: frozen_lake}`. Empty for none."""

    unlisted: ClassVar[tuple[str, ...]] = ()
    """Keys that only a section in a list or dict of such sections may have."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return expand_shorthand(cls, data)


def as_list(value: Any) -> Any:
    """A list of one part, for the part alone: `tools: calculator` means `tools: [calculator]`."""
    return (value,) if isinstance(value, str | Mapping | Config) else value


def _stop_strings(value: Any) -> Any:
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and "" in texts:
        raise ValueError("an empty stop string ends every completion at once. Leave it out.")
    return texts


StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop_strings)]
"""Strings that end a completion: one, or a list."""

C = TypeVar("C", bound=Config)
Loc = tuple[int | str, ...]


@dataclass(frozen=True)
class KeysOf:
    """Annotation of a dict: its keys are settings of `model`. For arguments that depend on the chosen part."""

    model: type[Config]
    overrides: bool = False
    """The settings are those of another section; only written ones are kept."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        schema = handler(source)
        return core_schema.no_info_before_validator_function(self._written, schema) if self.overrides else schema

    def _written(self, value: Any) -> Any:
        return self.model.model_validate(value).model_dump(exclude_none=True) if isinstance(value, Mapping) else value


def refuse_key(key: str, value: Any, message: str) -> NoReturn:
    """In the validator of a dict: raise an error with the path of one of its keys."""
    error: Any = {"type": "value_error", "loc": (key,), "input": value, "ctx": {"error": ValueError(message)}}
    raise ValidationError.from_exception_data(key, [error])


def check_args(model: type[C], args: Mapping[str, Any], reads: Collection[str], unread: Callable[[str], str]) -> C:
    """In the validator of `args`: the arguments as a `model`.

    Args:
        reads: arguments that the chosen part reads; others are refused unless they have their default.
        unread: the message for an argument that it does not read.
    """
    given = model.model_validate(args)
    for name in sorted(given.model_fields_set.difference(reads)):
        if getattr(given, name) != model.model_fields[name].get_default(call_default_factory=True):
            refuse_key(name, args[name], unread(name))
    return given


def overrides_of(model: type[Config], *names: str, **others: Any) -> KeysOf:
    """The annotation of a dict that overrides settings of `model`.

    Args:
        names: the settings.
        others: further ones, with a type of their own.
    """
    fields: dict[str, Any] = {}
    for name in (*names, *others):
        field = model.model_fields[name]
        kind: Any = others.get(name) or Annotated[field.annotation, *field.metadata, None]
        fields[name] = (
            Annotated[kind.__origin__ | None, *kind.__metadata__],
            Field(None, description=field.description),
        )
    overrides = create_model(f"{model.__name__}Overrides", __base__=Config, **fields)
    return KeysOf(overrides, True)


def expand_shorthand(model: type[Config], data: Any) -> Any:
    """The section that a bare string is short for; other values unchanged."""
    if model.shorthand and isinstance(data, str | os.PathLike):
        return {model.shorthand: os.fspath(data)}
    return data


def section_model(model: type[Config], key: str) -> type[Config] | None:
    """The class of the section `key` of `model`; None if `key` is not a section."""
    field = model.model_fields.get(key)
    annotation = field.annotation if field else None
    for rule in field.metadata if field else ():
        if isinstance(rule, KeysOf):
            return rule.model
    return annotation if isinstance(annotation, type) and issubclass(annotation, Config) else None


def item_model(model: type[Config], key: str) -> type[Config] | None:
    """The class of the items if `key` of `model` is a list of sections, or of an optional section."""
    field = model.model_fields.get(key)
    args = get_args(field.annotation) if field else ()
    return next((arg for arg in args if isinstance(arg, type) and issubclass(arg, Config)), None)


def setting_paths(model: type[Config], prefix: str = "") -> Iterator[str]:
    """All keys of the tree as dotted paths: `learner`, `learner.lr`, …"""
    for key in model.model_fields:
        if key in model.unlisted:
            continue
        yield prefix + key
        if inner := section_model(model, key):
            yield from setting_paths(inner, f"{prefix}{key}.")


def validate(model: type[C], data: Any) -> C:
    """Validate `data` as a `model`. Raises `ConfigError` with one line per mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, model)) from error


# ------------------------------------------------------------------------------------------------ error messages


def explain(error: ValidationError, model: type[Config]) -> str:
    """One line per mistake: `path: what is wrong, and what to write instead`.

    Example:
        lr: unknown key. Did you mean 'learner.lr'?
        trainer.steps: must be a whole number >= 1, given 0.
    """
    lines = []
    for found in error.errors():
        path, message = ".".join(map(str, found["loc"])), _message(found, model)
        lines.append(f"{path}: {message}" if path else message)
    return "\n".join(lines)


ELSEWHERE = {
    "envs": "data.sources.NAME.env, with a ratio",
    "val_envs": "data.sources.NAME.evaluation_tasks",
    "limits": "rollout or sampling in its place",
    "wandb": "track.trackers=[wandb]",
    "mlflow": "track.trackers=[mlflow]",
    "render_save_dir": "track.render_every=10",
    "trust_region": "algorithm.args.max_kl",
    "value": "algorithm.args.value_coef or value_clip",
    "zero_stage": "learner.strategy=zero1, zero2 or zero3",
    "critic_detach": "learner.critic=detached",
}
"""What to write instead of keys that other frameworks, or earlier versions, have."""


def suggest_key(key: str, model: type[Config], above: Loc = ()) -> str:
    """` Did you mean …?` for an unknown `key` in the section `above`: the same key elsewhere, or a similar one."""
    if key in ELSEWHERE:
        return f" Write {ELSEWHERE[key]}."
    if key in SETTING_OF and len(above) <= 1:  # sections below have parameters of other meanings
        return f" Write {SETTING_OF[key]}."
    all_paths = list(setting_paths(model))
    section = _model_at(model, above)
    keys = list(section.model_fields) if section else []
    prefix = "".join(f"{part}." for part in above)
    same = [path for path in all_paths if path.rpartition(".")[2] == key]
    if 1 <= len(same) <= 3:
        return f" Did you mean {' or '.join(map(repr, same))}?"
    if near := difflib.get_close_matches(key, keys, n=1, cutoff=0.6):
        return f" Did you mean {prefix + near[0]!r}?"
    leaves = {path.rpartition(".")[2]: path for path in reversed(all_paths)}
    if near := difflib.get_close_matches(key, leaves, n=1, cutoff=0.7):
        return f" Did you mean {leaves[near[0]]!r}?"
    return f" Known here: {', '.join(keys)}." if keys else ""


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


def _message(error: Any, model: type[Config]) -> str:
    """What is wrong with one setting, from pydantic's description of the error."""
    loc, value, kind = error["loc"], error["input"], error["type"].partition("_")[0]
    match error["type"]:
        case "extra_forbidden" | "no_such_attribute":
            return f"unknown key.{suggest_key(str(loc[-1]), model, loc[:-1])}"
        case "missing":
            return "is missing."
        case "too_long":
            return f"must have {error['ctx']['max_length']} items, given {_short(value)}."
        case "value_error":
            return str(error["ctx"]["error"])
        case "literal_error":
            choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            return f"must be one of {', '.join(choices)}; given {_short(value)}.{did_you_mean(str(value), choices)}"
    if kind in ("int", "float", "greater", "less"):
        field = _field_at(model, loc)
        whole = kind == "int" or (field is not None and int in (field.annotation, *get_args(field.annotation)))
        return f"must be {_KINDS['int' if whole else 'float']}{_range(field)}, given {_short(value)}."
    if kind == "tuple" and isinstance(value, str):
        return f"must be a list, given {value!r}. Write {loc[-1]}=[{value}]."
    what = f"must be {_KINDS[kind]}" if kind in _KINDS else error["msg"]
    return f"{what}, given {_short(value)}."


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
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
    is_key = True
    for part in loc:
        if not is_key or not isinstance(part, str) or here is None:
            is_key = True  # a name in a dict of sections, or an index in a list of them
            continue
        inner = section_model(here, part)
        field = here.model_fields.get(part)
        is_key = inner is not None or field is None or get_origin(field.annotation) is not dict
        here = inner or item_model(here, part)
    return here


def _field_at(model: type[Config], loc: Loc) -> FieldInfo | None:
    """The field of the last key in `loc`; an index after it belongs to the same field."""
    keys = [index for index, part in enumerate(loc) if isinstance(part, str)]
    if not keys:
        return None
    above = _model_at(model, loc[: keys[-1]])
    return above.model_fields.get(str(loc[keys[-1]])) if above else None


# ------------------------------------------------------------------------------------------------ YAML


def dump_yaml(config: Config) -> str:
    """The whole tree with defaults as YAML; `load` reads it back to an equal `config`. Secrets are masked."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(mask_secrets(to_plain(config)))))


def to_plain(config: Config) -> dict[str, Any]:
    """The whole tree as values of JSON; `validate` restores an equal `config`."""
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
        "Write a number, text, a list or a section."
    )


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key and values of the settings that differ between two plain configurations; secrets are neither compared nor
    returned."""
    old, new = (flatten(mask_secrets(tree)) for tree in (before, now))
    for key in sorted(old.keys() | new.keys()):
        if key != "output_dir" and old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _escaped(value: Any) -> Any:
    """Escape `${`: in a resolved tree it is text, not a reference."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
