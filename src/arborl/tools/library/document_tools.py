"""Tools for documents larger than the context: search and read, notes, edits of the model's context.

The document is the task's field `document_content`; the model sees it only through these tools. Every result is one
JSON object; an error is `{"error": "…"}`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from arborl.tools.core.tool import Tool
from arborl.tools.core.tool_context import EpisodeState, TokenEncoder, ToolContext
from arborl.tools.library.document_index import INDEX_CACHE, DocumentIndex, cut_into_chunks, highlights
from arborl.tools.library.finish import finish as plain_finish
from arborl.types import ToolResult, ToolSpec

FIELD = "document_content"
NO_LIMIT = 1 << 40  # output limit: truncation would break the JSON
INDEX_ID = "document_index"
FILE_NAME = "attached_document.txt"


class DocumentToolError(ValueError):
    """A call that cannot be executed; the message is for the model."""


class ContextEditor(Protocol):
    """The agent's context, which the model can edit."""

    def budget(self) -> dict[str, int]: ...

    def delete(self, msg_id: int) -> dict[str, Any]:
        """Replace a message by a deletion note; DocumentToolError if that is not possible."""
        ...

    def fold(self, summary: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class DocumentNote:
    """A note of the model."""

    summary: str  # always in the context
    content: str  # returned by `readNote`


@dataclass(frozen=True, slots=True)
class DocumentSettings:
    """Chunk sizes and search output."""

    chunk_size: int = 4000
    """Default tokens per chunk."""
    overlap: int = 0
    built: bool = False
    """The index exists from the start, with these sizes; `buildIndex` can build another."""
    results: int = 20
    """Maximum number of chunks per search."""
    fragment_size: int = 180
    """Characters per highlight."""
    fragments: int = 3
    """Highlights per chunk; 0: only chunk numbers."""

    def __post_init__(self) -> None:
        check_sizes(self.chunk_size, self.overlap)
        for name, least in (("results", 1), ("fragment_size", 1), ("fragments", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: give {least} or more")


def check_sizes(chunk_size: int, overlap: int) -> None:
    if chunk_size <= 0:
        raise DocumentToolError(f"chunk_size={chunk_size}: give 1 or more")
    if not 0 <= overlap < chunk_size:
        raise DocumentToolError(f"overlap={overlap}: give 0 or more, and less than chunk_size ({chunk_size})")


@dataclass(slots=True, eq=False)
class Workspace:
    """State of one episode: document, index, notes."""

    document: Any = None  # the text; None: the task's field `document_content`
    settings: DocumentSettings = field(default_factory=DocumentSettings)
    editor: ContextEditor | None = None
    notes: dict[str, DocumentNote] = field(default_factory=dict)
    searched: list[str] = field(default_factory=list)
    index: DocumentIndex | None = None
    scanning: bool = False
    last_chunk: int = -1

    def text(self, context: ToolContext) -> str:
        document = context.fields.get(FIELD) if self.document is None else self.document
        if document is None:
            raise DocumentToolError("no document is attached")
        if not isinstance(document, str) or "\x00" in document:
            raise DocumentToolError("the attached document is not text (binary data)")
        if not document.strip():
            raise DocumentToolError("the attached document is empty")
        return document

    def build(self, text: str, chunk_size: int, overlap: int, tokenizer: TokenEncoder | None) -> DocumentIndex:
        check_sizes(chunk_size, overlap)
        text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be stored
        self.index = INDEX_CACHE.index(text, chunk_size, overlap, tokenizer)
        self.searched.clear()
        self.scanning, self.last_chunk = False, -1
        return self.index

    def require_index(self) -> DocumentIndex:
        if self.index is None:
            raise DocumentToolError("the index is not built; call buildIndex first")
        return self.index

    def require_editor(self) -> ContextEditor:
        if self.editor is None:
            raise DocumentToolError("the context of this agent cannot be edited")
        return self.editor

    def note(self, key: str) -> DocumentNote:
        if key not in self.notes:
            raise DocumentToolError(f"Note '{key}' not found!")
        return self.notes[key]


WORKSPACE = EpisodeState(Workspace)
EpisodeWorkspace = Annotated[Workspace, WORKSPACE]


class JsonTool(Tool):
    """A tool whose result is a JSON object, also on failure."""

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        result = await super().run(arguments, context)
        return result if result.ok else replace(result, content=error_object(self.name, result.content))


def error_object(name: str, text: str) -> str:
    """`{"error": "…"}` without the tool's name and the exception's type."""
    text = text.removeprefix(f"{name}: ").removeprefix(f"{DocumentToolError.__name__}: ")
    return json.dumps({"error": text}, ensure_ascii=False)


def json_tool(name: str, **options: Any) -> Callable[[Callable[..., Any]], JsonTool]:
    """`@tool` for the tools of a workspace."""
    return functools.partial(
        JsonTool, name=name, **{"stateful": True, "max_tokens": NO_LIMIT, "max_chars": NO_LIMIT} | options
    )


@json_tool("analyzeText", timeout=60)
def analyze_text(space: EpisodeWorkspace, context: ToolContext) -> dict[str, Any]:
    """Get the length of the document in tokens."""
    text = space.text(context)
    tokens = space.index.tokens if space.index else cut_into_chunks(text, 1 << 60, 0, context.tokenizer)[1]
    return {"file_name": FILE_NAME, "total_tokens": tokens}


@json_tool("loadDocument")
async def load_document(space: EpisodeWorkspace, context: ToolContext) -> dict[str, Any]:
    """Read the whole document at once. It may not fit your context."""
    return {FIELD: space.text(context)}


@json_tool("buildIndex", timeout=120)
def build_index(
    space: EpisodeWorkspace, context: ToolContext, chunk_size: int | None = None, overlap: int | None = None
) -> dict[str, Any]:
    """Cut the document into chunks and index them.

    Args:
        chunk_size: tokens of a chunk.
        overlap: tokens that a chunk shares with the one before it.
    """
    settings = space.settings
    if overlap is None:
        overlap = settings.overlap if chunk_size is None else 0
    size = settings.chunk_size if chunk_size is None else chunk_size
    index = space.build(space.text(context), size, overlap, context.tokenizer)
    return {"index_id": INDEX_ID, "total_chunks": len(index), "first_chunk_id": 0, "last_chunk_id": len(index) - 1}


@json_tool("readChunk")
async def read_chunk(
    space: EpisodeWorkspace, context: ToolContext, chunk_id: int | None = None, enable_scan: bool | None = None
) -> dict[str, Any]:
    """Read one chunk of the document.

    Args:
        chunk_id: its number.
        enable_scan: true reads the chunks one after the other, without chunk_id, until false.
    """
    space.text(context)
    index = space.require_index()
    if enable_scan is not None:
        space.scanning = enable_scan
    if chunk_id is None and not space.scanning:
        raise DocumentToolError("give chunk_id, or enable_scan=true")
    number = space.last_chunk + 1 if chunk_id is None else chunk_id
    if not 0 <= number < len(index):
        if chunk_id is None:
            raise DocumentToolError(f"all {len(index)} chunks have been read")
        raise DocumentToolError(f"chunk_id={number}: give 0 to {len(index) - 1}")
    space.last_chunk = number
    begin, end = index.spans[number]
    chunk = {"chunk_id": number, "content": index.content(number), "start_pos": begin, "end_pos": end}
    progress = {"reading_progress": f"{number + 1}/{len(index)}"} if space.scanning else {}
    return {"retrieved_chunk": [chunk], "chunk_id": number} | progress


@json_tool("searchEngine", timeout=60)
def search_engine(
    keyword: str, space: EpisodeWorkspace, context: ToolContext, mode: Literal["or", "and"] = "or"
) -> dict[str, Any]:
    """Find the chunks that match keywords.

    Args:
        keyword: keywords, separated by commas.
        mode: a chunk matches any of them (or) or all (and).
    """
    space.text(context)
    index, settings = space.require_index(), space.settings
    keywords = [part.strip() for part in keyword.split(",") if part.strip()]
    if not keywords:
        raise DocumentToolError("the keyword is empty")
    space.searched.extend(one for one in keywords if one not in space.searched)
    total, hits = index.search(keywords, mode, settings.results, marked=settings.fragments > 0)
    found: dict[str, Any] = {
        "retrieved_chunks": [
            {
                "chunk_id": hit.chunk,
                "relevance_score": round(hit.score, 4),
                "highlights": highlights(hit.marked, settings.fragment_size, settings.fragments),
            }
            for hit in hits
        ],
        "keywords": keywords,
    }
    if not hits:
        found["message"] = "No matching content found."
    elif total > len(hits):
        found["message"] = f"Showing the most relevant {len(hits)}/{total} chunks."
    return found


finish = json_tool("finish", stateful=False, terminal=True, description=plain_finish.spec.description)(
    plain_finish.function
)


def _content_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


@json_tool("note")
async def note(key: str, summary: str, space: EpisodeWorkspace, content: Any = None) -> dict[str, Any]:
    """Write a note. Its key and summary stay in view; a note of the same key is replaced.

    Args:
        key: its name.
        summary: what it says, in short.
        content: what it says in full; the summary where left out.
    """
    space.notes[key] = DocumentNote(summary, summary if content is None else _content_text(content))
    return {"status": "success", "key": key}


@json_tool("readNote")
async def read_note(key: str, space: EpisodeWorkspace) -> dict[str, Any]:
    """Read a note in full.

    Args:
        key: its name.
    """
    found = space.note(key)
    return {"summary": found.summary, "full_content": found.content}


@json_tool("updateNote")
async def update_note(
    mode: Literal["append", "overwrite", "delete"],
    key: str,
    space: EpisodeWorkspace,
    new_content: Any = None,
    new_summary: str | None = None,
) -> dict[str, Any]:
    """Change or delete a note.

    Args:
        mode: append to it, overwrite it or delete it.
        key: its name.
        new_content: what to append, or its new content.
        new_summary: its new summary; the old one stays where left out.
    """
    old = space.note(key)
    if mode == "delete":
        del space.notes[key]
        return {"status": "success", "key": key, "message": "Note deleted."}
    if new_content is None and new_summary is None:
        raise DocumentToolError("give new_content or new_summary")
    content = old.content if new_content is None else _content_text(new_content)
    if mode == "append" and new_content is not None:
        content = f"{old.content}\n{content}"
    space.notes[key] = DocumentNote(old.summary if new_summary is None else new_summary, content)
    return {"status": "success", "key": key, "message": "Note updated."}


@json_tool("mergeNotes")
async def merge_notes(
    keys: list[str], space: EpisodeWorkspace, new_key: str | None = None, new_summary: str | None = None
) -> dict[str, Any]:
    """Make one note of several.

    Args:
        keys: names of the notes.
        new_key: name of the new note; the old ones joined by _ where left out.
        new_summary: its summary; the old ones joined where left out.
    """
    if len(set(keys)) < 2:
        raise DocumentToolError("give the keys of two notes or more")
    merged = {key: space.note(key) for key in dict.fromkeys(keys)}
    name = new_key or "_".join(merged)
    summary = new_summary or "  ".join(one.summary for one in merged.values())
    for key in merged:
        del space.notes[key]
    space.notes[name] = DocumentNote(summary, "\n".join(one.content for one in merged.values()))
    return {"status": "success", "new_key": name, "merged_from": list(merged)}


@json_tool("checkBudget")
async def check_budget(space: EpisodeWorkspace) -> dict[str, Any]:
    """See how many tokens and rounds are left."""
    return dict(space.require_editor().budget())


@json_tool("getContextStats")
async def get_context_stats(space: EpisodeWorkspace, context: ToolContext) -> dict[str, Any]:
    """See the budget, the notes, the index and what was searched for."""
    budget = space.require_editor().budget()
    try:
        size = len(space.text(context))
    except DocumentToolError:
        size = 0
    return budget | {
        "total_notes": len(space.notes),
        "notes_keys": list(space.notes),
        "index_chunks": len(space.index) if space.index else 0,
        "document_size": size,
        "searched_keywords": list(space.searched),
    }


@json_tool("deleteContext")
async def delete_context(msg_id: int, space: EpisodeWorkspace) -> dict[str, Any]:
    """Delete a message you no longer need from your context.

    Args:
        msg_id: its number.
    """
    return space.require_editor().delete(msg_id)


@json_tool("summarize")
async def summarize(summary: str, space: EpisodeWorkspace) -> dict[str, Any]:
    """Replace everything since the question by a summary.

    Args:
        summary: what you need to remember.
    """
    if not summary.strip():
        raise DocumentToolError("the summary is empty")
    return space.require_editor().fold(summary)


Payload = Mapping[str, Any]


def _short_search(payload: Payload) -> str:
    hits = payload["retrieved_chunks"]
    if not any(hit["highlights"] for hit in hits):
        return "chunks " + " ".join(str(hit["chunk_id"]) for hit in hits) if hits else "none"
    return "\n".join(f"{hit['chunk_id']}: {' … '.join(hit['highlights'])}" for hit in hits)


def _short_chunk(payload: Payload) -> str:
    (chunk,) = payload["retrieved_chunk"]
    return f"{payload.get('reading_progress', chunk['chunk_id'])}: {chunk['content'].strip()}"


def _short_budget(payload: Payload) -> str:
    return f"{payload['available_tokens']} tokens, {payload['available_rounds']} rounds"


def _short_stats(payload: Payload) -> str:
    return f"{_short_budget(payload)}, {payload['total_notes']} notes, {payload['index_chunks']} chunks"


def _ok(payload: Payload) -> str:
    return "ok"


SHORT_FORMS: dict[str, tuple[tuple[str, ...], Callable[[Payload], str]]] = {
    "analyzeText": ((), lambda payload: f"{payload['total_tokens']} tokens"),
    "loadDocument": ((), lambda payload: str(payload["document_content"])),
    "buildIndex": ((), lambda payload: f"chunks 0 to {payload['last_chunk_id']}"),
    "readChunk": (("chunk_id",), _short_chunk),
    "searchEngine": (("keyword",), _short_search),
    "note": (("key", "summary"), _ok),
    "readNote": (("key",), lambda payload: str(payload["full_content"])),
    "updateNote": (("mode", "key", "new_content"), _ok),
    "mergeNotes": (("keys",), _ok),
    "checkBudget": ((), _short_budget),
    "getContextStats": ((), _short_stats),
    "deleteContext": (("msg_id",), _ok),
    "summarize": (("summary",), _ok),
    "finish": (("answer",), lambda payload: str(payload.get("final_answer", ""))),
}
"""For small context windows: tool -> its listed arguments, and its result in a few words."""


def shorten_result(tool: str, content: str) -> str:
    try:
        payload = json.loads(content)
    except ValueError:
        return content
    if isinstance(payload, dict) and set(payload) == {"error"}:
        return f"error: {str(payload['error']).split('. ')[0]}"
    return SHORT_FORMS[tool][1](payload) if tool in SHORT_FORMS and isinstance(payload, dict) else content


def format_tool_list(specs: Sequence[ToolSpec]) -> str:
    parts = []
    for spec in specs:
        known = SHORT_FORMS.get(spec.name)
        arguments = known[0] if known else tuple(spec.parameters.get("required", ()))
        parts.append(f"{spec.name}({', '.join(arguments)})")
    return ", ".join(parts)
