"""Incremental rendering: the text of earlier messages is reused when a conversation grows.

A template is one program over all messages and may read any of them anywhere, but nearly all templates write their text
in one iteration per message (`traced_template.py`). Iterations at the start are reused if their message and everything
else they read are unchanged: outer variables, namespace values, other messages, the loop's remaining length. The text
before and behind the loop is always rendered. A template that cannot be traced, or that raises while traced, is
rendered as a whole; so the text always equals the full render.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from arborl.chat.chat_template import DEADLINE, RenderTimeout, render_timeout_error
from arborl.chat.control_tokens import DIVIDER, Rendered, TextParts, remove_dividers
from arborl.chat.traced_template import (
    ITERATIONS,
    MISSING,
    SCALARS,
    TracedLoop,
    TracedMessages,
    TracedNamespace,
    Untraceable,
    namespace_number,
    namespace_values,
)
from arborl.fast_init import fast_init
from arborl.tokens import Tokens
from arborl.types import Message, ToolSpec

if TYPE_CHECKING:
    from arborl.chat.renderer import Renderer

MAX_CONVERSATIONS = 8  # conversations kept per episode, for agents that alternate between several
MAX_FIRST_PROMPTS, MAX_FIRST_CHARS = 1024, 65_536
"""First prompts kept per renderer, and their maximum length in characters."""
NOT_READ = object()
EMPTY = Rendered("")


@dataclass(slots=True)
class LoopIteration:
    """Text and dependencies of one iteration."""

    item: Any
    text: Rendered = EMPTY
    next_item: Any = NOT_READ  # the next item, if it was read
    last_read: int = -1  # the last message that was read, by index
    read: list[tuple[int, str, Any]] = field(default_factory=list)  # values read from namespaces: (number, name, value)
    written: list[tuple[int, str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class LoopRecord:
    """The iterations of one loop and the outer variables that they see."""

    names: Mapping[str, Any] = field(default_factory=dict)
    before: Rendered = EMPTY
    iterations: list[LoopIteration] = field(default_factory=list)


LoopRecords = dict[int, LoopRecord]


class TemplateRender:
    """One render of a traced template."""

    def __init__(
        self,
        template: jinja2.Template,
        variables: Mapping[str, Any],
        messages: list[Any],
        earlier: LoopRecords,
        common: int,
    ):
        self.template, self.variables, self.messages = template, variables, messages
        self.earlier, self.common = earlier, common
        self.records: LoopRecords = {}
        self.namespaces: list[TracedNamespace] = []
        self.iteration: LoopIteration | None = None
        self._written: list[str] = []
        self._parts: list[Rendered] = []

    def run(self) -> TextParts:
        """The text. Raises Untraceable, or any error of the template."""
        traced = {
            "messages": TracedMessages(self, self.messages, 0),
            "namespace": self._namespace,
            ITERATIONS: self._iterations,
        }
        context = self.template.new_context({**self.variables, **traced}, shared=True)
        write = self._written.append
        mark = DEADLINE.begin()
        try:
            for text in self.template.root_render_func(context):  # one by one: `_iterations` takes text meanwhile
                write(text)
        finally:
            DEADLINE.end(mark)
        self._parts.append(_rendered(self._take_text()))
        return TextParts(self._parts)

    def _take_text(self) -> str:
        text = "".join(self._written)
        self._written.clear()
        return text

    def _iterations(
        self, number: int, items: Iterable[Any], names: Mapping[str, Any]
    ) -> Iterator[tuple[Any, TracedLoop]]:
        if number in self.records:
            raise Untraceable("a loop within a loop")
        self.iteration = None
        before = _rendered(self._take_text())
        items = items.items if isinstance(items, TracedMessages) else list(items)
        earlier = self.earlier.get(number, LoopRecord())
        self._parts.append(earlier.before if earlier.before == before else before)  # keeps the object's identity
        count = self._num_reusable(earlier, items, names)
        iterations = earlier.iterations[:count]
        self.records[number] = LoopRecord(names, self._parts[-1], iterations)
        self._parts.extend([iteration.text for iteration in iterations])
        for index in range(count, len(items)):
            self.iteration = iteration = LoopIteration(items[index])
            yield items[index], TracedLoop(self, items, index)
            text = _rendered(self._take_text())
            past = earlier.iterations[index].text if index < len(earlier.iterations) else None
            iteration.text = past if past is not None and past == text else text
            self._parts.append(iteration.text)
            iterations.append(iteration)
        self.iteration = None

    def _num_reusable(self, earlier: LoopRecord, items: Sequence[Any], names: Mapping[str, Any]) -> int:
        """Number of leading iterations that would write the same text; their namespace writes are repeated. The last
        item is always rendered."""
        if earlier.names.keys() != names.keys() or not all(_same(names[name], earlier.names[name]) for name in names):
            return 0
        count = 0
        for index, iteration in enumerate(earlier.iterations[: max(len(items) - 1, 0)]):
            if iteration.last_read >= self.common or not _same_item(iteration.item, items[index]):
                break
            if iteration.next_item is not NOT_READ and not _same_item(iteration.next_item, items[index + 1]):
                break
            if iteration.read and not self._reads_same_values(iteration):
                break
            for number, name, value in iteration.written:
                self.namespaces[number][name] = value
            count += 1
        return count

    def _reads_same_values(self, iteration: LoopIteration) -> bool:
        return all(
            number < len(self.namespaces) and _same(value, namespace_values(self.namespaces[number]).get(name, MISSING))
            for number, name, value in iteration.read
        )

    def _namespace(self, *args: Any, **values: Any) -> Namespace:
        if self.iteration is not None:
            return Namespace(*args, **values)  # local to its iteration
        self.namespaces.append(TracedNamespace(self, len(self.namespaces), *args, **values))
        return self.namespaces[-1]

    def record_read(self, index: int) -> None:
        if self.iteration is not None and index > self.iteration.last_read:
            self.iteration.last_read = index

    def undefined(self, reason: str) -> jinja2.Undefined:
        return self.template.environment.undefined(reason)


def _rendered(text: str) -> Rendered:
    if text.startswith(DIVIDER):
        raise Untraceable("a divider that belongs to the text before it")
    return remove_dividers(text)


def _same(one: Any, other: Any) -> bool:
    """Whether an iteration behaves the same with either value."""
    if one is other:
        return True
    if isinstance(one, TracedMessages) and isinstance(other, TracedMessages):
        return one.begin == other.begin  # reads of single messages are recorded
    if isinstance(one, TracedNamespace) and isinstance(other, TracedNamespace):
        return namespace_number(one) == namespace_number(other)
    if isinstance(one, jinja2.Undefined | Macro):
        return type(one) is type(other)  # variables of macros are among the loop's outer variables
    return type(one) is type(other) and isinstance(one, SCALARS) and bool(one == other)


def _same_item(one: Any, other: Any) -> bool:
    """Templates that rewrite messages make new objects each time."""
    if one is other:
        return True
    texts = isinstance(one, dict) and all(type(value) is str for value in one.values())
    return texts and type(other) is dict and one == other


@fast_init
@dataclass(frozen=True, slots=True, eq=False)
class RenderedConversation:
    """A conversation as last rendered."""

    template: jinja2.Template | None = None
    messages: tuple[Message, ...] = ()
    calls: tuple[str, ...] | None = None
    """Tool calls of each message as text, because they are mutable; None if no message has calls written by hand."""
    shown: Sequence[dict[str, Any]] = ()
    records: LoopRecords = field(default_factory=dict)

    def common(self, template: jinja2.Template, messages: tuple[Message, ...], calls: tuple[str, ...] | None) -> int:
        """Number of leading messages that are equal; -1 for another template."""
        if self.template is not template:
            return -1
        size = min(len(self.messages), len(messages))
        if calls is self.calls is None and self.messages == messages[: len(self.messages)]:  # mostly the same objects
            return size
        ours, theirs = self.calls or ("",) * size, calls or ("",) * size
        same = (self.messages[at] == messages[at] and ours[at] == theirs[at] for at in range(size))
        return next((at for at, equal in enumerate(same) if not equal), size)


NO_CONVERSATION = RenderedConversation()


class IncrementalRenderer:
    """Renders the conversations of one episode."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._conversations: list[RenderedConversation] = []
        self._untraceable: set[jinja2.Template] = set()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TextParts:
        renderer, template = self.renderer, self.renderer.template.traced(tools)
        if template is None or template in self._untraceable:
            return TextParts([renderer.render(messages, tools)])
        adapted = tuple(renderer.adapted(messages, tools))
        calls = None
        if [one for one in adapted if one.tool_calls and not one.sampled]:
            calls = tuple([repr(one.tool_calls) if one.tool_calls and not one.sampled else "" for one in adapted])
        earlier, common = self._nearest(template, adapted, calls)
        shown = [*earlier.shown[:common], *[renderer.escaper.message(one) for one in adapted[common:]]]
        variables = renderer.template.variables(tools, True, renderer.escaper)
        render = TemplateRender(template, variables, shown, earlier.records, common)
        try:
            text = render.run()
        except RenderTimeout:
            raise render_timeout_error() from None
        except Exception:  # the full render raises the template's own errors
            whole = renderer.render(messages, tools)
            self._untraceable.add(template)
            return TextParts([whole])
        if common == len(earlier.messages) and earlier in self._conversations:
            self._conversations.remove(earlier)
        rendered = RenderedConversation(template, adapted, calls, shown, render.records)
        self._conversations = [*self._conversations[1 - MAX_CONVERSATIONS :], rendered]
        return text

    @property
    def latest(self) -> RenderedConversation | None:
        return self._conversations[-1] if self._conversations else None

    def start_from(self, conversation: RenderedConversation) -> None:
        """Let later renders continue a conversation that was rendered elsewhere."""
        self._conversations.append(conversation)

    def _nearest(
        self, template: jinja2.Template, messages: tuple[Message, ...], calls: tuple[str, ...] | None
    ) -> tuple[RenderedConversation, int]:
        """The conversation with the most leading messages in common, and their number."""
        best, most = NO_CONVERSATION, 0
        for conversation in reversed(self._conversations):
            common = conversation.common(template, messages, calls)
            if common > most:
                best, most = conversation, common
        return best, most


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The first prompt of an episode; the episodes of a group share it."""

    shown: TextParts
    tokens: Tokens
    conversation: RenderedConversation | None
    """Start of later renders; None if the template is always rendered as a whole."""


class ToolsKey:
    """Tools as a cache key by identity: an agent uses the same objects in every episode."""

    __slots__ = ("ids", "tools")

    def __init__(self, tools: Sequence[ToolSpec]):
        self.tools, self.ids = tuple(tools), tuple(map(id, tools))  # the reference keeps the ids valid

    def __hash__(self) -> int:
        return hash(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolsKey) and self.ids == other.ids


class FirstPromptCache:
    """First prompts of one renderer, each rendered and tokenised once."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._cached = lru_cache(MAX_FIRST_PROMPTS)(self._make)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> FirstPrompt | None:
        """The first prompt with these messages. Messages with tool calls are mutable and not cached."""
        if any(message.tool_calls for message in messages):
            return None
        if sum([len(message.content) for message in messages]) > MAX_FIRST_CHARS:
            return None
        return self._cached(tuple(messages), ToolsKey(tools))

    def _make(self, messages: tuple[Message, ...], tools: ToolsKey) -> FirstPrompt:
        incremental = IncrementalRenderer(self.renderer)
        shown = incremental.render(messages, tools.tools)
        return FirstPrompt(shown, Tokens(self.renderer.encode(shown.after(0))), incremental.latest)
