"""The page of the command line's verbs and options, from what `--help` knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from arborl.cli.main import app

HEAD = """# Verbs and options

What `--help` says of every verb. [command-line.md](command-line.md) is about what they have in common: exit codes,
JSON, colours, completion. Settings (`a.b=c`) are those of [configuration.md](configuration.md).

This page is generated: `python -m website`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_command(typer.main.get_command(app), "arborl")])


def _command(command: Any, called: str) -> Iterator[str]:
    """A verb, or a group with its verbs below it."""
    inside = getattr(command, "commands", None)
    context = command.context_class(command, info_name=called)
    if inside is None:
        yield f"## {called}\n"
        yield f"{_prose(command.help)}\n"
        yield f"```\n{called} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        yield "| | |\n|---|---|"
        for param in command.get_params(context):
            if param.name != "help" and (record := param.get_help_record(context)):
                yield f"| `{_cell(re.sub(r' <.*>$', '', record[0]))}` | {_cell(record[1])} |"
        yield ""
        if command.epilog:
            yield f"```\n{command.epilog.partition(chr(8))[2].strip()}\n```\n"
    else:
        for name, verb in inside.items():
            yield from _command(verb, f"{called} {name}")


def _prose(text: str | None) -> str:
    """A docstring without its example line, which stands among the examples."""
    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs if not one.startswith("Example: "))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
