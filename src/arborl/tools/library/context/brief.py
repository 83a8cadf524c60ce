"""The document tools for small windows: each answer in a few words instead of JSON, each tool as name and arguments.

Nothing is decided here: the same calls are made and answered, only shown shorter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arborl.types import ToolSpec

Payload = Mapping[str, Any]


def _search(payload: Payload) -> str:
    hits = payload["retrieved_chunks"]
    if not any(hit["highlights"] for hit in hits):
        return "chunks " + " ".join(str(hit["chunk_id"]) for hit in hits) if hits else "none"
    return "\n".join(f"{hit['chunk_id']}: {' … '.join(hit['highlights'])}" for hit in hits)


def _read(payload: Payload) -> str:
    (chunk,) = payload["retrieved_chunk"]
    return f"{payload.get('reading_progress', chunk['chunk_id'])}: {chunk['content'].strip()}"


def _budget(payload: Payload) -> str:
    return f"{payload['available_tokens']} tokens, {payload['available_rounds']} rounds"


def _stats(payload: Payload) -> str:
    return f"{_budget(payload)}, {payload['total_notes']} notes, {payload['index_chunks']} chunks"


def _ok(payload: Payload) -> str:
    return "ok"


BRIEF: dict[str, tuple[tuple[str, ...], Callable[[Payload], str]]] = {
    "analyzeText": ((), lambda payload: f"{payload['total_tokens']} tokens"),
    "loadDocument": ((), lambda payload: str(payload["document_content"])),
    "buildIndex": ((), lambda payload: f"chunks 0 to {payload['last_chunk_id']}"),
    "readChunk": (("chunk_id",), _read),
    "searchEngine": (("keyword",), _search),
    "note": (("key", "summary"), _ok),
    "readNote": (("key",), lambda payload: str(payload["full_content"])),
    "updateNote": (("mode", "key", "new_content"), _ok),
    "mergeNotes": (("keys",), _ok),
    "checkBudget": ((), _budget),
    "getContextStats": ((), _stats),
    "deleteContext": (("msg_id",), _ok),
    "summarize": (("summary",), _ok),
    "finish": (("answer",), lambda payload: str(payload.get("final_answer", ""))),
}
"""Tool -> the arguments the model is told of, and its answer in short."""


def shorten(tool: str, content: str) -> str:
    """An answer in short; text that is no JSON object, or of another tool, as it is.

    Example:
        shorten("deleteContext", '{"status": "success", "deleted_msg_id": 3}')      # 'ok'
        shorten("readChunk", '{"error": "chunk_id=9: give 0 to 3"}')                # 'error: chunk_id=9: give 0 to 3'
    """
    try:
        payload = json.loads(content)
    except ValueError:
        return content
    if isinstance(payload, dict) and set(payload) == {"error"}:
        return f"error: {str(payload['error']).split('. ')[0]}"
    return BRIEF[tool][1](payload) if tool in BRIEF and isinstance(payload, dict) else content


def listed(specs: Sequence[ToolSpec]) -> str:
    """All tools in a line.

    Example:
        listed([read_chunk.spec, finish.spec])      # 'readChunk(chunk_id), finish(answer)'
    """
    shown = []
    for spec in specs:
        known = BRIEF.get(spec.name)
        arguments = known[0] if known else tuple(spec.parameters.get("required", ()))
        shown.append(f"{spec.name}({', '.join(arguments)})")
    return ", ".join(shown)
