"""`arborl init`: a commented configuration, a recipe, or a part with its test.

In the files of `templates/`, `NAME` stands for the part's name, `CLASS` for its class name, `FILE` for the path of the
configuration and `ALGORITHM` for the algorithm.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from arborl.cli.options import argument
from arborl.errors import ConfigError, did_you_mean, disk_errors

PRESETS = ("lake", "questions", "tools", "conversation", "sft")
PARTS = ("env", "tool", "reward", "agent")
HEAD = "# Train with `arborl train FILE`; `arborl train FILE --print` prints every key; docs/configuration.md.\n"


def init(
    kind: Annotated[str, argument("[env|tool|reward|agent]", "Kind of part.")] = "",
    name: Annotated[str, argument("[NAME]", "Name of the part.")] = "",
    path: Annotated[Path | None, typer.Option(help="File of the configuration.", show_default="config.yaml")] = None,
    preset: Annotated[
        str, typer.Option(help="lake, questions, tools, conversation, sft, or an algorithm.", metavar="NAME")
    ] = "lake",
    recipe: Annotated[str, typer.Option(help="Write recipes/NAME/, a tested configuration.", metavar="NAME")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a configuration, a recipe, or a new part: an environment, a tool, a reward or an agent, with a test."""
    texts: Mapping[Path, str]
    if recipe:
        if kind or path is not None:
            raise ConfigError("--recipe writes recipes/NAME/. Leave the part and --path out.")
        texts, hint = recipe_files(recipe)
    elif kind:
        texts, hint = part_files(kind, name, path)
    else:
        path = path or Path("config.yaml")
        text = configuration_text(path, preset)
        texts, hint = {path: text}, f"Check it: arborl train {path} --print"
        if "arithmetic.json" in text and not Path("arithmetic.json").exists():
            hint = f"Make its rows: arborl data make arithmetic --out .\n{hint}"
    existing = [str(file) for file in texts if file.exists()]
    if existing and not force:
        raise ConfigError(f"{', '.join(existing)}: exists already. Write another name, or --force to overwrite.")
    for file, text in texts.items():
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {file}")
    typer.echo(hint)


def configuration_text(path: Path, preset: str) -> str:
    """The text of a configuration file; the preset of an algorithm is the lake with that algorithm."""
    from arborl.config.algorithm_config import PRESETS as ALGORITHMS

    online = [name for name in ALGORITHMS if name not in ("dpo", "ipo", "kto", "sft", "distill")]
    if path.suffix != ".yaml":
        raise ConfigError(f"--path {path}: must end in .yaml. Write {path.with_suffix('.yaml')}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--path {path}: there is no folder {str(path.parent)!r}. Create it, or write another.")
    if preset not in PRESETS and preset not in online:
        known = [*PRESETS, *online]
        raise ConfigError(f"--preset {preset}: unknown.{did_you_mean(preset, known)} Known: {', '.join(known)}.")
    text = HEAD + _template(f"{preset if preset in PRESETS else 'lake'}.yaml")
    text += _template("common.yaml") if preset != "sft" else ""
    return text.replace("FILE", str(path)).replace("ALGORITHM", preset if preset in online else "grpo")


def recipe_files(name: str) -> tuple[Mapping[Path, str], str]:
    """The files of a recipe, and its commands from the head of its `run.yaml`."""
    recipes = files("arborl").joinpath("recipes")
    if not recipes.is_dir():  # an editable installation
        recipes = Path(__file__).parents[3] / "recipes"
    known = sorted(folder.name for folder in recipes.iterdir() if folder.is_dir())
    if name not in known:
        raise ConfigError(f"--recipe {name}: unknown.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    found = [file for file in recipes.joinpath(name).iterdir() if file.name.endswith((".yaml", ".md", ".py"))]
    texts = {Path("recipes", name, file.name): file.read_text(encoding="utf-8") for file in found}
    head = texts[Path("recipes", name, "run.yaml")].partition("\nname:")[0]
    return texts, "\n".join(line.removeprefix("#").removeprefix(" ") for line in head.splitlines())


def part_files(kind: str, name: str, path: Path | None) -> tuple[Mapping[Path, str], str]:
    """The files of a part and its test, and how to run the test."""
    if kind not in PARTS:
        raise ConfigError(f"{kind!r}: unknown kind of part.{did_you_mean(kind, PARTS)} Known: {', '.join(PARTS)}.")
    if not name:
        raise ConfigError(f"the name is missing. Write arborl init {kind} NAME.")
    if not name.isidentifier() or keyword.iskeyword(name) or name == "arborl":
        raise ConfigError(f"{name!r}: not a module name. Write letters, digits and _, as in my_{kind}.")
    if path is not None:
        raise ConfigError("--path is for a configuration. A part is written to NAME.py in the current folder.")
    title = "".join(word[:1].upper() + word[1:] for word in name.split("_")) or name
    texts = {}
    for prefix in ("", "test_"):
        text = _template(f"{prefix}{kind}.py.txt")
        texts[Path(f"{prefix}{name}.py")] = text.replace("NAME", name).replace("CLASS", title)
    return texts, f"Test it: python -m pytest test_{name}.py"


def _template(name: str) -> str:
    return files("arborl.cli").joinpath("templates", name).read_text(encoding="utf-8")
