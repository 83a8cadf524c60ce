"""Tokenizer, chat template, tool-call format and stop tokens of one model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from arborl.chat import builtin_templates
from arborl.chat.chat_template import Template
from arborl.chat.control_tokens import THINKING, MessageEscaper, Rendered, remove_dividers
from arborl.chat.formats import ToolCallParser, make_parser
from arborl.chat.incremental import FirstPromptCache
from arborl.chat.tokenizer import END_OF_TURN, FileTokenizer, Tokenizer
from arborl.errors import ConfigError
from arborl.types import Completion, Message, ToolSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Messages to the model's text, and completions to messages."""

    tokenizer: Tokenizer
    template: Template
    parser: ToolCallParser
    stop: tuple[int, ...]  # ids that end a completion, for `Sampling.stop`
    support: builtin_templates.TemplateSupport | None = None
    """What the template showed before it got a tool section; None if unknown."""
    escaper: MessageEscaper = field(init=False, repr=False, compare=False)
    template_only: frozenset[int] = field(init=False, repr=False, compare=False)
    """Ids of control tokens that replies must not contain."""
    first_prompts: FirstPromptCache = field(init=False, repr=False, compare=False)
    anchor: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known, source = self.tokenizer, "\n".join(self.template.sources)
        spoken = {*THINKING, *self.parser.tokens}
        escaper = MessageEscaper(known.control, spoken, [tag for tag in known.tags if tag in source])
        ids = (known.token_id(text) for text in known.control - spoken)
        object.__setattr__(self, "escaper", escaper)
        object.__setattr__(self, "template_only", frozenset(token for token in ids if token is not None))
        object.__setattr__(self, "first_prompts", FirstPromptCache(self))
        object.__setattr__(self, "anchor", known.decode(self.stop[:1]))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        tool_format: ToolCallParser | str = "auto",
        chat_args: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> Renderer:
        tokenizer = FileTokenizer(folder)
        sources = tokenizer.chat_templates
        setting = chat_template
        if setting is None and not sources:
            setting = builtin_templates.default_template(tokenizer)
            log.warning("%s has no chat template; uses the built-in %s (model.chat_template)", folder, setting)
        if setting is not None:
            sources = {"default": builtin_templates.template_source(setting, tokenizer)}
        parser = make_parser(tool_format, sources.values()) if isinstance(tool_format, str) else tool_format
        template, support = _template_with_tools(tokenizer, sources, parser, chat_args)
        renderer = cls(tokenizer, template, parser, _stop_tokens(tokenizer), support)
        if setting is not None:
            _check_end_token(renderer, setting)
        return renderer

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), generation: bool = True) -> Rendered:
        """The conversation's text up to the start of the reply; without `generation`, to the end of the last message.
        Control text of messages is quoted in it."""
        return self.template.render_escaped(self.adapted(messages, tools), tools, generation, self.escaper)

    def adapted(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """The messages, with tool calls as text if the template ignores them."""
        support = self.support
        if support is None or support.tools:
            return messages
        if tools:
            _warn_tool_section()
        if support.calls or not any(message.tool_calls and not message.sampled for message in messages):
            return messages
        return [builtin_templates.calls_as_text(message, self.parser) for message in messages]

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        return self.render(messages, tools).text

    def encode(self, rendered: Rendered) -> list[int]:
        if rendered.quoted:
            return self.tokenizer.encode(rendered.text, rendered.quoted)
        return self.tokenizer.encode(rendered.text)

    def escape_reply(self, text: str) -> Rendered:
        """A reply's text: control tokens of tool calls stay, all others are quoted."""
        return remove_dividers(self.escaper.spoken(text))

    def read(self, completion: Completion, begins: str = "") -> Message:
        """The sampled message, behind its given start `begins`. Its content is the exact text."""
        return self.message(begins + self.split_completion(completion)[0])

    def message(self, content: str) -> Message:
        return Message("assistant", content, tool_calls=self.parser.parse(content), sampled=True)

    def split_completion(self, completion: Completion) -> tuple[str, str]:
        """The text of a completion, and the text of its stop token (empty without one)."""
        ids = completion.tokens
        if ids and ids[-1] in self.stop:
            return self.decode(ids[:-1]), self.tokenizer.decode(ids[-1:])
        return self.decode(ids), ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids. Some decoders drop a space at the start of a text, so the ids are decoded behind a
        control token."""
        return self.tokenizer.decode((*self.stop[:1], *ids)).removeprefix(self.anchor)


def _template_with_tools(
    tokenizer: FileTokenizer, sources: Mapping[str, str], parser: ToolCallParser, chat_args: Mapping[str, Any] | None
) -> tuple[Template, builtin_templates.TemplateSupport]:
    """The template, with a tool section if it ignores tools, and what it supported before."""
    special = (tokenizer.bos_token, tokenizer.eos_token)
    template = Template(sources["default"], *special, with_tools=sources.get("tool_use"), arguments=chat_args)
    support = builtin_templates.template_support(template)
    if "tool_use" in sources:  # the model's own template for tools
        return template, replace(support, tools=True)
    if not support.tools:
        source = builtin_templates.add_tool_section(sources["default"], support, parser)
        template = Template(source, *special, arguments=chat_args)
    return template, support


@cache
def _warn_tool_section() -> None:
    log.warning("the model's chat template ignores tools: they are described in the system message")


def _check_end_token(renderer: Renderer, setting: str) -> None:
    """Raise ConfigError unless the template ends replies with a stop token."""
    reply = "An answer of some words."
    messages = [Message("user", "Hello."), Message("assistant", reply), Message("user", "Go on.")]
    text = renderer.text(messages)
    behind = text[text.find(reply) + len(reply) :] if reply in text else ""
    if renderer.tokenizer.encode(behind)[:1] not in [[stop] for stop in renderer.stop]:
        ends = " or ".join(repr(renderer.tokenizer.decode([stop])) for stop in renderer.stop)
        name = setting if setting in builtin_templates.BUILTIN_TEMPLATES else "…"
        raise ConfigError(
            f"model.chat_template={name}: it writes {behind[:16]!r} behind a reply, but the model's end tokens are "
            f"{ends}. Write one of them there, or choose model.chat_template=plain."
        )


def _stop_tokens(tokenizer: FileTokenizer) -> tuple[int, ...]:
    turns = [found for text in END_OF_TURN if (found := tokenizer.token_id(text)) is not None]
    stop = tuple(dict.fromkeys([*tokenizer.eos_ids, *turns]))
    if not stop:
        raise ConfigError(
            f"{tokenizer.folder}: no end token is defined. Write eos_token in tokenizer_config.json, or eos_token_id "
            "in generation_config.json."
        )
    return stop
