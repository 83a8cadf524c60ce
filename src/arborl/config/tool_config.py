"""Settings of tools: from the library, your own, of a tool server or an MCP server, with limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from arborl.config.config_base import Config, expand_shorthand
from arborl.errors import did_you_mean

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET = re.compile(r"(?:.*_)?(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)
"""Names of variables whose values must not be written to a file."""
FORMS = "NAME, NAME: {argument: value}, server: URL, mcp: {command: [PROGRAM, …]} or mcp: {url: URL}"


class SparseConfig(Config):
    """A section that is written to files without defaults."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> Any:
        values: dict[str, Any] = handler(self)
        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
        }
        return {name: value for name, value in values.items() if getattr(self, name) != defaults[name]}


class LimitConfig(SparseConfig):
    """Rate limit: at most `per_minute · t + burst` calls in any t minutes, over all processes that share it."""

    per_minute: float = Field(gt=0, allow_inf_nan=False)
    """Calls per minute."""
    burst: int = Field(1, ge=1)
    """Calls at once after a pause."""
    name: str | None = None
    """Runs share limits of the same name, with the same numbers. Default: the address of the server, the command, or
    the name of the tool."""
    server: str | None = None
    """Address of a tool server that enforces the limit for all its clients; `auto` is the server of the entry, or
    ARBORL_TOOL_SERVER. Default: the runs of this user on this machine share it."""

    @model_validator(mode="after")
    def _check_server(self) -> LimitConfig:
        if self.server not in (None, "auto"):
            check_url(self.server, "server")
        return self


class McpConfig(SparseConfig):
    """An MCP server: a command that runs as long as the run, or an address (streamable HTTP)."""

    command: tuple[str, ...] = ()
    """Program and arguments of an MCP server on standard input and output; restarted if it dies."""
    url: str | None = None
    """Address of a running server, such as `http://127.0.0.1:8000/mcp`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, beside HOME, LOGNAME, PATH, SHELL, TERM and USER. They are written to the
    run folder; use `pass_env` for secrets."""
    pass_env: tuple[str, ...] = ()
    """Variables of this process that the command inherits; only their names are written."""
    cwd: Path | None = None
    """Working directory of the command."""
    stateful: bool = False
    """Run the calls of one message in order, not concurrently."""

    @field_validator("command", mode="before")
    @classmethod
    def _check_command(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"must be a list of words; there is no shell. Write [{', '.join(value.split())}].")
        return value

    @model_validator(mode="after")
    def _check_origin(self) -> McpConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("write either command: [PROGRAM, …] or url: http://HOST:PORT/mcp.")
        for key in ("env", "pass_env", "cwd"):
            if self.url is not None and getattr(self, key):
                raise ValueError(f"{key} is for a command, and url is a running server. Leave {key} out.")
        if self.url is not None:
            check_url(self.url, "url")
        for name in self.pass_env:
            check_variable(name, "pass_env")
        for name, value in self.env.items():
            if SECRET.fullmatch(name) and value:
                raise ValueError(
                    f"env.{name}: looks like a secret, and env is written to the run folder. Export it and write "
                    f"pass_env: [{name}]."
                )
        return self


class ToolConfig(SparseConfig):
    """One tool, or the tools of one server. A bare string is a name; `NAME: {…}` is a name with arguments, `limit`,
    `concurrency`, `timeout` and `retries`."""

    shorthand: ClassVar[str] = "name"

    name: str | None = None
    """A tool of the library (`arborl tools list`), or your own as `package.module:attribute`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the tool; `search: {corpus: FILE}` means `name: search, args: {corpus: FILE}`."""
    server: str | None = None
    """Instead of `name`: address of a tool server (`arborl tools serve`)."""
    protocol: Literal["arborl", "execute"] = "arborl"
    """Of `server`: `execute` for a server that only runs code, by `POST /execute`. It gives the tool `python`."""
    code_prefix: str = ""
    """Of `protocol: execute`: text before every code, such as `"from tools import *\\n"`."""
    mcp: McpConfig | None = None
    """Instead of `name`: an MCP server."""
    tools: tuple[str, ...] | None = None
    """Of a server: the tools that are used. Default: all."""
    prefix: str = ""
    """Of a server: prefix of the names of its tools."""
    api_key_env: str | None = None
    """Of a server: environment variable with its API key (`Authorization: Bearer …`); the key is never written."""
    limit: LimitConfig | None = None
    """Rate limit of calls and retries."""
    concurrency: int | None = Field(None, ge=1)
    """Maximum concurrent calls of this run to all tools of the entry."""
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Timeout of one attempt in seconds, without the time in queues."""
    retries: int | None = Field(None, ge=0)
    """Retries of a call that raised, timed out, or found no server. Default: 0; requests to a tool server are repeated
    for two minutes, and it runs the call once."""

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, data: Any) -> Any:
        data = expand_shorthand(cls, data)
        if not isinstance(data, Mapping):
            return data
        names = [key for key in data if key not in cls.model_fields]
        if len(names) > 1:
            raise ValueError(f"{names[0]} and {names[1]} are given. An entry is one tool: write two entries.")
        if names and {"name", "args", "server", "mcp"} & data.keys():
            raise ValueError(
                f"{names[0]}: unknown key.{did_you_mean(str(names[0]), cls.model_fields)} An entry is {FORMS}."
            )
        head = names[0] if names else "mcp" if isinstance(data.get("mcp"), Mapping) else None
        if head is None:
            return data
        inner = data[head] if data[head] is not None else {}
        if not isinstance(inner, Mapping):
            near = did_you_mean(str(head), cls.model_fields)
            raise ValueError(f"{head}: must be arguments with values (argument: value).{near} An entry is {FORMS}.")
        common = {key: inner[key] for key in COMMON if key in inner} if head != "mcp" else _outside_mcp(inner)
        if twice := [key for key in common if key in data]:
            raise ValueError(f"{twice[0]}: given twice, in {head} and beside it. Keep one.")
        rest = {key: value for key, value in inner.items() if key not in common}
        outer = {key: value for key, value in data.items() if key != head}
        return {**outer, **common, **({"mcp": rest} if head == "mcp" else {"name": head, "args": rest})}

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
        values = self._without_defaults(handler)
        return values["name"] if list(values) == ["name"] else values

    @model_validator(mode="after")
    def _check_origin(self) -> ToolConfig:
        if self.api_key_env is not None:
            check_variable(self.api_key_env, "api_key_env")
        origins = [key for key in ("name", "server", "mcp") if getattr(self, key) is not None]
        if len(origins) != 1:
            what = f"{' and '.join(origins)} are given" if origins else "has no name, server or mcp"
            raise ValueError(f"{what}. An entry is {FORMS}.")
        if self.name is None and self.args:
            raise ValueError("args are for a named tool. Leave them out.")
        for key in ("tools", "prefix", "api_key_env") if self.name is not None else ():
            if getattr(self, key):
                raise ValueError(f"{key} is for server and mcp, not for the tool {self.name!r}.")
        if self.mcp is not None and self.mcp.command and self.api_key_env is not None:
            raise ValueError(f"api_key_env is for an address. Write mcp.pass_env: [{self.api_key_env}].")
        if self.server is not None:
            check_url(self.server, "server")
        self._check_protocol()
        return self

    def _check_protocol(self) -> None:
        if self.protocol != "execute":
            if self.code_prefix:
                raise ValueError("code_prefix is for protocol: execute. Write protocol: execute, or leave it out.")
            return
        if self.server is None:
            raise ValueError("protocol is for server. Write server: http://HOST:PORT, or leave it out.")
        if self.tools is not None:
            raise ValueError("protocol: execute has one tool, python. Leave tools out.")
        if self.limit is not None and self.limit.server == "auto":
            raise ValueError("limit.server: auto is a tool server, and protocol: execute is not one. Leave it out.")

    @property
    def origin(self) -> str:
        """Name, address or command, for messages."""
        if self.mcp is not None:
            return self.mcp.url or " ".join(self.mcp.command)
        return self.server or str(self.name)


COMMON = ("limit", "concurrency", "timeout", "retries")
"""Keys of every entry, whatever arguments the tool has."""


def _outside_mcp(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the entry that were written inside `mcp`."""
    return {key: inner[key] for key in (*COMMON, "tools", "prefix", "api_key_env") if key in inner}


def check_variable(name: str, where: str) -> None:
    """Raise ValueError unless it is the name of a variable. The message does not repeat it: it may be the secret."""
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"{where}: write the NAME of an environment variable, in capitals, and never a key itself.")


def check_url(url: str, where: str) -> None:
    """Raise ValueError unless it is an address without a password: it is written to files and printed."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good, parts = False, urlsplit("")
    if not good:
        raise ValueError(f"{where}: {url.rpartition('@')[2]!r} is not an address. Write http://HOST:PORT.")
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{where}: contains a user or password, and addresses are written to files. Write api_key_env: NAME."
        )
