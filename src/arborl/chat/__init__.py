"""Chat: messages to token ids and back. It never runs a model, and never tokenises again what a model sampled.

Start with `conversation.py` (the bookkeeping of one episode), then `renderer.py`, `template.py` and `parsers.py`.
"""

from arborl.chat.conversation import Conversations, Prompt
from arborl.chat.parsers import HermesParser, Parser
from arborl.chat.renderer import Renderer
from arborl.chat.template import Template
from arborl.chat.tokenizer import FileTokenizer, Tokenizer
from arborl.registry import Registry

PARSERS = Registry("tool-call format", {"hermes": "arborl.chat.parsers:HermesParser"})

__all__ = [
    "PARSERS",
    "Conversations",
    "FileTokenizer",
    "HermesParser",
    "Parser",
    "Prompt",
    "Renderer",
    "Template",
    "Tokenizer",
]
