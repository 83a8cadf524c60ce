"""Requests and responses of the tool server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from arborl.errors import ConfigError
from arborl.types import ToolResult, ToolSpec

VISIBLE_ASCII = r"^[!-~]+$"  # keys and session names: valid in paths, files and logs
MAX_DEPTH = 64
MAX_VALUES = 2**16
MAX_ARGUMENT_VALUES = 2**13  # values and keys of the arguments, which the event loop validates


def check_values(value: dict[str, Any], most: int = MAX_VALUES) -> dict[str, Any]:
    """The value; ValueError if it has more than `most` values and keys, or is nested too deep."""
    level: list[Any] = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, Mapping) else each for each in level]
        count += sum(len(each) * (2 if isinstance(each, Mapping) else 1) for each in level)
        level = [item for each in inner for item in each if isinstance(item, Mapping | list)]
        if not level and count > most:
            raise ValueError(f"more than {most:,} values and keys")
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


TaskFields = Annotated[dict[str, Any], AfterValidator(check_values)]
CallArguments = Annotated[dict[str, Any], AfterValidator(partial(check_values, most=MAX_ARGUMENT_VALUES))]


class StrictModel(BaseModel):
    """A body in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class CallRequest(StrictModel):
    name: str = Field(max_length=200)
    arguments: CallArguments = Field(default_factory=dict)
    key: str | None = Field(None, max_length=200, pattern=VISIBLE_ASCII)
    """Idempotency key: a repeated request gets the stored response."""
    session: str | None = Field(None, max_length=200, pattern=VISIBLE_ASCII)
    """Calls of one session share the state of stateful tools."""
    fields: TaskFields = Field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Hash of the call, to detect another call under the same key."""
        whole = [self.name, self.arguments, self.session, self.fields]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


class CallResponse(StrictModel):
    content: str
    ok: bool
    kind: str
    seconds: float
    replayed: bool = False

    @classmethod
    def of(cls, result: ToolResult) -> CallResponse:
        return cls(content=replace_surrogates(result.content), ok=result.ok, kind=result.kind, seconds=result.seconds)

    def result(self) -> ToolResult:
        return ToolResult(self.content, self.ok, self.kind, self.seconds)


class ToolDescription(StrictModel):
    name: str
    description: str
    parameters: dict[str, Any]
    stateful: bool = False
    terminal: bool = False
    fields: list[str] = Field(default_factory=list)

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description, self.parameters)


class ExecuteRequest(BaseModel):
    """Code for the sandbox. Other keys, which older clients send, are ignored."""

    code: str = Field(max_length=1_000_000)


class ExecuteResponse(StrictModel):
    success: bool
    output: str
    error: str | None
    execution_time: float


class LimitRequest(StrictModel):
    """Request for one grant of a rate limit."""

    name: str = Field(max_length=200)
    per_minute: float = Field(ge=0.001, le=1e9, allow_inf_nan=False)
    burst: int = Field(1, ge=1, le=1_000_000)
    timeout: float = Field(30.0, ge=0, le=600, allow_inf_nan=False)  # respond within this many seconds, granted or not


class LimitResponse(StrictModel):
    granted: bool


class HealthResponse(StrictModel):
    status: str  # `ok` or `draining`
    running: int
    waiting: int
    sandbox: str | None = None


class ErrorResponse(BaseModel):
    detail: str


def encode_api_key(api_key: str) -> bytes:
    """An API key as UTF-8 for a header; ConfigError for an invalid key."""
    if not api_key:
        raise ConfigError("the API key is empty. Give a long one, or omit it.")
    if api_key != api_key.strip() or not api_key.isprintable():
        raise ConfigError("the API key begins or ends with a space or contains a control character.")
    return api_key.encode()


def bearer_header(api_key: str | None) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + encode_api_key(api_key)} if api_key else {}


def replace_surrogates(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by `?`."""
    return text.encode("utf-8", "replace").decode()
