"""Gymnasium both ways: its environments as ours (`from_gymnasium`), ours as its (`to_gymnasium`).

Spaces are discrete or text. A pictured or continuous observation has no text of its own: give `describe`.
"""

from __future__ import annotations

import asyncio
import copy
import re
import string
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from arborl.envs.answers import answer, read_answer, read_choice
from arborl.envs.env import Env, Observation, Step
from arborl.registry import add_current_folder, parse_part_name
from arborl.seeds import derive, generator
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
INVALID = "Not an action."
TERMINATED = "terminated"


# ------------------------------------------------------------------------------------------------ theirs as ours


class FromGymnasium(Env):
    """An environment of Gymnasium, by its id.

    The start comes from the task's seed; what happens by chance later, from the episode's.

    A message that is no action does not stop the clock: a random action is taken in its place, and `format_penalty`
    comes on top of what that gave. To say nothing is then worth as much as to play at random, less the penalties,
    whatever rewards the environment gives: where every step costs something it would otherwise be best to do nothing.

    Args:
        id: of the environment, as `gymnasium.make` takes it; or the environment itself.
        kwargs: for `gymnasium.make`.
        names: what the discrete actions are called, in order; their numbers where nothing is said.
        instruction: the system message; by default one that lists the actions.
        describe: observation -> text, for spaces that are neither discrete nor text.
        format_penalty: of a message that is no action, on top of what the random action in its place gave.
        max_steps: the episode is truncated after this many messages; 0 leaves that to Gymnasium.
        success: when an episode counts as solved: `terminated` (Gymnasium ended it), or a number, which its rewards,
            added up, must reach. By default the `reward_threshold` that Gymnasium knows; where it knows none, success
            is not reported. An episode whose last action was not the agent's own is never solved.

    Example:
        FromGymnasium("FrozenLake-v1", names=("Left", "Down", "Right", "Up"))
    """

    tagged = True

    def __init__(
        self,
        id: str | gymnasium.Env[Any, Any] = "FrozenLake-v1",
        kwargs: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
        instruction: str = "",
        describe: Callable[[Any], str] | None = None,
        format_penalty: float = -0.05,
        max_steps: int = 0,
        success: float | str | None = None,
    ):
        if format_penalty > 0:
            raise ValueError(f"format_penalty={format_penalty}: a penalty is negative or zero")
        if isinstance(success, bool) or (isinstance(success, str) and success != TERMINATED):
            raise ValueError(f"success={success!r}: give {TERMINATED!r}, or the rewards that make an episode a success")
        self.gym = id if isinstance(id, gymnasium.Env) else _make(id, dict(kwargs or {}))
        self.names = _names(self.gym, names)
        self.describe = describe
        if describe is None and not readable(self.gym.observation_space):
            raise ValueError(
                f"the observations of {self.gym} are {self.gym.observation_space}: that is neither discrete nor text. "
                "Give describe=, a function from an observation to a text."
            )
        self.instruction = instruction or self._instruction()
        self.format_penalty, self.max_steps = format_penalty, max_steps
        self.success = getattr(self.gym.spec, "reward_threshold", None) if success is None else success

    def _instruction(self) -> str:
        if not self.names:
            return "Each turn, answer with a text: <answer>text</answer>."
        return f"Each turn, answer with one of {', '.join(self.names)}: <answer>{self.names[0]}</answer>."

    async def reset(self, task: Task, seed: int) -> Observation:
        seen, _ = self.gym.reset(seed=derive(task.seed, "gymnasium") % 2**31)
        self.gym.unwrapped.np_random = generator(seed, "gymnasium")
        self.text, self.steps, self.valid = self._describe(seen), 0, 0
        self.total = self.given = 0.0
        self.seed, self.own, self.terminated = seed, False, False
        return Observation((Message("system", self.instruction), Message("user", self.text)), state_key=self.text)

    async def step(self, action: Message) -> Step:
        chosen = self._read(action.content)
        self.own = chosen is not None
        taken = chosen if self.own else self._random()
        seen, given, terminated, truncated, _ = self.gym.step(taken)
        self.text, self.terminated = self._describe(seen), bool(terminated)
        reward = float(given) + (0.0 if self.own else self.format_penalty)
        self.steps += 1
        self.valid += self.own
        self.given += float(given)
        self.total += reward
        shown = self.text if self.own else f"{INVALID} {self._name(taken)} was taken instead.\n{self.text}"
        late = bool(truncated) or 0 < self.max_steps <= self.steps
        return Step(
            Observation((Message("user", shown),), self.text),
            reward=reward,
            terminated=self.terminated,
            truncated=late and not self.terminated,
            info={"valid": float(self.own)},
        )

    def _random(self) -> Any:
        """Any action; which one follows from the episode's seed and how many messages there have been."""
        self.gym.action_space.seed(derive(self.seed, "instead", self.steps) % 2**31)
        return self.gym.action_space.sample()

    def _name(self, action: Any) -> str:
        start = int(getattr(self.gym.action_space, "start", 0))
        return self.names[int(action) - start] if self.names else str(action)

    def _read(self, text: str) -> Any:
        if self.names:
            name = read_choice(text, self.names)
            start = int(getattr(self.gym.action_space, "start", 0))
            return None if name is None else start + self.names.index(name)
        said = read_answer(text)
        said = text if said is None else said
        return said if self.gym.action_space.contains(said) else None

    def _describe(self, seen: Any) -> str:
        return self.describe(seen) if self.describe else ESCAPES.sub("", in_words(seen))

    def metrics(self) -> Metrics:
        """`success` by the rule there is. Where there is none the episode is not judged here: rewards may do so."""
        numbers = {"return": self.total, "valid": self.valid / max(self.steps, 1)}
        if self.success is None:
            return {"judged": 0.0, **numbers}
        won = self.terminated if isinstance(self.success, str) else self.given >= self.success
        return {"success": float(won and self.own), **numbers}

    def actions(self) -> list[str]:
        return [answer(name) for name in self.names]

    def state_key(self) -> str:
        return self.text

    def snapshot(self) -> Any:
        try:
            return copy.deepcopy(vars(self))
        except Exception:  # windows, processes and sockets cannot be copied
            return None

    def render(self) -> str:
        shown = self.gym.render() if self.gym.render_mode == "ansi" else None
        return ESCAPES.sub("", str(shown)) if shown is not None else self.text

    def picture(self) -> Image | None:
        if self.gym.render_mode != "rgb_array":
            return None
        from PIL import Image

        return Image.fromarray(np.asarray(self.gym.render(), dtype=np.uint8)).convert("RGB")

    async def close(self) -> None:
        self.gym.close()


def from_gymnasium(env: str | gymnasium.Env[Any, Any], **arguments: Any) -> FromGymnasium:
    """An environment of Gymnasium as one of ours; see `FromGymnasium` for the arguments.

    Example:
        env = from_gymnasium("CliffWalking-v1", names=("Up", "Right", "Down", "Left"), max_steps=30)
    """
    return FromGymnasium(env, **arguments)


def _make(id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    if ":" in id:  # Gymnasium imports what stands before it
        if parse_part_name(id) is None:
            raise ValueError(f"{id!r} is not an id of Gymnasium. Write NAME-v0, or package.module:NAME-v0.")
        add_current_folder()
    try:
        return gymnasium.make(id, **kwargs)
    except gymnasium.error.Error as error:
        raise ValueError(f"Gymnasium cannot make {id!r}: {error}") from error


def _names(gym: gymnasium.Env[Any, Any], given: Sequence[str]) -> tuple[str, ...]:
    """What the actions are called; empty where an action is a text."""
    space = gym.action_space
    if isinstance(space, spaces.Text):
        return ()
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"the actions of {gym} are {space}: only discrete and text actions can be said in words")
    if given and len(given) != space.n:
        raise ValueError(f"names={list(given)}: {gym} has {space.n} actions; name them all")
    return tuple(given) or tuple(str(int(space.start) + number) for number in range(int(space.n)))


def readable(space: spaces.Space[Any]) -> bool:
    """Whether what the space holds can be said in words: numbers that count, texts, and groups of them."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(map(readable, space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, spaces.Discrete | spaces.Text | spaces.MultiDiscrete | spaces.MultiBinary)


def in_words(seen: Any) -> str:
    """An observation as text.

    Example:
        in_words({"row": np.int64(3), "goal": "G"})      # 'row: 3, goal: G'
    """
    if isinstance(seen, Mapping):
        return ", ".join(f"{name}: {in_words(part)}" for name, part in seen.items())
    if isinstance(seen, tuple | list | np.ndarray):
        return " ".join(map(in_words, seen))
    return str(seen)


# ------------------------------------------------------------------------------------------------ ours as theirs


class AnyText(spaces.Text):
    """Texts of any characters, up to a length. (Gymnasium's own space wants a list of the characters.)"""

    def __init__(self, max_length: int):
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class Moves(AnyText):
    """Any text may be said; a sample is a valid move of the environment as it stands."""

    def __init__(self, env: Env, max_length: int):
        super().__init__(max_length)
        self.env = env

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        text = self.env.random(self.np_random)
        return "hello" if text is None else text


class ToGymnasium(gymnasium.Env[str, str]):
    """One of our environments in Gymnasium's shape: observations and actions are texts.

    Args:
        env: the environment.
        task: seed -> the task to open; by default one of the training split with that seed.
        render_mode: `ansi` (text) or `rgb_array`.
        max_length: characters of an observation or an action.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}

    def __init__(
        self,
        env: Env,
        task: Callable[[int], Task] | None = None,
        render_mode: str | None = None,
        max_length: int = 100_000,
    ):
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode={render_mode!r}: give one of {', '.join(self.metadata['render_modes'])}")
        self.env, self.task, self.render_mode = env, task or _task, render_mode
        self.observation_space, self.action_space = AnyText(max_length), Moves(env, max_length)

        def again(render_mode: str | None = None, **_: Any) -> ToGymnasium:
            return ToGymnasium(copy.deepcopy(env), task, render_mode, max_length)

        self.spec = EnvSpec(f"arborl/{type(env).__name__}-v0", entry_point=again)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Open a task drawn from the seed, or the one in `options["task"]`."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**62))
        task = (options or {}).get("task") or self.task(drawn)
        seen = _wait(self.env.reset(task, derive(drawn, "episode")))
        return _text(seen), self._info(seen)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step = _wait(self.env.step(Message("assistant", action)))
        info = {**self._info(step.observation), **step.info}
        return _text(step.observation), float(step.reward), step.terminated, step.truncated, info

    def _info(self, seen: Observation) -> dict[str, Any]:
        return {"state_key": seen.state_key, "metrics": dict(self.env.metrics())}

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return self.env.render()
        if self.render_mode == "rgb_array":
            from arborl.envs.text_picture import write

            return np.asarray((self.env.picture() or write(self.env.render())).convert("RGB"), dtype=np.uint8)
        return None

    def close(self) -> None:
        _wait(self.env.close())


def to_gymnasium(
    env: Env, task: Callable[[int], Task] | None = None, render_mode: str | None = None, max_length: int = 100_000
) -> ToGymnasium:
    """One of our environments as one of Gymnasium's; it passes Gymnasium's `check_env`.

    Example:
        lake = to_gymnasium(FrozenLake())
        seen, info = lake.reset(seed=7)
        seen, reward, terminated, truncated, info = lake.step(lake.action_space.sample())
    """
    return ToGymnasium(env, task, render_mode, max_length)


def _task(seed: int) -> Task:
    return Task(f"gymnasium/{seed}", seed=seed, fields={"split": "train"})


def _text(seen: Observation) -> str:
    return "\n".join(message.content for message in seen.messages)


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """The result of async work, from code that is not; also inside a running event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
