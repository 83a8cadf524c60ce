"""Whether a run folder's `config.yaml` may do more than compute: a configuration is code.

`package.module:attribute` in a `config.yaml` is imported and called, commands in it are started, and data and keys are
sent to the addresses in it. A run signs its `config.yaml` with a key that only this user has. A folder from elsewhere
has no such signature, whoever owns its files after unpacking, and one that was signed and then changed has a wrong one;
both need `--trust` for whatever `capabilities` lists. `load_run` is how every command reads the file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from arborl.config.capabilities import READ, Capability, capabilities
from arborl.config.load import load_with_variables
from arborl.config.run import RunConfig
from arborl.errors import ConfigError

log = logging.getLogger(__name__)

SIGNATURE = ".signature"


def load_run(
    config_file: Path, overrides: Sequence[str] = (), trust: bool = False, only: Collection[str] = ()
) -> RunConfig:
    """Read the configuration of a run folder, and refuse what a stranger's asks for unless it is trusted.

    Nothing that the file names is imported, started, connected to or sent before this function returns.

    Args:
        config_file: the folder's `config.yaml`.
        overrides: settings on top of it. They are the user's own, and need no trust.
        trust: allow everything; it is printed all the same.
        only: the actions that the caller can take at all, as in `Capability.does`; empty for all of them.
    """
    config, variables = load_with_variables(config_file, overrides)
    asked = [*capabilities(config), *(Capability("", READ, (name,)) for name in variables)]
    asked = [one for one in asked if not _is_given(one, overrides) and (not only or one.does in only)]
    if not asked or is_signed(config_file):
        return config
    would = " and ".join(dict.fromkeys(map(str, asked)))
    if not trust:
        raise ConfigError(
            f"{config_file}: would {would}, and was not written by a run of yours here, or was changed since. Look at "
            "it; then write --trust."
        )
    log.warning("%s: trusted to %s", config_file, would)
    return config


def _is_given(one: Capability, overrides: Sequence[str]) -> bool:
    """Whether the user wrote all of it, under this key or one above it."""
    words = [f"oc.env:{name}" for name in one.values] if one.does == READ else one.values
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        here = one.does == READ or one.key == key or one.key.startswith(f"{key}.")
        if here and (all(_is_word(word, value) for word in words) if words else one.key == key):
            return True
    return False


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.\-])", text) is not None


def sign(config_file: Path, config: RunConfig) -> None:
    """Say that this user wrote the file, where it asks for anything that needs trust."""
    if not capabilities(config):
        return
    try:
        text = _digest(config_file, _key(make=True))
        (config_file.parent / SIGNATURE).write_text(text, encoding="ascii")
    except OSError as error:
        log.warning("%s is not signed (%s): to evaluate or resume it, write --trust", config_file, error)


def is_signed(config_file: Path) -> bool:
    """Whether a run of this user wrote exactly this file."""
    with suppress(OSError, ValueError):
        signature = config_file.parent / SIGNATURE
        if not stat.S_ISREG(signature.lstat().st_mode):  # a FIFO would block
            return False
        given = signature.read_text(encoding="ascii")
        return hmac.compare_digest(given, _digest(config_file, _key(make=False)))
    return False


def _digest(config_file: Path, key: bytes) -> str:
    return hmac.new(key, config_file.read_bytes(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes:
    """This user's, on this machine; made when first needed."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(base) / "arborl" / "key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"key-{os.getpid()}")
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(32))
        with suppress(FileExistsError):  # another run was first
            os.link(fresh, path)
        fresh.unlink()
    key = path.read_bytes()
    if len(key) < 32:
        raise OSError(f"{path} is no key")
    return key
