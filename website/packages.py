"""Generates docs/packages.md from the docstrings of the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "arborl"
HEAD = """# Packages

The packages of `src/arborl`: purpose, files in reading order, and the page on their use. A package imports only
packages of lower layers; the layers are in `pyproject.toml`.

This page is generated from the docstrings of the packages: `python -m website`.
"""
USAGE_PAGES: dict[str, tuple[str, ...]] = {
    "agents": ("agents.md", "context.md"),
    "algorithms": ("algorithms.md", "which-algorithm.md"),
    "chat": ("models.md", "concepts.md#text-is-text"),
    "checkpoint": ("resume.md",),
    "cli": ("command-line.md", "cli-reference.md"),
    "cluster": ("scale-out.md", "planner.md"),
    "config": ("configuration.md",),
    "conversational": ("guide.md", "trl.md"),
    "convert": ("migrate.md",),
    "data": ("data.md",),
    "diagnosis": ("doctor.md",),
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
    "trainer": ("concepts.md#one-training-step", "async.md"),
    "training_run": ("getting-started.md", "evaluation.md"),
    "tune": ("tuning.md",),
    "view": ("viewer.md", "run-folder.md"),
}
"""Pages on the use of each package."""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for package in sorted(USAGE_PAGES) for line in _package(package))])


def _package(name: str) -> Iterator[str]:
    text = ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
    files = re.findall(r"^ *(\w+(?:\.py|/)) +(.+(?:\n {8,}.+)*)$", text, re.MULTILINE)
    prose = re.sub(r"^ *\w+(?:\.py|/) .*$|^    .*$|\s*In reading order:\s*$", "", text, flags=re.MULTILINE)
    yield f"## {name}\n"
    yield " ".join(prose.split()) + "\n"
    yield f"How to use it: {', '.join(f'[{page}]({page})' for page in USAGE_PAGES[name])}.\n"
    if files:
        yield "| file | |\n|---|---|"
        yield from (f"| `{file}` | {' '.join(what.split()).replace('|', chr(92) + '|')} |" for file, what in files)
        yield ""
