"""JSON schema of a tool's arguments, and validation of a call. Both use one pydantic model of the signature."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from arborl.errors import did_you_mean
from arborl.tools.core.json_bounds import load_json

MAX_NAMED_ERRORS = 8
SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?):\s*$"
)
ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ArgumentError(ValueError):
    """Invalid arguments; the message is for the model."""


class ToolArguments:
    """Arguments of a tool: `schema` for the model, `check` for its calls."""

    def __init__(self, name: str, parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]):
        self.name = name
        self.model = _model(name, parameters, descriptions)
        self.schema = _simplify(self.model.model_json_schema(schema_generator=_CompactSchema))

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments converted to the signature's types; without defaults. A text in place of another type is parsed
        as JSON: some call formats write every value as text."""
        try:
            if not isinstance(arguments, Mapping):
                raise ValueError(f"the arguments are {_short(arguments)}, not an object")
            parsed = self._validate(arguments)
        except Exception as error:  # a custom validator may raise anything
            text = self._error_text(error) if isinstance(error, ValidationError) else str(error)
            named = type(error) in (ValidationError, ValueError)
            reason = text if named else f"{type(error).__name__}: {text}"
            raise ArgumentError(f"{self.name}: {reason}; {self.usage()}") from error
        fields = type(parsed).model_fields
        return {str(fields[name].alias): getattr(parsed, name) for name in fields if name in parsed.model_fields_set}

    def _validate(self, arguments: Mapping[str, Any]) -> BaseModel:
        try:
            return self.model.model_validate(dict(arguments))
        except ValidationError as error:
            invalid = {one["loc"][0] for one in error.errors(include_url=False) if one["loc"]}
            decoded = {key: _decode(value) if key in invalid else value for key, value in arguments.items()}
            try:
                return self.model.model_validate(decoded)
            except ValidationError:
                raise error from None  # the error of the original arguments

    def usage(self) -> str:
        """`it takes query (string), limit (integer, optional)`."""
        required = self.schema.get("required", [])
        parts = [
            f"{name} ({describe_schema(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.schema["properties"].items()
        ]
        return f"it takes {', '.join(parts) or 'no arguments'}"

    def _error_text(self, error: ValidationError) -> str:
        """One clause per argument; errors of all branches of a union are joined."""
        by_argument: dict[str, list[Any]] = {}
        for one in error.errors(include_url=False):
            by_argument.setdefault(str(one["loc"][0]) if one["loc"] else "", []).append(one)
        named = [self._argument_error(name, errors) for name, errors in islice(by_argument.items(), MAX_NAMED_ERRORS)]
        more = len(by_argument) - len(named)
        return ", ".join([*named, f"and {more:,} more"] if more else named)

    def _argument_error(self, name: str, errors: list[Any]) -> str:
        first = errors[0]
        place = name + "".join(f"[{part!r}]" for part in first["loc"][1:] if len(errors) == 1)
        if first["type"] == "missing":
            return f"argument {place!r} is missing"
        if first["type"] == "extra_forbidden":
            return f"argument {place!r} is unknown.{did_you_mean(name, self.schema['properties'])}".removesuffix(".")
        if len(errors) > 1:
            return f"argument {name!r} should be {describe_schema(self.schema['properties'].get(name, {}))}"
        reason = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        return f"argument {place!r} {reason}, not {_short(first['input'])}"


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Short description of a JSON schema: `string`, `array of integer`, `'a' or 'b'`, `object with x, y`."""
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum") or [schema["const"]]))
    if "anyOf" in schema:
        return " or ".join(describe_schema(branch) for branch in schema["anyOf"])
    if schema.get("type") == "array" and schema.get("items"):
        return f"array of {describe_schema(schema['items'])}"
    if schema.get("properties"):
        return f"object with {', '.join(schema['properties'])}"
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


class _CompactSchema(GenerateJsonSchema):
    """Omits the titles that pydantic generates, and `default: null`: the argument is absent from `required`."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if described.get("default", ...) is None:
            described.pop("default")
        return described


def _simplify(schema: dict[str, Any]) -> dict[str, Any]:
    definitions = schema.get("$defs", {})
    properties = {name: _inline(one, definitions, frozenset()) for name, one in schema.get("properties", {}).items()}
    simple: dict[str, Any] = {"type": "object", "properties": properties}
    if "required" in schema:
        simple["required"] = schema["required"]
    if '"$ref"' in json.dumps(properties, default=str):  # a recursive type stays in the definitions
        simple["$defs"] = {name: _inline(about, definitions, frozenset([name])) for name, about in definitions.items()}
    return simple


def _inline(schema: Any, definitions: Mapping[str, Any], within: frozenset[str]) -> Any:
    """`schema` with references replaced by their definitions, except recursive ones."""
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
        elif not (key == "title" and isinstance(schema[key], str)):
            made[key] = _inline(schema[key], definitions, within)
    return made


def _model(name: str, parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {name!r}: parameter {str(parameter)!r} has no name that a model can write; "
                "give every parameter a name"
            )
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        # Numbered fields with the name as alias: `json`, `copy` and `_private` are valid parameter names.
        about = descriptions.get(parameter.name)
        described: Any = {"description": about} if about else {}  # None would replace the annotation's description
        fields[f"argument_{index}"] = (kind, Field(default, alias=parameter.name, **described))
    return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)  # type: ignore[call-overload,no-any-return]


def _decode(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return load_json(value.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring that the model sees."""

    description: str
    arguments: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """Split a Google-style docstring into its description and its `Args:`."""
    description: list[str] = []
    arguments: dict[str, list[str]] = {}
    section, current, depth = "", "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        found = SECTION.match(line)
        indent = len(line) - len(line.lstrip())
        if found:
            section, current, depth = found.group(1), "", 0
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = depth or indent
            entry = ENTRY.match(line.strip()) if indent <= depth else None
            if entry:
                current = entry.group(1)
                arguments[current] = [entry.group(2)]
            elif current:
                arguments[current].append(line.strip())
    return Docstring(_join_lines(description), {name: _join_lines(lines) for name, lines in arguments.items()})


def _join_lines(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
