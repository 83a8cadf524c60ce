"""A conversation within a context window, and the policies that shorten it: window, truncation, summary.

Every policy is a sequence of edits of one history (`history.py`), so each gives branches that are trained as usual.
Without a policy the model sees the whole conversation.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arborl.agents.agent_interface import Model
from arborl.agents.context.history import (
    Delete,
    Edit,
    Fold,
    History,
    HistoryEntry,
    MessageStates,
    Truncate,
    ViewStyle,
    Window,
    append_edit,
    pinned_ids,
    visible_messages,
)
from arborl.chat.conversation import messages_exceed
from arborl.errors import ConfigError, ContextFull
from arborl.tools.core.tool_context import count_tokens
from arborl.types import Message, ToolSpec

HEADER_TOKENS = 8  # tokens around a message, if no chat template is known
PLAIN_STYLE = ViewStyle(form="plain", notes=False, rooms=False, ids=False)
PolicyKind = Literal["none", "window", "truncate", "summary", "statelm"]
POLICY_KINDS = ("none", "window", "truncate", "summary", "statelm")
SUMMARY_REQUEST = (
    "Your context is almost full. Summarize what you have found and what is left to do; only the summary will remain."
)


@dataclass(frozen=True, slots=True)
class ContextBudget:
    """Limits of one episode."""

    tokens: int
    reply: int  # tokens reserved for the model's next message
    turns: int

    @classmethod
    def of(cls, model: Model, tokens: int | None = None, reply: int | None = None, turns: int = 0) -> ContextBudget:
        """The agent's limits, or those of the run. ValueError if the agent's exceed those of the run."""
        limits, sampling = getattr(model, "limits", None), getattr(model, "sampling", None)
        window = limits.max_context if limits is not None else tokens
        longest = sampling.max_tokens if sampling is not None else reply
        if window is None or longest is None:
            raise ValueError("max_model_len and single_turn_max_tokens: this model has no limits; give both")
        if tokens is not None and tokens > window:
            raise ValueError(f"max_model_len={tokens} above sampling.max_context={window}: raise the latter")
        if reply is not None and reply < longest:
            raise ValueError(
                f"single_turn_max_tokens={reply} below sampling.max_tokens={longest}: a reply could exceed the "
                f"reserved tokens. Write sampling.max_tokens={reply}."
            )
        return cls(window if tokens is None else tokens, longest if reply is None else reply, turns)


class ManagedConversation:
    """A conversation with the model within a context window."""

    def __init__(
        self,
        model: Model,
        opening: Sequence[Message],
        policy: ContextPolicy | None = None,
        specs: Sequence[ToolSpec] = (),
        budget: ContextBudget | None = None,
        style: ViewStyle = PLAIN_STYLE,
    ):
        self.model, self.policy, self.specs, self.style = model, policy, tuple(specs), style
        self.limits = budget or (ContextBudget.of(model) if policy is not None else ContextBudget(0, 0, 0))
        self.history = History.open(opening)
        self.edits: tuple[Edit, ...] = ()
        if policy is not None:
            model.count({"context/exceeded": 0.0})
            policy.begin(self)

    def notes(self) -> Mapping[str, str]:
        return {}

    def messages(self) -> tuple[Message, ...]:
        if not self.edits and self.style is PLAIN_STYLE:
            return tuple([entry.message for entry in self.history.entries])
        return self.visible(self.history, self.edits)

    def visible(self, history: History, edits: Sequence[Edit]) -> tuple[Message, ...]:
        return visible_messages(history, edits, self.notes(), self.style)

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt with these messages. If they cannot fit, some number above the context window."""
        conversations = getattr(self.model, "conversations", None)
        tokenizer = getattr(self.model, "tokenizer", None)
        if tokenizer is not None and messages_exceed(messages, tokenizer, self.limits.tokens):
            return self.limits.tokens + 1  # a lower bound: the exact number would take long
        if conversations is not None:
            return int(conversations.count(messages, self.specs))
        texts = [message.content for message in messages] + [str(spec) for spec in self.specs]
        return sum(count_tokens(text, tokenizer) + HEADER_TOKENS for text in texts)

    def room(self, messages: Sequence[Message] | None = None) -> int:
        """Tokens that may be added before the window is full; negative if it is exceeded."""
        used = self.num_tokens(self.messages() if messages is None else messages)
        return self.limits.tokens - self.limits.reply - used

    async def sample(self, sample: Callable[[Sequence[Message]], Awaitable[Message]] | None = None) -> Message:
        """The model's next message, after the policy has made room. The caller adds it to the conversation."""
        if self.policy is not None:
            await self.policy.make_room(self)
        try:
            if sample is not None:
                return await sample(self.messages())
            return await self.model.chat(self.messages(), self.specs)
        except ContextFull:
            if self.policy is not None:
                self.model.count({"context/exceeded": 1.0})
            raise

    def add(self, message: Message, results: Sequence[Message] = ()) -> None:
        """Add a message of the model and the results of its tool calls. They are visible or hidden together."""
        self.history = self.history.add(message)
        caller = self.history.last
        for result in results:
            self.history = self.history.add(result, caller)

    def observe(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.history = self.history.observe(message)

    def edit(self, new: Edit) -> None:
        self.edits = append_edit(self.history, self.edits, new)

    def __enter__(self) -> ManagedConversation:
        return self

    def __exit__(self, *error: object) -> None:
        if self.policy is not None:
            self.model.count(self.edit_counts({"folded": Fold, "truncated": Truncate}))

    def edit_counts(self, kinds: Mapping[str, type]) -> dict[str, float]:
        """Metrics: number of edits of each kind, and the largest number of tokens of a call."""
        edits = {f"context/{name}": float(sum(isinstance(e, kind) for e in self.edits)) for name, kind in kinds.items()}
        calls = getattr(getattr(self.model, "episode", None), "calls", ())
        peak = max((len(call.prompt) + len(call.completion.tokens) for call in calls), default=0)
        return edits | {"context/peak": float(peak)}


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """How a conversation is shortened.

    Example:
        ContextPolicy("truncate", compress_at=0.8, compression_ratio=0.5)      # at 80 % of the window, keep half
    """

    kind: PolicyKind = "statelm"
    window: int = 8
    """`window`: number of visible messages besides the system messages and the first user message."""
    compress_at: float = 0.75
    """`truncate`, `summary`: share of the context window at which they start."""
    compression_ratio: float = 0.5
    """`truncate`: share of the context window that remains."""
    train_summaries: bool = True
    """Whether the calls that write summaries are trained on."""

    def __post_init__(self) -> None:
        if self.kind not in POLICY_KINDS:
            raise ValueError(f"policy={self.kind!r}: give one of {', '.join(POLICY_KINDS)}")
        if self.window < 1:
            raise ValueError(f"window={self.window}: give 1 or more")
        for name in ("compress_at", "compression_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a share above 0 and up to 1")

    def begin(self, conversation: ManagedConversation) -> None:
        if self.kind == "window":
            conversation.edit(Window(self.window))

    async def make_room(self, conversation: ManagedConversation) -> None:
        """Shorten the conversation before the next message of the model, if necessary. It runs once, or again while the
        rest still exceeds the window. If nothing helps, the conversation stays as it is and the next call raises
        `ContextFull`."""
        if self.kind not in ("truncate", "summary"):
            return
        limit = self.compress_at * conversation.limits.tokens
        while conversation.num_tokens(conversation.messages()) + conversation.limits.reply > limit:
            shorten = self._truncate if self.kind == "truncate" else self._summarize
            is_shorter = await shorten(conversation)
            if not is_shorter:
                return
            limit = conversation.limits.tokens

    async def _truncate(self, conversation: ManagedConversation) -> bool:
        """Hide the oldest rounds until the rest fits; the latest stays. Whether any was hidden."""
        limit = self.compression_ratio * conversation.limits.tokens
        history = conversation.history
        first = next((entry.id for entry in _removable(conversation)), history.last)
        starts = [start for start in _round_starts(conversation) if start > first]
        for before in starts:
            edits = (*conversation.edits, Truncate(before, pinned_ids(history)))
            used = conversation.num_tokens(conversation.visible(history, edits)) + conversation.limits.reply
            if used <= limit or before == starts[-1]:
                conversation.edit(Truncate(before))
                return True
        return False

    async def _summarize(self, conversation: ManagedConversation) -> bool:
        """Let the model summarize all visible messages; if the request does not fit, fewer rounds from the start.
        Whether a summary was written."""
        for last in _summary_ends(conversation):
            messages = self._summary_prompt(conversation, last)
            if conversation.room(messages) >= 0:
                reply = await conversation.model.chat(messages, conversation.specs)
                leave_out = getattr(conversation.model, "leave_out", None)
                if not self.train_summaries and leave_out is not None:
                    leave_out(reply)
                conversation.edit(Fold(1, last, reply.content.strip() or "(nothing)"))
                return True
        return False

    def _summary_prompt(self, conversation: ManagedConversation, last: int) -> list[Message]:
        kept = History(tuple(entry for entry in conversation.history.entries if entry.id <= last))
        edits = tuple(edit for edit in conversation.edits if not isinstance(edit, Delete) or edit.id <= last)
        *before, latest = conversation.visible(kept, edits)
        if latest.role == "user":  # many chat templates require alternating roles
            return [*before, Message("user", f"{latest.content}\n\n{SUMMARY_REQUEST}")]
        return [*before, latest, Message("user", SUMMARY_REQUEST)]


def _removable(conversation: ManagedConversation) -> list[HistoryEntry]:
    history = conversation.history
    states = MessageStates.of(history, conversation.edits)
    excluded = {*states.folded, *states.hidden, *pinned_ids(history), 0}
    return [entry for entry in history.entries if entry.id not in excluded]


def _round_starts(conversation: ManagedConversation) -> list[int]:
    """Ids of the messages that start a round: those of the model and of the environment, not tool results."""
    starts = {entry.id for entry in _removable(conversation) if not entry.caller}
    return sorted(starts | {conversation.history.last_user} - {0})


def _summary_ends(conversation: ManagedConversation) -> Iterator[int]:
    """Ids up to which a summary may reach, largest first. It never ends with the last user message, which the model
    has not answered."""
    removable = [entry.id for entry in _removable(conversation)]
    if not removable:
        return
    last_user = conversation.history.last_user
    for last in (conversation.history.last, *(start - 1 for start in reversed(_round_starts(conversation)))):
        end = last - 1 if last == last_user else last
        if end >= removable[0]:
            yield end


def check_accepts_context(agent: Any, where: str, policy: ContextPolicy | None) -> None:
    if policy is None or "context" in inspect.signature(agent).parameters:
        return
    prefix = where.partition("agent")[0]
    raise ConfigError(
        f"context.policy={policy.kind} with {where}, which manages its context itself. Write {prefix}context=none, or "
        f"{prefix}agent=chat, tool, code, react or statelm; a custom class takes an argument `context` (see "
        "docs/context.md)."
    )


def stateset_context(
    enable_context_compression: bool = True,
    compression_ratio: float = 0.5,
    compression_strategy: Literal["summary", "truncate", "sliding_window"] = "summary",
) -> dict[str, Any]:
    """Translate StateSet's settings into the section `context`. `truncate` cuts a full window down to the ratio,
    `sliding_window` never exceeds the ratio, `summary` starts at the ratio."""
    if not enable_context_compression:
        return {"policy": "none"}
    if compression_strategy == "summary":
        return {"policy": "summary", "args": {"compress_at": compression_ratio}}
    if compression_strategy in ("truncate", "sliding_window"):
        start = 1.0 if compression_strategy == "truncate" else compression_ratio
        return {"policy": "truncate", "args": {"compress_at": start, "compression_ratio": compression_ratio}}
    raise ValueError(f"compression_strategy={compression_strategy!r}: give summary, truncate or sliding_window")
