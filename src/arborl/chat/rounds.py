"""A template's loops, round by round: what each wrote, and what it looked at besides its own item.

What a round can see is: names from outside the loop (compared as a whole), a namespace (each value it read, and what it
wrote), other messages (the furthest it looked at), and the loop itself (whether it asked for what lies ahead). Where
all of that is as it was, so is what it writes, and it need not be gone through again.

A round that looked at none of this, and only wrote the content of its message, is the same for every message of that
role but for the content: what stands around it is kept as a `Form`, and later messages of the role need no round.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from arborl.chat.control import DIVIDER, Joined, Rendered, undivided
from arborl.chat.loops import ROUNDS
from arborl.chat.render_deadline import DEADLINE
from arborl.chat.round_views import MISSING, NEVER, SCALARS, Loop, Messages, Space, Unfit, number_of, values_of
from arborl.fast_init import fast_init

ANYTHING = object()
EMPTY = Rendered("")
CONTENT_HERE = f"\U000f0001{secrets.token_hex(16)}\U000f0001"
"""Stands for the content of a message while its round is rendered; no text has it."""
PLAIN = {"role", "content"}
"""Keys of a message that is nothing but its text."""
MOST_FORMS = 64


# ------------------------------------------------------------------------------------------------ what is kept


@dataclass(slots=True)
class Round:
    """A loop's way with one item."""

    item: Any
    text: Rendered = EMPTY
    following: Any = ANYTHING
    """The item behind it, where it looked at that."""
    furthest: int = -1
    """The last of the messages that it looked at."""
    read: list[tuple[int, str, Any]] = field(default_factory=list)
    """Of namespaces, by number: names and values."""
    written: list[tuple[int, str, Any]] = field(default_factory=list)
    alone: bool = True
    """Whether it looked neither at its place in the loop nor into the content."""

    @property
    def has_form(self) -> bool:
        """Whether it would go alike for another message of the same role."""
        seen = self.furthest >= 0 or self.read or self.written or self.following is not ANYTHING
        return self.alone and not seen and self.item.keys() == PLAIN


@dataclass(slots=True)
class Rounds:
    """Those of one loop, and what was seen from all of them."""

    names: Mapping[str, Any] = field(default_factory=dict)
    before: Rendered = EMPTY
    """The text in front of the loop."""
    rounds: list[Round] = field(default_factory=list)


Kept = dict[int, Rounds]
"""Of a whole render, by the number of the loop."""
Form = list[str]
"""The text around the content of a message."""


@dataclass(slots=True)
class Forms:
    """Those of a loop whose rounds see the same names."""

    seen: list[Any]
    """What the names are; that these objects are held keeps their ids theirs."""
    by_role: dict[str, Form] = field(default_factory=dict)


@fast_init
@dataclass(frozen=True, slots=True)
class Growth:
    """How a rendered conversation goes on with further messages, without its template."""

    number: int
    """Of the loop that goes through the messages."""
    forms: Mapping[str, Form]
    front: Joined
    """All parts but the last."""
    behind: Rendered
    """The last: what the template writes behind the messages."""

    def texts(self, messages: Iterable[Mapping[str, Any]]) -> list[Rendered] | None:
        """What is written of these; None where only the template can say."""
        found = []
        for message in messages:
            form = self.forms.get(message["role"]) if len(message) == len(PLAIN) else None
            if form is None:
                return None
            text = message["content"].join(form)
            if DIVIDER in text:
                return None
            found.append(Rendered(text))
        return found


# ------------------------------------------------------------------------------------------------ one render


class Render:
    """Goes through a template once, passing over what is kept.

    Args:
        template: as `with_rounds` made it.
        known: what it is given, but for the messages.
        messages: as templates read them.
        kept: of an earlier render.
        common: messages at the beginning that are those of that render.
        forms: of all renders; found ones are added.
    """

    def __init__(
        self,
        template: jinja2.Template,
        known: Mapping[str, Any],
        messages: list[Any],
        kept: Kept,
        common: int,
        forms: dict[tuple[Any, ...], Forms],
    ):
        self.template, self.known, self.messages, self.earlier = template, known, messages, kept
        self.common, self.forms = common, forms
        self.kept: Kept = {}
        self.growing: tuple[int, Mapping[str, Form]] | None = None
        """The number of the last loop and its forms, where it went through all messages."""
        self.outside = Round(None)
        """What is looked at outside of the rounds."""
        self.spaces: list[Space] = []
        self.round: Round | None = None
        """The one on its way."""
        self._written: list[str] = []
        self._parts: list[Rendered] = []

    def text(self) -> Joined:
        """Raises Unfit, or whatever a template raises that meets what it does not expect."""
        own = {"messages": Messages(self, self.messages, 0), "namespace": self._namespace, ROUNDS: self._rounds}
        context = self.template.new_context({**self.known, **own}, shared=True)
        write = self._written.append
        mark = DEADLINE.begin()
        try:
            for text in self.template.root_render_func(context):  # one by one: rounds are cut while it goes on
                write(text)
        finally:
            DEADLINE.end(mark)
        self._parts.append(_rendered(self._cut()))
        return Joined(self._parts)

    def growth(self) -> Growth | None:
        """How what was rendered goes on; None where the template has to be gone through again."""
        if self.growing is None or self.spaces or self.outside.furthest == NEVER:
            return None
        number, forms = self.growing
        if any(round.furthest == NEVER for rounds in self.kept.values() for round in rounds.rounds):
            return None
        return Growth(number, forms, Joined(self._parts[:-1]), self._parts[-1])

    def _cut(self) -> str:
        """What has been written since the last cut."""
        text = "".join(self._written)
        self._written.clear()
        return text

    def _rounds(
        self, number: int, items: Iterable[Any], names: Mapping[str, Any], apart: bool
    ) -> Iterator[tuple[Any, Loop, Any]]:
        if number in self.kept:
            raise Unfit("a loop within a loop")
        self.round = self.growing = None
        forms = self._forms(number, items, names) if apart and isinstance(items, Messages) else None
        items, before = items.rest if isinstance(items, Messages) else list(items), _rendered(self._cut())
        earlier = self.earlier.get(number, Rounds())
        self._parts.append(earlier.before if earlier.before == before else before)  # the very same, to be found again
        count = self._unchanged(earlier, items, names)
        rounds = earlier.rounds[:count]
        self.kept[number] = Rounds(names, self._parts[-1], rounds)
        self._parts.extend([round.text for round in rounds])
        for index in range(count, len(items)):
            item, self.round = items[index], (round := Round(items[index]))
            hidden = forms is not None and type(item) is dict and type(item.get("content")) is str
            yield item, Loop(self, items, index), CONTENT_HERE if hidden else self.content_of(item) if apart else None
            form = self._cut().split(CONTENT_HERE) if hidden else [self._cut()]
            if forms is not None and hidden and index and round.has_form:
                forms[item["role"]] = form
            text = _rendered(item["content"].join(form) if hidden else form[0])
            past = earlier.rounds[index].text if index < len(earlier.rounds) else None
            round.text = past if past is not None and past == text else text
            self._parts.append(round.text)
            rounds.append(round)
        self.round = None
        self.growing = None if forms is None else (number, forms)

    def _forms(self, number: int, items: Messages, names: Mapping[str, Any]) -> dict[str, Form] | None:
        """Those of the loop, where what its rounds see by name cannot change but for the messages."""
        key: list[Any] = [self.template, number, items.begin]
        seen = []
        for name, value in names.items():
            if isinstance(value, Messages):
                key.append(value.begin)
            elif isinstance(value, SCALARS):
                key.append((type(value), value))
            elif isinstance(value, jinja2.Undefined) or self.known.get(name, MISSING) is value:
                key.append(type(value) if isinstance(value, jinja2.Undefined) else id(value))
                seen.append(value)
            else:
                return None
        if (found := self.forms.get(tuple(key))) is None:
            if len(self.forms) >= MOST_FORMS:
                self.forms.clear()
            found = self.forms[tuple(key)] = Forms(seen)
        return found.by_role

    def content_of(self, item: Any) -> Any:
        """What a template means by `item.content`."""
        return self.template.environment.getattr(item, "content")

    def _unchanged(self, earlier: Rounds, items: Sequence[Any], names: Mapping[str, Any]) -> int:
        """Rounds that would go as they went; what they wrote is written. The last item's is always gone through."""
        if earlier.names.keys() != names.keys() or not all(_same(names[name], earlier.names[name]) for name in names):
            return 0
        count = 0
        for index, round in enumerate(earlier.rounds[: max(len(items) - 1, 0)]):
            if round.furthest >= self.common or not _same_item(round.item, items[index]):
                break
            if round.following is not ANYTHING and not _same_item(round.following, items[index + 1]):
                break
            if round.read and not self._reads_the_same(round):
                break
            for space, name, value in round.written:
                self.spaces[space][name] = value
            count += 1
        return count

    def _reads_the_same(self, round: Round) -> bool:
        return all(
            space < len(self.spaces) and _same(value, values_of(self.spaces[space]).get(name, MISSING))
            for space, name, value in round.read
        )

    def _namespace(self, *args: Any, **values: Any) -> Namespace:
        if self.round is not None:
            return Namespace(*args, **values)  # goes with its round
        self.spaces.append(Space(self, len(self.spaces), *args, **values))
        return self.spaces[-1]

    def looked_at(self, index: int) -> None:
        """Of the messages."""
        round = self.round or self.outside
        if index > round.furthest:
            round.furthest = index

    def placed(self) -> None:
        """A round looked at its place in the loop, or into the content of its item."""
        if self.round is not None:
            self.round.alone = False

    def undefined(self, why: str) -> jinja2.Undefined:
        return self.template.environment.undefined(why)


def _rendered(text: str) -> Rendered:
    if text.startswith(DIVIDER):
        raise Unfit("a divider that belongs to what is before it")
    return undivided(text)


def _same(one: Any, other: Any) -> bool:
    """Whether a round that saw one would have done the same with the other."""
    if one is other:
        return True
    if isinstance(one, Messages) and isinstance(other, Messages):
        return one.begin == other.begin  # which of them were looked at is noted
    if isinstance(one, Space) and isinstance(other, Space):
        return number_of(one) == number_of(other)
    if isinstance(one, jinja2.Undefined | Macro):
        return type(one) is type(other)  # what macros see is seen from the rounds
    return type(one) is type(other) and isinstance(one, SCALARS) and bool(one == other)


def _same_item(one: Any, other: Any) -> bool:
    """Templates may rewrite a message, and then it is another object each time."""
    if one is other:
        return True
    texts = isinstance(one, dict) and all(type(value) is str for value in one.values())
    return texts and type(other) is dict and one == other
