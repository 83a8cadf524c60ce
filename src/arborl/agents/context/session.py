"""One episode of an agent that edits its context: the history, the edits, the notes, and how much room there is.

Every number that the model is told about its budget is computed here, by the same lines that end the episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from arborl.agents.agent import Model
from arborl.agents.context.history import ContextError, Delete, Edit, Fold, Style
from arborl.agents.context.talk import Bounds, Talk
from arborl.chat.formats.hermes import HermesParser
from arborl.errors import ContextFull, MaxTurns
from arborl.tools.library.document_tools import (
    DocumentToolError,
    Workspace,
    error_object,
    format_tool_list,
    shorten_result,
)
from arborl.types import Message, ToolCall, ToolResult, ToolSpec

EXAMPLE = ToolCall("", "readChunk", {"chunk_id": 1})


class ContextSession(Talk):
    """What the loop and the context tools both hold.

    Args:
        model: samples; its calls are recorded.
        opening: what the environment said.
        specs: the tools.
        space: document and notes.
        bounds: limits.
        style: how the view looks; its budget is filled in here.
    """

    def __init__(
        self,
        model: Model,
        opening: Sequence[Message],
        specs: Sequence[ToolSpec],
        space: Workspace,
        bounds: Bounds,
        style: Style,
    ):
        self.space, brief = space, style.form == "brief" and bool(specs)
        shown = replace(style, budget=f"{bounds.tokens} tokens, {bounds.turns} rounds" if style.rooms else "")
        told = with_tools(opening, specs, model) if brief else opening
        super().__init__(model, told, None, () if brief else specs, bounds, shown)
        self.turns = 0

    def notes(self) -> Mapping[str, str]:
        return {key: note.summary for key, note in self.space.notes.items()}

    def check(self) -> None:
        """End the episode where a limit is passed; that it was, is counted."""
        if self.turns >= self.bounds.turns:
            self.model.count({"context/exceeded": 1.0})
            raise MaxTurns(f"{self.bounds.turns} rounds are used up")
        room = self.room()
        if room < 0:
            self.model.count({"context/exceeded": 1.0})
            raise ContextFull(f"{-room} tokens too many for a context of {self.bounds.tokens}")

    # -------------------------------------------------------------------------------------------- what happens

    async def next(self) -> Message:
        """The model's next message, added to the history."""
        message = await self.ask()
        self.add(message)
        self.turns += 1
        return message

    def answer(self, call: ToolCall, result: ToolResult, caller: int) -> None:
        """Add a tool's answer, as the model will read it, with the room there is for it and all that follows."""
        content, room = result.content, max(self.room(), 0)
        if not result.ok and not content.startswith('{"error"'):
            content = error_object(call.name, content)
        tag = ""
        if self.space.scanning and call.name == "readChunk" and self.space.index and result.ok:
            tag = f"{self.space.last_chunk + 1}/{len(self.space.index)}"
        if self.style.form == "brief":
            content = shorten_result(call.name, content)
        said = Message("tool", content, tool_call_id=call.id, name=call.name or None)
        self.history = self.history.add(said, caller, room, tag, result.ok)

    def report(self) -> None:
        """Count what happened into the episode's metrics."""
        counted = self.counted({"deleted": Delete, "folded": Fold})
        counted |= {"context/notes": float(len(self.space.notes)), "context/turns": float(self.turns)}
        self.model.count(counted)

    # -------------------------------------------------------------------------------------------- for the tools

    def budget(self) -> dict[str, int]:
        return {
            "conv_rounds": self.turns,
            "available_tokens": max(self.room(), 0),
            "available_rounds": max(self.bounds.turns - self.turns, 0),
        }

    def delete(self, msg_id: int) -> dict[str, Any]:
        self._edit(Delete(msg_id))
        entry = self.history.find(msg_id)
        assert entry is not None, "an edit of a message that does not exist was refused"
        return {"status": "success", "deleted_msg_id": msg_id, "deleted_role": entry.message.role}

    def fold(self, summary: str) -> dict[str, Any]:
        """Fold all before the message that asks for it; and that one too, where it asks for nothing else."""
        asking = max(entry.id for entry in self.history.entries if entry.message.role == "assistant")
        asker = self.history.find(asking)
        assert asker is not None, "the assistant's latest message is in the history"
        alone = all(call.name == "summarize" for call in asker.message.tool_calls)
        last = asking if alone else asking - 1
        if last < 1:
            raise DocumentToolError("there is nothing to summarize yet")
        self._edit(Fold(1, last, summary))
        return {"status": "success", "folded": last}

    def _edit(self, new: Edit) -> None:
        try:
            self.edit(new)
        except ContextError as error:
            raise DocumentToolError(str(error)) from error


def with_tools(opening: Sequence[Message], specs: Sequence[ToolSpec], model: Model) -> list[Message]:
    """The opening with the tools in a line of the system's message, and how to call one in the model's own format."""
    parser = getattr(getattr(model, "renderer", None), "parser", None) or HermesParser()
    told = f"Tools: {format_tool_list(specs)}\nCall: {parser.format(EXAMPLE)}"
    if opening and opening[0].role == "system":
        return [replace(opening[0], content=f"{opening[0].content}\n{told}"), *opening[1:]]
    return [Message("system", told), *opening]
