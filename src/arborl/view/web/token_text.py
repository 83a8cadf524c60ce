"""Token ids as text, with the tokenizer of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from arborl.chat.tokenizer import FileTokenizer
from arborl.errors import ConfigError
from arborl.models.model_files import resolve
from arborl.track.folder_files import entries_of, read_bytes
from arborl.view.web.folders import look_up, read_config

Decode = Callable[[Sequence[int]], str]
MAX_TOKENIZER = 2**26
MAX_CHECKPOINTS = 8
"""Checkpoints whose tokenizers are tried."""


def decoder_of(folder: Path) -> Decode | None:
    """The decoder of a checkpoint's tokenizer, or of the initial model's if it is a local folder."""
    steps = sorted(entry.name for entry in entries_of(folder / "checkpoints") if entry.name.startswith("step-"))
    places = [folder / "checkpoints" / step / "model" for step in reversed(steps[-MAX_CHECKPOINTS:])]
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
    """Refuse files that are links or too large, and decoders with a regular expression, which could run forever."""
    about = json.loads(read_bytes(folder / "tokenizer.json", MAX_TOKENIZER))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        with suppress(FileNotFoundError):
            read_bytes(folder / name, MAX_TOKENIZER)
    decoder = json.dumps(about.get("decoder"))
    if '"Regex"' in decoder:
        raise ConfigError(f"{folder}: its tokenizer decodes with its own regular expression and is not used.")


def pieces(tokens: Sequence[int], decode: Decode | None) -> list[str]:
    """The text that each token adds; joined, they are the whole text. Without a tokenizer a piece is the token's id.

    A token that is part of a character adds nothing; the token that completes the character adds it. Only a few tokens
    are decoded at a time, so the cost is linear.
    """
    if decode is None:
        return [f"⟨{token}⟩" for token in tokens]
    words, begin, decoded = list[str](), 0, 0
    for count in range(1, len(tokens) + 1):
        before, now = decode(tokens[begin:decoded]), decode(tokens[begin:count])
        if count < len(tokens) and (now.endswith("\N{REPLACEMENT CHARACTER}") or not now.startswith(before)):
            words.append("")
            continue
        words.append(now[len(before) :])
        begin, decoded = decoded, count
    return words
