"""Keys and passwords: what is never written down, in whatever file.

A text under a key that is called like one (`api_key`, `GITHUB_TOKEN`, `Authorization`) is written as `***`, and so is
the password of an address. A configuration that was written so says what it lacks when it is read again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from arborl.errors import ConfigError

MASK = "***"
CALLED = re.compile(
    r"(^|[_.\-])(api_?key|access_?key|private_?key|secret(_?key)?|(access|auth|bearer)?_?token|password|passwd|passphrase"
    r"|authorization|credentials?)$"
)
OF_TEXT = ("stop", "eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "start", "end", "special", "per")
"""What stands before `token` where a model's is meant."""
IN_ADDRESS = re.compile(r"(://[^/@\s:]*:)([^/@\s]+)@")
SHORTEST = 6
"""Characters of a secret that is looked for in texts; shorter ones would hide words that are none."""


def is_secret(key: str) -> bool:
    """Whether what stands under this key is to be kept: `api_key`, `apiKey`, `X-API-Key`, `HF_TOKEN`; not `max_tokens`,
    and not `api_key_env`, which names a variable."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    return CALLED.search(spaced) is not None and not spaced.endswith(tuple(f"{word}_token" for word in OF_TEXT))


def masked(tree: Any) -> Any:
    """The same tree with `***` in place of secrets.

    Example:
        masked({"api_key": "sk-1", "url": "http://me:pw@host", "n": 1})
        # {"api_key": "***", "url": "http://me:***@host", "n": 1}
    """
    if isinstance(tree, Mapping):
        return {key: MASK if _holds_secret(key, value) else masked(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value) for value in tree]
    return IN_ADDRESS.sub(rf"\1{MASK}@", tree) if isinstance(tree, str) else tree


def require_unmasked(tree: Any, where: str = "") -> None:
    """Refuse a configuration whose secrets were masked when it was written."""
    for path, value in _texts(tree, ""):
        if MASK in value and (is_secret(path.rpartition(".")[2]) or f":{MASK}@" in value):
            raise ConfigError(
                f"{where}{path}: is {MASK}, for secrets are not written down. Give it again: {path}=VALUE, or in a "
                f"file {path}: ${{oc.env:VARIABLE}}."
            )


class Veil:
    """Takes secrets out of texts: those of a configuration, and of variables of the environment that are called so."""

    def __init__(self, tree: Any = None):
        own = [value for path, value in _texts(tree, "") if is_secret(path.rpartition(".")[2])]
        addresses = [found[2] for _, value in _texts(tree, "") for found in IN_ADDRESS.finditer(value)]
        outside = [value for name, value in os.environ.items() if is_secret(name)]
        found = {value.strip() for value in (*own, *addresses, *outside) if len(value.strip()) >= SHORTEST}
        longest_first = sorted(found, key=len, reverse=True)  # one may be the beginning of another
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if found else None

    def __call__(self, text: str) -> str:
        text = IN_ADDRESS.sub(rf"\1{MASK}@", text)
        return self.pattern.sub(MASK, text) if self.pattern is not None else text


def _holds_secret(key: object, value: Any) -> bool:
    return isinstance(value, str) and value != "" and is_secret(str(key))


def _texts(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _texts(value, f"{path}.{number}")
    elif isinstance(tree, str):
        yield path, tree
