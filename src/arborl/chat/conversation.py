"""The token bookkeeping of one episode: the next prompt extends the tokens of an earlier call wherever its text does.

Text decides, tokens follow. The template renders the whole conversation each time; where that text begins with exactly
what an earlier call was shown and wrote, the earlier call's ids are taken as they are and only the rest is tokenised.
Where it does not (a message was deleted, old thinking was stripped, a sub-agent started), the prompt is tokenised whole
and a new branch begins. So a sampled id is never changed, and nothing is ever patched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arborl.chat.renderer import Renderer
from arborl.types import Completion, Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given."""

    tokens: tuple[int, ...]
    text: str
    reused: int
    """How many of the tokens, from the start, are an earlier call's; 0 begins a new branch."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What one call was shown and wrote."""

    text: str
    tokens: tuple[int, ...]
    said: Message | None = None
    """What it wrote, as the agent was given it."""


START = Branch("", ())


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
        self._branches: list[Branch] = []

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Prompt:
        """The ids to sample from, for these messages."""
        text = self.renderer.text(messages, tools)
        branch = self._begun(text, messages)
        rest = self._encode(text[len(branch.text) :], after=branch.tokens)
        return Prompt((*branch.tokens, *rest), text, reused=len(branch.tokens))

    def _begun(self, text: str, messages: Sequence[Message]) -> Branch:
        """The longest branch that this text goes on from.

        Of equally long ones that whose very message is among these, for two that were asked side by side may have
        written the same text in other tokens; else the latest: an agent that asks twice goes on from its second answer.
        The latest is nearly always the one, so the others are told apart by their length alone.
        """
        best = START
        for branch in reversed(self._branches):
            longer = len(branch.text) - len(best.text)
            if longer < 0 or not text.startswith(branch.text):
                continue
            if longer or (among(branch, messages) and not among(best, messages)):
                best = branch
        return best

    def sampled(
        self, prompt: Prompt, completion: Completion, at: int | None = None, said: Message | None = None
    ) -> None:
        """Record what the model answered to `prompt`. Earlier branches stay: a later prompt may leave from them.

        Args:
            prompt: what it was given.
            completion: what it sampled.
            at: the call's place among the others, where they overlap; without one it is the latest.
            said: the message that the agent was given.
        """
        content, end = self.renderer.written(completion)
        branch = Branch(prompt.text + content + end, (*prompt.tokens, *completion.tokens), said)
        self._branches.insert(len(self._branches) if at is None else at, branch)

    def _encode(self, text: str, after: Sequence[int]) -> list[int]:
        """The only place where a prompt is tokenised.

        A stop token is a hard border, so the ids behind it do not depend on what is before it, but they may depend on
        its being there: some tokenizers mark the start of a text, and some control tokens take white space after them.
        """
        encode, decode = self.renderer.tokenizer.encode, self.renderer.tokenizer.decode
        if text and after and after[-1] in self.renderer.stop:
            ids = encode(decode(after[-1:]) + text)
            if ids[:1] == [after[-1]]:
                return ids[1:]
        return encode(text)


def among(branch: Branch, messages: Sequence[Message]) -> bool:
    """Whether what the branch wrote is one of these: the very object, for equal ones were sampled elsewhere."""
    return any(message is branch.said for message in messages)
