"""Text to token ids and back. Control tokens are text here: parsed where they stand in it, never added to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from arborl.errors import ConfigError

REMEMBERED = 8192
"""Texts whose ids are kept, and lists of ids whose text is; the least recently used leave first."""
SHORT_TEXT, SHORT_IDS = 2048, 64
"""Longer ones are not kept."""


class Tokenizer(Protocol):
    """What the rest of Arbor needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. `<|im_end|>` in the text is that token; no BOS or EOS is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is `text`, if there is one."""
        ...

    @property
    def vocab_size(self) -> int: ...


class FileTokenizer:
    """The tokenizer of a model folder in Hugging Face's layout, without importing transformers.

    Example:
        tokenizer = FileTokenizer("models/qwen")
        tokenizer.encode("<|im_start|>user\\nHi")      # [151644, 872, 198, 13048]

    Args:
        folder: holds `tokenizer.json`, and beside it, where the model has them, `tokenizer_config.json`,
            `special_tokens_map.json`, `generation_config.json`, `config.json` and `chat_template.jinja`.
    """

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
        # A folder saved after supervised training often has both on, and they would cut or fill every prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        self._special = _read_json(self.folder / "special_tokens_map.json")
        self.bos_token = self._named("bos_token")
        self.eos_token = self._named("eos_token")
        # Siblings of a group are shown the same states, and say the same things.
        self._known_ids = lru_cache(REMEMBERED)(self._encode)
        self._known_text = lru_cache(REMEMBERED)(self._decode)

    def encode(self, text: str) -> list[int]:
        return list((self._known_ids if len(text) <= SHORT_TEXT else self._encode)(text))

    def decode(self, ids: Sequence[int]) -> str:
        return (self._known_text if len(ids) <= SHORT_IDS else self._decode)(tuple(ids))

    def __reduce__(self) -> tuple[type[FileTokenizer], tuple[Path]]:
        return FileTokenizer, (self.folder,)  # what is remembered stays where it is

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, as the model's own files say; the first is `eos_token`."""
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
        """Jinja sources by name: always `default`, and `tool_use` where the model has its own for tools."""
        file = self.folder / "chat_template.jinja"
        extra = sorted((self.folder / "additional_chat_templates").glob("*.jinja"))
        given = self._settings.get("chat_template")
        found: dict[str, str] = {}
        if file.is_file() or extra:  # these files, where there are any, replace the key
            found = {path.stem: path.read_text(encoding="utf-8") for path in extra}
            if file.is_file():
                found["default"] = file.read_text(encoding="utf-8")
        elif isinstance(given, str):
            found = {"default": given}
        elif isinstance(given, list):
            found = {entry["name"]: entry["template"] for entry in given}
        if "default" not in found:
            has = f"only templates named {', '.join(sorted(found))}" if found else "no chat template"
            raise ConfigError(
                f"{self.folder}: {has}. Put the model's Jinja template in chat_template.jinja, or under the key "
                "chat_template of tokenizer_config.json."
            )
        return found

    def _named(self, key: str) -> str | None:
        """A special token's text; files give it bare, or as an object with its `content`."""
        given = self._settings.get(key) or self._special.get(key)
        return given["content"] if isinstance(given, dict) else given


def _read_json(file: Path) -> dict[str, Any]:
    """An object from a file; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: holds a {type(found).__name__} where an object is wanted.")
    return found
