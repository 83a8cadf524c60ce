"""A model's chat template: messages to the text that the model sees, by the conventions of Hugging Face's Jinja.

It does not use transformers, so that rendering needs no torch; tests compare both. A template is a program of its
author: it runs in Jinja's sandbox, with bounded `*` and `**`, and with a deadline of processor time.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import get_ident
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser as JinjaParser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from arborl.chat.control_tokens import DIVIDER, NO_ESCAPING, MessageEscaper, Rendered, remove_dividers
from arborl.chat.traced_template import trace_loops
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, ToolSpec

log = logging.getLogger(__name__)

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
DICT_METHODS = frozenset(dir(dict))
MAX_POWER, MAX_REPEATED = 1000, 1_000_000
ESCAPED_DIVIDER = json.dumps(DIVIDER)[1:-1]
MAX_SECONDS = 10.0  # processor time of one render; normal ones take milliseconds
CHECK_SECONDS = 0.5
MAX_IDLE_CHECKS = 20


class RenderTimeout(jinja2.TemplateError):
    """A template used more processor time than allowed."""


class RenderDeadline:
    """Ends renders that take too long. A render registers a mark, which costs less than a microsecond. A thread checks
    the marks twice a second and raises `RenderTimeout` in the thread of a render that used too much processor time;
    wall time would be wrong on a busy machine."""

    def __init__(self, seconds: float = MAX_SECONDS, check_seconds: float = CHECK_SECONDS):
        self.seconds, self.check_seconds = seconds, check_seconds
        self._renders: dict[object, int] = {}
        """The thread of each mark. Removing a mark decides: only one of the two threads does it."""
        self._interrupted: set[object] = set()
        self._checker: threading.Thread | None = None

    def begin(self) -> object:
        mark = object()
        self._renders[mark] = get_ident()
        if self._checker is None:
            self._start()
        return mark

    def end(self, mark: object) -> None:
        if self._renders.pop(mark, None) is None:
            while mark not in self._interrupted:
                time.sleep(0.001)
            self._interrupted.discard(mark)
            _raise_in(get_ident(), None)  # a pending exception would reach other code of this thread

    def reset(self) -> None:
        """Forget all renders, in a forked process: it has none of its parent's threads."""
        self._renders, self._interrupted, self._checker = {}, set(), None

    def _start(self) -> None:
        self._checker = threading.Thread(target=self._check, name="arborl-render-deadline", daemon=True)
        self._checker.start()

    def _check(self) -> None:
        started: dict[object, float] = {}
        idle = 0
        while idle < MAX_IDLE_CHECKS:
            time.sleep(self.check_seconds)
            renders = dict(self._renders)
            idle = 0 if renders else idle + 1
            started = {
                mark: started[mark] if mark in started else _processor_seconds(thread)
                for mark, thread in renders.items()
            }
            for mark, thread in renders.items():
                if _processor_seconds(thread) - started[mark] > self.seconds:
                    self.interrupt(mark)
        self._checker = None
        if self._renders:  # registered meanwhile by a thread that still saw the checker
            self._start()

    def interrupt(self, mark: object) -> None:
        thread = self._renders.pop(mark, None)
        if thread is not None:
            _raise_in(thread, RenderTimeout)
            self._interrupted.add(mark)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next instruction; None cancels a pending one."""
    exception = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


def _processor_seconds(thread: int) -> float:
    """Processor time of a thread, 0 if it has ended; wall time where the system has no thread clocks."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return time.monotonic()
    if all(other.ident != thread for other in threading.enumerate()):  # the clock of an ended thread must not be read
        return 0.0
    try:
        return time.clock_gettime(clock_of(thread))
    except OSError:
        return 0.0


DEADLINE = RenderDeadline()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DEADLINE.reset)


def render_timeout_error() -> ConfigError:
    return ConfigError(
        f"model.chat_template: the template used more than {DEADLINE.seconds:g} s of processor time for one "
        "conversation; it seems to loop without end. Give another."
    )


class Template:
    """Renders a conversation as one text."""

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
        self._constants = {name: token for name, token in named.items() if token is not None} | {"documents": None}
        self._arguments = dict(arguments or {})
        self._check_arguments(environment)
        self._traced: dict[bool, jinja2.Template | None] = {}

    def _check_arguments(self, environment: ImmutableSandboxedEnvironment) -> None:
        if not self._arguments:
            return
        reads = {name for source in self.sources for name in meta.find_undeclared_variables(environment.parse(source))}
        known = sorted(reads - RESERVED)
        for name in self._arguments:
            if name in RESERVED:
                raise ConfigError(f"model.chat_args.{name}: Arbor sets it for every template. Remove it.")
            if name not in reads:
                near = did_you_mean(name, known)
                reason = f"model.chat_args.{name}: the model's chat template does not read it."
                listed = f"It reads: {', '.join(known)}." if known else "It reads no arguments."
                if near:
                    raise ConfigError(f"{reason}{near} {listed}")
                log.warning("%s It has no effect. %s", reason, listed)  # an argument of another model's template

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> str:
        """The conversation's text; `generation` adds the start of the assistant's next message."""
        return self.render_escaped(messages, tools, generation, NO_ESCAPING).text

    def save(self, folder: Path) -> None:
        """Write the sources in Hugging Face's layout, so that the model sees the same text elsewhere."""
        source, *with_tools = self.sources
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        for other in with_tools:
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(other, encoding="utf-8")

    def render_escaped(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool, escaper: MessageEscaper
    ) -> Rendered:
        """The text, and where control text in it comes from messages and not from the template."""
        template = self._with_tools if tools else self._plain
        variables = self.variables(tools, generation, escaper)
        variables["messages"] = [escaper.message(message) for message in messages]
        mark = DEADLINE.begin()
        try:  # the steps of `template.render(**variables)`, without chained lookups of globals
            try:
                text = "".join(template.root_render_func(template.new_context(variables, shared=True)))
            finally:
                DEADLINE.end(mark)
            return remove_dividers(text)
        except RenderTimeout:
            raise render_timeout_error() from None
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(f"the chat template refused the messages ({roles}): {error}") from error

    def variables(self, tools: Sequence[ToolSpec], generation: bool, escaper: MessageEscaper) -> dict[str, Any]:
        template = self._with_tools if tools else self._plain
        return {
            **template.globals,
            **self._constants,
            **escaper.arguments(self._arguments),
            "tools": escaper.tools(tools) if tools else None,
            "add_generation_prompt": generation,
        }

    def traced(self, tools: Sequence[ToolSpec]) -> jinja2.Template | None:
        """The template with traced loops, made at the first call; None if it cannot be traced."""
        which = bool(tools)
        if which not in self._traced:
            self._traced[which] = trace_loops(self._environment, self.sources[-1 if which else 0])
        return self._traced[which]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's text; the tag itself writes nothing."""

    tags = {"generation"}

    def parse(self, parser: JinjaParser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with fast access to dict keys (Jinja tries attributes first, which costs an exception) and
    bounded `*` and `**`, which could make endless texts or numbers within one instruction."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._undefined_keys: dict[str, jinja2.Undefined] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in DICT_METHODS:
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        if attribute not in self._undefined_keys:  # the same for every dict
            self._undefined_keys[attribute] = self.undefined(obj={}, name=attribute)
        return self._undefined_keys[attribute]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > MAX_POWER or abs(right) > MAX_POWER):
            raise jinja2.TemplateError(f"a power of numbers beyond {MAX_POWER:,}")
        if operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            if hasattr(repeated, "__len__") and isinstance(count, int) and count * len(repeated) > MAX_REPEATED:
                raise jinja2.TemplateError(f"a text or list repeated to more than {MAX_REPEATED:,}")
        return super().call_binop(context, operator, left, right)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
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
    """JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(ESCAPED_DIVIDER, DIVIDER) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
