"""Prompts for benchmarks, of exactly as many tokens as a case wants.

Where the model has a tokenizer, prompts are English sentences in the model's own chat template (`ChatText`): real
weights behave differently on text than on random ids. Models of random weights have no tokenizer and read random ids
(`RandomIds`). Both are deterministic from the generator that is given.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bodies import SHAPES, SINK
from transformers import AutoTokenizer

from arborl.models.model_files import resolve

WHO = ("The baker", "A student", "My neighbour", "The old captain", "Our teacher", "The engineer", "A farmer")
DOES = ("buys", "counts", "sells", "carries", "finds", "paints", "repairs", "delivers", "collects", "returns")
WHAT = ("apples", "red bicycles", "letters", "wooden chairs", "maps", "lamps", "small stones", "books", "tickets")
WHERE = ("at the market", "near the river", "on Monday morning", "in the library", "before dinner", "for her sister")
SENTENCES = 4000
MARK = "\x11"
"""Stands for a message's text while a template is looked at."""


class RandomIds:
    """Random ids that begin with the token that `bodies.add_outliers` makes an attention sink."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def prompt(self, length: int, chance: np.random.Generator) -> list[int]:
        return [SINK, *self.text(length - 1, chance)]

    def observation(self, length: int, chance: np.random.Generator) -> list[int]:
        return self.text(length, chance)

    def text(self, length: int, chance: np.random.Generator) -> list[int]:
        ids: list[int] = chance.integers(2, self.vocabulary, length).tolist()
        return ids


class ChatText:
    """Sentences in the chat template of the tokenizer in `folder`."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        opening = self._rendered([("user", MARK)], reply=True)
        self.before, self.after = (self._ids(part) for part in opening.split(MARK))
        later = self._rendered([("user", MARK), ("assistant", MARK), ("user", MARK)], reply=True)
        self.between = self._ids(later.split(MARK)[2])
        """From the end of a reply to the text of the next message."""
        self._prepare()

    def prompt(self, length: int, chance: np.random.Generator) -> list[int]:
        """A whole first prompt; the first tokens of one where `length` is too short for the template."""
        room = max(1, length - len(self.before) - len(self.after))
        return [*self.before, *self.text(room, chance), *self.after][:length]

    def observation(self, length: int, chance: np.random.Generator) -> list[int]:
        """What stands between two replies; text alone where `length` is too short for the template."""
        room = length - len(self.between) - len(self.after)
        return [*self.between, *self.text(room, chance), *self.after] if room > 0 else self.text(length, chance)

    def text(self, length: int, chance: np.random.Generator) -> list[int]:
        """Sentences without a template, from a random one of a prepared text on. Takes microseconds: it is called while
        time is measured."""
        start = self.starts[chance.integers(len(self.starts))]
        found = self.prepared[start : start + length]
        return found if len(found) == length else [*found, *self.text(length - len(found), chance)]

    def _prepare(self) -> None:
        chance = np.random.default_rng(0)
        self.prepared: list[int] = []
        self.starts: list[int] = []
        for _ in range(SENTENCES):
            who, does, what, where = (str(chance.choice(words)) for words in (WHO, DOES, WHAT, WHERE))
            self.starts.append(len(self.prepared))
            self.prepared += self._ids(f" {who} {does} {chance.integers(2, 100)} {what} {where}.")

    def _rendered(self, messages: list[tuple[str, str]], reply: bool) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        rendered: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=reply)
        return rendered

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


Texts = RandomIds | ChatText


def texts_of(name: str, vocabulary: int) -> Texts:
    """Prompts for a model of `bodies.load`."""
    return RandomIds(vocabulary) if name in SHAPES else ChatText(resolve(name))
