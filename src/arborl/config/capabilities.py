"""What a configuration makes a command do beyond computing: import code, start programs, send data, read keys, write.

`Capability` is one such action. The list is complete by key and by form rather than by part: a key that is called like
an address is one, whatever part it belongs to, and so is any text that looks like one. What it lists too much costs a
`--trust` on a stranger's folder; what it misses is a hole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arborl.config.base import plain
from arborl.config.run import RunConfig
from arborl.config.secrets import masked
from arborl.failures import printable
from arborl.registry import parse_part_name

TEXTS = (
    "name", "output_dir", "model.chat_template", "sampling", "engine.replies", "data.path", "data.question",
    "data.fields",
)  # fmt: skip
"""Keys below which a text is shown or read and nothing else."""
NO_PARTS = ("model", "track.wandb", "track.mlflow", "data.hub")
"""Keys below which no text is a part's name."""
PROMPTS = re.compile(
    r"(data\.sources\.[^.]+\.)?(agent\.system|env\.prompt)|data\.agents\.[^.]+\.system"
    r"|rollout\.envs\.custom_envs\.[^.]+\.(agent_system_template|agent_template|action_pattern)"
)
"""Keys of words for the model."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
KEYS = {
    "start": ("command", "python"),
    "connect to": ("url", "urls", "uri", "base_url", "server", "address", "host", "public", "allow"),
    "use the environment variable": ("key", "api_key_env", "pass_env"),
    "log to": ("project", "entity"),
    "write to": ("record", "weights_dir", "render_save_dir", "dir", "index"),
}
"""Last word of a key -> what a value there makes a command do."""
WHOLE = {"engine.args": "start vLLM with"}
"""Sections that any value makes a capability: among vLLM's own arguments are modules to import."""
SWITCHES = {"sandbox.allow_unsafe": "run code of the model without a sandbox where this machine has none"}

SHOWN = 300
"""Characters of an action that are printed."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One action that a configuration asks for."""

    key: str
    """Where it stands in the configuration, places in lists included: `tools.0.server`."""
    does: str
    """`import and run`, or one of `KEYS`."""
    values: tuple[str, ...]
    """What is imported, started, connected to or read."""

    def __str__(self) -> str:
        """In one line that any terminal shows."""
        words = printable(" ".join(" ".join(self.values).split()))
        return f"{self.does} {words if len(words) <= SHOWN else f'{words[:SHOWN]}…'}".strip()


IMPORT, READ = "import and run", "read the environment variable"


def capabilities(config: RunConfig) -> list[Capability]:
    """Every action that building and using this configuration may take."""
    return list(dict.fromkeys(_walk(masked(plain(config)), "")))


def imported(config: RunConfig) -> list[str]:
    """Every `package.module:attribute` that building this configuration may import."""
    return list(dict.fromkeys(one.values[0] for one in capabilities(config) if one.does == IMPORT))


def _walk(value: Any, key: str) -> Iterator[Capability]:
    place = re.sub(r"\.\d+(?=\.|$)", "", key)
    if PROMPTS.fullmatch(place) or _below(place, TEXTS):
        return
    if place in WHOLE and isinstance(value, Mapping):
        for name, inner in value.items():
            yield Capability(f"{key}.{name}", f"{WHOLE[place]} {name}", (str(inner),))
        return
    if place in SWITCHES and value:
        yield Capability(key, SWITCHES[place], ())
    does = next((does for does, names in KEYS.items() if place.rpartition(".")[2] in names), None)
    if does is not None and (texts := _texts(value)):
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
    if parse_part_name(value) is not None and not _below(place, NO_PARTS):
        yield Capability(key, IMPORT, (value,))
    elif ADDRESS.search(value):
        yield Capability(key, "connect to", (value,))


def _texts(value: Any) -> tuple[str, ...]:
    """A text, or a list; empty of what is neither."""
    if isinstance(value, list):
        return tuple(str(one) for one in value)
    return (value,) if isinstance(value, str) and value else ()


def _below(place: str, keys: Sequence[str]) -> bool:
    return any(place == key or place.startswith(f"{key}.") for key in keys)
