"""The page of the rooms of the source, from what each room's `__init__.py` says of itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "arborl"
HEAD = """# Rooms

Every folder of `src/arborl` is a room: what it does, what it never does, its files in reading order, and the
page that is about using it. A room imports only rooms below it; the order is in [concepts.md](concepts.md#the-rooms).

This page is generated from the rooms themselves: `python -m website`.
"""
ABOUT: dict[str, tuple[str, ...]] = {
    "agents": ("agents.md", "context.md"),
    "algorithms": ("algorithms.md", "which-algorithm.md"),
    "api": ("getting-started.md", "evaluation.md"),
    "chat": ("models.md", "concepts.md#text-is-text"),
    "checkpoint": ("resume.md",),
    "cli": ("command-line.md", "cli-reference.md"),
    "cluster": ("scale-out.md", "planner.md"),
    "config": ("configuration.md",),
    "conversational": ("guide.md", "trl.md"),
    "convert": ("migrate.md",),
    "data": ("data.md",),
    "doctor": ("doctor.md", "troubleshooting.md"),
    "engines": ("engines.md",),
    "envs": ("environments.md",),
    "learner": ("memory-and-speed.md", "scale-out.md"),
    "models": ("models.md",),
    "rewards": ("rewards.md",),
    "rollout": ("run-folder.md",),
    "sandbox": ("security.md",),
    "seedling": ("concepts.md#the-embedded-model",),
    "serve": ("serve.md",),
    "tools": ("tools.md",),
    "track": ("tracking.md", "run-folder.md"),
    "trainer": ("concepts.md#one-step", "async.md"),
    "tune": ("tuning.md",),
    "view": ("viewer.md", "run-folder.md"),
}
"""The pages on using each room."""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for room in sorted(ABOUT) for line in _room(room))])


def _room(name: str) -> Iterator[str]:
    said = ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
    files = re.findall(r"^    (\w+(?:\.py|/)) +(.+(?:\n {8,}.+)*)$", said, re.MULTILINE)
    prose = re.sub(r"^    .*$|\s*In reading order:\s*$", "", said, flags=re.MULTILINE)
    yield f"## {name}\n"
    yield " ".join(prose.split()) + "\n"
    yield f"How to use it: {', '.join(f'[{page}]({page})' for page in ABOUT[name])}.\n"
    if files:
        yield "| file | |\n|---|---|"
        yield from (f"| `{file}` | {' '.join(what.split()).replace('|', chr(92) + '|')} |" for file, what in files)
        yield ""
