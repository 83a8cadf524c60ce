"""Which format a model writes: as the configuration says, or as its chat template shows."""

from __future__ import annotations

from collections.abc import Iterable

from arborl.chat.formats.parser import Parser
from arborl.registry import Registry

PARSERS = Registry(
    "tool-call format",
    {
        "fence": "arborl.chat.formats.fence:FenceParser",
        "hermes": "arborl.chat.formats.hermes:HermesParser",
        "llama3": "arborl.chat.formats.llama3:Llama3Parser",
        "mistral": "arborl.chat.formats.mistral:MistralParser",
        "pythonic": "arborl.chat.formats.pythonic:PythonicParser",
        "qwen_xml": "arborl.chat.formats.qwen_xml:QwenXmlParser",
        "react": "arborl.chat.formats.react:ReactParser",
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
"""Text of a chat template -> the format it shows the model; the first that is found decides."""


def choose(format: str = "auto", templates: Iterable[str] = ()) -> Parser:
    """The parser of that name, or of your own as `package.module:attribute`.

    Example:
        choose("mistral")
        choose("auto", [template])      # what the template shows; Hermes where it shows nothing
    """
    made: Parser = PARSERS[sniff(templates) if format == "auto" else format]()
    return made


def sniff(templates: Iterable[str]) -> str:
    """The name of the format that a model's templates show it."""
    text = "\n".join(templates)
    return next((name for sign, name in SIGNS if sign in text), "hermes")
