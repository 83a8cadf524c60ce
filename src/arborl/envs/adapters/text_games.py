"""Text games of other packages: TextWorld, ALFWorld, ScienceWorld.

A command is read from `<answer>…</answer>`, or from the whole message without such a tag, and sent to the game as it
is; the game answers illegal commands. TextWorld and ALFWorld run in processes (`isolated`), ScienceWorld in a Java
process for each episode: a game that hangs or crashes costs only its own episode.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from arborl.envs.adapters.other_packages import MAX_DRAWS, MissingRequirementError, require_package
from arborl.envs.env import SPLITS, Observation, Step, check_split, parse_answer, split_of
from arborl.envs.games.text_game import TextGame, require
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

RULES = "Play the game until its task is done. Each turn, answer with one command, for example <answer>{}</answer>."


class IdlePool:
    """Objects of this process that are slow to make, or never freed, and that no episode uses now."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.idle: list[Any] = []
        self.lock = threading.Lock()

    def take(self) -> Any:
        with self.lock:
            if self.idle:
                return self.idle.pop()
        return self.make()

    def give_back(self, unused: Any) -> None:
        with self.lock:
            self.idle.append(unused)


class CommandGame(TextGame):
    """Base class: commands in, texts out. A subclass sets `text`, `legal`, `score` and `won`."""

    list_actions: bool

    def start(self, text: str) -> Observation:
        """The first observation."""
        self.text, self.score, self.won, self.commands = text, 0.0, False, tuple[str, ...]()
        return self.opening(self.shown())

    def command(self, action: Message) -> str:
        """The command of a message, in one line."""
        found = parse_answer(action.content)
        return " ".join((action.content if found is None else found).split())

    def answer(self, command: str, valid: bool, reward: float, over: bool) -> Step:
        """Count the command; the step with the current text."""
        self.commands += (command,)
        self.steps += 1
        self.valid += valid
        return Step(
            Observation((Message("user", self.shown()),), state_key=self.state_key()),
            reward=reward + (0.0 if valid else self.format_penalty),
            terminated=over,
            truncated=not over and self.steps >= self.max_steps,
            info={"valid": float(valid)},
        )

    def shown(self) -> str:
        """The text, with the legal commands if `list_actions` is set."""
        return f"{self.text}\nCommands: {', '.join(self.actions())}" if self.list_actions else self.text

    def following(self, path: Sequence[str]) -> str | None:
        """The next command of a solution; None after a command that is not part of it."""
        done = len(self.commands)
        return path[done] if done < len(path) and self.commands == tuple(path[:done]) else None

    def metrics(self) -> Metrics:
        played = max(self.steps, 1)
        return {"success": float(self.won), "score": self.score, "valid": self.valid / played}

    def render(self) -> str:
        return self.text

    def snapshot(self) -> None:
        return None


# ------------------------------------------------------------------------------------------------ TextWorld

MAX_COMMAND, NO_COMMAND = 198, "That is not a command."
"""Longest command in characters, and the answer to what cannot be one."""
TEXTWORLD_LOCK = threading.RLock()
"""TextWorld's parsers belong to the process: one call at a time."""
STATUS_LINE = re.compile(r"\n*>\s*(?:-= .*)?\Z|\n+Would you like to RESTART.*\Z", re.DOTALL)
"""The prompt and the status line below a text of an Inform 7 game, and the question at its end."""


class FileGame(CommandGame):
    """Base class: a game file that TextWorld plays."""

    isolated = True

    game: Any = None
    is_idle = True
    """Whether no call of the game is unfinished."""

    def play(self, game: Any) -> Any:
        """Start the game; its first state."""
        self.game, self.is_idle = game, False
        self.state = game.reset()
        self.is_idle = True
        return self.state

    def send(self, command: str) -> bool:
        """Send a command; whether it was admissible."""
        valid = command in self.state["admissible_commands"]
        self.is_idle = False
        with TEXTWORLD_LOCK:
            self.state, _, _ = self.game.step(command)
        self.won, self.is_idle = bool(self.state["won"]), True
        return valid

    def close_game(self) -> None:
        game, self.game = self.game, None
        if game is not None:
            game.close()

    async def close(self) -> None:
        self.close_game()

    def actions(self) -> list[str]:
        return [] if self.game is None else list(self.state["admissible_commands"])

    def state_key(self) -> str:
        facts = "\n".join(sorted(map(str, self.state["_facts"]))) if self.state.get("_facts") else self.text
        return hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()


@dataclass(eq=False)
class TextWorld(FileGame):
    """A TextWorld game: made from the task's seed, or one of your game files.

    A made game is compiled by Inform 7 and kept in `cache`, so that the episodes of a group, and later runs, share it.
    One game in ten, by a hash of its settings and seed or of its file's path in the folder, is held out. The files of
    subfolders `train` and `held_out` belong to these splits.
    """

    rules = RULES.format("go north")

    rooms: int = 3
    """Rooms of a made game."""
    objects: int = 5
    """Objects of a made game."""
    quest_length: int = 3
    """Commands of the shortest solution of a made game."""
    games: str = ""
    """A game file (`.z8`), or a folder of such files, in place of made games."""
    cache: str = "~/.cache/arborl/textworld"
    """Folder of made games."""
    show_goal: bool = True
    """Whether the text of a made game begins with its objective, which lists the commands of the quest."""
    list_actions: bool = False
    """Whether observations list the admissible commands."""
    step_reward: float = 0.0
    """Reward of a command that shortens the way to the goal; one that lengthens it has the negative."""
    max_steps: int = 30
    """The episode is truncated after this many commands."""
    format_penalty: float = 0.0
    """Additional reward of an inadmissible command."""

    def __post_init__(self) -> None:
        require_package("textworld", "textworld")
        for name in ("rooms", "objects", "quest_length"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: give at least 1")
        self.check_limits()
        self.files = _game_files(Path(self.games).expanduser()) if self.games else {}

    async def reset(self, task: Task, seed: int) -> Observation:
        with TEXTWORLD_LOCK:
            return self._reset(task)

    def _reset(self, task: Task) -> Observation:
        split = check_split(str(task.fields.get("split", "train")), "textworld")
        file = self._file(task.seed, split)
        textworld = require_package("textworld", "textworld")
        names = ("admissible_commands", "won", "lost", "description", "objective", "max_score")
        infos = textworld.EnvInfos(**dict.fromkeys((*names, "policy_commands", "intermediate_reward"), True))
        self.close_game()
        warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")  # of jericho, which plays it
        state = self.play(textworld.start(str(file), infos))
        text = "\n\n".join(filter(None, (state.get("objective") if self.show_goal else "", state.get("description"))))
        return self.start((text if state.get("description") else _without_status_line(state.feedback)).strip())

    def _file(self, seed: int, split: str) -> Path:
        if self.files:
            chosen = self.files[split] or self.files["train"] + self.files["held_out"]
            return chosen[derive(seed, "textworld") % len(chosen)]
        cache = Path(self.cache).expanduser()
        for number in range(MAX_DRAWS):
            drawn = derive(seed, "textworld", number) % 2**31
            if split_of((self.rooms, self.objects, self.quest_length, drawn)) == split:
                made = _made_game(self.rooms, self.objects, self.quest_length, drawn, cache)
                if made is not None:
                    return made
        raise ValueError(
            f"textworld: no game of split {split!r} with rooms={self.rooms}, objects={self.objects}, "
            f"quest_length={self.quest_length} in {MAX_DRAWS} draws: give more objects, or a shorter quest"
        )

    async def step(self, action: Message) -> Step:
        command = self.command(action)
        if not (command.isascii() and command.isprintable() and 0 < len(command) <= MAX_COMMAND):
            self.text = NO_COMMAND  # the interpreter of the game fails at such texts
            return self.answer(command, False, 0.0, False)
        valid = self.send(command)
        self.text = _without_status_line(self.state.feedback)
        most = self.state.get("max_score") or 1
        self.score = float(self.state.get("score") or 0) / most
        reward = float(self.won) + self.step_reward * float(self.state.get("intermediate_reward") or 0)
        return self.answer(command, valid, reward, self.won or bool(self.state["lost"]))

    def oracle(self) -> str | None:
        """The next command of the game's winning policy."""
        commands = self.state.get("policy_commands")
        return commands[0] if commands else None


def _without_status_line(text: str) -> str:
    return STATUS_LINE.sub("", text).strip()


def _game_files(path: Path) -> dict[str, tuple[Path, ...]]:
    """The game files of each split: by the first folder below `path`, else by a hash of the path below it."""
    found = [path] if path.is_file() else path.rglob("*.z8")
    files = {file: path.name if file == path else file.relative_to(path).as_posix() for file in found}
    require(bool(files), f"games={str(path)!r}: no game file is there; give a .z8 file, or a folder with some")
    splits: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for file, name in sorted(files.items()):
        first = name.partition("/")[0]
        splits[first if first in SPLITS else split_of(name)].append(file)
    empty = [split for split in SPLITS if not splits[split]]
    is_named = any(name.partition("/")[0] in SPLITS for name in files.values())
    require(
        not (empty and is_named),
        f"games={str(path)!r}: the subfolder {' and '.join(empty)!r} has no game file; make some, or give a folder "
        f"without the subfolders {' and '.join(SPLITS)}",
    )
    return {split: tuple(found) for split, found in splits.items()}


def _made_game(rooms: int, objects: int, quest_length: int, seed: int, cache: Path) -> Path | None:
    """The game file of a seed, from the cache or made now; None where the world of this seed has no such quest.

    A folder appears in the cache when its game is complete, so processes that make the same game do not conflict.
    """
    folder = cache / f"rooms{rooms}-objects{objects}-quest{quest_length}-seed{seed}"
    file = folder / "game.z8"
    if folder.exists():
        return file if file.exists() else None
    textworld = require_package("textworld", "textworld")
    no_quest = require_package("textworld.generator.chaining", "textworld").QuestGenerationError
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch, "game")
        made.mkdir()
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects = seed, rooms, objects
        options.quest_length, options.path = quest_length, str(made / "game.z8")
        with suppress(no_quest):
            textworld.make(options)
        with suppress(OSError):  # another process was faster
            os.rename(made, folder)
    return file if file.exists() else None


# ------------------------------------------------------------------------------------------------ ALFWorld

ALFWORLD_TASKS = (
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
)  # fmt: skip
ALFWORLD_SPLITS = ("train", "valid_seen", "valid_unseen")
PUT = re.compile(r"put (.+?) (?:in/on|in|on) (.+)")
"""The command of ALFWorld before 0.4, which calls it `move`."""


def _start_planner() -> Any:
    """TextWorld's environment of PDDL games, with ALFWorld's names of things. Each loads a library that stays."""
    demangler = require_package("alfworld.agents.environment.alfred_tw_env", "alfworld").AlfredDemangler
    textworld = require_package("textworld", "alfworld")
    infos = textworld.EnvInfos(admissible_commands=True, won=True, lost=True)
    return demangler(require_package("textworld.envs", "alfworld").PddlEnv(infos))


PLANNERS = IdlePool(_start_planner)


@dataclass(eq=False)
class ALFWorld(FileGame):
    """A household task of ALFWorld, as text; reward 1 when it is done.

    A row selects its game by `task_id` (the name of the trial) and `split`; without rows the task's seed selects one.
    """

    rules = RULES.format("go to cabinet 1")

    data: str = ""
    """Folder with `json_2.1.1`; by default the variable ALFWORLD_DATA, else `~/.cache/alfworld`."""
    tasks: Sequence[str] = ALFWORLD_TASKS
    """Kinds of tasks."""
    held_out: str = "valid_seen"
    """The games of evaluations: `valid_seen` or `valid_unseen`."""
    list_actions: bool = False
    """Whether observations list the admissible commands."""
    max_steps: int = 50
    """The episode is truncated after this many commands."""
    format_penalty: float = 0.0
    """Additional reward of an inadmissible command."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.tasks if name not in ALFWORLD_TASKS]
        require(not unknown, f"tasks: unknown {', '.join(unknown)}; give some of {', '.join(ALFWORLD_TASKS)}")
        require(self.held_out in ALFWORLD_SPLITS[1:], f"held_out={self.held_out!r}: give valid_seen or valid_unseen")
        self.check_limits()
        self.folder = Path(self.data or os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser()
        require_package("alfworld", "alfworld")
        if not (self.folder / "json_2.1.1" / "train").is_dir():
            raise MissingRequirementError(
                f"ALFWorld's games are not in {self.folder} (no folder json_2.1.1/train). Download them with: "
                "alfworld-download. Then set env.args.data, or ALFWORLD_DATA, to the folder that it names."
            )

    async def reset(self, task: Task, seed: int) -> Observation:
        file = self._file(task)
        self.walkthrough = tuple(json.loads(file.read_text(encoding="utf-8")).get("walkthrough") or ())
        self.close_game()
        with TEXTWORLD_LOCK:
            game = PLANNERS.take()
            game.load(str(file))
            state = self.play(game)
        return self.start(state.feedback.removeprefix("-= Welcome to TextWorld, ALFRED! =-").strip())

    def _file(self, task: Task) -> Path:
        """The game of the row, else one drawn by the task's seed among those that ALFWorld calls solvable."""
        split = str(task.fields.get("split", "train"))
        split = self.held_out if split == "held_out" else split
        require(split in ALFWORLD_SPLITS, f"split={split!r}: ALFWorld has {', '.join(ALFWORLD_SPLITS)}")
        if (trial := task.fields.get("task_id")) is not None:
            for one in dict.fromkeys((split, *ALFWORLD_SPLITS)):
                for file in _alfworld_games(self.folder / "json_2.1.1" / one, ALFWORLD_TASKS):
                    if file.parent.name == str(trial):
                        return file
            raise ValueError(f"task_id={trial!r}: no such game in {self.folder / 'json_2.1.1'}")
        files = _alfworld_games(self.folder / "json_2.1.1" / split, tuple(self.tasks))
        require(bool(files), f"{self.folder / 'json_2.1.1' / split}: no game.tw-pddl of the tasks is there")
        for number in range(MAX_DRAWS):
            file = files[derive(task.seed, "alfworld", number) % len(files)]
            if json.loads(file.read_text(encoding="utf-8")).get("solvable"):
                return file
        raise ValueError(f"{self.folder}: no solvable game in {MAX_DRAWS} draws. Run alfworld-generate.")

    async def step(self, action: Message) -> Step:
        command = self.command(action)
        if (put := PUT.fullmatch(command)) and command not in self.state["admissible_commands"]:
            command = f"move {put[1]} to {put[2]}"
        valid = self.send(command)
        self.text, self.score = self.state.feedback.strip(), float(self.won)
        return self.answer(command, valid, float(self.won), self.won)

    def close_game(self) -> None:
        """Keep the environment for the next episode, unless a call of it did not return."""
        game, self.game = self.game, None
        if game is not None and self.is_idle:
            PLANNERS.give_back(game)

    def oracle(self) -> str | None:
        """The next command of the game's walkthrough; None after a command that is not part of it."""
        return self.following(self.walkthrough)


@lru_cache(maxsize=16)
def _alfworld_games(folder: Path, tasks: tuple[str, ...]) -> tuple[Path, ...]:
    """The games of a split; ALFWorld does not play those with movable receptacles or sliced objects."""
    found = sorted(folder.glob("*/trial_*/game.tw-pddl"))
    kinds = {file: file.parent.parent.name for file in found}
    return tuple(
        file
        for file, kind in kinds.items()
        if kind.partition("-")[0] in tasks and "movable" not in kind and "Sliced" not in kind
    )


# ------------------------------------------------------------------------------------------------ ScienceWorld


JAVA_OPTIONS = "-XX:+UnlockExperimentalVMOptions -XX:hashCode=2"
"""Equal hash codes of objects: ScienceWorld lists things in the order of their hashes, which otherwise is random."""
JAVA_LOCK = threading.Lock()


def _start_simulator() -> Any:
    """A Java process with ScienceWorld; starting one takes seconds."""
    start = require_package("scienceworld", "scienceworld").ScienceWorldEnv
    with JAVA_LOCK:
        usual = os.environ.get("JAVA_TOOL_OPTIONS")
        os.environ["JAVA_TOOL_OPTIONS"] = " ".join(filter(None, (usual, JAVA_OPTIONS)))
        try:
            return start("")
        finally:
            if usual is None:
                del os.environ["JAVA_TOOL_OPTIONS"]
            else:
                os.environ["JAVA_TOOL_OPTIONS"] = usual


SIMULATORS = IdlePool(_start_simulator)


@dataclass(eq=False)
class ScienceWorld(CommandGame):
    """A task of ScienceWorld; the reward is what the score, from 0 to 1, gains.

    A row selects its task by `task_name` and `variation_idx`; without rows the task's seed selects a variation of
    ScienceWorld's training set, and in evaluations of its development or test set.
    """

    rules = RULES.format("look around")

    tasks: Sequence[str] = ("boil",)
    """Names of tasks, for example `boil` or `find-plant`; empty: all 30."""
    simplifications: str = "easy"
    """ScienceWorld's simplifications, separated by commas; `easy`: all of them; empty: none."""
    held_out: str = "dev"
    """The variations of evaluations: `dev` or `test`."""
    intermediate: bool = True
    """Whether every gain of score is a reward; otherwise only a finished task is, with 1."""
    list_actions: bool = False
    """Whether observations list the valid commands, which are often several hundred."""
    max_steps: int = 100
    """The episode is truncated after this many commands."""
    format_penalty: float = 0.0
    """Additional reward of a command that the simulator does not know."""

    def __post_init__(self) -> None:
        require(self.held_out in ("dev", "test"), f"held_out={self.held_out!r}: give dev or test")
        self.check_limits()
        known = list(require_package("scienceworld.constants", "scienceworld").ID2TASK.values())
        unknown = [name for name in self.tasks if name not in known]
        require(not unknown, f"tasks: unknown {', '.join(unknown)}; give some of {', '.join(known)}")
        self.names = list(self.tasks) or known
        if shutil.which("java") is None:
            raise MissingRequirementError("ScienceWorld needs Java 8 or later, and there is no java in PATH.")
        self.simulator: Any = None
        self.valid_actions: list[str] | None = None
        self.is_idle = True

    async def reset(self, task: Task, seed: int) -> Observation:
        self.simulator = self.simulator or SIMULATORS.take()
        self.is_idle = False
        self.name, self.variation = self._variation(task)
        self.simulator.load(self.name, self.variation, self.simplifications)
        self.simulator.server.reset()
        self.simulator.server.step("look around")
        self.valid_actions, self.is_idle = None, True
        goal = str(self.simulator.get_task_description()).removeprefix("Task Description:\n").strip()
        self.view = self._view()
        return self.start(f"{goal}\n\n{self.view}")

    def _variation(self, task: Task) -> tuple[str, int]:
        fields, simulator = task.fields, self.simulator
        name = str(fields.get("task_name") or self.names[derive(task.seed, "task") % len(self.names)])
        if (index := fields.get("variation_idx")) is not None:
            count = simulator.get_max_variations(name)
            require(0 <= int(index) < count, f"variation_idx={index}: {name} has variations 0 to {count - 1}")
            return name, int(index)
        split = str(fields.get("split", "train"))
        split = self.held_out if split == "held_out" else split
        require(split in ("train", "dev", "test"), f"split={split!r}: ScienceWorld has train, dev and test")
        known = _variations(simulator, name, split)
        return name, known[derive(task.seed, "variation") % len(known)]

    async def step(self, action: Message) -> Step:
        command = self.command(action)
        self.is_idle = False
        server = self.simulator.server
        self.text = str(server.step(command)).strip()
        before, self.score = self.score, round(100 * server.getScore()) / 100
        over = bool(server.getCompleted()) or self.score < 0
        self.valid_actions, self.is_idle, self.view = None, True, self._view()
        self.won = self.score >= 1
        reward = self.score - before if self.intermediate else float(self.won and before < 1)
        known = not self.text.startswith("No known action matches that input")
        return self.answer(command, known, reward, over)

    def _view(self) -> str:
        return f"{str(self.simulator.look()).strip()}\n{str(self.simulator.inventory()).strip()}"

    def actions(self) -> list[str]:
        if self.simulator is None:
            return []
        if self.valid_actions is None:
            self.valid_actions = sorted(set(self.simulator.get_valid_action_object_combinations()))
        return list(self.valid_actions)

    def oracle(self) -> str | None:
        """The next command of ScienceWorld's gold path; None after a command that is not part of it."""
        return self.following(_gold_path(self.name, self.variation, self.simplifications))

    def state_key(self) -> str:
        return hashlib.blake2b(f"{self.score}\n{self.view}".encode(), digest_size=12).hexdigest()

    def render(self) -> str:
        return f"{self.text}\n\n{self.view}"

    async def close(self) -> None:
        """Keep the simulator for the next episode; one that an episode left in the middle of a call is ended."""
        simulator, self.simulator = self.simulator, None
        if simulator is not None and self.is_idle:
            SIMULATORS.give_back(simulator)
        elif simulator is not None:
            simulator.close()


def _variations(simulator: Any, name: str, split: str) -> list[int]:
    """The variations of a split; the simulator lists those of the task that it has loaded."""
    simulator.load(name, 0, "")
    return list(getattr(simulator, f"get_variations_{split}")())


@lru_cache(maxsize=256)
def _gold_path(name: str, variation: int, simplifications: str) -> tuple[str, ...]:
    """ScienceWorld's solution, found in a simulator of its own: finding it changes the simulator's state."""
    simulator = SIMULATORS.take()
    simulator.load(name, variation, simplifications, generateGoldPath=True)
    path = tuple(simulator.get_gold_action_sequence())
    SIMULATORS.give_back(simulator)
    return path
