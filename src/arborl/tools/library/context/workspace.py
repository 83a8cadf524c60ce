"""What the document tools of one episode share: the hidden document, its index, the notes, and the context's keeper.

Every tool here answers with one JSON object; whatever goes wrong is `{"error": "…"}`, written for the model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

from arborl.tools.injection import Context, State, Tokens
from arborl.tools.library.context.chunks import SHELF, Index
from arborl.tools.tool import Tool
from arborl.types import ToolResult

FIELD = "document_content"
"""The task's field that holds the document."""
ENDLESS = 1 << 40
"""These tools say themselves how much they show: a cut would break their JSON."""


class Refused(ValueError):
    """A call that cannot be answered; the message is written for the model."""


class Keeper(Protocol):
    """Who keeps the context that the model edits: the agent."""

    def budget(self) -> dict[str, int]:
        """Rounds so far, tokens and rounds that are left: the numbers the loop enforces."""
        ...

    def delete(self, msg_id: int) -> dict[str, Any]:
        """Show a message as deleted from now on; Refused where that cannot be."""
        ...

    def fold(self, summary: str) -> dict[str, Any]:
        """Show a summary in place of what happened so far."""
        ...


@dataclass(frozen=True, slots=True)
class Note:
    """What the model wrote down."""

    summary: str
    """Always shown."""
    content: str
    """Shown when asked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the document is cut, searched and shown."""

    chunk_size: int = 4000
    """Tokens of a chunk, where the model does not say."""
    overlap: int = 0
    built: bool = False
    """The index is there from the start, with these sizes; `buildIndex` may still make another."""
    results: int = 20
    """Most chunks a search shows."""
    fragment_size: int = 180
    """Characters of a highlight."""
    fragments: int = 3
    """Highlights of a chunk; with 0 a search only says which chunks to read."""

    def __post_init__(self) -> None:
        check_sizes(self.chunk_size, self.overlap)
        for name, least in (("results", 1), ("fragment_size", 1), ("fragments", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: give {least} or more")


def check_sizes(chunk_size: int, overlap: int) -> None:
    """Refused where a text cannot be cut like this."""
    if chunk_size <= 0:
        raise Refused(f"chunk_size={chunk_size}: give 1 or more")
    if not 0 <= overlap < chunk_size:
        raise Refused(f"overlap={overlap}: give 0 or more, and less than chunk_size ({chunk_size})")


@dataclass(slots=True, eq=False)
class Workspace:
    """One episode's work on one document."""

    document: Any = None
    """The text; None takes it from the task's field `document_content`."""
    reading: Reading = field(default_factory=Reading)
    keeper: Keeper | None = None
    notes: dict[str, Note] = field(default_factory=dict)
    searched: list[str] = field(default_factory=list)
    index: Index | None = None
    scanning: bool = False
    at: int = -1
    """The chunk read last."""

    def text(self, context: Context) -> str:
        """The document, or a word on why there is none."""
        given = context.fields.get(FIELD) if self.document is None else self.document
        if given is None:
            raise Refused("no document is attached")
        if not isinstance(given, str) or "\x00" in given:
            raise Refused("the attached document is not text (binary data)")
        if not given.strip():
            raise Refused("the attached document is empty")
        return given

    def build(self, text: str, chunk_size: int, overlap: int, tokenizer: Tokens | None) -> Index:
        """Index the document. What was searched in another index is forgotten."""
        check_sizes(chunk_size, overlap)
        text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be stored; lengths stay
        self.index = SHELF.index(text, chunk_size, overlap, tokenizer)
        self.searched.clear()
        self.scanning, self.at = False, -1
        return self.index

    def built(self) -> Index:
        if self.index is None:
            raise Refused("the index is not built; call buildIndex first")
        return self.index

    def kept(self) -> Keeper:
        if self.keeper is None:
            raise Refused("this agent keeps no context that can be edited")
        return self.keeper

    def note(self, key: str) -> Note:
        if key not in self.notes:
            raise Refused(f"Note '{key}' not found!")
        return self.notes[key]


WORKSPACE = State(Workspace)
"""The mark under which an episode's workspace is found: `context.state(WORKSPACE, WORKSPACE.make)`."""
Shared = Annotated[Workspace, WORKSPACE]


class JsonTool(Tool):
    """A tool whose answer is a JSON object, also where the call fails."""

    async def run(self, arguments: Mapping[str, Any], context: Context | None = None) -> ToolResult:
        result = await super().run(arguments, context)
        return result if result.ok else replace(result, content=error_object(self.name, result.content))


def error_object(name: str, text: str) -> str:
    """`{"error": "…"}`, once.

    Example:
        error_object("readChunk", "readChunk: Refused: no chunk 9")      # '{"error": "no chunk 9"}'
    """
    return json.dumps({"error": text.removeprefix(f"{name}: ").removeprefix("Refused: ")}, ensure_ascii=False)


def json_tool(name: str, **options: Any) -> Callable[[Callable[..., Any]], JsonTool]:
    """`@tool` for the tools of a workspace."""
    settings = {"stateful": True, "max_tokens": ENDLESS, "max_chars": ENDLESS} | options
    return functools.partial(JsonTool, name=name, **settings)
