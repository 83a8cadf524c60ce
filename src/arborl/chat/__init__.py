"""Chat: messages to token ids and back. It never runs a model, and never tokenises again what a model sampled.

Start with `conversation.py` (the bookkeeping of one episode), then `renderer.py`, `template.py` and
`formats/` (how tool calls are written).
"""

from arborl.chat.control import Rendered
from arborl.chat.conversation import Conversations, Prompt
from arborl.chat.formats import PARSERS, Parser
from arborl.chat.formats.hermes import HermesParser
from arborl.chat.renderer import Renderer
from arborl.chat.template import Template
from arborl.chat.tokenizer import FileTokenizer, TextTokenizer, Tokenizer

__all__ = [
    "PARSERS",
    "Conversations",
    "FileTokenizer",
    "HermesParser",
    "Parser",
    "Prompt",
    "Rendered",
    "Renderer",
    "Template",
    "TextTokenizer",
    "Tokenizer",
]
