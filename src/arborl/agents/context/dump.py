"""Episodes of a context-managing agent as JSON files for people: the whole history, the deletions, and every call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arborl.agents.context.history import Delete
from arborl.agents.context.session import ContextSession
from arborl.seeds import derive
from arborl.tokens import Tokens
from arborl.types import Call, Episode, Message


@dataclass(frozen=True, slots=True)
class Dump:
    """Where to write, and how often."""

    enabled: bool = False
    folder: str = "trajectories"
    freq: int = 1
    """One episode in so many, chosen by a hash of its name: the same ones whatever the order."""

    def __post_init__(self) -> None:
        if self.freq < 1:
            raise ValueError(f"dump_trajectories_freq={self.freq}: give 1 or more")

    def write(self, session: ContextSession) -> Path | None:
        """Write the episode, if it is one of those; nothing is read from the file again."""
        episode = getattr(session.model, "episode", None)
        if not self.enabled or not isinstance(episode, Episode) or derive(0, episode.id, episode.seed) % self.freq:
            return None
        name = re.sub(r"[^\w.-]+", "_", episode.id)[-80:]
        path = Path(self.folder) / f"{name}-{episode.seed:016x}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(describe(session, episode), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return path


def describe(session: ContextSession, episode: Episode) -> dict[str, Any]:
    """The episode in the seed's fields."""
    entries = session.history.entries
    deleted = [edit.id for edit in session.edits if isinstance(edit, Delete)]
    return {
        "request_id": episode.id,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "user_turns": sum(entry.message.role == "user" for entry in entries),
        "assistant_turns": session.turns,
        "had_delete_operation": bool(deleted),
        "deleted_msg_ids": deleted,
        "notes": {key: note.summary for key, note in session.space.notes.items()},
        "messages": [{"msg_id": entry.id} | _message(entry.message) for entry in entries],
        "rows": [_row(index, episode.calls, session) for index in range(len(episode.calls))],
    }


def _message(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {})


def _row(index: int, calls: list[Call], session: ContextSession) -> dict[str, Any]:
    """One call. It is a snapshot where no later call goes on from it."""
    call = calls[index]
    whole = call.whole
    decode = getattr(getattr(session.model, "tokenizer", None), "decode", str)
    return {
        "index": index,
        "is_snapshot": index < len(calls) - 1 and all(not whole.begins(Tokens(c.prompt)) for c in calls[index + 1 :]),
        "num_turns": index + 1,
        "prompt_length": len(call.prompt),
        "response_length": len(call.completion.tokens),
        "prompt_text": decode(call.prompt),
        "response_text": decode(call.completion.tokens),
    }
