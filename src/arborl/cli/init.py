"""`arborl init`: files to begin with."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from arborl.cli.starters import PARTS, PRESETS
from arborl.errors import ConfigError, did_you_mean, disk_errors


def init(
    kind: Annotated[str, typer.Argument(metavar="[env|tool|reward|agent]", help="A part.", show_default=False)] = "",
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="What it is called.", show_default=False)] = "",
    path: Annotated[Path | None, typer.Option(help="Of a configuration: its file.", show_default="config.yaml")] = None,
    preset: Annotated[str, typer.Option(help="What the configuration trains.", metavar="NAME")] = "lake",
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a commented configuration; or an environment, a tool, a reward or an agent with a test beside it."""
    if kind:
        files, then = part(kind, name, path)
    else:
        path = path or Path("config.yaml")
        files, then = {path: configuration(path, preset)}, f"Look at it with: arborl train {path} --print"
    there = [str(file) for file in files if file.exists()]
    if there and not force:
        raise ConfigError(f"{', '.join(there)}: there already. Write another name, or --force to replace.")
    for file, text in files.items():
        with disk_errors(file):
            file.write_text(text, encoding="utf-8")
        typer.echo(f"{file}  written.")
    typer.echo(then)


def configuration(path: Path, preset: str) -> str:
    """The text of a configuration file; an algorithm's name is the lake with that algorithm."""
    from arborl.config.algorithm_config import PRESETS as ALGORITHMS

    playing = [name for name in ALGORITHMS if name not in ("dpo", "ipo", "kto", "sft", "distill")]
    if path.suffix != ".yaml":
        raise ConfigError(f"--path {path}: a configuration's name ends in .yaml. Write {path.with_suffix('.yaml')}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--path {path}: there is no folder {str(path.parent)!r}. Make it, or write another.")
    if preset not in PRESETS and preset not in playing:
        known = [*PRESETS, *playing]
        raise ConfigError(f"--preset {preset}: unknown.{did_you_mean(preset, known)} Known: {', '.join(known)}.")
    text = PRESETS.get(preset, PRESETS["lake"]).replace("FILE", str(path))
    return text.replace("ALGORITHM", preset if preset in playing else "grpo")


def part(kind: str, name: str, path: Path | None) -> tuple[Mapping[Path, str], str]:
    """The files of a part and its test, and what to do with them."""
    if kind not in PARTS:
        raise ConfigError(f"{kind!r}: no kind of part.{did_you_mean(kind, PARTS)} Known: {', '.join(PARTS)}.")
    if not name:
        raise ConfigError(f"a name is missing. Write arborl init {kind} NAME.")
    if not name.isidentifier() or keyword.iskeyword(name) or name == "arborl":
        raise ConfigError(f"{name!r}: no name for a Python module. Write letters, digits and _, as in my_{kind}.")
    if path is not None:
        raise ConfigError("--path is of a configuration. A part is written as NAME.py in the current folder.")
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_")) or name
    own, test = (text.replace("NAME", name).replace("CLASS", title) for text in PARTS[kind])
    return {Path(f"{name}.py"): own, Path(f"test_{name}.py"): test}, f"Try it with: python -m pytest test_{name}.py"
