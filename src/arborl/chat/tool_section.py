"""Tools for a template that has no place for them: they are described in the system message.

Many templates ignore the tools they are given, and the model would never hear of them. What is missing is put in front
of the template as more Jinja, which rewrites the messages before the template sees them; so the whole is again one
template, which can be saved with the model and renders the same anywhere. What a template lacks is found by trying:
whether a name that was given appears in what it renders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from arborl.chat.formats import Parser
from arborl.chat.template import Template
from arborl.types import Message, ToolCall, ToolSpec

NAME = "arbor_probe"
"""What is looked for in a render; no template writes it by itself."""
PROBE = ToolSpec(NAME, "Probe.", {"type": "object", "properties": {"x": {"type": "string"}}})
USER = Message("user", "Hello.")
CALL = Message("assistant", tool_calls=(ToolCall("call00000", NAME, {"x": "1"}),))

SECTION = """{%- if tools %}
{%- set section = namespace(text='You may call these tools:\\n') %}
{%- for tool in tools %}
{%- set section.text = section.text + (tool | tojson) + '\\n' %}
{%- endfor %}
{%- set section.text = section.text + HOW %}
PLACED
{%- endif %}
"""
IN_SYSTEM = """{%- if messages and messages[0].role == 'system' %}
{%- set messages = [dict(messages[0], content=messages[0].content + '\\n\\n' + section.text)] + messages[1:] %}
{%- else %}
{%- set messages = [{'role': 'system', 'content': section.text}] + messages %}
{%- endif %}"""
IN_FIRST = """{%- set place = namespace(messages=[], found=false) %}
{%- for message in messages %}
{%- if message.role == 'user' and not place.found %}
{%- set place.found = true %}
{%- set place.messages = place.messages + [dict(message, content=section.text + '\\n\\n' + message.content)] %}
{%- else %}
{%- set place.messages = place.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = place.messages %}"""
RESULTS = """{%- set talk = namespace(messages=[], results='') %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- set talk.results = talk.results + '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' %}
{%- elif talk.results and message.role == 'user' %}
{%- set talk.messages = talk.messages + [dict(message, content=talk.results + message.content)] %}
{%- set talk.results = '' %}
{%- elif talk.results %}
{%- set talk.messages = talk.messages + [{'role': 'user', 'content': talk.results}, message] %}
{%- set talk.results = '' %}
{%- else %}
{%- set talk.messages = talk.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = talk.messages + ([{'role': 'user', 'content': talk.results}] if talk.results else []) %}
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a template shows of what it is given."""

    tools: bool
    system: bool
    calls: bool
    """Whether calls of a message written by hand appear."""
    results: bool
    """Whether messages of the role `tool` do."""


def shown_by(template: Template) -> Shown:
    """Found by trying."""

    def has(*messages: Message, tools: tuple[ToolSpec, ...] = ()) -> bool:
        try:
            return NAME in template.render(messages, tools, generation=True)
        except Exception:  # a template may refuse, or stumble over what it does not expect
            return False

    return Shown(
        tools=has(USER, tools=(PROBE,)) or has(Message("system", "Hi."), USER, tools=(PROBE,)),
        system=has(Message("system", NAME), USER),
        calls=has(USER, CALL, Message("tool", "1", tool_call_id="call00000")) or has(USER, CALL),
        results=has(USER, Message("assistant", "Yes."), Message("tool", NAME, tool_call_id="call00000", name="add")),
    )


def with_tools(source: str, shown: Shown, parser: Parser) -> str:
    """The template with a place for tools, and for what they answer where it has none."""
    placed = SECTION.replace("PLACED", IN_SYSTEM if shown.system else IN_FIRST)
    placed = placed.replace("HOW", json.dumps(how_to_call(parser), ensure_ascii=False))
    return placed + ("" if shown.results else RESULTS) + source


def how_to_call(parser: Parser) -> str:
    """What the model is told about the form of a call: one that the parser itself writes."""
    for example in (ToolCall("call_0", "TOOL", {"NAME": "VALUE"}), ToolCall("call_0", "python", {"code": "CODE"})):
        try:
            return f"\nTo call one, write\n{parser.format(example)}"
        except ValueError:  # some forms are for one tool only
            continue
    return ""


def spelt_out(message: Message, parser: Parser) -> Message:
    """A message with its calls in its text, where the template would leave them out; a sampled one has them there."""
    if message.sampled or not message.tool_calls:
        return message
    said = parser.format(*message.tool_calls)
    return Message(message.role, f"{message.content}\n{said}" if message.content else said, name=message.name)
