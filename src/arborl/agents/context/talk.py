"""A conversation with the model that may outgrow its window: what was said, how it is shown, how much room is left.

Any agent may talk through one. Without a policy the model is shown everything, message by message, as it was said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from arborl.agents.agent import Model
from arborl.agents.context.history import Edit, Fold, History, Style, Truncate, edited, view
from arborl.chat.conversation import messages_exceed
from arborl.errors import ContextFull
from arborl.tools.core.tool_context import count_tokens
from arborl.types import Message, ToolSpec

if TYPE_CHECKING:
    from arborl.agents.context.policy import Policy

HEADER = 8
"""Tokens around a message, where no template says how many."""
PLAIN = Style(form="plain", notes=False, rooms=False, ids=False)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one episode may take."""

    tokens: int
    """Prompt and completion together."""
    reply: int
    """Tokens kept free for the model's next message."""
    turns: int

    @classmethod
    def of(cls, model: Model, tokens: int | None = None, reply: int | None = None, turns: int = 0) -> Bounds:
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


class Talk:
    """One conversation.

    Args:
        model: samples; its calls are recorded.
        opening: what the environment said.
        policy: what is done when it grows; None for nothing.
        specs: tools that the model is told of.
        bounds: limits; the run's by default.
        style: how it is shown.

    Example:
        with Talk(model, observation.messages, policy) as talk:
            talk.add(await talk.ask())
            talk.hear(step.observation.messages)
    """

    def __init__(
        self,
        model: Model,
        opening: Sequence[Message],
        policy: Policy | None = None,
        specs: Sequence[ToolSpec] = (),
        bounds: Bounds | None = None,
        style: Style = PLAIN,
    ):
        self.model, self.policy, self.specs, self.style = model, policy, tuple(specs), style
        self.bounds = bounds or (Bounds.of(model) if policy is not None else Bounds(0, 0, 0))
        self.history = History.open(opening)
        self.edits: tuple[Edit, ...] = ()
        if policy is not None:
            model.count({"context/exceeded": 0.0})
            policy.begin(self)

    # -------------------------------------------------------------------------------------------- what is shown

    def notes(self) -> Mapping[str, str]:
        """What is shown beside the question."""
        return {}

    def messages(self) -> tuple[Message, ...]:
        """What the model is shown next."""
        if not self.edits and self.style is PLAIN:
            return tuple([entry.message for entry in self.history.entries])
        return self.shown(self.history, self.edits)

    def shown(self, history: History, edits: Sequence[Edit]) -> tuple[Message, ...]:
        return view(history, edits, self.notes(), self.style)

    def measure(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt that these messages make: what the engine would be given. More than the context takes,
        where they cannot fit."""
        conversations = getattr(self.model, "conversations", None)
        tokenizer = getattr(self.model, "tokenizer", None)
        if tokenizer is not None and messages_exceed(messages, tokenizer, self.bounds.tokens):
            return self.bounds.tokens + 1  # at least; how many more would take long to find out
        if conversations is not None:
            return int(conversations.count(messages, self.specs))
        texts = [message.content for message in messages] + [str(spec) for spec in self.specs]
        return sum(count_tokens(text, tokenizer) + HEADER for text in texts)

    def room(self, messages: Sequence[Message] | None = None) -> int:
        """Tokens that may be added before the episode ends; negative when it is too late."""
        used = self.measure(self.messages() if messages is None else messages)
        return self.bounds.tokens - self.bounds.reply - used

    # -------------------------------------------------------------------------------------------- what happens

    async def ask(self, ask: Callable[[Sequence[Message]], Awaitable[Message]] | None = None) -> Message:
        """The model's next message, once there is room for it. It is not added: that is the agent's to do.

        Args:
            ask: how the model is asked; by default with the tools and nothing else.
        """
        if self.policy is not None:
            await self.policy.make_room(self)
        try:
            if ask is not None:
                return await ask(self.messages())
            return await self.model.chat(self.messages(), self.specs)
        except ContextFull:
            if self.policy is not None:
                self.model.count({"context/exceeded": 1.0})
            raise

    def add(self, said: Message, answers: Sequence[Message] = ()) -> None:
        """What the model said, and the answers to what it asked for: these are shown or gone together."""
        self.history = self.history.add(said)
        caller = self.history.last
        for answer in answers:
            self.history = self.history.add(answer, caller)

    def hear(self, messages: Sequence[Message]) -> None:
        """What the environment says."""
        for message in messages:
            self.history = self.history.hear(message)

    def edit(self, new: Edit) -> None:
        """One more edit; ContextError where it makes no sense."""
        self.edits = edited(self.history, self.edits, new)

    # -------------------------------------------------------------------------------------------- what is counted

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.policy is not None:
            self.model.count(self.counted({"folded": Fold, "truncated": Truncate}))

    def counted(self, kinds: Mapping[str, type]) -> dict[str, float]:
        """How often the context was edited, and how long it became."""
        edits = {f"context/{name}": float(sum(isinstance(e, kind) for e in self.edits)) for name, kind in kinds.items()}
        calls = getattr(getattr(self.model, "episode", None), "calls", ())
        peak = max((len(call.prompt) + len(call.completion.tokens) for call in calls), default=0)
        return edits | {"context/peak": float(peak)}
