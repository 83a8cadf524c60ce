"""Token ids of an episode's prompts: a prompt extends the ids of an earlier call wherever its text does.

The text decides. Each time the template renders the conversation (`incremental.py`); if the text begins with the prompt
and the reply of an earlier call, that call's ids are reused and only the rest is tokenised. Otherwise (a message was
deleted, thinking was stripped, a sub-agent started) the prompt is tokenised as a whole and a new branch begins. A
sampled id is never changed.

Control text in a message is text and differs from the same control token of the template. A reply in which the model
sampled a control token is therefore not continued: the next prompt shows it as text, on a new branch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from arborl.chat.control_tokens import Rendered, TextParts
from arborl.chat.incremental import FirstPrompt, IncrementalRenderer
from arborl.chat.renderer import Renderer
from arborl.chat.tokenizer import TextTokenizer
from arborl.fast_init import fast_init
from arborl.tokens import Tokens
from arborl.types import Completion, Message, ToolSpec

log = logging.getLogger(__name__)

USUAL_CHARS, SLACK = 8, 16
"""Characters per token that no text exceeds on average, and tokens that cutting a text may add."""
JSON_FACTOR = 4  # how many times shorter than JSON a template may write tools


@fast_init
@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of one model call."""

    tokens: Tokens
    parts: TextParts
    reused: int  # leading tokens of an earlier call; 0 begins a new branch

    @property
    def shown(self) -> Rendered:
        return self.parts.joined

    @property
    def text(self) -> str:
        return self.shown.text


@fast_init
@dataclass(frozen=True, slots=True)
class ConversationBranch:
    """Prompt and reply of one call."""

    shown: TextParts
    prompt: Tokens
    sampled: tuple[int, ...]
    reply: Message | None = None

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.sampled)


ROOT = ConversationBranch(TextParts(()), Tokens(), ())


class Conversations:
    """The branches of one episode; conversations may be interleaved."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._incremental = IncrementalRenderer(renderer)
        self._branches: list[ConversationBranch] = []

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), begins: str = "") -> Prompt:
        """Token ids of these messages, followed by the start `begins` of the reply."""
        if not self._branches and not begins and (first := self._first_prompt(messages, tools)) is not None:
            return Prompt(first.tokens.copy(), first.shown, reused=0)
        shown, branch, rest = self._extend(messages, tools, begins)
        further = [*branch.sampled, *rest]
        return Prompt(branch.prompt + further, shown, reused=branch.size)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        _, branch, rest = self._extend(messages, tools)
        return branch.size + len(rest)

    def _first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> FirstPrompt | None:
        """The cached first prompt: the episodes of a group share it."""
        first = self.renderer.first_prompts.find(messages, tools)
        if first is not None and first.conversation is not None:
            self._incremental.start_from(first.conversation)
        return first

    def _extend(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], begins: str = ""
    ) -> tuple[TextParts, ConversationBranch, list[int]]:
        shown = self._incremental.render(messages, tools)
        shown = shown.extended(self.renderer.escape_reply(begins)) if begins else shown
        branch = self._longest_branch(shown, messages)
        return shown, branch, self._encode(shown, branch)

    def _longest_branch(self, shown: TextParts, messages: Sequence[Message]) -> ConversationBranch:
        """The longest branch that this text extends. Among branches of equal length the one whose reply is among the
        messages, because parallel calls may write the same text in other tokens; otherwise the latest, because an agent
        that calls twice continues the second reply."""
        best = ROOT
        for branch in reversed(self._branches):
            longer = branch.shown.size - best.shown.size
            if longer < 0 or not shown.starts_with(branch.shown):
                continue
            if longer or (contains_reply(messages, branch) and not contains_reply(messages, best)):
                best = branch
        return best

    def record(
        self,
        prompt: Prompt,
        completion: Completion,
        at: int | None = None,
        reply: Message | None = None,
        texts: tuple[str, str] | None = None,
    ) -> None:
        renderer, ids = self.renderer, completion.tokens
        content, end = renderer.split_completion(completion) if texts is None else texts
        content_ids = ids[:-1] if ids and ids[-1] in renderer.stop else ids
        branch = ROOT
        if renderer.template_only.isdisjoint(content_ids):
            parts = prompt.parts.extended(renderer.escape_reply(content), Rendered(end))
            branch = ConversationBranch(parts, prompt.tokens, ids, reply)
        else:
            first = next(token for token in content_ids if token in renderer.template_only)
            _warn_control_token(renderer.tokenizer.decode([first]))
        self._branches.insert(len(self._branches) if at is None else at, branch)

    def _encode(self, shown: TextParts, after: ConversationBranch) -> list[int]:
        """Ids of the text behind a branch. Ids behind a stop token do not depend on the text before it, but they may
        depend on the token itself: some tokenizers mark the start of a text, and some control tokens absorb white space
        behind them."""
        renderer, last, size = self.renderer, after.sampled[-1:], after.shown.size
        if last and last[0] in renderer.stop and size < shown.size:
            ids = renderer.encode(shown.after(size, before=renderer.tokenizer.decode(last)))
            if ids[:1] == [*last]:
                return ids[1:]
        return renderer.encode(shown.after(size))


def contains_reply(messages: Sequence[Message], branch: ConversationBranch) -> bool:
    """Whether the branch's reply is one of these objects; an equal message may come from another call."""
    return any(message is branch.reply for message in messages)


@cache
def _warn_control_token(token: str) -> None:
    log.warning(
        "the model wrote the control token %s within a reply; later prompts show it as text. If its tool calls begin "
        "with it, give its parser `tokens = (%r,)`.",
        token,
        token,
    )


def messages_exceed(messages: Sequence[Message], tokenizer: TextTokenizer, most: int) -> bool:
    """Whether the messages not written by the model have more than `most` tokens, mostly without tokenising them."""
    written = [message.content for message in messages if message.role != "assistant"]
    if sum(map(len, written)) <= USUAL_CHARS * most:
        return False
    return has_more_tokens("".join(written), tokenizer.encode, most)


def tools_exceed(messages: Sequence[Message], tools: Sequence[ToolSpec], tokenizer: TextTokenizer, most: int) -> bool:
    """Whether tools and tool calls have far more than `most` tokens in any template's form."""
    text = tool_text(messages, tools)
    return len(text) > USUAL_CHARS * most and has_more_tokens(text, tokenizer.encode, JSON_FACTOR * most)


def tool_text(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
    calls = [[call.name, call.arguments] for message in messages for call in message.tool_calls]
    specs = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return json.dumps([calls, specs], ensure_ascii=False, default=str) if calls or specs else ""


def rendered_exceeds(shown: Rendered, renderer: Renderer, most: int) -> bool:
    """Whether a rendered conversation has more than `most` tokens, mostly without tokenising it."""
    return has_more_tokens(shown.text, lambda part: renderer.encode(shown.until(len(part))), most)


def has_more_tokens(text: str, encode: Callable[[str], Sequence[int]], most: int) -> bool:
    """Whether a text has more than `most` tokens. Tokenising megabytes would block all other episodes for seconds. A
    prefix of the text suffices in general; only if it has long tokens, prefixes of double length follow."""
    end = USUAL_CHARS * most
    while end < len(text):
        if len(encode(text[:end])) > most + SLACK:
            return True
        end *= 2
    return False
