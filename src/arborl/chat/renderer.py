"""Everything one model needs to talk: its tokenizer, its template, its way of calling tools, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arborl.chat.formats import Parser, choose
from arborl.chat.template import Template
from arborl.chat.tokenizer import FileTokenizer, Tokenizer
from arborl.errors import ConfigError
from arborl.types import Completion, Message, ToolSpec

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<|end_of_turn|>")
"""Tokens that end an assistant's turn wherever they exist; model files often forget to list them."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """Messages to the model's text, and its completions to messages.

    Example:
        renderer = Renderer.from_folder("models/qwen")
        renderer.text([Message("user", "Hi")])     # what the model is shown
        renderer.read(completion)                  # Message("assistant", "Hello!", sampled=True)
    """

    tokenizer: Tokenizer
    template: Template
    parser: Parser
    stop: tuple[int, ...]
    """Ids that end a completion; give them to the engine as `Sampling.stop`."""

    @classmethod
    def from_folder(cls, folder: str | Path, tool_format: Parser | str = "auto") -> Renderer:
        """From a model folder in Hugging Face's layout.

        Args:
            folder: of the model.
            tool_format: how it writes tool calls: a parser, a name from `PARSERS`, or `auto` for what its chat template
                shows it.
        """
        tokenizer = FileTokenizer(folder)
        sources = tokenizer.chat_templates
        template = Template(
            sources["default"], tokenizer.bos_token, tokenizer.eos_token, with_tools=sources.get("tool_use")
        )
        parser = choose(tool_format, sources.values()) if isinstance(tool_format, str) else tool_format
        return cls(tokenizer, template, parser, _stop(tokenizer))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The conversation as the model is shown it, up to where its answer begins."""
        return self.template.render(messages, tools, generation=True)

    def read(self, completion: Completion) -> Message:
        """The message that was sampled. Its content is the text exactly, white space included."""
        content, _ = self.written(completion)
        return Message("assistant", content, tool_calls=self.parser.parse(content), sampled=True)

    def written(self, completion: Completion) -> tuple[str, str]:
        """The text of a completion, and that of the stop token that ended it (empty if none did)."""
        ids = completion.tokens
        if ids and ids[-1] in self.stop:
            return self._decode(ids[:-1]), self.tokenizer.decode(ids[-1:])
        return self._decode(ids), ""

    def _decode(self, ids: Sequence[int]) -> str:
        # Some decoders drop a space at the very start of a text; behind a control token it is not at the start.
        anchor = self.stop[:1]
        return self.tokenizer.decode((*anchor, *ids)).removeprefix(self.tokenizer.decode(anchor))


def _stop(tokenizer: FileTokenizer) -> tuple[int, ...]:
    turns = [found for text in END_OF_TURN if (found := tokenizer.token_id(text)) is not None]
    stop = tuple(dict.fromkeys([*tokenizer.eos_ids, *turns]))
    if not stop:
        raise ConfigError(
            f"{tokenizer.folder}: nothing says which token ends an answer. Write eos_token in tokenizer_config.json, "
            "or eos_token_id in generation_config.json."
        )
    return stop
