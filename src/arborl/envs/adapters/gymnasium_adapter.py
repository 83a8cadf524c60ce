"""Gymnasium in both directions: `from_gymnasium` and `to_gymnasium`.

Spaces are discrete or text. For image or continuous observations, give `describe`.
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

from arborl.envs.env import Env, Observation, Step, format_answer, parse_answer, parse_choice
from arborl.registry import add_current_folder, parse_part_name
from arborl.seeds import derive, generator
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
INVALID = "Not an action."
TERMINATED = "terminated"


# ------------------------------------------------------------------------------------------------ from Gymnasium


class GymnasiumEnv(Env):
    """A Gymnasium environment.

    The start state depends on the task's seed, later randomness on the episode's seed.

    An illegal message takes a random action, with `format_penalty` added to its reward. Otherwise, where every step has
    a negative reward, illegal messages would be optimal.

    Args:
        id: id for `gymnasium.make`, or the environment.
        kwargs: arguments of `gymnasium.make`.
        names: names of the discrete actions, in order; by default their numbers.
        instruction: the system message; by default one that lists the actions.
        describe: observation -> text, for spaces that are neither discrete nor text.
        format_penalty: added to the reward of the random action that replaces an illegal message.
        max_steps: the episode is truncated after this many messages; 0: Gymnasium's limit.
        success: `terminated`, or the minimum return of a successful episode. By default Gymnasium's
            `reward_threshold`; without one, success is not reported. An episode whose last message was illegal is
            never successful.

    Example:
        GymnasiumEnv("FrozenLake-v1", names=("Left", "Down", "Right", "Up"))
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
            raise ValueError(f"success={success!r}: give {TERMINATED!r}, or the minimum return of a success")
        self.gym = id if isinstance(id, gymnasium.Env) else _make(id, dict(kwargs or {}))
        self.names = _names(self.gym, names)
        self.first = int(getattr(self.gym.action_space, "start", 0))
        self.describe = describe
        if describe is None and not is_textual_space(self.gym.observation_space):
            raise ValueError(
                f"the observations of {self.gym} are {self.gym.observation_space}: neither discrete nor text. "
                "Give describe=, a function from an observation to a text."
            )
        names_or_text = (
            f"one of {', '.join(self.names)}: <answer>{self.names[0]}" if self.names else "a text: <answer>text"
        )
        self.instruction = instruction or f"Each turn, answer with {names_or_text}</answer>."
        self.format_penalty, self.max_steps = format_penalty, max_steps
        self.success = getattr(self.gym.spec, "reward_threshold", None) if success is None else success

    async def reset(self, task: Task, seed: int) -> Observation:
        observation, _ = self.gym.reset(seed=derive(task.seed, "gymnasium") % 2**31)
        self.gym.unwrapped.np_random = generator(seed, "gymnasium")
        self.text, self.steps, self.valid = self._describe(observation), 0, 0
        self.total = self.env_return = 0.0
        self.seed, self.is_legal, self.terminated = seed, False, False
        return Observation((Message("system", self.instruction), Message("user", self.text)), state_key=self.text)

    async def step(self, action: Message) -> Step:
        chosen = self._read(action.content)
        self.is_legal = chosen is not None
        taken = chosen
        if not self.is_legal:  # a random action, seeded by the episode's seed and the step
            self.gym.action_space.seed(derive(self.seed, "instead", self.steps) % 2**31)
            taken = self.gym.action_space.sample()
        observation, env_reward, terminated, truncated, _ = self.gym.step(taken)
        self.text, self.terminated = self._describe(observation), bool(terminated)
        reward = float(env_reward) + (0.0 if self.is_legal else self.format_penalty)
        self.steps += 1
        self.valid += self.is_legal
        self.env_return += float(env_reward)
        self.total += reward
        shown = self.text
        if not self.is_legal:
            name = self.names[int(taken) - self.first] if self.names else str(taken)
            shown = f"{INVALID} {name} was taken instead.\n{self.text}"
        late = bool(truncated) or 0 < self.max_steps <= self.steps
        return Step(
            Observation((Message("user", shown),), self.text),
            reward=reward,
            terminated=self.terminated,
            truncated=late and not self.terminated,
            info={"valid": float(self.is_legal)},
        )

    def _read(self, text: str) -> Any:
        if self.names:
            name = parse_choice(text, self.names)
            return None if name is None else self.first + self.names.index(name)
        found = parse_answer(text)
        found = text if found is None else found
        return found if self.gym.action_space.contains(found) else None

    def _describe(self, observation: Any) -> str:
        return self.describe(observation) if self.describe else ESCAPES.sub("", observation_text(observation))

    def metrics(self) -> Metrics:
        """`success`; without a criterion, `judged` is 0: rewards judge the episode."""
        numbers = {"return": self.total, "valid": self.valid / max(self.steps, 1)}
        if self.success is None:
            return {"judged": 0.0, **numbers}
        won = self.terminated if isinstance(self.success, str) else self.env_return >= self.success
        return {"success": float(won and self.is_legal), **numbers}

    def actions(self) -> list[str]:
        return [format_answer(name) for name in self.names]

    def state_key(self) -> str:
        return self.text

    def snapshot(self) -> Any:
        try:
            return copy.deepcopy(vars(self))
        except Exception:  # it holds a window, process or socket
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


def from_gymnasium(env: str | gymnasium.Env[Any, Any], **arguments: Any) -> GymnasiumEnv:
    """A Gymnasium environment as an `Env`; see `GymnasiumEnv` for the arguments.

    Example:
        env = from_gymnasium("CliffWalking-v1", names=("Up", "Right", "Down", "Left"), max_steps=30)
    """
    return GymnasiumEnv(env, **arguments)


def _make(id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    if ":" in id:  # Gymnasium imports the module before the colon
        if parse_part_name(id) is None:
            raise ValueError(f"{id!r} is not an id of Gymnasium. Write NAME-v0, or package.module:NAME-v0.")
        add_current_folder()
    try:
        return gymnasium.make(id, **kwargs)
    except gymnasium.error.Error as error:
        raise ValueError(f"Gymnasium cannot make {id!r}: {error}") from error


def _names(gym: gymnasium.Env[Any, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Action names; empty for text actions."""
    space = gym.action_space
    if isinstance(space, spaces.Text):
        return ()
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"the actions of {gym} are {space}: only discrete and text actions are supported")
    if names and len(names) != space.n:
        raise ValueError(f"names={list(names)}: {gym} has {space.n} actions; name all of them")
    return tuple(names) or tuple(str(int(space.start) + number) for number in range(int(space.n)))


def is_textual_space(space: spaces.Space[Any]) -> bool:
    """Whether observations of the space have a text form: discrete, text, and groups of these."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(map(is_textual_space, space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, spaces.Discrete | spaces.Text | spaces.MultiDiscrete | spaces.MultiBinary)


def observation_text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return ", ".join(f"{name}: {observation_text(part)}" for name, part in observation.items())
    if isinstance(observation, tuple | list | np.ndarray):
        return " ".join(map(observation_text, observation))
    return str(observation)


# ------------------------------------------------------------------------------------------------ to Gymnasium


class AnyTextSpace(spaces.Text):
    """Texts of any characters, up to a length. (Gymnasium's `Text` needs a character set.)"""

    def __init__(self, max_length: int):
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class MoveSpace(AnyTextSpace):
    """Any text; a sample is a legal action in the current state."""

    def __init__(self, env: Env, max_length: int):
        super().__init__(max_length)
        self.env = env

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        text = self.env.random(self.np_random)
        return "hello" if text is None else text


class ArborGymnasiumEnv(gymnasium.Env[str, str]):
    """An `Env` with Gymnasium's interface; observations and actions are texts.

    Args:
        env: the environment.
        task: seed -> task; by default a task of the training split with that seed.
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
        self.env, self.task, self.render_mode = env, task, render_mode
        self.observation_space, self.action_space = AnyTextSpace(max_length), MoveSpace(env, max_length)

        def make_copy(render_mode: str | None = None, **_: Any) -> ArborGymnasiumEnv:
            return ArborGymnasiumEnv(copy.deepcopy(env), task, render_mode, max_length)

        self.spec = EnvSpec(f"arborl/{type(env).__name__}-v0", entry_point=make_copy)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with a task drawn from the seed, or with `options["task"]`."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**62))
        task = (options or {}).get("task")
        if task is None and self.task is not None:
            task = self.task(drawn)
        task = task or Task(f"gymnasium/{drawn}", seed=drawn, fields={"split": "train"})
        observation = _run_coroutine(self.env.reset(task, derive(drawn, "episode")))
        return _text(observation), self._info(observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step = _run_coroutine(self.env.step(Message("assistant", action)))
        info = {**self._info(step.observation), **step.info}
        return _text(step.observation), float(step.reward), step.terminated, step.truncated, info

    def _info(self, observation: Observation) -> dict[str, Any]:
        return {"state_key": observation.state_key, "metrics": dict(self.env.metrics())}

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return self.env.render()
        if self.render_mode == "rgb_array":
            from arborl.envs.games.drawing import draw_text_page

            return np.asarray((self.env.picture() or draw_text_page(self.env.render())).convert("RGB"), dtype=np.uint8)
        return None

    def close(self) -> None:
        _run_coroutine(self.env.close())


def to_gymnasium(
    env: Env, task: Callable[[int], Task] | None = None, render_mode: str | None = None, max_length: int = 100_000
) -> ArborGymnasiumEnv:
    """An `Env` as a Gymnasium environment; it passes Gymnasium's `check_env`.

    Example:
        lake = to_gymnasium(FrozenLake())
        seen, info = lake.reset(seed=7)
        seen, reward, terminated, truncated, info = lake.step(lake.action_space.sample())
    """
    return ArborGymnasiumEnv(env, task, render_mode, max_length)


def _text(observation: Observation) -> str:
    return "\n".join(message.content for message in observation.messages)


def _run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, also inside a running event loop (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
