"""Reads a Google-style docstring: what a function does, and what each argument means."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?):\s*$"
)
ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts a model is told about."""

    description: str = ""
    """Everything before the first section, as one paragraph."""
    arguments: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docstring:
    """Split a docstring into its description and its `Args:`.

    Example:
        read_docstring("Add.\\n\\nArgs:\\n    a: the first\\n        number.").arguments    # {"a": "the first number."}
    """
    description: list[str] = []
    arguments: dict[str, list[str]] = {}
    section, current, depth = "", "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        found = SECTION.match(line)
        indent = len(line) - len(line.lstrip())
        if found:
            section, current, depth = found.group(1), "", 0
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = depth or indent
            entry = ENTRY.match(line.strip()) if indent <= depth else None
            if entry:
                current = entry.group(1)
                arguments[current] = [entry.group(2)]
            elif current:
                arguments[current].append(line.strip())
    return Docstring(_flow(description), {name: _flow(lines) for name, lines in arguments.items()})


def _flow(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
