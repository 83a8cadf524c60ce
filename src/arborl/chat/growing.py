"""Rendering a conversation that has grown: what a template wrote for its earlier messages is kept where it is the same.

A template is one program over all messages, and may look at any of them anywhere. But nearly all go round a loop, once
a message (`rounds.py`). When the conversation has grown, the rounds at the beginning whose message and whose sight are
as they were are passed over, and only the others are gone through. The parts before and behind the loop are always
rendered. A template whose loops cannot be followed, or that meets an error on this way, is rendered whole; so the text
is always that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jinja2

from arborl.chat.control import Joined, Rendered
from arborl.chat.render_deadline import RenderTimeout, without_end
from arborl.chat.rounds import Growth, Kept, Render, Round, Rounds
from arborl.fast_init import fast_init
from arborl.types import Message, ToolSpec

if TYPE_CHECKING:
    from arborl.chat.renderer import Renderer

TALKS = 8
"""Conversations of an episode that are kept, for agents that go back and forth between several."""


@fast_init
@dataclass(frozen=True, slots=True, eq=False)
class Talk:
    """A conversation as it was last rendered."""

    template: jinja2.Template | None = None
    said: tuple[Message, ...] = ()
    """Its messages."""
    calls: tuple[str, ...] | None = None
    """What may change in messages that stay the same objects: the tool calls of each, written out; None where no
    message has calls that were written by hand."""
    messages: Sequence[dict[str, Any]] = ()
    """As templates read them."""
    kept: Kept = field(default_factory=dict)
    since: tuple[tuple[dict[str, Any], Rendered], ...] = ()
    """Messages that were added without going through the template, and their texts."""
    tools: object = None
    """As templates read them."""
    growth: Growth | None = None
    """How it goes on without its template; None where that has to be gone through."""

    def grown(self, said: tuple[Message, ...], new: Sequence[dict[str, Any]]) -> Talk | None:
        """The conversation with these messages at its end; None where its template has to be gone through."""
        growth = self.growth
        if growth is None or (texts := growth.texts(new)) is None:
            return None
        further = Growth(growth.number, growth.forms, growth.front.plus(*texts), growth.behind)
        since = (*self.since, *zip(new, texts, strict=True))
        return Talk(self.template, said, None, [*self.messages, *new], self.kept, since, self.tools, further)

    def all_kept(self) -> Kept:
        """What is kept, as if the template had been gone through for every message."""
        if self.growth is None or not self.since:
            return self.kept
        old = self.kept[self.growth.number]
        rounds = [*old.rounds, *[Round(item, text) for item, text in self.since]]
        return {**self.kept, self.growth.number: Rounds(old.names, old.before, rounds)}

    def common(self, template: jinja2.Template, said: tuple[Message, ...], calls: tuple[str, ...] | None) -> int:
        """Messages at the beginning that are these."""
        if self.template is not template:
            return -1
        size = min(len(self.said), len(said))
        if calls is self.calls is None and self.said == said[: len(self.said)]:  # mostly the very same objects
            return size
        ours, theirs = self.calls or ("",) * size, calls or ("",) * size
        same = (self.said[at] == said[at] and ours[at] == theirs[at] for at in range(size))
        return next((at for at, alike in enumerate(same) if not alike), size)


class Growing:
    """Renders the conversations of one episode.

    Example:
        growing = Growing(renderer)
        growing.render(messages)                  # goes through all of them
        growing.render([*messages, reply, answer])   # goes through the last two, and gives the same as renderer.render
    """

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._talks: list[Talk] = []
        """The latest last."""
        self._unfit: set[jinja2.Template] = set()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Joined:
        """The conversation as the model is shown it, up to where its answer begins."""
        renderer, template = self.renderer, self.renderer.template.with_rounds(tools)
        if template is None or template in self._unfit:
            return Joined([renderer.render(messages, tools)])
        said = tuple(renderer.adapted(messages, tools))
        calls = None
        if [one for one in said if one.tool_calls and not one.sampled]:
            calls = tuple([repr(one.tool_calls) if one.tool_calls and not one.sampled else "" for one in said])
        talk, common = self._nearest(template, said, calls)
        new = [renderer.quoting.message(one) for one in said[common:]]
        shown_tools = renderer.quoting.tools(tools) if tools else None
        if common == len(talk.said) and calls is None and talk.tools is shown_tools:
            grown = talk.grown(said, new)
            if grown is not None and grown.growth is not None:
                self._keep(grown, talk)
                return grown.growth.front.plus(grown.growth.behind)
        shown = [*talk.messages[:common], *new]
        known = renderer.template.known(tools, True, renderer.quoting)
        render = Render(template, known, shown, talk.all_kept(), common, renderer.template.forms)
        try:
            text = render.text()
        except RenderTimeout:
            raise without_end() from None
        except Exception:  # what a template can stumble over here is its own affair; refusals are told by the whole
            whole = renderer.render(messages, tools)
            self._unfit.add(template)
            return Joined([whole])
        growth = render.growth() if calls is None else None
        made = Talk(template, said, calls, shown, render.kept, (), shown_tools, growth)
        self._keep(made, talk if common == len(talk.said) else None)
        return text

    def _keep(self, talk: Talk, before: Talk | None) -> None:
        """Remember a conversation, in place of the one that it goes on from."""
        if before in self._talks:
            self._talks.remove(before)
        self._talks = [*self._talks[1 - TALKS :], talk]

    @property
    def latest(self) -> Talk | None:
        return self._talks[-1] if self._talks else None

    def begin(self, talk: Talk) -> None:
        """Later renders may go on from a conversation that was rendered elsewhere."""
        self._talks.append(talk)

    def _nearest(
        self, template: jinja2.Template, said: tuple[Message, ...], calls: tuple[str, ...] | None
    ) -> tuple[Talk, int]:
        """The conversation that has most in common with this one, and how many messages that is."""
        best, most = NO_TALK, 0
        for talk in reversed(self._talks):
            common = talk.common(template, said, calls)
            if common > most:
                best, most = talk, common
        return best, most


NO_TALK = Talk()
