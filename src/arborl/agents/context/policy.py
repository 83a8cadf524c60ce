"""What is done about a context that grows: nothing, a window, a cut, a summary, or the model's own edits.

All of them are edits of one history (`history.py`), so each gives branches that are trained like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from arborl.agents.context.history import Delete, Entry, Fate, Fold, History, Truncate, Window, pinned
from arborl.agents.context.talk import Talk
from arborl.errors import ConfigError
from arborl.types import Message

Kind = Literal["none", "window", "truncate", "summary", "statelm"]
KINDS = ("none", "window", "truncate", "summary", "statelm")
ASK = "Your context is almost full. Summarize what you have found and what is left to do; only the summary will remain."


@dataclass(frozen=True, slots=True)
class Policy:
    """One of the five.

    Example:
        Policy("truncate", compress_at=0.8, compression_ratio=0.5)      # at 80 % of the window, keep the latest half
    """

    kind: Kind = "statelm"
    window: int = 8
    """With `window`: messages shown besides the system's and the first user's."""
    compress_at: float = 0.75
    """With `truncate` and `summary`: the share of the window that starts it."""
    compression_ratio: float = 0.5
    """With `truncate`: the share of the window that is left afterwards."""
    train_summaries: bool = True
    """Whether the calls that write summaries are trained on."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"policy={self.kind!r}: give one of {', '.join(KINDS)}")
        if self.window < 1:
            raise ValueError(f"window={self.window}: give 1 or more")
        for name in ("compress_at", "compression_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a share above 0 and up to 1")

    def begin(self, talk: Talk) -> None:
        """Edits that hold from the start."""
        if self.kind == "window":
            talk.edit(Window(self.window))

    async def make_room(self, talk: Talk) -> None:
        """Called before every message of the model, when all that it called for has been answered.

        Once is enough, unless what is left still does not fit: then what could not be asked about before may be now.
        Where nothing helps, the conversation is as it was, and who goes on with it will find that it is too long.
        """
        if self.kind not in ("truncate", "summary"):
            return
        most = self.compress_at * talk.bounds.tokens
        while talk.measure(talk.messages()) + talk.bounds.reply > most:
            if not (self._truncate(talk) if self.kind == "truncate" else await self._summarize(talk)):
                return
            most = talk.bounds.tokens

    def _truncate(self, talk: Talk) -> bool:
        """Leave out rounds from the beginning until the rest fits; the latest one stays. Whether any was left out."""
        most = self.compression_ratio * talk.bounds.tokens
        first = next((entry.id for entry in left(talk)), talk.history.last)
        heads = [head for head in round_heads(talk) if head > first]
        for before in heads:
            edits = (*talk.edits, Truncate(before, pinned(talk.history)))
            used = talk.measure(talk.shown(talk.history, edits)) + talk.bounds.reply
            if used <= most or before == heads[-1]:
                talk.edit(Truncate(before))
                return True
        return False

    async def _summarize(self, talk: Talk) -> bool:
        """Ask the model for a summary of all it sees; where there is no room to ask, of fewer rounds from the start.
        Whether one was written."""
        for last in spans(talk):
            messages = self._asking(talk, last)
            if talk.room(messages) >= 0:
                reply = await talk.model.chat(messages, talk.specs)
                self._leave_out(talk, reply)
                talk.edit(Fold(1, last, reply.content.strip() or "(nothing)"))
                return True
        return False

    def _asking(self, talk: Talk, last: int) -> list[Message]:
        """What the model is shown when it is asked for a summary of everything up to `last`."""
        kept = History(tuple(entry for entry in talk.history.entries if entry.id <= last))
        edits = tuple(edit for edit in talk.edits if not isinstance(edit, Delete) or edit.id <= last)
        *before, latest = talk.shown(kept, edits)
        if latest.role == "user":  # many templates want the roles to alternate
            return [*before, Message("user", f"{latest.content}\n\n{ASK}")]
        return [*before, latest, Message("user", ASK)]

    def _leave_out(self, talk: Talk, summary: Message) -> None:
        """The summary's own tokens are not trained on, where so asked; it is on record all the same."""
        leave_out = getattr(talk.model, "leave_out", None)
        if not self.train_summaries and leave_out is not None:
            leave_out(summary)


def left(talk: Talk) -> list[Entry]:
    """What is shown of the history and may be left out by an edit."""
    fate, stay = Fate.of(talk.history, talk.edits), pinned(talk.history)
    gone = {*fate.folded, *fate.hidden, *stay, 0}
    return [entry for entry in talk.history.entries if entry.id not in gone]


def round_heads(talk: Talk) -> list[int]:
    """Numbers of the messages that begin a round: the model's own, and what the environment said; answers do not."""
    return sorted({entry.id for entry in left(talk) if not entry.caller} | {talk.history.asked} - {0})


def spans(talk: Talk) -> Iterator[int]:
    """Numbers of messages up to which a summary may be written, the most first. Each covers something, and none ends
    with what the user said last: that is not summarised before it was answered."""
    foldable = [entry.id for entry in left(talk)]
    if not foldable:
        return
    asked = talk.history.asked
    for last in (talk.history.last, *(head - 1 for head in reversed(round_heads(talk)))):
        end = last - 1 if last == asked else last
        if end >= foldable[0]:
            yield end


def check_takes(found: Any, where: str, policy: Policy | None) -> None:
    """ConfigError for an agent that a policy is given to and that takes none.

    Args:
        found: the agent, its class, or a function.
        where: the key that gave it, and what it said.
        policy: of the run, or of its source.
    """
    if policy is None or "context" in inspect.signature(found).parameters:
        return
    above = where.partition("agent")[0]
    raise ConfigError(
        f"context.policy={policy.kind} with {where}, which keeps its own account of what it shows. Write "
        f"{above}context=none, or {above}agent=chat, tool, code, react or statelm; a class of your own takes an "
        "argument `context` (see docs/context.md)."
    )


def compression(
    enable_context_compression: bool = True,
    compression_ratio: float = 0.5,
    compression_strategy: Literal["summary", "truncate", "sliding_window"] = "summary",
) -> dict[str, Any]:
    """The section `context`, or arguments of `statelm`, for settings in StateSet's names.

    `truncate` cuts down to that share of the window when the window is full, `sliding_window` never shows more than
    that share, `summary` asks for one when that share is reached.

    Example:
        compression(compression_ratio=0.4, compression_strategy="truncate")
        # {"policy": "truncate", "compress_at": 1.0, "compression_ratio": 0.4}
    """
    if not enable_context_compression:
        return {"policy": "none"}
    match compression_strategy:
        case "truncate":
            return {"policy": "truncate", "compress_at": 1.0, "compression_ratio": compression_ratio}
        case "sliding_window":
            return {"policy": "truncate", "compress_at": compression_ratio, "compression_ratio": compression_ratio}
        case "summary":
            return {"policy": "summary", "compress_at": compression_ratio}
    raise ValueError(f"compression_strategy={compression_strategy!r}: give summary, truncate or sliding_window")
