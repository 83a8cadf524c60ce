"""Environments of GEM (`gem-llm`): games, reasoning_gym, mathematics, code and questions, optionally with Python.

GEM uses the global random generators of Python and NumPy; every call swaps in the episode's state. Environments are
used again by later episodes of the process: some hold a data set and a process of their own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from arborl.envs.adapters.other_packages import (
    GLOBAL_RANDOM_LOCK,
    MAX_DRAWS,
    MissingRequirementError,
    require_package,
)
from arborl.envs.adapters.text_games import IdlePool
from arborl.envs.env import Env, Observation, Step, split_of, task_split
from arborl.envs.games.text_game import require
from arborl.sandbox import Sandbox
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator

LARGE = 1000
"""Values of an environment with more items (word lists) are no part of its state."""
NO_DEPENDENCIES = "pip install --no-deps gem-llm==0.1.0"
"""GEM's own requirements exclude Hydra's (another version of antlr4); the extra has those that fit."""
NLTK_RESOURCE = re.compile(r"Resource (?:\x1b\[\d+m)?(\w+)\S* not found")
POOLS: dict[str, IdlePool] = {}
POOLS_LOCK = threading.Lock()


@dataclass(eq=False)
class Gem(Env):
    """An environment of GEM.

    The message goes to GEM as it is; most environments read an action from `\\boxed{…}`. Rewards are GEM's.
    """

    isolated = True

    id: str = "game:Sokoban-v0-easy"
    """Name, for example `game:Mastermind-v0-hard`, `rg:leg_counting` or `math:GSM8K`."""
    kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment, for example `dataset_name`, a data set of the hub or a folder."""
    python: bool = False
    """Whether code in a message (`<python>…</python>` or a Python code block) is run, in Arbor's sandbox."""
    hold_out: Literal["problem", "seed"] = "problem"
    """What is held out: one problem in ten, by a hash of it, or one seed in ten, for environments of few problems."""
    success: float = 1.0
    """Minimum reward of a success, of the last message."""

    def __post_init__(self) -> None:
        require(self.hold_out in ("problem", "seed"), f"hold_out={self.hold_out!r}: give problem or seed")
        self.game: Any = None
        pool = self._pool()
        pool.give_back(pool.take())  # raises for an unknown name or argument

    def _pool(self) -> IdlePool:
        key = json.dumps([self.id, dict(self.kwargs or {}), self.python], sort_keys=True, default=repr)
        with POOLS_LOCK:
            if key not in POOLS:
                POOLS[key] = IdlePool(lambda: _make(self.id, dict(self.kwargs or {}), self.python))
            return POOLS[key]

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "gem")
        self.game = self.game or self._pool().take()
        self.is_idle = False
        for number in range(MAX_DRAWS):
            drawn = derive(task.seed, "gem", number) % 2**31
            if self.hold_out == "seed" and split_of((self.id, drawn)) != split:
                continue
            self.random_states = _random_states(drawn)
            with self._episode_random_states():
                if hasattr(self.game.unwrapped, "idx"):
                    self.game.unwrapped.idx = 0  # some count their episodes, and change with the number
                text, info = self.game.reset(seed=drawn)
            if self.hold_out == "seed" or split_of(self._state()) == split:
                break
        else:
            raise ValueError(
                f"{self.id}: no problem of split {split!r} in {MAX_DRAWS} draws: it has few different problems. Write "
                "env.args.hold_out=seed, which holds out seeds instead"
            )
        self.random_states = _random_states(derive(seed, "gem") % 2**31)
        self.is_idle, self.is_over, self.last_reward, self.total, self.steps = True, False, 0.0, 0.0, 0
        return self._observation(text, info)

    async def step(self, action: Message) -> Step:
        self.is_idle = False
        with self._episode_random_states():
            text, reward, terminated, truncated, info = self.game.step(action.content)
        self.is_idle = True
        self.last_reward = float(reward)
        self.total += self.last_reward
        self.steps += 1
        self.is_over = bool(terminated or truncated)
        return Step(
            self._observation(text, info),
            reward=self.last_reward,
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
        )

    def _observation(self, text: str, info: Mapping[str, Any]) -> Observation:
        constants = require_package("gem.utils.constants", "gem")
        parts = (info.get("prefix"), "" if text == constants.TERMINAL_STATE else text, info.get("suffix"))
        self.text = "\n".join(str(part).strip("\n") for part in parts if part)
        return Observation((Message("user", self.text),) if self.text else (), state_key=self.state_key())

    @contextmanager
    def _episode_random_states(self) -> Iterator[None]:
        """Swap the global random states for the episode's; one game at a time in all threads."""
        with GLOBAL_RANDOM_LOCK:
            before = random.getstate(), np.random.get_state()
            random.setstate(self.random_states[0])
            np.random.set_state(self.random_states[1])
            try:
                yield
            finally:
                self.random_states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])

    def _state(self) -> str:
        """The plain values of GEM's environment, which contain the problem."""
        values = sorted(vars(self.game.unwrapped).items())
        return "\n".join(f"{name}={text}" for name, value in values if name != "idx" and (text := _plain(value)))

    def metrics(self) -> Metrics:
        won = self.is_over and self.last_reward >= self.success
        return {"success": float(won), "return": self.total, "steps": float(self.steps)}

    def random(self, rng: Generator) -> str | None:
        """GEM's random action; None for environments without one."""
        kept, self.random_states = self.random_states, _random_states(int(rng.integers(2**31)))
        try:
            with self._episode_random_states():
                text = str(self.game.unwrapped.sample_random_action())
        except NotImplementedError:
            return None
        finally:
            self.random_states = kept
        return text if "\\boxed" in text else f"\\boxed{{{text}}}"

    def state_key(self) -> str:
        return hashlib.blake2b(self._state().encode(), digest_size=12).hexdigest()

    def render(self) -> str:
        return self.text

    def snapshot(self) -> None:
        return None

    async def close(self) -> None:
        """Keep the environment for the next episode, unless a call of it did not return."""
        game, self.game = self.game, None
        if game is not None and self.is_idle:
            self._pool().give_back(game)
        elif game is not None and hasattr(game, "close"):
            game.close()


def _random_states(seed: int) -> tuple[Any, Any]:
    return random.Random(seed).getstate(), np.random.RandomState(seed).get_state()


def _plain(value: Any) -> str:
    """A value of numbers and texts as text, equal for equal values; empty for any other and for a large one."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=repr)
    if not isinstance(value, list | tuple) or len(value) > LARGE:
        return ""
    parts = [_plain(part) for part in value]
    return f"[{', '.join(parts)}]" if all(parts) else ""


# ------------------------------------------------------------------------------------------------ making one


def _make(id: str, kwargs: dict[str, Any], python: bool) -> Any:
    gem = _import_gem()
    known = require_package("gem.envs.registration", "gem").ENV_REGISTRY
    if id not in known:
        near = [name for name in known if name.rpartition(":")[2].lower() == id.rpartition(":")[2].lower()]
        names = near or [name for name in known if name.startswith("game:")]
        raise ValueError(f"id={id!r}: GEM has {', '.join(names)}, …")
    with GLOBAL_RANDOM_LOCK:
        before = random.getstate(), np.random.get_state()
        try:
            made = gem.make(id, **kwargs)
        except (ImportError, OSError) as error:
            raise MissingRequirementError(f"{id} cannot be made: {type(error).__name__}: {error}") from error
        except Exception as error:
            if (resource := NLTK_RESOURCE.search(str(error))) is not None:
                raise MissingRequirementError(
                    f"{id} needs data of NLTK. Write: python -m nltk.downloader {resource[1]}"
                ) from error
            raise ValueError(f"id={id!r}, kwargs={kwargs}: {type(error).__name__}: {error}") from error
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
    if not python:
        return made
    return require_package("gem.tools.tool_env_wrapper", "gem").ToolEnvWrapper(made, [_sandboxed_python()])


def _import_gem() -> Any:
    """GEM and its names; its import sets up logging of the whole program, which is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        require_package("gem.envs", "gem")
        return require_package("gem", "gem")
    except MissingRequirementError as error:
        raise MissingRequirementError(f"{error}, then: {NO_DEPENDENCIES}") from error
    finally:
        root.handlers[:], root.level = handlers, level


def _sandboxed_python() -> Any:
    """GEM's tool for Python code, with Arbor's sandbox: GEM's own default is a plain process."""
    base = require_package("gem.tools.python_code_tool", "gem").PythonCodeTool

    class SandboxedPython(base):  # type: ignore[misc, valid-type]
        def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
            code, text, found = self._parse_action(action)
            if not found:
                return False, True, "", text
            with Sandbox() as sandbox:
                result = sandbox.run_sync(code)
            shown = "\n".join(filter(None, (result.stdout, result.stderr or result.error)))
            return True, not result.ok, f"Code execution result: {shown.strip()}\n", text

    return SandboxedPython()
