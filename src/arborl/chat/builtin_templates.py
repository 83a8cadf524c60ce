"""Built-in chat templates, and the tool section for templates that ignore tools.

`chatml` marks turns by the tokens `<|im_start|>` and `<|im_end|>`. `plain` needs only the end token, which every model
has: roles are words, and a reply ends with that token. Both show a reply and its end token as sampled, so a
conversation only grows.

Many templates ignore tools. The tool section is Jinja code in front of such a template that writes the tools into the
system message; both together are one template, which can be saved with the model. What a template ignores is found by
rendering a probe and searching its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arborl.chat.chat_template import Template
from arborl.chat.formats import ToolCallParser
from arborl.chat.tokenizer import FileTokenizer
from arborl.errors import ConfigError, did_you_mean
from arborl.types import Message, ToolCall, ToolSpec

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PLAIN = """{%- for message in messages %}
{{- message.role | capitalize + ':\\n' + message.content + (END if message.role == 'assistant' else '') + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:\\n' }}
{%- endif %}
"""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def _plain(tokenizer: FileTokenizer) -> str:
    if not tokenizer.eos_ids:
        raise ConfigError(
            f"{tokenizer.folder}: it names no end token, which the chat template plain needs. Write eos_token in "
            "tokenizer_config.json."
        )
    return PLAIN.replace("END", json.dumps(tokenizer.decode(tokenizer.eos_ids[:1]), ensure_ascii=False))


BUILTIN_TEMPLATES: dict[str, Callable[[FileTokenizer], str]] = {"chatml": lambda tokenizer: CHATML, "plain": _plain}


def default_template(tokenizer: FileTokenizer) -> str:
    """The template's name for a model without one: ChatML if it has the tokens, else plain."""
    return "chatml" if all(tokenizer.token_id(token) is not None for token in CHATML_TOKENS) else "plain"


def template_source(setting: str, tokenizer: FileTokenizer) -> str:
    """The Jinja source of `model.chat_template`: a built-in name, a file, or the source itself."""
    if setting in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[setting](tokenizer)
    if "{{" in setting or "{%" in setting:
        return setting
    file = Path(setting).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.chat_template={setting}: neither a built-in template nor a readable file "
            f"({type(error).__name__}).{did_you_mean(setting, BUILTIN_TEMPLATES)} Write "
            f"{' or '.join(BUILTIN_TEMPLATES)}, a file, or Jinja."
        ) from error


PROBE_NAME = "arbor_probe"  # text that is searched in a render; no template writes it by itself
PROBE_TOOL = ToolSpec(PROBE_NAME, "Probe.", {"type": "object", "properties": {"x": {"type": "string"}}})
PROBE_USER = Message("user", "Hello.")
PROBE_CALL = Message("assistant", tool_calls=(ToolCall("call00000", PROBE_NAME, {"x": "1"}),))

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
class TemplateSupport:
    """What a template shows."""

    tools: bool
    system: bool
    calls: bool  # tool calls of messages written by hand
    results: bool


def template_support(template: Template) -> TemplateSupport:

    def shows(*messages: Message, tools: tuple[ToolSpec, ...] = ()) -> bool:
        try:
            return PROBE_NAME in template.render(messages, tools, generation=True)
        except Exception:  # a template may refuse or fail on unexpected messages
            return False

    system, result = Message("system", "Hi."), Message("tool", "1", tool_call_id="call00000")
    probe_result = Message("tool", PROBE_NAME, tool_call_id="call00000", name="add")
    return TemplateSupport(
        tools=shows(PROBE_USER, tools=(PROBE_TOOL,)) or shows(system, PROBE_USER, tools=(PROBE_TOOL,)),
        system=shows(Message("system", PROBE_NAME), PROBE_USER),
        calls=shows(PROBE_USER, PROBE_CALL, result) or shows(PROBE_USER, PROBE_CALL),
        results=shows(PROBE_USER, Message("assistant", "Yes."), probe_result),
    )


def add_tool_section(source: str, support: TemplateSupport, parser: ToolCallParser) -> str:
    """The template with a tool section, and with tool results if it ignores them."""
    section = SECTION.replace("PLACED", IN_SYSTEM if support.system else IN_FIRST)
    section = section.replace("HOW", json.dumps(call_instructions(parser), ensure_ascii=False))
    return section + ("" if support.results else RESULTS) + source


def call_instructions(parser: ToolCallParser) -> str:
    for example in (ToolCall("call_0", "TOOL", {"NAME": "VALUE"}), ToolCall("call_0", "python", {"code": "CODE"})):
        try:
            return f"\nTo call one, write\n{parser.format(example)}"
        except ValueError:  # some formats support one tool only
            continue
    return ""


def calls_as_text(message: Message, parser: ToolCallParser) -> Message:
    """A message with its tool calls as text, for templates that ignore them. A sampled one has them in its text."""
    if message.sampled or not message.tool_calls:
        return message
    calls = parser.format(*message.tool_calls)
    return Message(message.role, f"{message.content}\n{calls}" if message.content else calls, name=message.name)
