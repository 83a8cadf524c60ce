"""Token ids as text, by the tokenizer that a run has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from arborl.chat.tokenizer import FileTokenizer
from arborl.errors import ConfigError
from arborl.models.find import resolve
from arborl.track.folder_files import entries_of, read_bytes
from arborl.view.web.folders import look_up, read_config

Decode = Callable[[Sequence[int]], str]
MAX_TOKENIZER = 2**26
MOST_TRIED = 8
"""Checkpoints whose tokenizers are tried."""


def decoder_of(folder: Path) -> Decode | None:
    """From a checkpoint of the run, or from the model it began with, if that is on this machine."""
    steps = sorted(entry.name for entry in entries_of(folder / "checkpoints") if entry.name.startswith("step-"))
    places = [folder / "checkpoints" / step / "model" for step in reversed(steps[-MOST_TRIED:])]
    name = look_up(read_config(folder), "model.name")
    with suppress(ConfigError, OSError, ValueError, RuntimeError):
        if name == "seedling" or (isinstance(name, str) and Path(name).expanduser().is_dir()):
            places.append(resolve(name))
    for place in places:
        try:
            _check_tokenizer(place)
            return FileTokenizer(place).decode
        except (ConfigError, OSError, ValueError, TypeError, AttributeError, RecursionError):
            continue
    return None


def _check_tokenizer(folder: Path) -> None:
    """That the files a tokenizer is read from are regular and of usual size, and that decoding runs no pattern of the
    file's own, which could run without end."""
    about = json.loads(read_bytes(folder / "tokenizer.json", MAX_TOKENIZER))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        with suppress(FileNotFoundError):
            read_bytes(folder / name, MAX_TOKENIZER)
    decoder = json.dumps(about.get("decoder"))
    if '"Regex"' in decoder:
        raise ConfigError(f"{folder}: its tokenizer decodes by a pattern of its own, and is not used.")


def pieces(tokens: Sequence[int], decode: Decode | None) -> list[str]:
    """The text each token adds; together they are the text of all.

    A token may be part of a character: decoding it alone would show a question mark. Such a token adds nothing, and
    the one that completes the character adds it. Only a few tokens are decoded at a time, so that a long context costs
    what its length does. Without a tokenizer a piece is the token's number.
    """
    if decode is None:
        return [f"⟨{token}⟩" for token in tokens]
    words, begin, told = list[str](), 0, 0
    for count in range(1, len(tokens) + 1):
        before, now = decode(tokens[begin:told]), decode(tokens[begin:count])
        if count < len(tokens) and (now.endswith("\N{REPLACEMENT CHARACTER}") or not now.startswith(before)):
            words.append("")
            continue
        words.append(now[len(before) :])
        begin, told = told, count
    return words
