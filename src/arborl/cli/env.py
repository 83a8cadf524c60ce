"""`arborl env list | play | check`: see the environments, play one, hold one to the contract."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from arborl.cli.arguments import one_path, split
from arborl.errors import ConfigError

PLAY_OPTIONS = ("--oracle", "--random", "--model", "--seed", "--split", "--pause", "--help")
CHECK_OPTIONS = ("--tasks", "--steps", "--seconds", "--help")

env = typer.Typer(name="env", help="See, play and check environments.", no_args_is_help=True, rich_markup_mode=None)
SETTINGS = {"ignore_unknown_options": True}
PROMPT = "env.prompt."


@env.command("list")
def list_environments(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every environment with a short name, and its arguments."""
    import json

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from arborl.envs import ENVS, EXTRAS

    if as_json:
        rows = [{"name": name, "what": _what(ENVS[name]), "arguments": _arguments(ENVS[name])} for name in ENVS]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    shown = Table("name", "what", box=box.SIMPLE)
    shown.add_column("arguments", overflow="fold")
    for name in ENVS:
        found = ENVS[name]
        what = _what(found)
        package = "openenv" if name == "openenv" else name
        if name in EXTRAS and importlib.util.find_spec(package) is None:
            what += f" (pip install 'arborl[{name}]')"
        shown.add_row(Text(name, style="bold"), Text(what), Text(", ".join(_arguments(found)), style="dim"))
    Console().print(shown)


def _what(part: Any) -> str:
    return (inspect.getdoc(part) or "").splitlines()[0]


def _arguments(part: Any) -> list[str]:
    return [
        name if value.default is value.empty or value.default is None else f"{name}={value.default}"
        for name, value in inspect.signature(part).parameters.items()
        if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)
    ]


@env.command("play", context_settings=SETTINGS)
def play(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME a=b", help="An environment, and arguments of it.", show_default=False)
    ],
    oracle: Annotated[bool, typer.Option("--oracle", help="Watch a perfect player.")] = False,
    random: Annotated[bool, typer.Option("--random", help="Watch a random player.")] = False,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="Watch a run, a checkpoint or a model play.", show_default=False)
    ] = "",
    seed: Annotated[int, typer.Option(help="Which task.")] = 0,
    split_name: Annotated[str, typer.Option("--split", help="train or held_out.")] = "train",
    pause: Annotated[float, typer.Option(help="Seconds between the moves of a player that is watched.")] = 0.4,
) -> None:
    """Play by hand in the terminal, or watch a player."""
    from arborl.cli.play import Stage, by_hand, by_model, by_oracle, by_random, run_with
    from arborl.config.config_base import validate
    from arborl.config.part_config import PromptConfig
    from arborl.envs.prompted import Sizes, prompted
    from arborl.types import Task

    if oracle + random + bool(model) > 1:
        raise ConfigError("--oracle, --random and --model each name the player: give one of them.")
    name, args, prompt = named(arguments, PLAY_OPTIONS)
    task = Task(f"{name}/play-{seed}", seed=seed, env=name, fields={"split": split_name})
    made, pause = first(name, args), pause if oracle or random or model else 0.0
    if model:
        config = run_with(model, name, args, prompt)
        sizes = Sizes(config.rollout.max_turns, config.sampling.max_tokens)
        stage = Stage(prompted(made, config.env.prompt, config.agent.system, sizes), task, seed, pause)
        player, stage.seed = by_model(config, task, seed)
    else:
        stage = Stage(prompted(made, validate(PromptConfig, prompt)), task, seed, pause)
        player = by_oracle if oracle else by_random(seed) if random else by_hand(stage.console)
    stage.run(player)


@env.command("check", context_settings=SETTINGS)
def check(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="NAME a=b", help="A name or package.module:Class, and arguments.", show_default=False),
    ],
    tasks: Annotated[int, typer.Option(help="Tasks to open, with seeds 0, 1, 2, …", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="Longest play.", min=1)] = 30,
    seconds: Annotated[float, typer.Option(help="What one call may take.", min=0.01)] = 30.0,
) -> None:
    """Hold an environment to the contract. Exit code 1 if it breaks it."""
    from time import monotonic

    from arborl.config.config_base import validate
    from arborl.config.part_config import PromptConfig
    from arborl.envs.checker import check_env
    from arborl.envs.prompted import prompted
    from arborl.types import Message, Task

    name, args, prompt = named(arguments, CHECK_OPTIONS)
    first(name, args, seconds)
    around = validate(PromptConfig, prompt)

    def fresh() -> Any:
        return prompted(make(name, args), around)

    question = (Message("user", "What is 6 * 7?"),)
    problems: dict[str, int] = {}
    for seed in range(tasks):
        chosen, began = "held_out" if seed % 2 else "train", monotonic()
        task = Task(f"{name}/check-{seed}", question, {"split": chosen, "answer": "42"}, seed=seed)
        for problem in check_env(
            lambda: prompted(make(name, args), around), task, seed=seed, steps=steps, seconds=seconds
        ):
            problems[problem] = problems.get(problem, 0) + 1
        if problems and monotonic() - began > seconds:  # it hangs: once is enough
            tasks = seed + 1
            break
    for problem, count in problems.items():
        typer.echo(f"- {problem} ({count} of {tasks} tasks)")
    if problems:
        typer.echo(f"{name} breaks the contract of an environment in {len(problems)} way(s).", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name} keeps the contract of an environment ({tasks} tasks, up to {steps} steps each).")


def named(arguments: Sequence[str], options: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The environment's name, its arguments, and the prompt around it.

    Example:
        named(["sokoban", "preset=10x10"], ())      # ("sokoban", {"preset": "10x10"}, {})
    """
    import yaml

    paths, settings = split(arguments, options)
    name = one_path(paths, "environment")
    if name is None:
        raise ConfigError("no environment is named. Write its name first; `arborl env list` shows them.")
    args: dict[str, Any] = {}
    prompt: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        place, key = (prompt if key.startswith(PROMPT) else args), key.removeprefix(PROMPT).removeprefix("env.args.")
        try:
            place[key] = text if place is prompt else yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{setting!r}: the value is no YAML: {error}") from error
    return name, args, prompt


def part(name: str) -> Any:
    """What makes the environment: a class, or a function."""
    from arborl.envs import ENVS

    found = ENVS[name]
    if callable(found) and not (hasattr(found, "reset") and not inspect.isclass(found)):
        return found
    kind = type(found)
    raise ConfigError(
        f"{name} is an object of {kind.__name__}, and every episode is played in an environment of its own. Name the "
        f"class, {kind.__module__}:{kind.__qualname__}, or a function that makes one."
    )


def make(name: str, args: Mapping[str, Any]) -> Any:
    """A fresh environment."""
    from arborl.registry import call_checked

    made = call_checked(part(name), args, name)
    if not all(callable(getattr(made, call, None)) for call in ("reset", "step")):
        raise ConfigError(
            f"{name} made {made!r} ({type(made).__name__}), which has no reset() and step(). Name a class of "
            "environments, or a function that returns one."
        )
    return made


def first(name: str, args: Mapping[str, Any], seconds: float = 30.0) -> Any:
    """A fresh environment; one that cannot be made, for whatever reason, is a sentence."""
    from arborl.rollout.threads import Threads, TooLong

    part(name)
    try:
        return Threads().take().wait(f"making {name}", seconds, lambda: make(name, args))
    except TooLong as error:
        raise ConfigError(f"{error} Let it open what it needs in reset().") from error
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
