"""The arguments of a tool: a JSON schema for the model to read, and a check of what the model then wrote.

Both come from one pydantic model built from the function's signature, so they cannot disagree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from arborl.errors import did_you_mean


class ArgumentError(ValueError):
    """The model's arguments do not fit; the message is written for the model."""


class Arguments:
    """What a function takes.

    Example:
        takes = Arguments("add", add, {"a": "the first number"})
        takes.schema                        # {"type": "object", "properties": {"a": {"type": "integer", …}}, …}
        takes.check({"a": "3"})             # {"a": 3}
        takes.check({})                     # ArgumentError: add: argument 'a' is missing; it takes a (integer)
    """

    def __init__(self, name: str, function: Callable[..., Any], descriptions: Mapping[str, str]):
        self.name = name
        self.model = _model(name, function, descriptions)
        self.schema = _tidy(self.model.model_json_schema(schema_generator=_Plain))

    def check(self, given: Any) -> dict[str, Any]:
        """The arguments, converted to the signature's types; only those given, so the function's defaults apply."""
        if not isinstance(given, Mapping):
            raise ArgumentError(f"{self.name}: the arguments are {_short(given)}, not an object; {self.takes()}")
        try:
            read = self.model.model_validate(dict(given))
        except ValidationError as error:
            raise ArgumentError(f"{self.name}: {self._faults(error)}; {self.takes()}") from error
        fields = type(read).model_fields
        return {str(fields[field].alias): getattr(read, field) for field in fields if field in read.model_fields_set}

    def takes(self) -> str:
        """`it takes query (string), limit (integer, optional)`."""
        required = self.schema.get("required", [])
        parts = [
            f"{name} ({phrase(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.schema["properties"].items()
        ]
        return f"it takes {', '.join(parts) or 'no arguments'}"

    def _faults(self, error: ValidationError) -> str:
        """One clause an argument: a union reports every branch it tried, which says less than its name."""
        by_argument: dict[str, list[Any]] = {}
        for fault in error.errors(include_url=False):
            by_argument.setdefault(str(fault["loc"][0]) if fault["loc"] else "", []).append(fault)
        return ", ".join(self._fault(name, faults) for name, faults in by_argument.items())

    def _fault(self, name: str, faults: list[Any]) -> str:
        first = faults[0]
        place = name + "".join(f"[{part!r}]" for part in first["loc"][1:] if len(faults) == 1)
        if first["type"] == "missing":
            return f"argument {place!r} is missing"
        if first["type"] == "extra_forbidden":
            return f"argument {place!r} is unknown.{did_you_mean(name, self.schema['properties'])}".removesuffix(".")
        if len(faults) > 1:
            return f"argument {name!r} should be {phrase(self.schema['properties'][name])}"
        why = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        return f"argument {place!r} {why}, not {_short(first['input'])}"


def phrase(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words: `string`, `array of integer`, `'a' or 'b'`."""
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    if "const" in schema:
        return repr(schema["const"])
    if "anyOf" in schema:
        return " or ".join(phrase(branch) for branch in schema["anyOf"])
    if schema.get("type") == "array" and schema.get("items"):
        return f"array of {phrase(schema['items'])}"
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


class _Plain(GenerateJsonSchema):
    """Without the titles pydantic makes up: the model reads every word of a schema."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """`= None` on an optional argument says nothing that its absence from `required` does not."""
        described = super().default_schema(schema)
        if described.get("default", ...) is None:
            described.pop("default")
        return described


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as people write one: the type first, and no word that every tool would repeat."""
    properties = {
        name: {key: about[key] for key in sorted(about, key=lambda key: key != "type")}
        for name, about in schema.get("properties", {}).items()
    }
    rest: dict[str, Any] = {key: schema[key] for key in ("required", "$defs") if key in schema}
    return {"type": "object", "properties": properties, **rest}


def _model(name: str, function: Callable[..., Any], descriptions: Mapping[str, str]) -> type[BaseModel]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise TypeError(
            f"tool {name!r}: a type in its signature cannot be resolved ({error}); import it at the top of the module"
        ) from error
    fields: dict[str, tuple[Any, FieldInfo]] = {}
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {name!r}: parameter {str(parameter)!r} has no name a model can write; "
                "give every parameter its own name"
            )
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        # Fields go by number with the name as alias, so `json`, `copy` and `_private` are names like any other.
        about = descriptions.get(parameter.name)
        fields[f"argument_{index}"] = (kind, Field(default, alias=parameter.name, description=about))
    return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)  # type: ignore[call-overload,no-any-return]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
