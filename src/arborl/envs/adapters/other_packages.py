"""Environments of other packages: reasoning_gym, textarena, OpenEnv servers."""

from __future__ import annotations

import copy
import importlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from arborl.envs.env import Env, Observation, Step, format_answer, parse_answer, split_of, task_split
from arborl.envs.wrapper import await_if_needed
from arborl.errors import ConfigError
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task


class MissingRequirementError(ConfigError):
    """An environment needs a package, a program or data that this machine does not have."""


def require_package(name: str, extra: str) -> Any:
    """Import the package; an error with the install command when it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingRequirementError(
            f"the environment {extra!r} needs the package {name!r} ({error}). Write: pip install 'arborl[{extra}]'"
        ) from error


RULES = "Answer the question. Give your final answer as <answer>answer</answer>."
MAX_DRAWS = 200
"""Problems drawn before an error."""


@dataclass(eq=False)
class ReasoningGym(Env):
    """One problem of a `reasoning_gym` data set; the reward is the data set's score."""

    blocking = False
    tagged = True

    dataset: str = "leg_counting"
    """Name, for example `leg_counting` or `chain_sum`."""
    config: Mapping[str, Any] | None = None
    """Arguments of the data set."""
    format_penalty: float = 0.0
    """Reward of a message without an answer."""

    def __post_init__(self) -> None:
        if self.format_penalty > 0:
            raise ValueError(f"format_penalty={self.format_penalty}: a penalty is negative or zero")
        self._make(0)  # raises for an unknown name or argument

    def _make(self, seed: int) -> Any:
        gym = require_package("reasoning_gym", "reasoning_gym")
        try:
            return gym.create_dataset(self.dataset, **{**(self.config or {}), "seed": seed, "size": 1})
        except (TypeError, AssertionError) as error:
            raise ValueError(f"dataset={self.dataset!r}, config={self.config or {}}: {error}") from error

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "reasoning_gym")
        for number in range(MAX_DRAWS):
            self.seed = derive(task.seed, "reasoning_gym", number) % 2**32
            self.entry = self._make(self.seed)[0]
            if split_of(self.entry["question"]) == split:
                break
        else:
            raise ValueError(f"{self.dataset}: no problem of split {split!r} in {MAX_DRAWS} draws")
        self.reply: str | None = None
        self.score = 0.0
        return Observation(
            (Message("system", RULES), Message("user", self.entry["question"])), state_key=self.state_key()
        )

    async def step(self, action: Message) -> Step:
        found = parse_answer(action.content)
        self.reply = action.content
        if found is not None:
            self.score = float(self._make(self.seed).score_answer(found, self.entry))
        return Step(
            Observation((), state_key=self.state_key()),
            reward=self.format_penalty if found is None else self.score,
            terminated=True,
            info={"valid": float(found is not None)},
        )

    def metrics(self) -> Metrics:
        return {"success": float(self.score >= 1.0), "score": self.score}

    def oracle(self) -> str | None:
        known = self.entry.get("answer")
        return None if known is None else format_answer(str(known))

    def state_key(self) -> str:
        return self.entry["question"] if self.reply is None else f"{self.entry['question']}/answered"

    def render(self) -> str:
        return self.entry["question"] if self.reply is None else f"{self.entry['question']}\n{self.reply}"


GLOBAL_RANDOM_LOCK = threading.Lock()


class TextArena(Env):
    """A single-player game of `textarena`.

    textarena uses Python's global random generator; every call swaps in the episode's random state, so that concurrent
    episodes are independent.

    Args:
        game: id, for example `GuessTheNumber-v0` or `Wordle-v0`.
        kwargs: arguments of the game.
        success: minimum reward of a success.
    """

    blocking = False

    def __init__(self, game: str = "GuessTheNumber-v0", kwargs: Mapping[str, Any] | None = None, success: float = 1.0):
        self.arena = require_package("textarena", "textarena").make(f"{game}-raw", **dict(kwargs or {}))
        self.success = success

    def __deepcopy__(self, memo: Any) -> TextArena:
        made = object.__new__(TextArena)
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    async def reset(self, task: Task, seed: int) -> Observation:
        self.random_state = random.Random(derive(task.seed, "textarena")).getstate()
        with self._episode_random_state():
            self.arena.reset(num_players=1, seed=derive(task.seed, "textarena") % 2**32)
            text = self._new_text()
        self.random_state = random.Random(derive(seed, "textarena")).getstate()
        self.reward, self.over, self.transcript = 0.0, False, text
        return Observation((Message("user", text),), state_key=self.transcript)

    async def step(self, action: Message) -> Step:
        errors = self._errors()
        with self._episode_random_state():
            self.over, _ = self.arena.step(action.content)
            text = self._new_text()
        invalid = self._errors() > errors
        if self.over:
            rewards, info = self.arena.close()
            self.reward = float((rewards or {}).get(0, 0.0))
            invalid = invalid or bool(info.get(0, {}).get("invalid_move"))
        self.transcript = f"{self.transcript}\n> {action.content}\n{text}"
        return Step(
            Observation((Message("user", text),), state_key=self.transcript),
            reward=self.reward,
            terminated=self.over,
            info={"valid": float(not invalid)},
        )

    def _errors(self) -> int:
        return int(getattr(self.arena.state, "error_count", 0))

    def _new_text(self) -> str:
        """Game messages since the last call."""
        _, messages = self.arena.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender == -1).strip()

    @contextmanager
    def _episode_random_state(self) -> Iterator[None]:
        """Swap Python's global random state for the episode's; one game at a time in all threads."""
        with GLOBAL_RANDOM_LOCK:
            global_state = random.getstate()
            random.setstate(self.random_state)
            try:
                yield
            finally:
                self.random_state = random.getstate()
                random.setstate(global_state)

    def metrics(self) -> Metrics:
        return {"success": float(self.over and self.reward >= self.success), "score": self.reward}

    def state_key(self) -> str:
        return self.transcript

    def render(self) -> str:
        return self.transcript


@dataclass(eq=False)
class OpenEnv(Env):
    """An environment behind an OpenEnv server.

    `reset` sends the task's seed; determinism depends on the server. Snapshots are not supported.
    """

    url: str = "http://localhost:8000"
    """Server address, `http://…` or `ws://…`."""
    action_field: str = "message"
    """The action is `{action_field: the agent's message}`."""
    observation_field: str = ""
    """Field of the observation that is shown; by default all fields as JSON."""
    client: Callable[[], Any] | None = None
    """Returns a client; by default OpenEnv's `GenericEnvClient(url)`."""
    max_steps: int = 32
    """The episode is truncated after this many steps."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps}: give at least 1")
        if self.client is None:
            require_package("openenv", "openenv")
        self._client: Any = None

    async def reset(self, task: Task, seed: int) -> Observation:
        if self._client is None and self.client is not None:
            self._client = self.client()
        elif self._client is None:
            self._client = require_package("openenv.core", "openenv").GenericEnvClient(self.url)
        result = await await_if_needed(self._client.reset(seed=derive(task.seed, "openenv") % 2**31))
        self.total, self.steps, self.text = 0.0, 0, self._read(result.observation)
        return Observation((Message("user", self.text),), state_key=self.text)

    async def step(self, action: Message) -> Step:
        result = await await_if_needed(self._client.step({self.action_field: action.content}))
        self.text, self.steps = self._read(result.observation), self.steps + 1
        reward = 0.0 if result.reward is None else float(result.reward)
        self.total += reward
        return Step(
            Observation((Message("user", self.text),), state_key=self.text),
            reward=reward,
            terminated=bool(result.done),
            truncated=not result.done and self.steps >= self.max_steps,
        )

    def _read(self, observation: Any) -> str:
        fields = observation if isinstance(observation, Mapping) else vars(observation)
        if not self.observation_field:
            return json.dumps(dict(fields), default=str, sort_keys=True)
        if self.observation_field not in fields:
            raise ValueError(f"observation_field={self.observation_field!r}: the observation has {', '.join(fields)}")
        return str(fields[self.observation_field])

    def metrics(self) -> Metrics:
        return {"return": self.total}

    def snapshot(self) -> None:
        return None

    def state_key(self) -> str:
        return self.text

    def render(self) -> str:
        return self.text

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await await_if_needed(client.close())
