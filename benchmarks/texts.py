"""Prompts for benchmarks with an exact number of tokens.

Models with a tokenizer get English sentences in their own chat template (`ChatText`), because trained weights behave
differently on text than on random token ids. Models with random weights have no tokenizer and get random token ids
(`RandomIds`). Both are determined by the random generator that the caller passes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from benchmark_models import SHAPES, SINK
from transformers import AutoTokenizer

from arborl.models.model_files import resolve

SUBJECTS = ("The baker", "A student", "My neighbour", "The old captain", "Our teacher", "The engineer", "A farmer")
VERBS = ("buys", "counts", "sells", "carries", "finds", "paints", "repairs", "delivers", "collects", "returns")
OBJECTS = ("apples", "red bicycles", "letters", "wooden chairs", "maps", "lamps", "small stones", "books", "tickets")
PLACES = ("at the market", "near the river", "on Monday morning", "in the library", "before dinner", "for her sister")
NUM_SENTENCES = 4000
PLACEHOLDER = "\x11"
"""Placeholder of message texts while the parts of a chat template are determined."""


class RandomIds:
    """Random token ids; prompts begin with a sink token of `benchmark_models.add_outliers`."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def prompt(self, length: int, rng: np.random.Generator) -> list[int]:
        return [SINK, *self.text(length - 1, rng)]

    def observation(self, length: int, rng: np.random.Generator) -> list[int]:
        return self.text(length, rng)

    def text(self, length: int, rng: np.random.Generator) -> list[int]:
        ids: list[int] = rng.integers(2, self.vocabulary, length).tolist()
        return ids


class ChatText:
    """English sentences in the chat template of the tokenizer in `folder`."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        first_prompt = self._render([("user", PLACEHOLDER)], reply=True)
        self.before, self.after = (self._encode(part) for part in first_prompt.split(PLACEHOLDER))
        later = self._render([("user", PLACEHOLDER), ("assistant", PLACEHOLDER), ("user", PLACEHOLDER)], reply=True)
        self.between = self._encode(later.split(PLACEHOLDER)[2])
        """Tokens between the end of a reply and the text of the next message."""
        self._prepare()

    def prompt(self, length: int, rng: np.random.Generator) -> list[int]:
        """A complete first prompt, truncated if `length` is too short for the template."""
        num_text_tokens = max(1, length - len(self.before) - len(self.after))
        return [*self.before, *self.text(num_text_tokens, rng), *self.after][:length]

    def observation(self, length: int, rng: np.random.Generator) -> list[int]:
        """Tokens between two replies; text without a template if `length` is too short for it."""
        num_text_tokens = length - len(self.between) - len(self.after)
        return (
            [*self.between, *self.text(num_text_tokens, rng), *self.after]
            if num_text_tokens > 0
            else self.text(length, rng)
        )

    def text(self, length: int, rng: np.random.Generator) -> list[int]:
        """Sentences without a template, from a random position of a prepared text. Takes only microseconds, because it
        is called during measurements."""
        start = self.starts[rng.integers(len(self.starts))]
        found = self.prepared[start : start + length]
        return found if len(found) == length else [*found, *self.text(length - len(found), rng)]

    def _prepare(self) -> None:
        rng = np.random.default_rng(0)
        self.prepared: list[int] = []
        self.starts: list[int] = []
        for _ in range(NUM_SENTENCES):
            subject, verb, direct_object, place = (
                str(rng.choice(words)) for words in (SUBJECTS, VERBS, OBJECTS, PLACES)
            )
            self.starts.append(len(self.prepared))
            self.prepared += self._encode(f" {subject} {verb} {rng.integers(2, 100)} {direct_object} {place}.")

    def _render(self, messages: list[tuple[str, str]], reply: bool) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        rendered: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=reply)
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


Texts = RandomIds | ChatText


def make_texts(name: str, vocabulary: int) -> Texts:
    """Generator of prompts for a model of `benchmark_models.load`."""
    return RandomIds(vocabulary) if name in SHAPES else ChatText(resolve(name))
