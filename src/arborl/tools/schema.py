"""The arguments of a tool: a JSON schema for the model to read, and a check of what the model then wrote.

Both come from one pydantic model built from the function's signature, so they cannot disagree.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from arborl.errors import did_you_mean
from arborl.tools.json_bounds import load_json

FAULTS_NAMED = 8
"""Arguments that an error names; a model that got more of them wrong mends these first."""


class ArgumentError(ValueError):
    """The model's arguments do not fit; the message is written for the model."""


class Arguments:
    """What a function takes.

    Example:
        takes = Arguments("add", inspect.signature(add).parameters.values(), {"a": "the first number"})
        takes.schema                        # {"type": "object", "properties": {"a": {"type": "integer", …}}, …}
        takes.check({"a": "3"})             # {"a": 3}
        takes.check({})                     # ArgumentError: add: argument 'a' is missing; it takes a (integer)
    """

    def __init__(self, name: str, parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]):
        self.name = name
        self.model = _model(name, parameters, descriptions)
        self.schema = _tidy(self.model.model_json_schema(schema_generator=_Plain))

    def check(self, given: Any) -> dict[str, Any]:
        """The arguments, converted to the signature's types; only those given, so the function's defaults apply.

        Text where something else is wanted is read as JSON: some formats write every value as text, and some models do.
        """
        if not isinstance(given, Mapping):
            raise ArgumentError(f"{self.name}: the arguments are {_short(given)}, not an object; {self.takes()}")
        try:
            read = self._validate(given)
        except ValidationError as error:
            raise ArgumentError(f"{self.name}: {self._faults(error)}; {self.takes()}") from error
        except Exception as error:  # a validator of the author's own that raises what it likes
            raise ArgumentError(f"{self.name}: {type(error).__name__}: {error}; {self.takes()}") from error
        fields = type(read).model_fields
        return {str(fields[field].alias): getattr(read, field) for field in fields if field in read.model_fields_set}

    def _validate(self, given: Mapping[str, Any]) -> BaseModel:
        try:
            return self.model.model_validate(dict(given))
        except ValidationError as error:
            at_fault = {fault["loc"][0] for fault in error.errors(include_url=False) if fault["loc"]}
            meant = {key: _decoded(value) if key in at_fault else value for key, value in given.items()}
            try:
                return self.model.model_validate(meant)
            except ValidationError:
                raise error from None  # about what was written, not about what it might have meant

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
        named = [self._fault(name, faults) for name, faults in islice(by_argument.items(), FAULTS_NAMED)]
        more = len(by_argument) - len(named)
        return ", ".join([*named, f"and {more:,} more"] if more else named)

    def _fault(self, name: str, faults: list[Any]) -> str:
        first = faults[0]
        place = name + "".join(f"[{part!r}]" for part in first["loc"][1:] if len(faults) == 1)
        if first["type"] == "missing":
            return f"argument {place!r} is missing"
        if first["type"] == "extra_forbidden":
            return f"argument {place!r} is unknown.{did_you_mean(name, self.schema['properties'])}".removesuffix(".")
        if len(faults) > 1:
            return f"argument {name!r} should be {phrase(self.schema['properties'].get(name, {}))}"
        why = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        return f"argument {place!r} {why}, not {_short(first['input'])}"


def phrase(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words: `string`, `array of integer`, `'a' or 'b'`, `object with x, y`."""
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    if "const" in schema:
        return repr(schema["const"])
    if "anyOf" in schema:
        return " or ".join(phrase(branch) for branch in schema["anyOf"])
    if schema.get("type") == "array" and schema.get("items"):
        return f"array of {phrase(schema['items'])}"
    if schema.get("properties"):
        return f"object with {', '.join(schema['properties'])}"
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
    """The schema as people write one: the type first, nothing to look up elsewhere, no word every tool would repeat."""
    definitions = schema.get("$defs", {})
    properties = {
        name: _inline(about, definitions, frozenset()) for name, about in schema.get("properties", {}).items()
    }
    tidy: dict[str, Any] = {"type": "object", "properties": properties}
    if "required" in schema:
        tidy["required"] = schema["required"]
    left = {name: _inline(about, definitions, frozenset([name])) for name, about in definitions.items()}
    if '"$ref"' in json.dumps(properties, default=str):  # a type that contains itself stays in the definitions
        tidy["$defs"] = left
    return tidy


def _inline(schema: Any, definitions: Mapping[str, Any], within: frozenset[str]) -> Any:
    """`schema` with every reference replaced by what it refers to, except from inside that itself."""
    if isinstance(schema, list):
        return [_inline(part, definitions, within) for part in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in within:
        around = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**definitions[name], **around}, definitions, within | {name})
    made = {}
    for key in sorted(schema, key=lambda key: key != "type"):
        if key == "properties" and isinstance(schema[key], dict):
            made[key] = {one: _inline(about, definitions, within) for one, about in schema[key].items()}
        elif not (key == "title" and isinstance(schema[key], str)):  # the name of a class tells the model nothing
            made[key] = _inline(schema[key], definitions, within)
    return made


def _model(name: str, parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]) -> type[BaseModel]:
    fields: dict[str, tuple[Any, FieldInfo]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {name!r}: parameter {str(parameter)!r} has no name a model can write; "
                "give every parameter its own name"
            )
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        # Fields go by number with the name as alias, so `json`, `copy` and `_private` are names like any other.
        about = descriptions.get(parameter.name)
        described: Any = {"description": about} if about else {}  # none would hide one in the annotation
        fields[f"argument_{index}"] = (kind, Field(default, alias=parameter.name, **described))
    return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)  # type: ignore[call-overload,no-any-return]


def _decoded(value: Any) -> Any:
    """The JSON value a text holds; the text itself where it holds none."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
