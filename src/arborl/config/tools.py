"""The tools of a run: from the library, your own, behind a tool server, or of an MCP server; each within limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from arborl.config.base import Config, spelt_out
from arborl.errors import did_you_mean

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET = re.compile(r"(?:.*_)?(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)
"""Names of variables whose values do not belong in a file."""
FORMS = "NAME, NAME: {argument: value}, server: URL, mcp: {command: [PROGRAM, …]} or mcp: {url: URL}"


class Sparse(Config):
    """A section that is written without what was not said."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> Any:
        said: dict[str, Any] = handler(self)
        unsaid = {name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()}
        return {name: value for name, value in said.items() if getattr(self, name) != unsaid[name]}


class LimitConfig(Sparse):
    """A rate limit: at most `per_minute · t + burst` calls in any t minutes, over all processes that share it."""

    per_minute: float = Field(gt=0, allow_inf_nan=False)
    """Calls a minute, sustained."""
    burst: int = Field(1, ge=1)
    """Calls that may be made at once after a pause."""
    name: str | None = None
    """Runs whose limits have the same name share one, and must agree on its numbers. Without one, it is the server's
    address, the command, or the tool's name."""
    scope: Literal["host", "cluster"] = "host"
    """`host`: shared by the runs of this user on this machine. `cluster`: by all that ask the same tool server."""
    server: str | None = None
    """With `scope: cluster`, the tool server that grants; without one, the entry's own, or ARBORL_TOOL_SERVER."""

    @model_validator(mode="after")
    def _host_needs_no_server(self) -> LimitConfig:
        if self.server is not None and self.scope == "host":
            raise ValueError("server is for scope: cluster. Write that too, or leave server out.")
        if self.server is not None:
            check_url(self.server, "server")
        return self


class McpConfig(Sparse):
    """An MCP server: a command that is started with the run and ended with it, or an address (streamable HTTP)."""

    command: tuple[str, ...] = ()
    """A program and its arguments; it speaks MCP on its standard input and output. Started once a run, and again if it
    dies."""
    url: str | None = None
    """Address of a server that is running, such as `http://127.0.0.1:8000/mcp`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables for the command, beside HOME, LOGNAME, PATH, SHELL, TERM and USER. They are written into the run's
    folder: secrets go by `pass_env`."""
    pass_env: tuple[str, ...] = ()
    """Variables of this process that the command gets as they are; only their names are written down."""
    cwd: Path | None = None
    """Folder to start the command in."""
    stateful: bool = False
    """Calls of one message run in the order written, and not at once."""

    @field_validator("command", mode="before")
    @classmethod
    def _is_a_list(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise ValueError(f"must be a list of words, and no shell reads it. Write [{', '.join(given.split())}].")
        return given

    @model_validator(mode="after")
    def _one_of_two(self) -> McpConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("write either command: [PROGRAM, …] or url: http://HOST:PORT/mcp.")
        for key in ("env", "pass_env", "cwd"):
            if self.url is not None and getattr(self, key):
                raise ValueError(f"{key} is for a command, and url is a server that somebody else started.")
        if self.url is not None:
            check_url(self.url, "url")
        for name in self.pass_env:
            check_variable(name, "pass_env")
        for name, value in self.env.items():
            if SECRET.fullmatch(name) and value:
                raise ValueError(
                    f"env.{name}: would be written into the run's folder, and looks like a secret. Export it and write "
                    f"pass_env: [{name}]."
                )
        return self


class ToolConfig(Sparse):
    """Tools of one origin. A bare string is a name; `NAME: {…}` is a name with its arguments, and `limit`,
    `concurrency`, `timeout` and `retries` among them."""

    shorthand: ClassVar[str] = "name"

    name: str | None = None
    """From the library (`arborl tools list`), or your own as `package.module:attribute`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that tool; `search: {corpus: FILE}` is short for `name: search, args: {corpus: FILE}`."""
    server: str | None = None
    """Instead of a name: the address of a tool server (`arborl tools serve`)."""
    mcp: McpConfig | None = None
    """Instead of a name: an MCP server."""
    tools: tuple[str, ...] | None = None
    """Of a server: which of its tools; without it, all."""
    prefix: str = ""
    """Of a server: what its tools' names begin with here, so that two servers may have tools of one name."""
    api_key_env: str | None = None
    """Of a server: the variable that holds the key it wants (`Authorization: Bearer …`); the key itself is written
    nowhere."""
    limit: LimitConfig | None = None
    """Calls wait for it, and so does each time they are tried again."""
    concurrency: int | None = Field(None, ge=1)
    """Calls of this run under way at a time, all the tools of the entry together; the others wait."""
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds one try of a call may take; waiting for its turn is no part of it."""
    retries: int | None = Field(None, ge=0)
    """How often a call is tried again that raised, took too long, or found no server. Without it never; but a tool
    server is asked again for two minutes, and runs the call once all the same."""

    @model_validator(mode="before")
    @classmethod
    def _from_its_short_forms(cls, given: Any) -> Any:
        given = spelt_out(cls, given)
        if not isinstance(given, Mapping):
            return given
        own = [key for key in given if key not in cls.model_fields]
        if len(own) > 1:
            raise ValueError(f"{own[0]} and {own[1]} are given. An entry is one of them: write two.")
        if own and {"name", "args", "server", "mcp"} & given.keys():
            raise ValueError(
                f"{own[0]}: unknown key.{did_you_mean(str(own[0]), cls.model_fields)} An entry is {FORMS}."
            )
        head = own[0] if own else "mcp" if isinstance(given.get("mcp"), Mapping) else None
        if head is None:
            return given
        inner = given[head] if given[head] is not None else {}
        if not isinstance(inner, Mapping):
            near = did_you_mean(str(head), cls.model_fields)
            raise ValueError(f"{head}: must be arguments with values (argument: value).{near} An entry is {FORMS}.")
        common = {key: inner[key] for key in COMMON if key in inner} if head != "mcp" else _beside(inner)
        if twice := [key for key in common if key in given]:
            raise ValueError(f"{twice[0]}: given twice, in {head} and beside it. Keep one.")
        rest = {key: value for key, value in inner.items() if key not in common}
        outer = {key: value for key, value in given.items() if key != head}
        return {**outer, **common, **({"mcp": rest} if head == "mcp" else {"name": head, "args": rest})}

    @model_serializer(mode="wrap")
    def _as_short_as_can_be(self, handler: SerializerFunctionWrapHandler) -> Any:
        said = self._without_defaults(handler)
        return said["name"] if list(said) == ["name"] else said

    @model_validator(mode="after")
    def _one_origin(self) -> ToolConfig:
        if self.api_key_env is not None:
            check_variable(self.api_key_env, "api_key_env")
        given = [key for key in ("name", "server", "mcp") if getattr(self, key) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "says nothing of where it comes from"
            raise ValueError(f"{what}. An entry is {FORMS}.")
        if self.name is None and self.args:
            raise ValueError("args are a named tool's. Leave them out.")
        for key in ("tools", "prefix", "api_key_env") if self.name is not None else ():
            if getattr(self, key):
                raise ValueError(f"{key} is for server and mcp, not for the tool {self.name!r}.")
        if self.mcp is not None and self.mcp.command and self.api_key_env is not None:
            raise ValueError(f"api_key_env is for an address. Write mcp.pass_env: [{self.api_key_env}].")
        if self.server is not None:
            check_url(self.server, "server")
        return self

    @property
    def origin(self) -> str:
        """Where its tools come from, in a word."""
        if self.mcp is not None:
            return self.mcp.url or " ".join(self.mcp.command)
        return self.server or str(self.name)


COMMON = ("limit", "concurrency", "timeout", "retries")
"""What any tool can have, whatever arguments it takes."""


def _beside(inner: Mapping[str, Any]) -> dict[str, Any]:
    """What was written within `mcp` and belongs beside it."""
    return {key: inner[key] for key in (*COMMON, "tools", "prefix", "api_key_env") if key in inner}


def check_variable(name: str, where: str) -> None:
    """That it is a variable's name. What is none may be the secret itself, and is not repeated."""
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"{where}: write the NAME of an environment variable, in capitals, and never a key itself.")


def check_url(url: str, where: str) -> None:
    """That it is an address, and holds no password: it will be written down and printed."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good, parts = False, urlsplit("")
    if not good:
        raise ValueError(f"{where}: {url.rpartition('@')[2]!r} is no address. Write http://HOST:PORT.")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{where}: holds a user or a password, which would be written down. Write api_key_env: NAME.")
