"""JSON schema of a tool's arguments, and validation of a call. Both use one pydantic model of the signature."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from arborl.errors import did_you_mean
from arborl.tools.core.json_bounds import load_json

MAX_NAMED_ERRORS = 8  # maximum number of arguments that an error names


class ArgumentError(ValueError):
    """Invalid arguments; the message is for the model."""


class ToolArguments:
    """Arguments of a tool.

    Example:
        takes = Arguments("add", inspect.signature(add).parameters.values(), {"a": "the first number"})
        arguments.schema                        # {"type": "object", "properties": {"a": {"type": "integer", …}}, …}
        arguments.check({"a": "3"})             # {"a": 3}
        arguments.check({})                     # ArgumentError: add: argument 'a' is missing; it takes a (integer)
    """

    def __init__(self, name: str, parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]):
        self.name = name
        self.model = _model(name, parameters, descriptions)
        self.schema = _simplify(self.model.model_json_schema(schema_generator=_CompactSchema))

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments converted to the signature's types; without defaults.

        A text in place of another type is parsed as JSON: some call formats write every value as text.
        """
        if not isinstance(arguments, Mapping):
            raise ArgumentError(f"{self.name}: the arguments are {_short(arguments)}, not an object; {self.usage()}")
        try:
            parsed = self._validate(arguments)
        except ValidationError as error:
            raise ArgumentError(f"{self.name}: {self._error_text(error)}; {self.usage()}") from error
        except Exception as error:  # raised by a custom validator
            raise ArgumentError(f"{self.name}: {type(error).__name__}: {error}; {self.usage()}") from error
        fields = type(parsed).model_fields
        return {
            str(fields[field].alias): getattr(parsed, field) for field in fields if field in parsed.model_fields_set
        }

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
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    if "const" in schema:
        return repr(schema["const"])
    if "anyOf" in schema:
        return " or ".join(describe_schema(branch) for branch in schema["anyOf"])
    if schema.get("type") == "array" and schema.get("items"):
        return f"array of {describe_schema(schema['items'])}"
    if schema.get("properties"):
        return f"object with {', '.join(schema['properties'])}"
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


class _CompactSchema(GenerateJsonSchema):
    """Omits the titles that pydantic generates."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Omit `default: null`: the argument is absent from `required`."""
        described = super().default_schema(schema)
        if described.get("default", ...) is None:
            described.pop("default")
        return described


def _simplify(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `type` first and references inlined."""
    definitions = schema.get("$defs", {})
    properties = {
        name: _inline(about, definitions, frozenset()) for name, about in schema.get("properties", {}).items()
    }
    simple: dict[str, Any] = {"type": "object", "properties": properties}
    if "required" in schema:
        simple["required"] = schema["required"]
    recursive = {name: _inline(about, definitions, frozenset([name])) for name, about in definitions.items()}
    if '"$ref"' in json.dumps(properties, default=str):  # a recursive type stays in the definitions
        simple["$defs"] = recursive
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
    fields: dict[str, tuple[Any, FieldInfo]] = {}
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
    """The JSON value of a text, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# ------------------------------------------------------------------------------------------------ docstrings

SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?):\s*$"
)
ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring that the model sees."""

    description: str = ""  # text before the first section, as one paragraph
    arguments: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str | None) -> Docstring:
    """Split a Google-style docstring into its description and its `Args:`.

    Example:
        parse_docstring("Add.\\n\\nArgs:\\n    a: the first\\n        number.").arguments  # {"a": "the first number."}
    """
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
