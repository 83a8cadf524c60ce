"""Token ids as text, by the tokenizer that a run has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from arborl.chat.tokenizer import FileTokenizer
from arborl.errors import ConfigError
from arborl.models.find import resolve
from arborl.view.web.folders import look_up, read_config

Decode = Callable[[Sequence[int]], str]


def decoder_of(folder: Path) -> Decode | None:
    """From a checkpoint of the run, or from the model it began with, if that is on this machine."""
    places = sorted((folder / "checkpoints").glob("step-*/model"), reverse=True)
    name = look_up(read_config(folder), "model.name")
    if name == "seedling" or (isinstance(name, str) and Path(name).expanduser().is_dir()):
        places.append(resolve(name))
    for place in places:
        try:
            return FileTokenizer(place).decode
        except (ConfigError, OSError):
            continue
    return None


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
