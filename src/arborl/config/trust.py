"""Trust in the `config.yaml` of a run folder: a configuration is code.

Loading one can import `package.module:attribute`, start commands, connect to addresses and send data and API keys to
them. `capabilities` lists these actions by key and form, not by part: a key with the name of an address is an address
whatever part it belongs to. An action listed in excess costs a `--trust`; a missing one is a security hole.

A run signs its `config.yaml` with a key that only this user has. A folder from elsewhere, or one that was changed, has
no valid signature and needs `--trust` for its capabilities. All commands load the file with `load_run_config`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.config.config_base import to_plain
from arborl.config.engine_config import EngineArgs
from arborl.config.load_config import load_with_variables
from arborl.config.run_config import RunConfig
from arborl.config.secrets import mask_secrets
from arborl.errors import ConfigError, printable
from arborl.registry import parse_part_name

log = logging.getLogger(__name__)

TEXTS = (
    "name", "output_dir", "model.chat_template", "sampling", "engine.args.replies", "data.path", "data.question",
    "data.fields",
)  # fmt: skip
"""Sections whose texts are only displayed or read."""
NOT_PARTS = ("model", "data.hub")
"""Sections whose texts are not names of parts."""
PROMPTS = re.compile(r"(data\.sources\.[^.]+\.)?(agent\.system|env\.prompt)|data\.agents\.[^.]+\.system")
"""Keys of prompts."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
ACTION_KEYS = {
    "start": ("command", "python"),
    "connect to": ("url", "urls", "uri", "base_url", "server", "address", "host", "public", "allow"),
    "use the environment variable": ("key", "api_key_env", "pass_env"),
    "log to": ("project", "entity"),
    "write to": ("record", "weights_dir", "checkpoint_dir", "dir", "index"),
}
"""Action -> last words of the keys whose values cause it."""
SWITCHES = {"sandbox.allow_unsafe": "run code of the model without a sandbox if this machine has none"}

MAX_PRINTED = 300
"""Printed characters of an action."""


@dataclass(frozen=True, slots=True)
class Capability:
    """An action beyond computation that a configuration causes."""

    key: str
    """Path in the configuration with list indices: `tools.0.server`."""
    does: str
    """`import and run`, or one of `ACTION_KEYS`."""
    values: tuple[str, ...]
    """What is imported, started, connected to or read."""

    def __str__(self) -> str:
        """One line of printable characters."""
        words = printable(" ".join(" ".join(self.values).split()))
        return f"{self.does} {words if len(words) <= MAX_PRINTED else f'{words[:MAX_PRINTED]}…'}".strip()


IMPORT, READ = "import and run", "read the environment variable"


def capabilities(config: RunConfig) -> list[Capability]:
    """All actions that building and running this configuration may cause."""
    return list(dict.fromkeys(_walk(mask_secrets(to_plain(config)), "")))


def imported_parts(config: RunConfig) -> list[str]:
    """All `package.module:attribute` that building this configuration may import."""
    return list(dict.fromkeys(one.values[0] for one in capabilities(config) if one.does == IMPORT))


def _walk(value: Any, key: str) -> Iterator[Capability]:
    place = re.sub(r"\.\d+(?=\.|$)", "", key)
    if PROMPTS.fullmatch(place) or _below(place, TEXTS):
        return
    above, _, name = place.rpartition(".")
    if above == "engine.args" and name not in EngineArgs.model_fields:
        yield Capability(key, f"start vLLM with {name}", (str(value),))
        return
    if place == "track.trackers.name" and value in ("wandb", "mlflow"):
        yield Capability(key, "log to", (value,))
    if place in SWITCHES and value:
        yield Capability(key, SWITCHES[place], ())
    does = next((does for does, names in ACTION_KEYS.items() if name in names), None)
    if does is not None and (texts := _strings(value)):
        yield Capability(key, does, texts)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _text(str(name), f"{key}.{name}".lstrip("."), place)
            yield from _walk(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _walk(inner, f"{key}.{number}")
    elif isinstance(value, str):
        yield from _text(value, key, place)


def _text(value: str, key: str, place: str) -> Iterator[Capability]:
    if parse_part_name(value) is not None and not _below(place, NOT_PARTS):
        yield Capability(key, IMPORT, (value,))
    elif ADDRESS.search(value):
        yield Capability(key, "connect to", (value,))


def _strings(value: Any) -> tuple[str, ...]:
    """The texts of a string or list; else empty."""
    if isinstance(value, list):
        return tuple(str(one) for one in value)
    return (value,) if isinstance(value, str) and value else ()


def _below(place: str, keys: Sequence[str]) -> bool:
    return any(place == key or place.startswith(f"{key}.") for key in keys)


SIGNATURE = ".signature"


def load_run_config(
    config_file: Path,
    overrides: Sequence[str] = (),
    trust: bool = False,
    only: Collection[str] = (),
    sections: Sequence[str] = (),
) -> RunConfig:
    """Load the configuration of a run folder; refuse capabilities of an unsigned one without `trust`.

    Nothing that the file names is imported, started, connected to or sent before this function returns.

    Args:
        config_file: the folder's `config.yaml`.
        overrides: settings of the user, which need no trust.
        trust: allow all capabilities; they are logged.
        only: the actions that the caller may cause, as in `Capability.does`; empty for all.
        sections: the keys whose parts the caller builds; empty for all.
    """
    config, variables = load_with_variables(config_file, overrides)
    needed = [*capabilities(config), *(Capability("", READ, (name,)) for name in variables)]
    needed = [one for one in needed if not _is_overridden(one, overrides) and (not only or one.does in only)]
    needed = [one for one in needed if not sections or not one.key or _below(one.key, sections)]
    if not needed or is_signed(config_file):
        return config
    would = " and ".join(dict.fromkeys(map(str, needed)))
    if not trust:
        raise ConfigError(
            f"{config_file}: would {would}, and was not written by a run of yours here, or was changed since. Look at "
            "it; then write --trust."
        )
    log.warning("%s: trusted to %s", config_file, would)
    return config


def _is_overridden(one: Capability, overrides: Sequence[str]) -> bool:
    """Whether an override of the user sets it, at this key or one above."""
    words = [f"oc.env:{name}" for name in one.values] if one.does == READ else one.values
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        applies = one.does == READ or one.key == key or one.key.startswith(f"{key}.")
        if applies and (all(_is_word(word, value) for word in words) if words else one.key == key):
            return True
    return False


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.\-])", text) is not None


def sign(config_file: Path, config: RunConfig) -> None:
    """Sign the file if it has capabilities."""
    if not capabilities(config):
        return
    try:
        text = _digest(config_file, _key(make=True))
        (config_file.parent / SIGNATURE).write_text(text, encoding="ascii")
    except OSError as error:
        log.warning("%s is not signed (%s). To evaluate or resume it, write --trust", config_file, error)


def is_signed(config_file: Path) -> bool:
    """Whether a run of this user wrote exactly this file."""
    with suppress(OSError, ValueError):
        signature = config_file.parent / SIGNATURE
        if not stat.S_ISREG(signature.lstat().st_mode):  # a FIFO would block
            return False
        text = signature.read_text(encoding="ascii")
        return hmac.compare_digest(text, _digest(config_file, _key(make=False)))
    return False


def _digest(config_file: Path, key: bytes) -> str:
    return hmac.new(key, config_file.read_bytes(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes:
    """The signing key of this user on this machine; `make` creates it."""
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
        raise OSError(f"{path} is not a key")
    return key
