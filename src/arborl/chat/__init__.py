"""Chat: messages to token ids and back. It never runs a model, and never tokenises again what a model sampled.

In reading order:

    renderer.py         Everything one model needs to talk
    template.py         A model's chat template
    render_deadline.py  Ends a template that loops without end
    built_in.py         Chat templates for models that come with none, or whose own is not wanted
    tool_section.py     Tools for a template that has no place for them: they are described in the system message
    tokenizer.py        Text to token ids and back
    control.py          Control tokens belong to the template: what looks like one in a message is text, and stays text
    growing.py          Rendering a conversation that has grown: what a template wrote for its earlier messages is kept
    loops.py            A template's loops, as its syntax tree has them
    rounds.py           A template's loops, round by round
    round_views.py      What a round of a template's loop sees
    openings.py         First prompts of episodes: those of a group are rendered and tokenised once
    conversation.py     The token bookkeeping of one episode
    messages.py         Messages in OpenAI's shape
    fit.py              Whether messages can fit a context at all, told before they are tokenised
    formats/            Ways of writing tool calls, one file each: text to calls, and calls to text
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
