"""Masking of secrets in files and logs.

The value of a key with a secret name (`api_key`, `GITHUB_TOKEN`, `Authorization`) and the password of an address are
written as `***`. Loading a configuration with a masked value is an error that names the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from arborl.errors import ConfigError

MASK = "***"
SECRET_NAME = re.compile(
    r"(^|[_.\-])(api_?key|access_?key|private_?key|secret(_?key)?|(access|auth|bearer)?_?token|password|passwd|passphrase"
    r"|authorization|credentials?)$"
)
TOKEN_PREFIXES = ("stop", "eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "start", "end", "special", "per")
"""Words before `token` that mean a token of a model."""
URL_PASSWORD = re.compile(r"(://[^/@\s:]*:)([^/@\s]+)@")
MIN_SECRET_CHARS = 6
"""Shorter secrets are not searched in texts: they would hide ordinary words."""


def is_secret(key: str) -> bool:
    """Whether the key has a secret name: `api_key`, `apiKey`, `X-API-Key`, `HF_TOKEN`; not `max_tokens` or
    `api_key_env`, which names a variable."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    return SECRET_NAME.search(spaced) is not None and not spaced.endswith(
        tuple(f"{word}_token" for word in TOKEN_PREFIXES)
    )


def mask_secrets(tree: Any) -> Any:
    """The tree with secrets replaced by `***`.

    Example:
        masked({"api_key": "sk-1", "url": "http://me:pw@host", "n": 1})
        # {"api_key": "***", "url": "http://me:***@host", "n": 1}
    """
    if isinstance(tree, Mapping):
        return {key: MASK if _holds_secret(key, value) else mask_secrets(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [mask_secrets(value) for value in tree]
    return URL_PASSWORD.sub(rf"\1{MASK}@", tree) if isinstance(tree, str) else tree


def require_unmasked(tree: Any, where: str = "") -> None:
    """Raise ConfigError if the configuration has a masked secret."""
    for path, value in _texts(tree, ""):
        if MASK in value and (is_secret(path.rpartition(".")[2]) or f":{MASK}@" in value):
            raise ConfigError(
                f"{where}{path}: is {MASK}, secrets are not written to files. Set it again: {path}=VALUE, or in a "
                f"file {path}: ${{oc.env:VARIABLE}}."
            )


class SecretRedactor:
    """Replaces secrets in texts: those of a configuration and of environment variables with secret names."""

    def __init__(self, tree: Any = None):
        configured = [value for path, value in _texts(tree, "") if is_secret(path.rpartition(".")[2])]
        addresses = [found[2] for _, value in _texts(tree, "") for found in URL_PASSWORD.finditer(value)]
        variables = [value for name, value in os.environ.items() if is_secret(name)]
        found = {
            value.strip() for value in (*configured, *addresses, *variables) if len(value.strip()) >= MIN_SECRET_CHARS
        }
        longest_first = sorted(found, key=len, reverse=True)  # one may be a prefix of another
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if found else None

    def __call__(self, text: str) -> str:
        text = URL_PASSWORD.sub(rf"\1{MASK}@", text)
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
