"""`arborl env list | play | check`, and an episode in the terminal."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import SETTINGS, AsJson, SettingsCommand, argument, option, path_and_settings
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from arborl.config import RunConfig
    from arborl.envs.env import Env, Observation
    from arborl.rollout.env_threads import EnvThread
    from arborl.types import Task

Player = Callable[["Env"], "str | None"]
"""Returns the next action; None leaves the game."""
PROMPT = "env.prompt."
COLORS = {
    "P": "bold dark_orange", "S": "bold dark_orange", "G": "bold red", "O": "blue", "X": "bold yellow",
    "√": "bold green", "_": "grey62", "#": "grey35",
}  # fmt: skip
KEYS = {"w": "Up", "a": "Left", "s": "Down", "d": "Right"}
MAX_ACTIONS = 12
"""Actions that are listed."""
CALL_SECONDS = 30.0
"""Time limit of one call of an environment."""

env = typer.Typer(name="env", help="List, play and check environments.", no_args_is_help=True, rich_markup_mode=None)


@env.command("list")
def list_environments(as_json: AsJson = False) -> None:
    """List the built-in environments and their arguments."""
    from rich.console import Console

    from arborl.cli.terminal_table import Text, new_table
    from arborl.envs import ENVS, EXTRAS

    rows: list[dict[str, Any]] = []
    for name, part in ENVS.items():
        what = (inspect.getdoc(part) or "").splitlines()[0]
        rows.append({"name": name, "what": what, "arguments": _arguments(part)})
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    table = new_table("name", "what", "arguments", left=("name", "what"), fold=("arguments",))
    for row in rows:
        name = row["name"]
        is_missing = name in EXTRAS and importlib.util.find_spec(name) is None
        what = f"{row['what']} (pip install 'arborl[{name}]')" if is_missing else row["what"]
        table.add_row(Text(name, style="bold"), Text(what), Text(", ".join(row["arguments"]), style="dim"))
    Console().print(table)


def _arguments(part: Any) -> list[str]:
    return [
        name if value.default is value.empty or value.default is None else f"{name}={value.default}"
        for name, value in inspect.signature(part).parameters.items()
        if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)
    ]


@env.command("play", cls=SettingsCommand, context_settings=SETTINGS)
def play(
    arguments: Annotated[list[str], argument("NAME a=b", "An environment, and its arguments.")],
    oracle: Annotated[bool, option("--oracle", help="Watch a perfect player.")] = False,
    random: Annotated[bool, option("--random", help="Watch a random player.")] = False,
    model: Annotated[str, option(metavar="PATH", help="Watch a run, a checkpoint or a model.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the task.")] = 0,
    split_name: Annotated[str, typer.Option("--split", help="train or held_out.")] = "train",
    pause: Annotated[float, typer.Option(help="Seconds between the moves of a player that is watched.")] = 0.4,
) -> None:
    """Play in the terminal, or watch a player."""
    from arborl.config.config_base import validate
    from arborl.config.part_config import PromptConfig
    from arborl.envs.prompt_wrapper import PromptLimits, wrap_with_prompt
    from arborl.types import Task

    if oracle + random + bool(model) > 1:
        raise ConfigError("--oracle, --random and --model each select the player. Write one of them.")
    name, args, prompt = parse_environment(arguments)
    task = Task(f"{name}/play-{seed}", seed=seed, env=name, fields={"split": split_name})
    made, pause = make_checked(name, args), pause if oracle or random or model else 0.0
    if model:
        config = play_config(model, name, args, prompt)
        sizes = PromptLimits(config.rollout.max_turns, config.sampling.max_tokens)
        made = wrap_with_prompt(made, config.env.prompt, config.agent.system, sizes)
        player, env_seed = model_player(config, task, seed)
        EpisodeTerminal(made, task, env_seed, pause).run(player)
        return
    terminal = EpisodeTerminal(wrap_with_prompt(made, validate(PromptConfig, prompt)), task, seed, pause)
    terminal.run(oracle_player if oracle else random_player(seed) if random else human_player(terminal.console))


@env.command("check", cls=SettingsCommand, context_settings=SETTINGS)
def check(
    arguments: Annotated[list[str], argument("NAME a=b", "A name or package.module:Class, and its arguments.")],
    tasks: Annotated[int, typer.Option(help="Number of tasks, with seeds 0, 1, 2, …", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="Steps per episode at most.", min=1)] = 30,
    seconds: Annotated[float, typer.Option(help="Time limit of one call.", min=0.01)] = 30.0,
) -> None:
    """Check an environment against the contract. Exit code 1 if it violates it."""
    from arborl.config.config_base import validate
    from arborl.config.part_config import PromptConfig
    from arborl.envs.checker import check_env
    from arborl.envs.prompt_wrapper import wrap_with_prompt
    from arborl.types import Message, Task

    name, args, prompt = parse_environment(arguments)
    make_checked(name, args, seconds)
    prompt_config = validate(PromptConfig, prompt)
    question = (Message("user", "What is 6 * 7?"),)
    problems: dict[str, int] = {}
    for seed in range(tasks):
        split_name, start = "held_out" if seed % 2 else "train", time.monotonic()
        task = Task(f"{name}/check-{seed}", question, {"split": split_name, "answer": "42"}, seed=seed)
        for problem in check_env(
            lambda: wrap_with_prompt(make(name, args), prompt_config), task, seed=seed, steps=steps, seconds=seconds
        ):
            problems[problem] = problems.get(problem, 0) + 1
        if problems and time.monotonic() - start > seconds:  # it hangs: one task is enough
            tasks = seed + 1
            break
    for problem, count in problems.items():
        typer.echo(f"- {problem} ({count} of {tasks} tasks)")
    if problems:
        typer.echo(f"{name} violates the contract of an environment: {len(problems)} problem(s).", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name} satisfies the contract of an environment ({tasks} tasks, up to {steps} steps each).")


# ------------------------------------------------------------------------------------------------ environments


def parse_environment(arguments: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Name, arguments and prompt settings: of `["sokoban", "preset=10x10"]` `("sokoban", {"preset": "10x10"}, {})`."""
    import yaml

    name, settings = path_and_settings(arguments, "environment")
    if name is None:
        raise ConfigError("no environment. Write its name first; `arborl env list` lists them.")
    args: dict[str, Any] = {}
    prompt: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key.startswith(PROMPT):
            prompt[key.removeprefix(PROMPT)] = text
            continue
        try:
            args[key.removeprefix("env.args.")] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{setting!r}: the value is not YAML: {error}") from error
    return name, args, prompt


def environment_factory(name: str) -> Any:
    from arborl.envs import ENVS

    part = ENVS[name]
    if callable(part) and not (hasattr(part, "reset") and not inspect.isclass(part)):
        return part
    kind = type(part)
    raise ConfigError(
        f"{name} is an instance of {kind.__name__}, and every episode needs a new environment. Write the class, "
        f"{kind.__module__}:{kind.__qualname__}, or a function that makes one."
    )


def make(name: str, args: Mapping[str, Any]) -> Any:
    from arborl.registry import call_checked

    made = call_checked(environment_factory(name), args, name)
    if not all(callable(getattr(made, method, None)) for method in ("reset", "step")):
        raise ConfigError(
            f"{name} made {made!r} ({type(made).__name__}), which has no reset() and step(). Write a class of "
            "environments, or a function that returns one."
        )
    return made


def make_checked(name: str, args: Mapping[str, Any], seconds: float = 30.0) -> Any:
    """A new environment; every failure is a `ConfigError`."""
    from arborl.rollout.env_threads import ThreadPool, ThreadTimeout

    environment_factory(name)
    try:
        return ThreadPool().take().wait(f"making {name}", seconds, lambda: make(name, args))
    except ThreadTimeout as error:
        raise ConfigError(f"{error} Open files and connections in reset().") from error
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------ an episode


class EpisodeTerminal:
    """Plays an episode in the terminal, with `pause` seconds between moves."""

    def __init__(self, env: Env, task: Task, seed: int, pause: float = 0.0):
        from rich.console import Console

        self.env, self.task, self.seed, self.pause = env, task, seed, pause
        self.console = Console(highlight=False)

    def run(self, player: Player) -> None:
        """Play until the end or until the player leaves. Ctrl-C works even if the environment blocks."""
        from arborl.rollout.env_threads import ThreadPool, ThreadTimeout

        thread = ThreadPool().take()
        try:
            self._play(player, thread)
            thread.wait("close()", CALL_SECONDS, self.env.close)
        except ThreadTimeout as error:
            raise ConfigError(f"{type(self.env).__name__}.{error}") from error
        except BaseException:
            thread.submit(lambda: thread.run(self.env.close))
            raise

    def _play(self, player: Player, thread: EnvThread) -> None:
        from rich.text import Text

        from arborl.types import Message

        self._show(thread.wait("reset()", CALL_SECONDS, lambda: self.env.reset(self.task, self.seed)))
        total, turns, is_over = 0.0, 0, False
        while not is_over:
            text = player(self.env)
            if text is None:
                self.console.print("left the game", style="dim")
                break
            action = Message("assistant", text)
            step = thread.wait("step()", CALL_SECONDS, lambda action=action: self.env.step(action))  # type: ignore[misc]
            total, turns, is_over = total + step.reward, turns + 1, step.over
            self.console.print(Text(f"\n{turns}> {text}", style="bold cyan"))
            self._show(step.observation)
            self.console.print(Text(f"reward {step.reward:+.2f}   total {total:+.2f}", style="dim"))
            if self.pause and self.console.is_terminal:
                time.sleep(self.pause)
        metrics = "   ".join(f"{name} {value:.3g}" for name, value in self.env.metrics().items())
        self.console.print(Text(f"\nreturn {total:+.2f} in {turns} turns   {metrics}", style="bold"))

    def _show(self, observation: Observation) -> None:
        for message in observation.messages:
            self.console.print(colored(message.content, "italic" if message.role == "system" else ""))


def colored(content: str, style: str = "") -> Text:
    """The text with colors for symbols of a board and for words in square brackets."""
    from rich.text import Text

    text = Text(style=style)
    for line in content.splitlines():
        if len(line) > 1 and set(line) <= set(COLORS):
            for symbol in line:
                text.append(f"{symbol} ", COLORS[symbol])
        else:
            for part in re.split(r"(\[[^\]]*\])", line):
                text.append(part, "bold blue" if part.startswith("[") else "")
        text.append("\n")
    text.rstrip()
    return text


def oracle_player(env: Env) -> str:
    text = env.oracle()
    if text is None:
        raise ConfigError(f"{type(env).__name__} has no perfect player. Write --random, or play yourself.")
    return text


def random_player(seed: int) -> Player:
    from arborl.seeds import generator

    rng = generator(seed, "player")

    def player(env: Env) -> str:
        text = env.random(rng)
        if text is None:
            raise ConfigError(f"{type(env).__name__} has no random player. Play yourself.")
        return text

    return player


def human_player(console: Console) -> Player:
    from rich.text import Text

    def player(env: Env) -> str | None:
        actions = env.actions()
        if actions:
            listed = "   ".join(f"{number} {_bare(text)}" for number, text in enumerate(actions[:MAX_ACTIONS], 1))
            console.print(Text(listed, style="dim"))
        try:
            typed = console.input("[bold cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        return None if typed == "q" else typed_action(typed, actions)

    return player


def typed_action(typed: str, actions: list[str]) -> str:
    """The action of a typed text: the number or the words of a valid action, w a s d, or any text unchanged."""
    if typed.isdecimal() and 1 <= int(typed) <= len(actions):
        return actions[int(typed) - 1]
    by_words = {_bare(text).lower(): text for text in actions}
    return by_words.get(typed.lower()) or by_words.get(KEYS.get(typed.lower(), "").lower()) or typed


def _bare(text: str) -> str:
    return text.removeprefix("<answer>").removesuffix("</answer>")


def model_player(config: RunConfig, task: Task, seed: int) -> tuple[Player, int]:
    """A player that repeats an episode of the model, which is played first; and the seed of its environment."""
    from arborl.seeds import derive
    from arborl.training_run.build import build

    episode = asyncio.run(build(config).rollout.play(task, seed, f"{task.id}#0"))
    if episode.failure is not None:
        raise ConfigError(f"the episode failed: {episode.failure}")
    texts = iter([turn.message.content for turn in episode.turns])
    return (lambda env: next(texts, None)), derive(episode.seed, "environment")


def play_config(model: str, name: str, args: Mapping[str, Any], prompt: Mapping[str, Any]) -> RunConfig:
    """The configuration of an episode in this environment, with the agent of the model's run.

    `prompt` overrides the `env.prompt` of a run with the same environment.
    """
    from arborl.config.config_base import to_plain, validate
    from arborl.config.run_config import RunConfig
    from arborl.config.trust import load_run_config

    env: dict[str, Any] = {"name": name, "args": dict(args), "prompt": dict(prompt)}
    tree: dict[str, Any] = {}
    path = Path(model).expanduser()
    file = next((one / "config.yaml" for one in (path, *path.parents[:2]) if (one / "config.yaml").is_file()), None)
    if file is not None:
        config = load_run_config(file)
        run_tree = to_plain(config)
        tree |= {key: run_tree[key] for key in ("model", "agent", "tools", "sampling", "context", "sandbox")}
        if config.env.name == name:
            env["prompt"] = run_tree["env"]["prompt"] | env["prompt"]
    tree["model"] = {**tree.get("model", {}), "name": str(model_folder(model))}
    return validate(RunConfig, {**tree, "env": env})


def model_folder(path: str) -> Path:
    """The model folder of a run's last checkpoint, of a checkpoint, or the path itself."""
    from arborl.checkpoint import checkpoint
    from arborl.models.model_files import is_model_folder

    folder = Path(path).expanduser()
    if (folder / "checkpoints").is_dir():
        return checkpoint.find(folder / "checkpoints", "latest") / "model"
    return folder / "model" if is_model_folder(folder / "model") else folder
