"""The single-player games of `textarena`."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from arborl.envs.env import Env, Observation, Step
from arborl.envs.extras import package
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

BORROWED = threading.Lock()


class TextArena(Env):
    """One single-player game of `textarena`.

    textarena draws from Python's shared random numbers; each episode borrows them with a state of its own, so that
    games played side by side do not disturb one another.

    Args:
        game: its id, for example `GuessTheNumber-v0` or `Wordle-v0`.
        kwargs: arguments of the game.
        success: a reward of at least this counts as solved.
    """

    blocking = False

    def __init__(self, game: str = "GuessTheNumber-v0", kwargs: Mapping[str, Any] | None = None, success: float = 1.0):
        self.arena = package("textarena", "textarena").make(f"{game}-raw", **dict(kwargs or {}))
        self.success = success

    def __deepcopy__(self, memo: Any) -> TextArena:
        made = object.__new__(TextArena)
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    async def reset(self, task: Task, seed: int) -> Observation:
        self.chance = random.Random(derive(task.seed, "textarena")).getstate()
        with self._borrowed():
            self.arena.reset(num_players=1, seed=derive(task.seed, "textarena") % 2**32)
            text = self._heard()
        self.chance = random.Random(derive(seed, "textarena")).getstate()
        self.reward, self.over, self.talk = 0.0, False, text
        return Observation((Message("user", text),), state_key=self.talk)

    async def step(self, action: Message) -> Step:
        errors = self._errors()
        with self._borrowed():
            self.over, _ = self.arena.step(action.content)
            text = self._heard()
        invalid = self._errors() > errors
        if self.over:
            rewards, info = self.arena.close()
            self.reward = float((rewards or {}).get(0, 0.0))
            invalid = invalid or bool(info.get(0, {}).get("invalid_move"))
        self.talk = f"{self.talk}\n> {action.content}\n{text}"
        return Step(
            Observation((Message("user", text),), state_key=self.talk),
            reward=self.reward,
            terminated=self.over,
            info={"valid": float(not invalid)},
        )

    def _errors(self) -> int:
        """Invalid moves in a row that the game has let pass."""
        return int(getattr(self.arena.state, "error_count", 0))

    def _heard(self) -> str:
        """What the game has said since the last time."""
        _, said = self.arena.get_observation()
        return "\n".join(text for sender, text, _ in said if sender == -1).strip()

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Python's shared random numbers, in the state this episode left them; one game at a time, in all threads."""
        with BORROWED:
            theirs = random.getstate()
            random.setstate(self.chance)
            try:
                yield
            finally:
                self.chance = random.getstate()
                random.setstate(theirs)

    def metrics(self) -> Metrics:
        return {"success": float(self.over and self.reward >= self.success), "score": self.reward}

    def state_key(self) -> str:
        return self.talk

    def render(self) -> str:
        return self.talk
