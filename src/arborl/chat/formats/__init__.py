"""Tool-call formats: text to calls, and calls to text. The interface, the registry, and detection of a model's format.

json_formats.py  Formats with JSON: Hermes and Qwen, Llama 3, Mistral
text_formats.py  Formats without: code fences, tags (Qwen Coder), a Python list, ReAct
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from arborl.registry import Registry
from arborl.types import ToolCall


class ToolCallParser(ABC):
    """One format of tool calls. `parse(format(*calls)) == calls`, up to the calls' ids. An invalid call is still a
    call, whose error says what to write. `parse` raises for no text."""

    tokens: tuple[str, ...] = ()
    """Control tokens that the model writes as part of this format."""
    opens: tuple[str, ...] | None = None
    """Texts with which every call begins: text before the first may be streamed. None if unknown."""

    @abstractmethod
    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls of a message in order, with ids `call_0`, `call_1`, …"""

    @abstractmethod
    def format(self, *calls: ToolCall) -> str:
        """The calls as text; ValueError if the format cannot express one."""


PARSERS = Registry(
    "tool-call format",
    {
        "fence": "arborl.chat.formats.text_formats:FenceParser",
        "hermes": "arborl.chat.formats.json_formats:HermesParser",
        "llama3": "arborl.chat.formats.json_formats:Llama3Parser",
        "mistral": "arborl.chat.formats.json_formats:MistralParser",
        "pythonic": "arborl.chat.formats.text_formats:PythonicParser",
        "qwen_xml": "arborl.chat.formats.text_formats:QwenXmlParser",
        "react": "arborl.chat.formats.text_formats:ReactParser",
    },
)

SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen_xml"),
    ("<tool_call>", "hermes"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
)
"""Text in a chat template and the format it implies; the first match decides."""


def make_parser(format: str = "auto", templates: Iterable[str] = ()) -> ToolCallParser:
    """The parser of a name or of `package.module:attribute`; with `auto` that of the templates, Hermes if unknown."""
    parser: ToolCallParser = PARSERS[detect_format(templates) if format == "auto" else format]()
    return parser


def detect_format(templates: Iterable[str]) -> str:
    text = "\n".join(templates)
    return next((name for sign, name in SIGNS if sign in text), "hermes")


def numbered(calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls with ids `call_0`, `call_1`, …"""
    return tuple(replace(call, id=f"call_{index}") for index, call in enumerate(calls))
