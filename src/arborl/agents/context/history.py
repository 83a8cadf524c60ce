"""What the model is shown of its past: an immutable history, a list of edits, and a pure view of the two.

The history only grows. An edit never changes it: it says how it is shown from now on. So nothing is lost, any view can
be had again, and what training, evaluation and serving show is the same function of the same three things.

Example:
    history = History.open(opening).add(said).add(result, caller=1)
    edits = edited(history, (), Delete(2))
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
Form = Literal["json", "brief", "plain"]
CHORES = ("note", "updateNote", "mergeNotes", "deleteContext")


class ContextError(ValueError):
    """An edit that cannot be made; the message is written for the model."""


# ------------------------------------------------------------------------------------------------ history


@fast_init
@dataclass(frozen=True, slots=True)
class Entry:
    """A message and its number, which it keeps for ever."""

    id: int
    """1, 2, 3, … in order; 0 for the system's and the first user's message, whichever of them there are."""
    message: Message
    caller: int = 0
    """Id of the assistant's message whose call this answers."""
    room: int | None = None
    """Tokens that were left when it came, as the loop counts them."""
    tag: str = ""
    """What stays visible of it when it is deleted: how far a scan has read."""
    ok: bool = True
    """Whether the call that it answers worked."""


@fast_init
@dataclass(frozen=True, slots=True)
class History:
    """Everything that was said. `add` returns a longer one."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def open(cls, messages: Sequence[Message]) -> History:
        """The opening: what the environment said before the model's first message."""
        history, asked = cls(), False
        for message in messages:
            if message.role == "system" or (message.role == "user" and not asked):
                asked = asked or message.role == "user"
                history = cls((*history.entries, Entry(0, message)))
            else:
                history = history.hear(message)
        return history

    def hear(self, message: Message) -> History:
        """The history with a message of the environment's; one of a tool answers the model's latest."""
        if message.role != "tool":
            return self.add(message)
        spoke = (entry.id for entry in reversed(self.entries) if entry.message.role == "assistant")
        return self.add(message, next(spoke, 0))

    def add(
        self, message: Message, caller: int = 0, room: int | None = None, tag: str = "", ok: bool = True
    ) -> History:
        """The history with one more message, under the next number."""
        return History((*self.entries, Entry(self.last + 1, message, caller, room, tag, ok)))

    @property
    def last(self) -> int:
        """The highest number given so far; 0 before any."""
        for entry in reversed(self.entries):
            if entry.id:
                return entry.id
        return 0

    @property
    def asked(self) -> int:
        """The number of what the user said last; 0 where that is the question. An answer to a call is not the user's,
        whatever its role."""
        said = (entry.id for entry in reversed(self.entries) if entry.message.role == "user" and not entry.caller)
        return next(said, 0)

    def find(self, number: int) -> Entry | None:
        return next((entry for entry in self.entries if entry.id == number and number > 0), None)


# ------------------------------------------------------------------------------------------------ edits


@dataclass(frozen=True, slots=True)
class Delete:
    """Show a stub in place of a message; a deleted call keeps its name and loses its arguments."""

    id: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Show a message again that was deleted, or folded; of what was folded, the whole round."""

    id: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Show a summary, beside the question, in place of messages `first` to `last` and the answers to their calls."""

    first: int
    last: int
    summary: str
    keep: frozenset[int] = frozenset()
    """Of these, messages that are shown all the same; `edited` fills it in."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Do not show messages before this one, nor answers to their calls."""

    before: int
    keep: frozenset[int] = frozenset()
    """Of these, messages that are shown all the same; `edited` fills it in."""


@dataclass(frozen=True, slots=True)
class Window:
    """Show only so many of the latest messages, besides the system's, and the user's first and newest."""

    size: int


Edit = Delete | Restore | Fold | Truncate | Window


def edited(history: History, edits: Sequence[Edit], new: Edit) -> tuple[Edit, ...]:
    """The edits with one more; ContextError where it makes no sense, and then nothing has changed.

    What the system said, and what the user said last, is neither folded nor cut off: the model has not answered it yet,
    or works on it. Once the user has said something else, a later edit may cover it.
    """
    fate = Fate.of(history, edits)
    match new:
        case Delete(number):
            _check_delete(history, fate, number)
        case Restore(number):
            if number not in fate.deleted and number not in fate.folded:
                raise ContextError(f"message {number} is not deleted")
        case Fold(first, last, summary, _):
            if not 1 <= first <= last <= history.last:
                raise ContextError(f"messages {first} to {last}: give numbers from 1 to {history.last}")
            if not summary.strip():
                raise ContextError("the summary is empty")
            new = replace(new, keep=pinned(history))
        case Truncate(before, _):
            if not 1 <= before <= history.last:
                raise ContextError(f"before={before}: give a number from 1 to {history.last}")
            new = replace(new, keep=pinned(history))
        case Window(size):
            if size < 1:
                raise ContextError(f"size={size}: give 1 or more")
    return (*edits, new)


def pinned(history: History) -> frozenset[int]:
    """Numbers of messages that only a later edit may leave out."""
    system = {entry.id for entry in history.entries if entry.message.role == "system"}
    return frozenset(system | {history.asked}) - {0}


def _check_delete(history: History, fate: Fate, number: int) -> None:
    entry = history.find(number)
    if number == 0:
        raise ContextError("message 0 is the question; system and user messages cannot be deleted")
    if entry is None:
        raise ContextError(f"there is no message {number}; the latest is {history.last}")
    if entry.message.role in ("system", "user"):
        raise ContextError(f"message {number} is a {entry.message.role} message; it cannot be deleted")
    if number in fate.deleted:
        raise ContextError(f"message {number} is already deleted")
    if number in fate.folded or number in fate.hidden:
        raise ContextError(f"message {number} is no longer in your context")


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of each message."""

    deleted: frozenset[int]
    folded: Mapping[int, Fold]
    hidden: frozenset[int]

    @classmethod
    def of(cls, history: History, edits: Sequence[Edit]) -> Fate:
        """By the edits, in order; of two that concern one message the later decides."""
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
                        folded = {n: f for n, f in folded.items() if n not in _with_answers(history, number, number)}
                case Fold(first, last, _, keep):
                    folded |= dict.fromkeys(_with_answers(history, first, last) - keep, edit)
                case Truncate(before, keep):
                    hidden |= _with_answers(history, 1, before - 1) - keep
                case Window(size):
                    window = size
        gone = hidden | set(folded)
        if window is not None:
            hidden |= _outside(history, window, gone)
        return cls(frozenset(deleted - gone), folded, frozenset(hidden - set(folded)))


def _with_answers(history: History, first: int, last: int) -> set[int]:
    """The numbers of a span, and of the answers to calls made in it: both are shown or gone together."""
    inside = {entry.id for entry in history.entries if first <= entry.id <= last}
    inside |= {entry.id for entry in history.entries if entry.caller in inside}
    callers = {entry.caller for entry in history.entries if entry.id in inside and entry.caller > 0}
    if callers <= inside:
        return inside
    return _with_answers(history, min(callers), last)  # the span began among the answers to one call


def _outside(history: History, size: int, gone: set[int]) -> set[int]:
    """What a window leaves out. It never begins with an answer whose call is not shown."""
    left = [entry for entry in history.entries if entry.id > 0 and entry.id not in gone]
    stay = pinned(history)
    shown = [entry for entry in left if entry.id not in stay][-size:]
    while shown and (shown[0].caller or shown[0].message.role == "tool"):
        shown = shown[1:]
    kept = stay | {entry.id for entry in shown}
    return {entry.id for entry in left if entry.id not in kept}


# ------------------------------------------------------------------------------------------------ view


@dataclass(frozen=True, slots=True)
class Style:
    """How ids, notes, budget and stubs look; one for a whole run."""

    form: Form = "json"
    """`json`: as JSON objects and headed blocks; `brief`: in a few characters, for small windows; `plain`: messages as
    they are, without numbers."""
    stub: str = STUB
    notes: bool = True
    """Show the notes beside the question, from the first turn on, also where there are none yet."""
    budget: str = ""
    """The whole budget in words, shown beside the question."""
    rooms: bool = True
    """Show with every answer of a tool how many tokens are left."""
    ids: bool = True
    """Show with every answer of a tool its number."""
    tidy: bool = False
    """Do not show rounds that only took notes or deleted, once that worked: what they did is in view."""


def view(
    history: History, edits: Sequence[Edit] = (), notes: Mapping[str, str] | None = None, style: Style | None = None
) -> tuple[Message, ...]:
    """The messages as the model is shown them. A pure function: equal arguments, equal messages.

    Args:
        history: all of it.
        edits: in the order they were made.
        notes: key -> summary.
        style: how it looks.
    """
    style = style or Style()
    fate = Fate.of(history, edits)
    chores = _chores(history) if style.tidy else frozenset()
    beside = question_block(_summaries(fate), notes or {}, style)
    nobody = all(entry.id or entry.message.role != "user" for entry in history.entries)
    alone = [Message("user", beside.strip())] if beside and nobody else []  # there is no question to stand beside
    shown: list[Message] = []
    gap = False
    for entry in history.entries:
        if alone and entry.message.role != "system":
            shown, alone, gap = [*shown, *alone], [], True
        if entry.id in fate.folded or entry.id in fate.hidden or entry.id in chores:
            gap = True
            continue
        message = _message(entry, entry.id in fate.deleted, style)
        if entry.id == 0 and message.role == "user":
            message = replace(message, content=message.content + beside)
        if gap and shown and shown[-1].role == message.role == "user":  # an edit brought them together: they are one
            shown[-1] = replace(message, content=f"{shown[-1].content}\n\n{message.content}")
        else:
            shown.append(message)
        gap = False
    return (*shown, *alone)


def question_block(summaries: Sequence[str], notes: Mapping[str, str], style: Style) -> str:
    """What is added to the first user's message.

    Example:
        question_block((), {"lamp": "Mira keeps it"}, Style(form="brief"))      # '\\nNotes: lamp: Mira keeps it'
    """
    folded = "".join(f"\n\n{SUMMARY} {summary}" for summary in summaries)
    if style.form == "brief":
        told = "; ".join(f"{key}: {summary}" for key, summary in notes.items()) or "none"
        return (
            folded + (f"\nNotes: {told}" if style.notes else "") + (f"\nBudget: {style.budget}" if style.budget else "")
        )
    told = "\n".join(f"- **{key}**: {summary}" for key, summary in notes.items()) or "No notes recorded."
    memory = f"\n\n<external_memory>\n## Available Notes\n{told}\n</external_memory>" if style.notes else ""
    return folded + memory + (f"\n\n<budget>{style.budget}</budget>" if style.budget else "")


def _chores(history: History) -> frozenset[int]:
    """Numbers of the rounds of which nothing but their effect is left to see."""
    found: set[int] = set()
    for entry in history.entries:
        calls = entry.message.tool_calls
        if entry.message.role == "assistant" and calls and all(call.name in CHORES for call in calls):
            answers = [other for other in history.entries if other.caller == entry.id]
            if len(answers) == len(calls) and all(answer.ok for answer in answers):
                found |= {entry.id, *(answer.id for answer in answers)}
    return frozenset(found)


def _summaries(fate: Fate) -> list[str]:
    """Summaries that still stand for something, in order of what they stand for."""
    standing = {(fold.first, fold.last): fold.summary for _, fold in sorted(fate.folded.items())}
    return list(standing.values())


def _message(entry: Entry, deleted: bool, style: Style) -> Message:
    message = entry.message
    if message.role == "tool" and (deleted or style.form != "plain"):
        return replace(message, content=_result(entry, deleted, style))
    if message.role == "assistant" and deleted:
        named = tuple(ToolCall(c.id, c.name, {"message": style.stub}) for c in message.tool_calls if c.name)
        return Message("assistant", style.stub, tool_calls=named)
    return message


def _result(entry: Entry, deleted: bool, style: Style) -> str:
    """A tool's answer with its number, and the room there was."""
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
    """An answer as a JSON object; one that is none, as the `result` of one."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"result": content}
