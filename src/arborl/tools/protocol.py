"""What tool server and client say to each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from arborl.errors import ConfigError
from arborl.types import ToolResult, ToolSpec

PLAIN = r"^[!-~]+$"
"""Keys and session names: visible ASCII, so that they can stand in a path, a file and a log."""

MOST_DEEP = 64
"""Lists and objects inside one another: what goes deeper is no argument, and exhausts whatever walks it."""


MOST_VALUES = 2**16
"""Values and keys of a request."""
MOST_ARGUMENT_VALUES = 2**13
"""Values and keys of the arguments alone, which the event loop checks against the tool's schema."""


def shallow(value: dict[str, Any]) -> dict[str, Any]:
    """The same value, unless it nests too deep."""
    _count(value)
    return value


def small(value: dict[str, Any]) -> dict[str, Any]:
    """The same value, unless it nests too deep or has too many values."""
    if _count(value) > MOST_ARGUMENT_VALUES:
        raise ValueError(f"more than {MOST_ARGUMENT_VALUES:,} values and keys")
    return value


def _count(value: dict[str, Any]) -> int:
    """How many values and keys there are."""
    level: list[Any] = [value]
    count = 0
    for _ in range(MOST_DEEP):
        inner = [each.values() if isinstance(each, Mapping) else each for each in level]
        count += sum(len(each) * (2 if isinstance(each, Mapping) else 1) for each in level)
        level = [item for each in inner for item in each if isinstance(item, Mapping | list)]
        if not level:
            return count
    raise ValueError(f"nested more than {MOST_DEEP} deep")


Fields = Annotated[dict[str, Any], AfterValidator(shallow)]
CallArguments = Annotated[dict[str, Any], AfterValidator(small)]


class Shape(BaseModel):
    """A body without surprises: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class CallRequest(Shape):
    """One call."""

    name: str = Field(max_length=200)
    arguments: CallArguments = Field(default_factory=dict)
    key: str | None = Field(None, max_length=200, pattern=PLAIN)
    """The same key is the same call: sent again, it is answered again and not run again."""
    session: str | None = Field(None, max_length=200, pattern=PLAIN)
    """Calls of one session share the state of stateful tools."""
    fields: Fields = Field(default_factory=dict)
    """Those of the task that the tool asks for."""

    @cached_property
    def digest(self) -> str:
        """Tells this call from another one under the same key."""
        whole = [self.name, self.arguments, self.session, self.fields]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


class CallAnswer(Shape):
    """A `ToolResult`, and whether it is one that had been given before."""

    content: str
    ok: bool
    kind: str
    seconds: float
    replayed: bool = False

    @classmethod
    def of(cls, result: ToolResult) -> CallAnswer:
        return cls(content=encodable(result.content), ok=result.ok, kind=result.kind, seconds=result.seconds)

    def result(self) -> ToolResult:
        return ToolResult(self.content, self.ok, self.kind, self.seconds)


class About(Shape):
    """A tool as the server describes it."""

    name: str
    description: str
    parameters: dict[str, Any]
    stateful: bool = False
    terminal: bool = False
    fields: list[str] = Field(default_factory=list)
    """Fields of the task that it wants sent with each call, where the task has them."""

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description, self.parameters)


class ExecuteRequest(BaseModel):
    """Code to run in a sandbox of its own; other keys that older clients send are of no use and of no harm."""

    code: str = Field(max_length=1_000_000)


class ExecuteAnswer(Shape):
    """What became of it."""

    success: bool
    output: str
    error: str | None
    execution_time: float


class LimitRequest(Shape):
    """Ask for one grant of a rate limit that machines share."""

    name: str = Field(max_length=200)
    per_minute: float = Field(ge=0.001, le=1e9, allow_inf_nan=False)
    burst: int = Field(1, ge=1, le=1_000_000)
    timeout: float = Field(30.0, ge=0, le=600, allow_inf_nan=False)
    """Answer within this many seconds, granted or not."""


class LimitAnswer(Shape):
    """Whether the call may be made now."""

    granted: bool


class Health(Shape):
    """How the server stands."""

    status: str
    """`ok` or `draining`."""
    running: int
    waiting: int
    sandbox: str | None = None


class Problem(BaseModel):
    """Why a request was not answered."""

    detail: str


def key_bytes(api_key: str) -> bytes:
    """An API key as it stands in a header; UTF-8, so that any letters will do."""
    if not api_key:
        raise ConfigError("the API key is empty: whoever brings none would have it. Give a long one, or leave it out.")
    if api_key != api_key.strip() or not api_key.isprintable():
        raise ConfigError(
            "the API key begins or ends with a space or holds a control character: no header can carry it."
        )
    return api_key.encode()


def bearer(api_key: str | None) -> dict[bytes, bytes]:
    """The header that carries a key; none where there is none."""
    return {b"Authorization": b"Bearer " + key_bytes(api_key)} if api_key else {}


def encodable(text: str) -> str:
    """The text without what UTF-8 has no form for (half a surrogate pair)."""
    return text.encode("utf-8", "replace").decode()
