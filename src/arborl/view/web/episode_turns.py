"""An episode as a conversation: each message, tool call, tool result and observation once, in order.

An episode stores the messages of its turns, and of each model call the whole context and the reply. A context repeats
earlier messages, and the text of a sampled reply contains the tool calls that were parsed from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from arborl.types import Call, Episode, Message, ToolCall

CALL_TEXT = re.compile(
    r"<tool_call>.*?(?:</tool_call>|\Z)"
    r"|<function=[^>\n]{0,200}>.*?(?:</function>|\Z)"
    r"|^ {0,3}(?P<fence>`{3,})[ \t]*[\w+-]*[ \t]*\r?\n.*?(?:^ {0,3}(?P=fence)`*[ \t]*\r?$|\Z)"
    r"|^[ \t]*Action[ \t]*:[^\n]*"
    r"(?:\n[ \t]*Action Input[ \t]*:.*?(?=^[ \t]*(?:Thought|Action|Observation|Final Answer)[ \t]*:|\Z))?",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)  # fmt: skip
"""The text of one tool call, in the formats with tags, code fences and ReAct lines."""
ALL_CALLS = re.compile(
    r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|<\|python_start\|>).*\Z|\A\s*(?:\{.*\}|\[.*\])\s*\Z", re.DOTALL
)
"""The text of all tool calls of a message, in the formats with a list or bare JSON."""

Entry = dict[str, Any]
Key = tuple[str, str, str | None]
"""Role, content and name of a message."""


def conversation(episode: Episode) -> list[Entry]:
    """The entries: role, name, `parts` (text or tool call with its result), turn, model call, and the turn's reward.

    `kind` is `opening`, `reply`, `observation`, or `context` for what an agent wrote into a context.
    """
    return _Writer(episode).entries


class _Writer:
    def __init__(self, episode: Episode):
        self.entries: list[Entry] = []
        self.unclaimed = Counter[Key]()
        """Messages that were shown and not yet seen in the context of a call."""
        self.open_calls: list[Entry] = []
        """Tool calls without a result."""
        self.before: Call | None = None
        calls: dict[int, list[tuple[int, Call]]] = {}
        for number, call in enumerate(episode.calls):
            calls.setdefault(call.turn, []).append((number, call))
        self.add(_opening(episode), "opening", None)
        for index, turn in enumerate(episode.turns):
            self.add_turn(turn.message, calls.pop(index, []), index, turn.reward)
            self.add(turn.observation, "observation", index)
        for index, unused in sorted(calls.items()):  # the episode ended before the environment got it
            self.add_turn(None, unused, index, 0.0)

    def add(self, messages: Iterable[Message], kind: str, turn: int | None) -> None:
        for message in messages:
            self.unclaimed[_key(message)] += 1
            self.write(message, kind, turn)

    def add_turn(self, message: Message | None, calls: Sequence[tuple[int, Call]], turn: int, reward: float) -> None:
        """The model calls of a turn with what was added to their contexts, and the message to the environment."""
        reply: Message | None = None
        for number, call in calls:
            for added in self.added(call):
                self.write(added, "context", turn)
            reply = call.reply
            if reply is not None and message is not None and reply.content == message.content and call is calls[-1][1]:
                reply = message  # the same text, with the tool calls that the agent parsed
            if reply is not None:
                self.write(reply, "reply", turn, number)
            self.before = call
        if message is not None and reply is not message:
            self.write(message, "reply", turn, calls[-1][0] if reply is None and calls else None)
        if reward and self.entries:
            self.entries[-1]["reward"] = reward

    def added(self, call: Call) -> list[Message]:
        """The messages of a call's context that were not shown before. If the agent edited the context, a message that
        the previous context had was shown."""
        before = self.before
        known = () if before is None else (*before.messages, *((before.reply,) if before.reply else ()))
        same = 0
        for one, other in zip(call.messages, known, strict=False):
            if one is not other and _key(one) != _key(other):
                break
            same += 1
        left = Counter(map(_key, known[same:]))
        return [one for one in call.messages[same:] if not _take(left, one) and not _take(self.unclaimed, one)]

    def write(self, message: Message, kind: str, turn: int | None, call: int | None = None) -> None:
        if message.role == "tool" and (owner := self.owner(message)) is not None:
            owner["result"] = message.content
            return
        parts = parts_of(message)
        if message.role != "tool":
            self.open_calls = [part["call"] for part in parts if "call" in part] or self.open_calls
        self.entries.append({
            "role": message.role, "name": message.name, "parts": parts, "kind": kind, "turn": turn, "call": call,
            "reward": None,
        })  # fmt: skip

    def owner(self, result: Message) -> Entry | None:
        """The tool call that a result belongs to: by its id, or the first without a result of the same name."""
        waiting = [call for call in self.open_calls if call["result"] is None]
        by_id = [call for call in waiting if result.tool_call_id is not None and call["id"] == result.tool_call_id]
        by_name = [call for call in waiting if result.tool_call_id is None and result.name in (None, call["name"])]
        return next(iter(by_id or by_name), None)


def parts_of(message: Message) -> list[Entry]:
    """Text and tool calls of a message in order, each once. If the text of the calls is not found in a sampled message,
    its text is the only part, and the calls are named if they are not in it."""
    text, calls = message.content, message.tool_calls
    found = list(CALL_TEXT.finditer(text)) if calls else []
    if len(found) != len(calls):
        if message.sampled and not any(call.error for call in calls) and (whole := ALL_CALLS.search(text)):
            return [*_text(text[: whole.start()]), *({"call": _call(call, "")} for call in calls)]
        if message.sampled and all(call.name in text for call in calls):
            shown = [call for call in calls if call.error]
        else:
            shown = list(calls)
        return [*_text(text), *({"call": _call(call, "")} for call in shown)]
    parts, at = list[Entry](), 0
    for match, call in zip(found, calls, strict=True):
        parts += [*_text(text[at : match.start()]), {"call": _call(call, match[0])}]
        at = match.end()
    return [*parts, *_text(text[at:])]


def _text(text: str) -> list[Entry]:
    return [{"text": text}] if text.strip() else []


def _call(call: ToolCall, text: str) -> Entry:
    """A call; with its text if it could not be parsed."""
    raw = text if call.error else ""
    return {
        "id": call.id, "name": call.name, "arguments": call.arguments, "error": call.error, "text": raw, "result": None,
    }  # fmt: skip


def _opening(episode: Episode) -> Sequence[Message]:
    """The first messages: the context of the first call if it has them all, which also has what the agent added."""
    first = episode.calls[0].messages if episode.calls else ()
    missing = Counter(map(_key, episode.opening)) - Counter(map(_key, first))
    return episode.opening if missing else first or episode.opening


def _key(message: Message) -> Key:
    return message.role, message.content, message.name


def _take(messages: Counter[Key], wanted: Message) -> bool:
    """Remove one equal message; whether there was one."""
    key = _key(wanted)
    if messages[key] < 1:
        return False
    messages[key] -= 1
    return True
