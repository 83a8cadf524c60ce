"""An append-only history, a list of edits, and the visible messages as a pure function of both.

An edit never changes the history, only what is visible from now on. Training, evaluation and serving use the same
function.

Example:
    history = History.open(opening).add(reply).add(result, caller=1)
    edits = append_edit(history, (), Delete(2))
    view(history, edits, {"lamp": "Mira keeps it"}, Style())
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from arborl.fast_init import fast_init
from arborl.types import Message, ToolCall

STUB = "Content has been deleted to save space."
SUMMARY = "[Previous Summary]:"
ViewForm = Literal["json", "brief", "plain"]
BOOKKEEPING_TOOLS = ("note", "updateNote", "mergeNotes", "deleteContext")


class ContextError(ValueError):
    """An invalid edit; the message is for the model."""


@fast_init
@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A message and its id, which never changes."""

    id: int  # 1, 2, 3, … in order; 0 for the system messages and the first user message
    message: Message
    caller: int = 0  # id of the assistant message whose tool call this answers
    room: int | None = None  # tokens that were left when it was added
    tag: str = ""  # stays visible when the message is deleted: progress of a scan
    ok: bool = True


@fast_init
@dataclass(frozen=True, slots=True)
class History:
    """All messages. `add` returns a longer history."""

    entries: tuple[HistoryEntry, ...] = ()

    @classmethod
    def open(cls, messages: Sequence[Message]) -> History:
        """The history of the messages before the model's first message."""
        history, has_user = cls(), False
        for message in messages:
            if message.role == "system" or (message.role == "user" and not has_user):
                has_user = has_user or message.role == "user"
                history = cls((*history.entries, HistoryEntry(0, message)))
            else:
                history = history.observe(message)
        return history

    def observe(self, message: Message) -> History:
        """Add a message of the environment. A tool message answers the latest assistant message."""
        if message.role != "tool":
            return self.add(message)
        assistant_ids = (entry.id for entry in reversed(self.entries) if entry.message.role == "assistant")
        return self.add(message, next(assistant_ids, 0))

    def add(
        self, message: Message, caller: int = 0, room: int | None = None, tag: str = "", ok: bool = True
    ) -> History:
        return History((*self.entries, HistoryEntry(self.last + 1, message, caller, room, tag, ok)))

    @property
    def last(self) -> int:
        for entry in reversed(self.entries):
            if entry.id:
                return entry.id
        return 0

    @property
    def last_user(self) -> int:
        """Id of the last user message; 0 if that is the question. Tool results do not count, whatever their role."""
        user_ids = (entry.id for entry in reversed(self.entries) if entry.message.role == "user" and not entry.caller)
        return next(user_ids, 0)

    def find(self, number: int) -> HistoryEntry | None:
        return next((entry for entry in self.entries if entry.id == number and number > 0), None)


@dataclass(frozen=True, slots=True)
class Delete:
    """Replace a message by a stub. A deleted tool call keeps its name and loses its arguments."""

    id: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Show a deleted or folded message again; of folded messages the whole round."""

    id: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Replace messages `first` to `last` and the results of their calls by a summary next to the question."""

    first: int
    last: int
    summary: str
    keep: frozenset[int] = frozenset()  # ids that stay visible; `append_edit` sets it


@dataclass(frozen=True, slots=True)
class Truncate:
    """Hide messages before this one, and the results of their calls."""

    before: int
    keep: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Window:
    """Show only the latest `size` messages, besides system messages and the first and last user message."""

    size: int


Edit = Delete | Restore | Fold | Truncate | Window


def append_edit(history: History, edits: Sequence[Edit], new: Edit) -> tuple[Edit, ...]:
    """The edits with one more; ContextError if it is invalid. System messages and the last user message are neither
    folded nor hidden, because the model still works on them. After a newer user message a later edit may cover them."""
    states = MessageStates.of(history, edits)
    match new:
        case Delete(number):
            _check_delete(history, states, number)
        case Restore(number):
            if number not in states.deleted and number not in states.folded:
                raise ContextError(f"message {number} is not deleted")
        case Fold(first, last, summary, _):
            if not 1 <= first <= last <= history.last:
                raise ContextError(f"messages {first} to {last}: give numbers from 1 to {history.last}")
            if not summary.strip():
                raise ContextError("the summary is empty")
            new = replace(new, keep=pinned_ids(history))
        case Truncate(before, _):
            if not 1 <= before <= history.last:
                raise ContextError(f"before={before}: give a number from 1 to {history.last}")
            new = replace(new, keep=pinned_ids(history))
        case Window(size):
            if size < 1:
                raise ContextError(f"size={size}: give 1 or more")
    return (*edits, new)


def pinned_ids(history: History) -> frozenset[int]:
    """Ids of messages that must stay visible for now."""
    system = {entry.id for entry in history.entries if entry.message.role == "system"}
    return frozenset(system | {history.last_user}) - {0}


def _check_delete(history: History, states: MessageStates, number: int) -> None:
    entry = history.find(number)
    if number == 0:
        raise ContextError("message 0 is the question; system and user messages cannot be deleted")
    if entry is None:
        raise ContextError(f"there is no message {number}; the latest is {history.last}")
    if entry.message.role in ("system", "user"):
        raise ContextError(f"message {number} is a {entry.message.role} message; it cannot be deleted")
    if number in states.deleted:
        raise ContextError(f"message {number} is already deleted")
    if number in states.folded or number in states.hidden:
        raise ContextError(f"message {number} is no longer in your context")


@dataclass(frozen=True, slots=True)
class MessageStates:
    """Which messages are deleted, folded or hidden."""

    deleted: frozenset[int]
    folded: Mapping[int, Fold]
    hidden: frozenset[int]

    @classmethod
    def of(cls, history: History, edits: Sequence[Edit]) -> MessageStates:
        """Apply the edits in order; the later of two edits of one message wins."""
        deleted: set[int] = set()
        folded: dict[int, Fold] = {}
        hidden: set[int] = set()
        window: int | None = None
        for edit in edits:
            match edit:
                case Delete(number):
                    deleted.add(number)
                case Restore(number):
                    deleted.discard(number)
                    if number in folded:
                        folded = {n: f for n, f in folded.items() if n not in _with_results(history, number, number)}
                case Fold(first, last, _, keep):
                    folded |= dict.fromkeys(_with_results(history, first, last) - keep, edit)
                case Truncate(before, keep):
                    hidden |= _with_results(history, 1, before - 1) - keep
                case Window(size):
                    window = size
        not_visible = hidden | set(folded)
        if window is not None:
            hidden |= _outside(history, window, not_visible)
        return cls(frozenset(deleted - not_visible), folded, frozenset(hidden - set(folded)))


def _with_results(history: History, first: int, last: int) -> set[int]:
    """Ids of a span and of the results of its calls: they are visible or hidden together."""
    inside = {entry.id for entry in history.entries if first <= entry.id <= last}
    inside |= {entry.id for entry in history.entries if entry.caller in inside}
    callers = {entry.caller for entry in history.entries if entry.id in inside and entry.caller > 0}
    if callers <= inside:
        return inside
    return _with_results(history, min(callers), last)  # the span starts among the results of one call


def _outside(history: History, size: int, not_visible: set[int]) -> set[int]:
    """Ids outside a window. The window never starts with a result whose call is hidden."""
    left = [entry for entry in history.entries if entry.id > 0 and entry.id not in not_visible]
    stay = pinned_ids(history)
    shown = [entry for entry in left if entry.id not in stay][-size:]
    while shown and (shown[0].caller or shown[0].message.role == "tool"):
        shown = shown[1:]
    kept = stay | {entry.id for entry in shown}
    return {entry.id for entry in left if entry.id not in kept}


@dataclass(frozen=True, slots=True)
class ViewStyle:
    """Format of ids, notes, budget and stubs; the same for a whole run."""

    form: ViewForm = "json"
    """`json`: JSON objects and headed blocks; `brief`: few characters; `plain`: unchanged messages."""
    stub: str = STUB
    notes: bool = True
    """Show the notes next to the question, also if there are none yet."""
    budget: str = ""
    rooms: bool = True
    ids: bool = True
    tidy: bool = False
    """Hide rounds that only took notes or deleted, after they succeeded."""


def visible_messages(
    history: History, edits: Sequence[Edit] = (), notes: Mapping[str, str] | None = None, style: ViewStyle | None = None
) -> tuple[Message, ...]:
    """The messages that the model sees. A pure function."""
    style = style or ViewStyle()
    states = MessageStates.of(history, edits)
    bookkeeping = _bookkeeping_ids(history) if style.tidy else frozenset()
    beside = question_block(_summaries(states), notes or {}, style)
    has_no_question = all(entry.id or entry.message.role != "user" for entry in history.entries)
    alone = [Message("user", beside.strip())] if beside and has_no_question else []
    shown: list[Message] = []
    gap = False
    for entry in history.entries:
        if alone and entry.message.role != "system":
            shown, alone, gap = [*shown, *alone], [], True
        if entry.id in states.folded or entry.id in states.hidden or entry.id in bookkeeping:
            gap = True
            continue
        message = _message(entry, entry.id in states.deleted, style)
        if entry.id == 0 and message.role == "user":
            message = replace(message, content=message.content + beside)
        if gap and shown and shown[-1].role == message.role == "user":  # neighbours after an edit are merged
            shown[-1] = replace(message, content=f"{shown[-1].content}\n\n{message.content}")
        else:
            shown.append(message)
        gap = False
    return (*shown, *alone)


def question_block(summaries: Sequence[str], notes: Mapping[str, str], style: ViewStyle) -> str:
    folded = "".join(f"\n\n{SUMMARY} {summary}" for summary in summaries)
    if style.form == "brief":
        listed = "; ".join(f"{key}: {summary}" for key, summary in notes.items()) or "none"
        return (
            folded
            + (f"\nNotes: {listed}" if style.notes else "")
            + (f"\nBudget: {style.budget}" if style.budget else "")
        )
    listed = "\n".join(f"- **{key}**: {summary}" for key, summary in notes.items()) or "No notes recorded."
    memory = f"\n\n<external_memory>\n## Available Notes\n{listed}\n</external_memory>" if style.notes else ""
    return folded + memory + (f"\n\n<budget>{style.budget}</budget>" if style.budget else "")


def _bookkeeping_ids(history: History) -> frozenset[int]:
    """Ids of successful rounds that only took notes or deleted."""
    ids: set[int] = set()
    for entry in history.entries:
        calls = entry.message.tool_calls
        if entry.message.role == "assistant" and calls and all(call.name in BOOKKEEPING_TOOLS for call in calls):
            results = [other for other in history.entries if other.caller == entry.id]
            if len(results) == len(calls) and all(result.ok for result in results):
                ids |= {entry.id, *(result.id for result in results)}
    return frozenset(ids)


def _summaries(states: MessageStates) -> list[str]:
    """Summaries in force, in the order of the messages that they replace."""
    summaries = {(fold.first, fold.last): fold.summary for _, fold in sorted(states.folded.items())}
    return list(summaries.values())


def _message(entry: HistoryEntry, deleted: bool, style: ViewStyle) -> Message:
    message = entry.message
    if message.role == "tool" and (deleted or style.form != "plain"):
        return replace(message, content=_result(entry, deleted, style))
    if message.role == "assistant" and deleted:
        named = tuple(ToolCall(c.id, c.name, {"message": style.stub}) for c in message.tool_calls if c.name)
        return Message("assistant", style.stub, tool_calls=named)
    return message


def _result(entry: HistoryEntry, deleted: bool, style: ViewStyle) -> str:
    content = style.stub if deleted else entry.message.content
    room = entry.room if style.rooms and not deleted else None
    if style.form == "brief":
        number = f"#{entry.id} " if style.ids else ""
        tag = f"{entry.tag}: " if deleted and entry.tag else ""
        return f"{number}{tag}{content}" + ("" if room is None else f" ({room} left)")
    shown: dict[str, object] = _object(content) if not deleted else {"status": "success", "message": content}
    ids = {"msg_id": entry.id, "msg_id(invoking_assistant)": entry.caller} if style.ids else {}
    if deleted:
        shown |= {"original_tool": entry.message.name} | ({"reading_progress": entry.tag} if entry.tag else {})
    left = {} if room is None else {"available_tokens": room}
    return json.dumps(ids | shown | left, ensure_ascii=False)


def _object(content: str) -> dict[str, object]:
    """A tool result as a JSON object; other text becomes the `result` of one."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"result": content}
