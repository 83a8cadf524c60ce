"""Text to token ids and back. Control tokens in the text are parsed unless quoted; none are added."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers.models import Model

from arborl.chat.control_tokens import alternation
from arborl.errors import ConfigError

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<|end_of_turn|>")
"""Tokens that end an assistant's turn; model files often omit them."""
TAG = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")  # form of tokens that a template may write around content
PREFIX_CHARS = range(0x10FFFD, 0x100000, -1)
"""Private-use characters; one that is not in the text marks its control tokens."""
CACHE_SIZE = 8192  # entries of the caches of encoded texts and decoded ids
MAX_CACHED_TEXT, MAX_CACHED_IDS = 2048, 64  # maximum length of their keys


class Tokenizer(Protocol):
    """The interface of tokenizers."""

    def encode(self, text: str, quoted: Sequence[int] = ()) -> list[int]:
        """Token ids of `text`. `<|im_end|>` in the text is that token; no BOS or EOS is added. Where it covers one of
        the positions `quoted` (in order), it is text. There are no such positions without control tokens and tags."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        ...

    def token_id(self, text: str) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def control(self) -> frozenset[str]:
        """Control tokens: those that structure turns or stand for something that is no text."""
        ...

    @property
    def tags(self) -> frozenset[str]:
        """Other tokens of the form `<…>` or `[…]`, which messages may contain and templates may use."""
        ...


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer for text of messages: nothing in it becomes a control token."""

    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        known = self.tokenizer
        return known.encode(text, range(len(text))) if known.control or known.tags else known.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


class FileTokenizer:
    """The tokenizer of a model folder in Hugging Face's layout, without importing transformers."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{self.folder}: there is no tokenizer.json. Give the folder of a model with a fast tokenizer, or "
                "write one there with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file}: not a tokenizer that `tokenizers` can read: {error}") from error
        # Folders saved after supervised training often enable both, which would cut or pad every prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        self._special = _read_json(self.folder / "special_tokens_map.json")
        self.bos_token = self._named("bos_token")
        self.eos_token = self._named("eos_token")
        # The episodes of a group share many texts.
        self._cached_ids = lru_cache(CACHE_SIZE)(self._encode)
        self._cached_text = lru_cache(CACHE_SIZE)(self._decode)

    def encode(self, text: str, quoted: Sequence[int] = ()) -> list[int]:
        if quoted or self._folds:
            begins, any_quoted = self._unquoted(text, quoted)
            if any_quoted or self._folds:
                return self._quoted.encode(text, begins)
        return list((self._cached_ids if len(text) <= MAX_CACHED_TEXT else self._encode)(text))

    def _unquoted(self, text: str, quoted: Sequence[int]) -> tuple[list[int], bool]:
        """Positions of unquoted control tokens and tags, and whether there are quoted ones."""
        begins, any_quoted, at = [], False, 0
        while found := self._marks.search(text, at):
            begin, at = found.span()
            place = bisect_left(quoted, begin)
            if place < len(quoted) and quoted[place] < at:
                any_quoted, at = True, begin + 1
            else:
                begins.append(begin)
        return begins, any_quoted

    def decode(self, ids: Sequence[int]) -> str:
        return (self._cached_text if len(ids) <= MAX_CACHED_IDS else self._decode)(tuple(ids))

    def __reduce__(self) -> tuple[type[FileTokenizer], tuple[Path]]:
        return FileTokenizer, (self.folder,)  # without the caches

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(_ids(self._tokenizer, text))

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def text_of(self, number: int) -> str | None:
        return self._tokenizer.id_to_token(number)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The content of tokenizer.json, without truncation and padding."""
        return self._tokenizer.to_str()

    @property
    def wants_bos(self) -> bool:
        """Whether the model expects a begin token, which the template should write."""
        return bool(self.bos_token and self._settings.get("add_bos_token"))

    @cached_property
    def _added(self) -> dict[str, tokenizers.AddedToken]:
        return {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values() if token.content}

    @cached_property
    def control(self) -> frozenset[str]:
        turns = {*END_OF_TURN, self.bos_token, self.eos_token, *map(self._tokenizer.id_to_token, self.eos_ids)}
        return frozenset(text for text, token in self._added.items() if token.special or text in turns)

    @cached_property
    def tags(self) -> frozenset[str]:
        return frozenset(text for text in self._added if TAG.fullmatch(text)) - self.control

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile(alternation(self.control | self.tags) or "(?!)")

    @cached_property
    def _folds(self) -> bool:
        """Whether normalisation may turn text into a control token."""
        return self._tokenizer.normalizer is not None and any(self._added[text].normalized for text in self.control)

    @cached_property
    def _quoted(self) -> QuotedText:
        return QuotedText(self._tokenizer, self.control | self.tags)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion by the model's files; the first is `eos_token`."""
        ids = []
        if self.eos_token is not None:
            known = self.token_id(self.eos_token)
            if known is None:
                raise ConfigError(
                    f"{self.folder}: eos_token {self.eos_token!r} is not in tokenizer.json. Write a token of the "
                    "vocabulary as eos_token in tokenizer_config.json."
                )
            ids.append(known)
        for name in ("generation_config.json", "config.json"):
            given = _read_json(self.folder / name).get("eos_token_id")
            ids.extend(given if isinstance(given, list) else [] if given is None else [given])
        return tuple(dict.fromkeys(ids))

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by name: `default`, and `tool_use` if the model has one for tools; empty without any."""
        file = self.folder / "chat_template.jinja"
        extra = sorted((self.folder / "additional_chat_templates").glob("*.jinja"))
        given = self._settings.get("chat_template")
        found: dict[str, str] = {}
        if file.is_file() or extra:  # these files replace the key
            found = {path.stem: path.read_text(encoding="utf-8") for path in extra}
            if file.is_file():
                found["default"] = file.read_text(encoding="utf-8")
        elif isinstance(given, str):
            found = {"default": given}
        elif isinstance(given, list):
            found = {entry["name"]: entry["template"] for entry in given}
        if found and "default" not in found:
            raise ConfigError(
                f"{self.folder}: only templates named {', '.join(sorted(found))}. Put the model's Jinja template in "
                "chat_template.jinja, or under the key chat_template of tokenizer_config.json."
            )
        return found

    def _named(self, key: str) -> str | None:
        """A special token's text; files have a string or an object with `content`."""
        given = self._settings.get(key) or self._special.get(key)
        return given["content"] if isinstance(given, dict) else given


class QuotedText:
    """The tokenizer with renamed control tokens and tags, whose new names cannot occur in the text. Splitting, white
    space and the start of a text work as before, so ids differ only where control text is quoted."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, names: frozenset[str]):
        self._tokenizer, self._names = tokenizer, names
        self._cached = lru_cache(4)(self._renamed)

    def encode(self, text: str, begins: Sequence[int]) -> list[int]:
        """Ids of `text`, in which tokens of those names begin at `begins`, and nowhere else."""
        prefix = next(sign for sign in map(chr, PREFIX_CHARS) if sign not in text)
        cuts = [0, *begins, len(text)]
        marked = prefix.join(text[cuts[i] : cuts[i + 1]] for i in range(len(cuts) - 1))
        renamed, ids = self._cached(prefix)
        return [ids.get(token, token) for token in _ids(renamed, marked)]

    def _renamed(self, prefix: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer with `prefix` in front of those names, and the map of its ids to the original ones."""
        made = self._with_model(self._tokenizer.model, prefix)
        if any(
            self._tokenizer.token_to_id(name) in made[0].encode(name, add_special_tokens=False).ids
            for name in self._names
        ):
            made = self._with_model(self._model_without(prefix), prefix)
        return made

    def _with_model(self, model: Model, prefix: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        made, known = tokenizers.Tokenizer(model), self._tokenizer
        if known.normalizer is not None:
            made.normalizer = known.normalizer
        if known.pre_tokenizer is not None:
            made.pre_tokenizer = known.pre_tokenizer
        ids: dict[int, int] = {}
        for token_id, token in known.get_added_tokens_decoder().items():
            name = prefix + token.content if token.content in self._names else token.content
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            made.add_tokens([tokenizers.AddedToken(name, **flags)])
            if (renamed := made.token_to_id(name)) is not None:
                ids[renamed] = token_id
        return made, ids

    def _model_without(self, prefix: str) -> Model:
        """The model with renamed vocabulary entries: some vocabularies contain the names as words."""
        state = json.loads(self._tokenizer.to_str())
        model = state["model"]

        def renamed(word: str) -> str:
            return prefix + word if word in self._names else word

        if isinstance(model["vocab"], dict):
            model["vocab"] = {renamed(word): number for word, number in model["vocab"].items()}
        else:
            model["vocab"] = [[renamed(word), score] for word, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = renamed(model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps({**state, "added_tokens": [], "post_processor": None})).model


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """The ids of a text. A long one is tokenised without Python's global lock."""
    if len(text) <= MAX_CACHED_TEXT:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: contains a {type(found).__name__}; expected an object.")
    return found
