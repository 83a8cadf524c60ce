"""The token bookkeeping of one episode: the next prompt extends the tokens of an earlier call wherever its text does.

Text decides, tokens follow. Each time the template says what the text of the conversation is (`growing.py`); where that
begins with exactly what an earlier call was shown and wrote, the earlier call's ids are taken as they are and only
the rest is tokenised. Where it does not (a message was deleted, old thinking was stripped, a sub-agent started), the
prompt is tokenised whole and a new branch begins. So a sampled id is never changed, and nothing is ever patched.

Control text in a message is text, and counts as another text than the same of the template. A reply in which the model
sampled a control token is therefore not gone on from: the next prompt shows it as text, on a new branch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from arborl.chat.control import Joined, Rendered
from arborl.chat.growing import Growing
from arborl.chat.openings import Opening
from arborl.chat.renderer import Renderer
from arborl.fast_init import fast_init
from arborl.tokens import Tokens
from arborl.types import Completion, Message, ToolSpec

log = logging.getLogger(__name__)


@fast_init
@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given."""

    tokens: Tokens
    parts: Joined
    reused: int
    """How many of the tokens, from the start, are an earlier call's; 0 begins a new branch."""

    @property
    def shown(self) -> Rendered:
        return self.parts.whole

    @property
    def text(self) -> str:
        return self.shown.text


@fast_init
@dataclass(frozen=True, slots=True)
class Branch:
    """What one call was shown and wrote."""

    shown: Joined
    prompt: Tokens
    sampled: tuple[int, ...]
    said: Message | None = None
    """What it wrote, as the agent was given it."""

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.sampled)


START = Branch(Joined(()), Tokens(), ())


class Conversations:
    """The branches of one episode; any number of conversations may be interleaved.

    Example:
        conversations = Conversations(renderer)
        prompt = conversations.prompt(messages)
        completion = await engine.generate(prompt.tokens, sampling, session="…")
        conversations.sampled(prompt, completion)
        messages += [renderer.read(completion), Message("user", "Go on.")]
        conversations.prompt(messages).tokens     # begins with prompt.tokens + completion.tokens
    """

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._growing = Growing(renderer)
        self._branches: list[Branch] = []

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), begins: str = "") -> Prompt:
        """The ids to sample from, for these messages; with `begins`, behind the beginning of the reply."""
        if not self._branches and not begins and (opening := self._opening(messages, tools)) is not None:
            return Prompt(opening.tokens.copy(), opening.shown, reused=0)
        shown, branch, rest = self._new(messages, tools, begins)
        further = [*branch.sampled, *rest]
        return Prompt(branch.prompt + further, shown, reused=branch.size)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """How many ids these messages would make."""
        _, branch, rest = self._new(messages, tools)
        return branch.size + len(rest)

    def _opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Opening | None:
        """The first prompt, where it is kept: other episodes of the group have the same."""
        opening = self.renderer.openings.find(messages, tools)
        if opening is not None and opening.talk is not None:
            self._growing.begin(opening.talk)
        return opening

    def _new(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], begins: str = ""
    ) -> tuple[Joined, Branch, list[int]]:
        """The text, the branch it goes on from, and the ids that are new."""
        shown = self._growing.render(messages, tools)
        shown = shown.plus(self.renderer.said(begins)) if begins else shown
        branch = self._begun(shown, messages)
        return shown, branch, self._encode(shown, branch)

    def _begun(self, shown: Joined, messages: Sequence[Message]) -> Branch:
        """The longest branch that this text goes on from.

        Of equally long ones that whose very message is among these, for two that were asked side by side may have
        written the same text in other tokens; else the latest: an agent that asks twice goes on from its second answer.
        The latest is nearly always the one, so the others are told apart by their length alone.
        """
        best = START
        for branch in reversed(self._branches):
            longer = branch.shown.size - best.shown.size
            if longer < 0 or not shown.starts_with(branch.shown):
                continue
            if longer or (among(branch, messages) and not among(best, messages)):
                best = branch
        return best

    def sampled(
        self,
        prompt: Prompt,
        completion: Completion,
        at: int | None = None,
        said: Message | None = None,
        written: tuple[str, str] | None = None,
    ) -> None:
        """Record what the model answered to `prompt`. Earlier branches stay: a later prompt may leave from them.

        Args:
            prompt: what it was given.
            completion: what it sampled.
            at: the call's place among the others, where they overlap; without one it is the latest.
            said: the message that the agent was given.
            written: what `Renderer.written` gives for the completion, where that is known.
        """
        renderer, ids = self.renderer, completion.tokens
        content, end = renderer.written(completion) if written is None else written
        within = ids[:-1] if ids and ids[-1] in renderer.stop else ids
        branch = START
        if renderer.unspoken.isdisjoint(within):
            parts = prompt.parts.plus(renderer.said(content), Rendered(end))
            branch = Branch(parts, prompt.tokens, ids, said)
        else:
            _tell(renderer.tokenizer.decode([next(token for token in within if token in renderer.unspoken)]))
        self._branches.insert(len(self._branches) if at is None else at, branch)

    def _encode(self, shown: Joined, after: Branch) -> list[int]:
        """The only place where a prompt is tokenised.

        A stop token is a hard border, so the ids behind it do not depend on what is before it, but they may depend on
        its being there: some tokenizers mark the start of a text, and some control tokens take white space after them.
        """
        renderer, last, size = self.renderer, after.sampled[-1:], after.shown.size
        if last and last[0] in renderer.stop and size < shown.size:
            ids = renderer.encode(shown.after(size, before=renderer.tokenizer.decode(last)))
            if ids[:1] == [*last]:
                return ids[1:]
        return renderer.encode(shown.after(size))


def among(branch: Branch, messages: Sequence[Message]) -> bool:
    """Whether what the branch wrote is one of these: the very object, for equal ones were sampled elsewhere."""
    return any(message is branch.said for message in messages)


@cache
def _tell(token: str) -> None:
    """Once: a model whose format has this token within replies needs a parser that says so."""
    log.warning(
        "the model wrote the control token %s within a reply; later prompts show it as text. If its tool calls begin "
        "with it, give its parser `tokens = (%r,)`.",
        token,
        token,
    )
