"""Tools to keep what matters and let go of the rest: notes, the budget, and edits of the model's own context."""

from __future__ import annotations

import json
from typing import Any, Literal

from arborl.tools.injection import Context
from arborl.tools.library.context.workspace import Note, Refused, Shared, json_tool


def as_content(content: Any) -> str:
    """A note's content as text; an object as JSON."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


@json_tool("note")
async def note(key: str, summary: str, space: Shared, content: Any = None) -> dict[str, Any]:
    """Write a note. Its key and summary stay in view; a note of the same key is replaced.

    Args:
        key: its name.
        summary: what it says, in short.
        content: what it says in full; the summary where left out.
    """
    space.notes[key] = Note(summary, summary if content is None else as_content(content))
    return {"status": "success", "key": key}


@json_tool("readNote")
async def read_note(key: str, space: Shared) -> dict[str, Any]:
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
    space: Shared,
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
        raise Refused("give new_content or new_summary")
    content = old.content if new_content is None else as_content(new_content)
    if mode == "append" and new_content is not None:
        content = f"{old.content}\n{content}"
    space.notes[key] = Note(old.summary if new_summary is None else new_summary, content)
    return {"status": "success", "key": key, "message": "Note updated."}


@json_tool("mergeNotes")
async def merge_notes(
    keys: list[str], space: Shared, new_key: str | None = None, new_summary: str | None = None
) -> dict[str, Any]:
    """Make one note of several.

    Args:
        keys: names of the notes.
        new_key: name of the new note; the old ones joined by _ where left out.
        new_summary: its summary; the old ones joined where left out.
    """
    if len(set(keys)) < 2:
        raise Refused("give the keys of two notes or more")
    merged = [(key, space.note(key)) for key in dict.fromkeys(keys)]
    name = new_key or "_".join(key for key, _ in merged)
    summary = new_summary or "  ".join(one.summary for _, one in merged)
    for key, _ in merged:
        del space.notes[key]
    space.notes[name] = Note(summary, "\n".join(one.content for _, one in merged))
    return {"status": "success", "new_key": name, "merged_from": [key for key, _ in merged]}


@json_tool("checkBudget")
async def check_budget(space: Shared) -> dict[str, Any]:
    """See how many tokens and rounds are left."""
    return dict(space.kept().budget())


@json_tool("getContextStats")
async def get_context_stats(space: Shared, context: Context) -> dict[str, Any]:
    """See the budget, the notes, the index and what was searched for."""
    return space.kept().budget() | {
        "total_notes": len(space.notes),
        "notes_keys": list(space.notes),
        "index_chunks": len(space.index) if space.index else 0,
        "document_size": len(_text_or_none(space, context)),
        "searched_keywords": list(space.searched),
    }


def _text_or_none(space: Any, context: Context) -> str:
    try:
        return str(space.text(context))
    except Refused:
        return ""


@json_tool("deleteContext")
async def delete_context(msg_id: int, space: Shared) -> dict[str, Any]:
    """Delete a message you no longer need from your context.

    Args:
        msg_id: its number.
    """
    return space.kept().delete(msg_id)


@json_tool("summarize")
async def summarize(summary: str, space: Shared) -> dict[str, Any]:
    """Replace everything since the question by a summary.

    Args:
        summary: what you need to remember.
    """
    if not summary.strip():
        raise Refused("the summary is empty")
    return space.kept().fold(summary)
