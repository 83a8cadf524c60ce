"""What is done about a context that grows: nothing, a window, a cut, a summary, or the model's own edits.

All of them are edits of one history (`history.py`), so each gives branches that are trained like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from arborl.agents.context.history import Delete, Fate, Fold, History, Truncate, Window
from arborl.agents.context.session import ContextSession
from arborl.errors import ContextFull
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

    def begin(self, session: ContextSession) -> None:
        """Edits that hold from the start."""
        if self.kind == "window":
            session.edit(Window(self.window))

    async def make_room(self, session: ContextSession) -> None:
        """Called before every message of the model."""
        if self.kind not in ("truncate", "summary"):
            return
        used = session.measure(session.messages()) + session.bounds.reply
        if used <= self.compress_at * session.bounds.tokens:
            return
        if self.kind == "truncate":
            self._truncate(session)
        else:
            await self._summarize(session)

    def _truncate(self, session: ContextSession) -> None:
        """Leave out rounds from the beginning until the rest fits; the latest one stays."""
        most = self.compression_ratio * session.bounds.tokens
        heads = round_heads(session)[1:]
        for before in heads:
            edits = (*session.edits, Truncate(before))
            used = session.measure(session.shown(session.history, edits)) + session.bounds.reply
            if used <= most or before == heads[-1]:
                session.edit(Truncate(before))
                return

    async def _summarize(self, session: ContextSession) -> None:
        """Ask the model for a summary of all it sees; where there is no room to ask, of all but the latest round."""
        heads = round_heads(session)
        for last in (session.history.last, heads[-1] - 1 if heads else 0):
            if last < 1 or (heads and last < heads[0]):
                continue
            messages = self._asking(session, last)
            if session.room(messages) >= 0:
                reply = await session.model.chat(messages)
                self._leave_out(session, reply)
                session.edit(Fold(1, last, reply.content.strip() or "(nothing)"))
                return
        session.model.count({"context/exceeded": 1.0})
        raise ContextFull("there is no room left to ask for a summary")

    def _asking(self, session: ContextSession, last: int) -> list[Message]:
        """What the model is shown when it is asked for a summary of everything up to `last`."""
        kept = History(tuple(entry for entry in session.history.entries if entry.id <= last))
        edits = tuple(edit for edit in session.edits if not isinstance(edit, Delete) or edit.id <= last)
        return [*session.shown(kept, edits), Message("user", ASK)]

    def _leave_out(self, session: ContextSession, summary: Message) -> None:
        """The summary's own tokens are not trained on, where so asked; it is on record all the same."""
        leave_out = getattr(session.model, "leave_out", None)
        if not self.train_summaries and leave_out is not None:
            leave_out(summary)


def round_heads(session: ContextSession) -> list[int]:
    """Numbers of the messages that begin a round and are shown: the model's own, and the environment's."""
    fate = Fate.of(session.history, session.edits)
    shown = [e for e in session.history.entries if e.id > 0 and e.id not in fate.folded and e.id not in fate.hidden]
    return [entry.id for entry in shown if entry.message.role != "tool"]


def compression(
    enable_context_compression: bool = True,
    compression_ratio: float = 0.5,
    compression_strategy: Literal["summary", "truncate", "sliding_window"] = "summary",
) -> dict[str, Any]:
    """Arguments of the agent for settings in StateSet's names.

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
