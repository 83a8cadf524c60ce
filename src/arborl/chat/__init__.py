"""Chat: messages to token ids and back. It runs no model and never tokenises sampled tokens again.

renderer.py           `Renderer`: tokenizer, template, tool-call format and stop tokens of one model
conversation.py       `Conversations`: prompts of an episode as token ids; context limits
chat_template.py      A model's Jinja chat template, its sandbox and deadline
builtin_templates.py  Built-in templates; the tool section for templates that ignore tools
incremental.py        Incremental rendering of growing conversations; cache of first prompts
traced_template.py    Rewrites a template's loops for incremental rendering
control_tokens.py     Escaping of control tokens in messages
json_schema.py        JSON schemas as masks of tokens
tokenizer.py          Text to token ids and back
messages.py           Messages in OpenAI's format
formats/              Tool-call formats: text to calls and back
"""

from arborl.chat.chat_template import Template
from arborl.chat.control_tokens import Rendered
from arborl.chat.conversation import Conversations, Prompt
from arborl.chat.formats import PARSERS, ToolCallParser
from arborl.chat.formats.json_formats import HermesParser
from arborl.chat.renderer import Renderer
from arborl.chat.tokenizer import FileTokenizer, TextTokenizer, Tokenizer

__all__ = [
    "PARSERS", "Conversations", "FileTokenizer", "HermesParser", "Prompt", "Rendered", "Renderer", "Template",
    "TextTokenizer", "Tokenizer", "ToolCallParser",
]  # fmt: skip
