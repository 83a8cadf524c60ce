"""Whether the parts that a run's folder names may be imported: a configuration is code.

`package.module:attribute` in a `config.yaml` is imported and called with the arguments beside it, so evaluating or
resuming somebody's run runs what that somebody wrote. A run signs its `config.yaml` with a key that only this user has.
A folder from elsewhere has no such signature, whoever owns its files after unpacking, and one that was signed and then
changed has a wrong one; both need `--trust`. The command of an MCP server or of agent `endpoint` is code as well, and
the address of a server is where this user's keys and whatever the model writes are sent. A configuration without any of
these needs neither.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arborl.config.base import plain
from arborl.config.run import AgentConfig, Part, RunConfig
from arborl.errors import ConfigError

log = logging.getLogger(__name__)

SIGNATURE = ".signature"
NAME = re.compile(r"(?!object:)[A-Za-z_][\w.]*:[A-Za-z_][\w.\-]*")
TEXTS = (
    "name", "output_dir", "model", "sampling", "track.wandb", "track.mlflow", "track.render_save_dir",
    "engine.replies", "data.path", "data.hub",
)  # fmt: skip
"""Keys below which nothing is ever imported."""
PROMPTS = re.compile(
    r"(data\.sources\.[^.]+\.)?(agent\.system|env\.prompt)|data\.agents\.[^.]+\.system"
    r"|rollout\.envs\.custom_envs\.[^.]+\.(agent_system_template|agent_template|action_pattern)"
)
"""Nor below these: they are words for the model."""


def sign(config_file: Path, config: RunConfig) -> None:
    """Say that this user wrote the file, where it names anything that would be imported, started or asked."""
    if not any(imported(config)) and not any(reached(config)):
        return
    try:
        text = _digest(config_file, _key(make=True))
        (config_file.parent / SIGNATURE).write_text(text, encoding="ascii")
    except OSError as error:
        log.warning("%s is not signed (%s): to evaluate or resume it, write --trust", config_file, error)


def require_trust(config_file: Path, config: RunConfig, overrides: Sequence[str] = ()) -> None:
    """Refuse to import what a run's folder names unless this user wrote it. Overrides are the user's own: the names in
    them, and lists of tools that they give whole."""
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    names = [name for name in imported(config) if not any(name in text for text in overrides)]
    places = [place for key, place in reached(config) if key not in given]
    if (names or places) and not _is_signed(config_file):
        would = [f"import and run {', '.join(dict.fromkeys(names))}"] if names else []
        would += list(dict.fromkeys(places))
        raise ConfigError(
            f"{config_file}: would {' and '.join(would)}, and was not written by a run of yours here, or was changed "
            "since. Look at it; then write --trust."
        )


def imported(config: RunConfig) -> Iterator[str]:
    """Every `package.module:attribute` that building this configuration may import."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if path in TEXTS or PROMPTS.fullmatch(path):
            return
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(item, f"{path}.{key}".lstrip("."))
        elif isinstance(value, list):
            for item in value:
                yield from walk(item, path)
        elif isinstance(value, str) and NAME.fullmatch(value):
            yield value

    yield from walk(plain(config), "")


def reached(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The key of a list of tools, or of an agent's program -> each command that is started and each server that is
    asked for it, in words."""
    lists = {"tools": config.tools}
    lists |= {f"data.sources.{name}.tools": source.tools or () for name, source in config.data.sources.items()}
    for key, entries in lists.items():
        for entry in entries:
            if entry.mcp is not None and entry.mcp.command:
                yield key, f"start {entry.origin!r}"
            elif entry.name is None:
                yield key, f"ask {entry.origin}"
            if entry.limit is not None and entry.limit.scope == "cluster" and entry.limit.server is not None:
                yield key, f"ask {entry.limit.server}"
    agents: dict[str, AgentConfig | Part | None] = {"agent": config.agent}
    agents |= {f"data.sources.{name}.agent": source.agent for name, source in config.data.sources.items()}
    agents |= {f"data.agents.{name}": agent for name, agent in config.data.agents.items()}
    for key, agent in agents.items():
        for what, does in (("command", "start"), ("url", "ask")):
            if agent is not None and agent.name == "endpoint" and agent.args.get(what):
                yield f"{key}.args.{what}", f"{does} {agent.args[what]!r}"


def _is_signed(config_file: Path) -> bool:
    with suppress(OSError, ValueError):
        given = (config_file.parent / SIGNATURE).read_text(encoding="ascii")
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
