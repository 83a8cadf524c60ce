"""One episode of an agent that edits its context: the history, the edits, the notes, and how much room there is.

Every number that the model is told about its budget is computed here, by the same lines that end the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from arborl.agents.agent import Model
from arborl.agents.context.history import ContextError, Delete, Edit, Fold, History, Style, edited, view
from arborl.chat.fit import cannot_fit
from arborl.chat.formats.hermes import HermesParser
from arborl.errors import ContextFull, MaxTurns
from arborl.tools.library.context.brief import listed, shorten
from arborl.tools.library.context.workspace import Refused, Workspace, error_object
from arborl.tools.output import count
from arborl.types import Message, ToolCall, ToolResult, ToolSpec

EXAMPLE = ToolCall("", "readChunk", {"chunk_id": 1})
HEADER = 8
"""Tokens around a message, where no template says how many."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one episode may take."""

    tokens: int
    """Prompt and completion together."""
    reply: int
    """Tokens kept free for the model's next message."""
    turns: int

    @classmethod
    def of(cls, model: Model, tokens: int | None, reply: int | None, turns: int) -> Bounds:
        """The agent's settings within the run's; where the agent says nothing, the run's.

        Raises ValueError where the agent's cannot be kept within the run's.
        """
        limits, sampling = getattr(model, "limits", None), getattr(model, "sampling", None)
        window = limits.max_context if limits is not None else tokens
        longest = sampling.max_tokens if sampling is not None else reply
        if window is None or longest is None:
            raise ValueError("max_model_len and single_turn_max_tokens: this model has none of its own; give both")
        if tokens is not None and tokens > window:
            raise ValueError(f"max_model_len={tokens} above sampling.max_context={window}: raise the latter")
        if reply is not None and reply < longest:
            raise ValueError(
                f"single_turn_max_tokens={reply} below sampling.max_tokens={longest}: the model would write more than "
                f"was kept free. Write sampling.max_tokens={reply}."
            )
        return cls(window if tokens is None else tokens, longest if reply is None else reply, turns)


class ContextSession:
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
        self.model, self.space, self.bounds = model, space, bounds
        self.style = replace(style, budget=f"{bounds.tokens} tokens, {bounds.turns} rounds" if style.rooms else "")
        brief = style.form == "brief" and bool(specs)
        self.specs = () if brief else tuple(specs)
        self.history = History.open(with_tools(opening, specs, model) if brief else opening)
        self.edits: tuple[Edit, ...] = ()
        self.turns = 0

    # -------------------------------------------------------------------------------------------- what is shown

    def messages(self) -> tuple[Message, ...]:
        """What the model is shown next."""
        return self.shown(self.history, self.edits)

    def shown(self, history: History, edits: Sequence[Edit]) -> tuple[Message, ...]:
        return view(history, edits, {key: note.summary for key, note in self.space.notes.items()}, self.style)

    def measure(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt that these messages make: what the engine would be given. More than the context takes,
        where they cannot fit."""
        conversations = getattr(self.model, "conversations", None)
        tokenizer = getattr(self.model, "tokenizer", None)
        if tokenizer is not None and cannot_fit(messages, tokenizer, self.bounds.tokens):
            return self.bounds.tokens + 1  # at least; how many more would take long to find out
        if conversations is not None:
            return len(conversations.prompt(messages, self.specs).tokens)
        texts = [message.content for message in messages] + [str(spec) for spec in self.specs]
        return sum(count(text, tokenizer) + HEADER for text in texts)

    def room(self, messages: Sequence[Message] | None = None) -> int:
        """Tokens that may be added before the episode ends; negative when it is too late."""
        used = self.measure(self.messages() if messages is None else messages)
        return self.bounds.tokens - self.bounds.reply - used

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

    async def ask(self) -> Message:
        """The model's next message, added to the history."""
        message = await self.model.chat(self.messages(), self.specs)
        self.history = self.history.add(message)
        self.turns += 1
        return message

    def answer(self, call: ToolCall, result: ToolResult, caller: int) -> None:
        """Add a tool's answer, as the model will read it, with the room there is for it and all that follows."""
        content, room = result.content, max(self.room(), 0)
        if not result.ok and not content.startswith('{"error"'):
            content = error_object(call.name, content)
        tag = ""
        if self.space.scanning and call.name == "readChunk" and self.space.index and result.ok:
            tag = f"{self.space.at + 1}/{len(self.space.index)}"
        if self.style.form == "brief":
            content = shorten(call.name, content)
        said = Message("tool", content, tool_call_id=call.id, name=call.name or None)
        self.history = self.history.add(said, caller, room, tag, result.ok)

    def edit(self, new: Edit) -> None:
        """One more edit; ContextError where it makes no sense."""
        self.edits = edited(self.history, self.edits, new)

    def report(self) -> None:
        """Count what happened into the episode's metrics."""
        kinds = {"deleted": Delete, "folded": Fold}
        counted = {f"context/{name}": float(sum(isinstance(e, k) for e in self.edits)) for name, k in kinds.items()}
        counted |= {"context/notes": float(len(self.space.notes)), "context/turns": float(self.turns)}
        calls = getattr(getattr(self.model, "episode", None), "calls", ())
        peak = max((len(call.prompt) + len(call.completion.tokens) for call in calls), default=0)
        self.model.count(counted | {"context/peak": float(peak)})

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
            raise Refused("there is nothing to summarize yet")
        self._edit(Fold(1, last, summary))
        return {"status": "success", "folded": last}

    def _edit(self, new: Edit) -> None:
        try:
            self.edit(new)
        except ContextError as error:
            raise Refused(str(error)) from error


def with_tools(opening: Sequence[Message], specs: Sequence[ToolSpec], model: Model) -> list[Message]:
    """The opening with the tools in a line of the system's message, and how to call one in the model's own format."""
    parser = getattr(getattr(model, "renderer", None), "parser", None) or HermesParser()
    told = f"Tools: {listed(specs)}\nCall: {parser.format(EXAMPLE)}"
    if opening and opening[0].role == "system":
        return [replace(opening[0], content=f"{opening[0].content}\n{told}"), *opening[1:]]
    return [Message("system", told), *opening]
