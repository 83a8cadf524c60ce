"""A model's chat template: messages to the text the model is shown, by the conventions of Hugging Face's Jinja.

Written against those conventions rather than on top of transformers, so that talking needs no torch; the tests hold
both to the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser as JinjaParser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from arborl.chat.control import DIVIDER, PLAIN, Quoting, Rendered, undivided
from arborl.chat.loops import DICT, with_rounds
from arborl.chat.render_deadline import DEADLINE, RenderTimeout, without_end
from arborl.chat.rounds import Forms
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, ToolSpec

OURS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""What every template is given, and nobody else may set."""


class Template:
    """Renders a conversation as one text.

    Example:
        template = Template(source, bos_token=None, eos_token="<|im_end|>")
        template.render([Message("user", "Hi")], tools=(), generation=True)
        # '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'

    Args:
        source: the Jinja template.
        bos_token: text of the begin token, where the model has one.
        eos_token: text of the end token.
        with_tools: another template that takes over when tools are given; some models ship two.
        now: what `strftime_now` tells. Taken once, so that all renders of a run tell the same day.
        arguments: of the template's own, such as `enable_thinking`; one that it never reads is refused.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        with_tools: str | None = None,
        now: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        self.sources = (source,) if with_tools is None else (source, with_tools)
        self._environment = environment = _environment(now or datetime.now())
        self._plain = _compile(environment, source)
        self._with_tools = self._plain if with_tools is None else _compile(environment, with_tools)
        # A token that does not exist must stay undefined: None would be rendered as the text "None".
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._always = {name: token for name, token in named.items() if token is not None} | {"documents": None}
        self._arguments = dict(arguments or {})
        self._check_arguments(environment)
        self._rounds: dict[bool, jinja2.Template | None] = {}
        self.forms: dict[tuple[Any, ...], Forms] = {}
        """What stands around the content of messages, as renders found it."""

    def _check_arguments(self, environment: ImmutableSandboxedEnvironment) -> None:
        if not self._arguments:
            return
        reads = {name for source in self.sources for name in meta.find_undeclared_variables(environment.parse(source))}
        known = sorted(reads - OURS)
        for name in self._arguments:
            if name in OURS:
                raise ConfigError(f"model.chat_args.{name}: is given by Arbor to every template. Leave it out.")
            if name not in reads:
                what = f"It reads: {', '.join(known)}." if known else "It reads no arguments. Leave it out."
                raise ConfigError(
                    f"model.chat_args.{name}: the model's chat template never mentions it."
                    f"{did_you_mean(name, known)} {what}"
                )

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> str:
        """The conversation's text; `generation` adds what comes before the assistant's next message."""
        return self.quoted(messages, tools, generation, PLAIN).text

    def save(self, folder: Path) -> None:
        """Write the sources where Hugging Face's layout has them: what the model is shown here, it is shown there."""
        source, *with_tools = self.sources
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        for other in with_tools:
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(other, encoding="utf-8")

    def quoted(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool, quoting: Quoting
    ) -> Rendered:
        """The same text, and where in it control text is not the template's own."""
        template = self._with_tools if tools else self._plain
        known = self.known(tools, generation, quoting)
        known["messages"] = [quoting.message(message) for message in messages]
        mark = DEADLINE.begin()
        try:  # what `template.render(**known)` does, without looking each global up in a chain of tables
            try:
                text = "".join(template.root_render_func(template.new_context(known, shared=True)))
            finally:
                DEADLINE.end(mark)
            return undivided(text)
        except RenderTimeout:
            raise without_end() from None
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(f"the chat template refused the messages ({roles}): {error}") from error

    def known(self, tools: Sequence[ToolSpec], generation: bool, quoting: Quoting) -> dict[str, Any]:
        """What the template is given, but for the messages."""
        template = self._with_tools if tools else self._plain
        return {
            **template.globals,
            **self._always,
            **quoting.arguments(self._arguments),
            "tools": quoting.tools(tools) if tools else None,
            "add_generation_prompt": generation,
        }

    def with_rounds(self, tools: Sequence[ToolSpec]) -> jinja2.Template | None:
        """The template as `rounds.py` goes through it, made when first asked for; None if it cannot be."""
        which = bool(tools)
        if which not in self._rounds:
            self._rounds[which] = with_rounds(self._environment, self.sources[-1 if which else 0])
        return self._rounds[which]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model says; the text is the same without it."""

    tags = {"generation"}

    def parse(self, parser: JinjaParser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


MOST_IN_POWER, MOST_REPEATED = 1000, 1_000_000
ESCAPED_DIVIDER = json.dumps(DIVIDER)[1:-1]


class _Sandbox(ImmutableSandboxedEnvironment):
    """`message.role` is nearly always a key of a dict; Jinja looks for an attribute first, which costs an exception.

    `*` and `**` are bounded: the one makes texts without end, the other numbers, within a single instruction.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._lacks: dict[str, jinja2.Undefined] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in DICT:
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        if attribute not in self._lacks:  # what it says of itself is the same for every dict
            self._lacks[attribute] = self.undefined(obj={}, name=attribute)
        return self._lacks[attribute]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > MOST_IN_POWER or abs(right) > MOST_IN_POWER):
            raise jinja2.TemplateError(f"a power of numbers beyond {MOST_IN_POWER:,}")
        if operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            if hasattr(repeated, "__len__") and isinstance(count, int) and count * len(repeated) > MOST_REPEATED:
                raise jinja2.TemplateError(f"a text or list repeated to more than {MOST_REPEATED:,}")
        return super().call_binop(context, operator, left, right)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = now.strftime
    return environment


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        template = environment.from_string(source)
        template.globals = dict(template.globals)
        return template
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(ESCAPED_DIVIDER, DIVIDER) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
