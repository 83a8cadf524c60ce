"""An episode in the terminal: the state in color, a move by hand or by a player, what it was worth."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from arborl.envs.env import Env, Observation
from arborl.errors import ConfigError
from arborl.rollout.threads import Hand, Threads, TooLong
from arborl.seeds import derive, generator
from arborl.types import Message, Task

if TYPE_CHECKING:
    from arborl.config import RunConfig

Player = Callable[[Env], str | None]
"""The text to say now; None leaves the game."""

COLORS = {
    "P": "bold dark_orange",
    "S": "bold dark_orange",
    "G": "bold red",
    "O": "blue",
    "X": "bold yellow",
    "√": "bold green",
    "_": "grey62",
    "#": "grey35",
}
KEYS = {"w": "Up", "a": "Left", "s": "Down", "d": "Right"}
SHOWN_ACTIONS = 12
SECONDS = 30.0
"""What one call of an environment may take."""


@dataclass
class Stage:
    """Where an episode is shown.

    Args:
        env: fresh.
        task: what is played.
        seed: of the episode's chance.
        pause: seconds between moves.
    """

    env: Env
    task: Task
    seed: int
    pause: float = 0.0
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def run(self, player: Player) -> None:
        """Play to the end, or until the player leaves; Ctrl-C is heard whatever the environment does."""
        hand = Threads().take()
        try:
            self._play(player, hand)
            hand.wait("close()", SECONDS, self.env.close)
        except TooLong as error:
            raise ConfigError(f"{type(self.env).__name__}.{error}") from error
        except BaseException:
            hand.ask(self.env.close)
            raise

    def _play(self, player: Player, hand: Hand) -> None:
        self._show(hand.wait("reset()", SECONDS, lambda: self.env.reset(self.task, self.seed)))
        total, turns, over = 0.0, 0, False
        while not over:
            text = player(self.env)
            if text is None:
                self.console.print("left the game", style="dim")
                break
            said = Message("assistant", text)
            step = hand.wait("step()", SECONDS, lambda said=said: self.env.step(said))  # type: ignore[misc]
            total, turns, over = total + step.reward, turns + 1, step.over
            self.console.print(Text(f"\n{turns}> {text}", style="bold cyan"))
            self._show(step.observation)
            self.console.print(Text(f"reward {step.reward:+.2f}   total {total:+.2f}", style="dim"))
            if self.pause and self.console.is_terminal:
                time.sleep(self.pause)
        numbers = "   ".join(f"{name} {value:.3g}" for name, value in self.env.metrics().items())
        self.console.print(Text(f"\nreturn {total:+.2f} in {turns} turns   {numbers}", style="bold"))

    def _show(self, seen: Observation) -> None:
        for message in seen.messages:
            self.console.print(colored(message.content, "italic" if message.role == "system" else ""))


def colored(text: str, style: str = "") -> Text:
    """A board by its symbols, words in square brackets as buttons, anything else as it is."""
    shown = Text(style=style)
    for line in text.splitlines():
        if len(line) > 1 and set(line) <= set(COLORS):
            for symbol in line:
                shown.append(f"{symbol} ", COLORS[symbol])
        else:
            for part in re.split(r"(\[[^\]]*\])", line):
                shown.append(part, "bold blue" if part.startswith("[") else "")
        shown.append("\n")
    shown.rstrip()
    return shown


# ------------------------------------------------------------------------------------------------ players


def by_oracle(env: Env) -> str:
    text = env.oracle()
    if text is None:
        raise ConfigError(f"{type(env).__name__} knows no perfect player. Write --random, or play by hand.")
    return text


def by_random(seed: int) -> Player:
    chance = generator(seed, "player")

    def player(env: Env) -> str:
        text = env.random(chance)
        if text is None:
            raise ConfigError(f"{type(env).__name__} knows no random player. Play by hand.")
        return text

    return player


def by_hand(console: Console) -> Player:
    def player(env: Env) -> str | None:
        legal = env.actions()
        if legal:
            listed = "   ".join(f"{number} {bare(text)}" for number, text in enumerate(legal[:SHOWN_ACTIONS], 1))
            console.print(Text(listed, style="dim"))
        try:
            typed = console.input("[bold cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        return None if typed == "q" else meant(typed, legal)

    return player


def meant(typed: str, legal: list[str]) -> str:
    """What somebody at a keyboard means: a number or the bare words of a legal move, w a s d, or any text as it is.

    Example:
        meant("right", ["<answer>Left</answer>", "<answer>Right</answer>"])      # '<answer>Right</answer>'
    """
    if typed.isdecimal() and 1 <= int(typed) <= len(legal):
        return legal[int(typed) - 1]
    words = {bare(text).lower(): text for text in legal}
    return words.get(typed.lower()) or words.get(KEYS.get(typed.lower(), "").lower()) or typed


def bare(text: str) -> str:
    return text.removeprefix("<answer>").removesuffix("</answer>")


def by_model(config: RunConfig, task: Task, seed: int) -> tuple[Player, int]:
    """A model's episode, played first and then shown; and the seed its environment had."""
    from arborl.training_run.build import build

    episode = asyncio.run(build(config).rollout.play(task, seed, f"{task.id}#0"))
    if episode.failure is not None:
        raise ConfigError(f"the episode failed: {episode.failure}")
    texts = iter([turn.message.content for turn in episode.turns])
    return (lambda env: next(texts, None)), derive(episode.seed, "environment")


def run_with(model: str, name: str, args: Mapping[str, Any], prompt: Mapping[str, Any]) -> RunConfig:
    """A run that plays this environment, with the words that the model's own run had around it.

    Args:
        model: a run, a checkpoint or a model.
        name, args: the environment.
        prompt: settings of `env.prompt`, on top of those of a run of the same environment.
    """
    from arborl.config.config_base import to_plain, validate
    from arborl.config.run_config import RunConfig
    from arborl.config.trust import load_run_config

    env: dict[str, Any] = {"name": name, "args": dict(args), "prompt": dict(prompt)}
    tree: dict[str, Any] = {}
    place = Path(model).expanduser()
    file = next((one / "config.yaml" for one in (place, *place.parents[:2]) if (one / "config.yaml").is_file()), None)
    if file is not None:
        config = load_run_config(file)
        its = to_plain(config)
        tree |= {key: its[key] for key in ("model", "agent", "tools", "sampling", "context", "sandbox")}
        if config.env.name == name:
            env["prompt"] = its["env"]["prompt"] | env["prompt"]
    tree["model"] = {**tree.get("model", {}), "name": str(model_folder(model))}
    return validate(RunConfig, {**tree, "env": env})


def model_folder(path: str) -> Path:
    """The model of a run's last checkpoint, of a checkpoint, or the model's own folder or name."""
    from arborl.checkpoint import checkpoint
    from arborl.models.load import holds_model

    place = Path(path).expanduser()
    if (place / "checkpoints").is_dir():
        return checkpoint.find(place / "checkpoints", "latest") / "model"
    return place / "model" if holds_model(place / "model") else place
