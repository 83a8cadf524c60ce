"""Everything one model needs to talk: its tokenizer, its template, its way of calling tools, and where it stops."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from arborl.chat.built_in import BUILT_IN, chosen, usual
from arborl.chat.control import THINKING, Quoting, Rendered, undivided
from arborl.chat.formats import Parser, choose
from arborl.chat.openings import Openings
from arborl.chat.template import Template
from arborl.chat.tokenizer import END_OF_TURN, FileTokenizer, Tokenizer
from arborl.chat.tool_section import Shown, shown_by, spelt_out, with_tools
from arborl.errors import ConfigError
from arborl.types import Completion, Message, ToolSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Messages to the model's text, and its completions to messages.

    Example:
        renderer = Renderer.from_folder("models/qwen")
        renderer.text([Message("user", "Hi")])     # what the model is shown
        renderer.read(completion)                  # Message("assistant", "Hello!", sampled=True)
    """

    tokenizer: Tokenizer
    template: Template
    parser: Parser
    stop: tuple[int, ...]
    """Ids that end a completion; give them to the engine as `Sampling.stop`."""
    shown: Shown | None = None
    """What the model's template showed of tools before it was given a place for them; None where nobody has looked."""
    quoting: Quoting = field(init=False, repr=False, compare=False)
    unspoken: frozenset[int] = field(init=False, repr=False, compare=False)
    """Ids of control tokens that have no place within a reply."""
    openings: Openings = field(init=False, repr=False, compare=False)
    """First prompts that were rendered already."""
    anchor: str = field(init=False, repr=False, compare=False)
    """Text of the first of the stop tokens."""

    def __post_init__(self) -> None:
        known, source = self.tokenizer, "\n".join(self.template.sources)
        spoken = {*THINKING, *getattr(self.parser, "tokens", ())}
        quoting = Quoting(known.control, spoken, [tag for tag in known.tags if tag in source])
        unspoken = frozenset(found for text in known.control - spoken if (found := known.token_id(text)) is not None)
        object.__setattr__(self, "quoting", quoting)
        object.__setattr__(self, "unspoken", unspoken)
        object.__setattr__(self, "openings", Openings(self))
        object.__setattr__(self, "anchor", known.decode(self.stop[:1]))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        tool_format: Parser | str = "auto",
        chat_args: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> Renderer:
        """From a model folder in Hugging Face's layout.

        Args:
            folder: of the model.
            tool_format: how it writes tool calls: a parser, a name from `PARSERS`, or `auto` for what its chat template
                shows it.
            chat_args: arguments of its chat template, such as `enable_thinking`.
            chat_template: in place of the model's own: a name from `BUILT_IN`, a file, or Jinja. A model that has none
                is given a built-in one.
        """
        tokenizer = FileTokenizer(folder)
        sources = tokenizer.chat_templates
        asked = chat_template
        if asked is None and not sources:
            asked = usual(tokenizer)
            log.warning(
                "%s has no chat template: the built-in one called %s is used (model.chat_template)", folder, asked
            )
        if asked is not None:
            sources = {"default": chosen(asked, tokenizer)}
        parser = choose(tool_format, sources.values()) if isinstance(tool_format, str) else tool_format
        template, shown = _with_tools(tokenizer, sources, parser, chat_args)
        made = cls(tokenizer, template, parser, _stop(tokenizer), shown)
        if asked is not None:
            _check_end(made, asked)
        return made

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), generation: bool = True) -> Rendered:
        """The conversation as the model is shown it, up to where its answer begins; without `generation`, up to the end
        of the last message.

        The text, and where in it a control token is none because somebody wrote it into a message.
        """
        return self.template.quoted(self.adapted(messages, tools), tools, generation, self.quoting)

    def adapted(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """The messages, with calls in their text where the template would leave them out."""
        shown = self.shown
        if shown is None or shown.tools:
            return messages
        if tools:
            _tell()
        if shown.calls or not any(message.tool_calls and not message.sampled for message in messages):
            return messages
        return [spelt_out(message, self.parser) for message in messages]

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The text of that alone, for people."""
        return self.render(messages, tools).text

    def encode(self, rendered: Rendered) -> list[int]:
        """Ids of what was rendered, or of a part of it."""
        if rendered.quoted:
            return self.tokenizer.encode(rendered.text, rendered.quoted)
        return self.tokenizer.encode(rendered.text)

    def said(self, text: str) -> Rendered:
        """A reply's text: tool calls may be marked by control tokens; all others in it are text."""
        return undivided(self.quoting.spoken(text))

    def read(self, completion: Completion, begins: str = "") -> Message:
        """The message that was sampled, behind what it was given to begin with. Its content is the text exactly, white
        space included."""
        return self.message(begins + self.written(completion)[0])

    def message(self, content: str) -> Message:
        """The message that a sampled text is."""
        return Message("assistant", content, tool_calls=self.parser.parse(content), sampled=True)

    def written(self, completion: Completion) -> tuple[str, str]:
        """The text of a completion, and that of the stop token that ended it (empty if none did)."""
        ids = completion.tokens
        if ids and ids[-1] in self.stop:
            return self.decode(ids[:-1]), self.tokenizer.decode(ids[-1:])
        return self.decode(ids), ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, or of some of them in a row."""
        # Some decoders drop a space at the very start of a text; behind a control token it is not at the start.
        return self.tokenizer.decode((*self.stop[:1], *ids)).removeprefix(self.anchor)


def _with_tools(
    tokenizer: FileTokenizer, sources: Mapping[str, str], parser: Parser, chat_args: Mapping[str, Any] | None
) -> tuple[Template, Shown]:
    """The template, with a place for tools, and whether it had one before."""
    named = (tokenizer.bos_token, tokenizer.eos_token)
    template = Template(sources["default"], *named, with_tools=sources.get("tool_use"), arguments=chat_args)
    shown = shown_by(template)
    if "tool_use" in sources:  # its makers wrote it for tools
        return template, replace(shown, tools=True)
    if not shown.tools:
        template = Template(with_tools(sources["default"], shown, parser), *named, arguments=chat_args)
    return template, shown


@cache
def _tell() -> None:
    """Once: what the model is told of its tools is not of its makers' writing."""
    log.warning("the model's chat template has no place for tools: they are described in the system message")


def _check_end(renderer: Renderer, asked: str) -> None:
    """What this template writes behind an answer must be a token at which sampling stops."""
    said = "An answer of some words."
    talk = [Message("user", "Hello."), Message("assistant", said), Message("user", "Go on.")]
    text = renderer.text(talk)
    behind = text[text.find(said) + len(said) :] if said in text else ""
    if renderer.tokenizer.encode(behind)[:1] not in [[stop] for stop in renderer.stop]:
        ends = " or ".join(repr(renderer.tokenizer.decode([stop])) for stop in renderer.stop)
        name = asked if asked in BUILT_IN else "…"
        raise ConfigError(
            f"model.chat_template={name}: behind an answer it writes {behind[:16]!r}, and the tokens that end one of "
            f"this model are {ends}. Write one of them there, or choose model.chat_template=plain."
        )


def _stop(tokenizer: FileTokenizer) -> tuple[int, ...]:
    turns = [found for text in END_OF_TURN if (found := tokenizer.token_id(text)) is not None]
    stop = tuple(dict.fromkeys([*tokenizer.eos_ids, *turns]))
    if not stop:
        raise ConfigError(
            f"{tokenizer.folder}: nothing says which token ends an answer. Write eos_token in tokenizer_config.json, "
            "or eos_token_id in generation_config.json."
        )
    return stop
