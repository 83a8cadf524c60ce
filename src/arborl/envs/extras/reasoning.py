"""The problems of `reasoning_gym`: a question, an answer, and the data set's own score of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborl.envs.answers import answer, read_answer
from arborl.envs.env import Env, Observation, Step
from arborl.envs.extras import package
from arborl.envs.splits import split_of, wanted_split
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

RULES = "Answer the question. Give your final answer as <answer>answer</answer>."
TRIES = 200
"""Problems drawn before giving up on a split."""


class ReasoningGym(Env):
    """One problem of a data set that `reasoning_gym` generates.

    Args:
        dataset: its name, for example `leg_counting` or `chain_sum`.
        config: arguments of the data set.
        format_penalty: reward of a message without an answer.
    """

    blocking = False
    tagged = True

    def __init__(
        self, dataset: str = "leg_counting", config: Mapping[str, Any] | None = None, format_penalty: float = 0.0
    ):
        if format_penalty > 0:
            raise ValueError(f"format_penalty={format_penalty}: a penalty is negative or zero")
        self.dataset, self.config, self.format_penalty = dataset, dict(config or {}), format_penalty
        self._make(0)  # a name or an argument it does not have is found here

    def _make(self, seed: int) -> Any:
        gym = package("reasoning_gym", "reasoning_gym")
        try:
            return gym.create_dataset(self.dataset, **{**self.config, "seed": seed, "size": 1})
        except (TypeError, AssertionError) as error:
            raise ValueError(f"dataset={self.dataset!r}, config={self.config}: {error}") from error

    async def reset(self, task: Task, seed: int) -> Observation:
        split = wanted_split(task, "reasoning_gym")
        for number in range(TRIES):
            self.seed = derive(task.seed, "reasoning_gym", number) % 2**32
            self.entry = self._make(self.seed)[0]
            if split_of(self.entry["question"]) == split:
                break
        else:
            raise ValueError(f"{self.dataset}: no problem of split {split!r} in {TRIES} draws")
        self.said: str | None = None
        self.score = 0.0
        return Observation(
            (Message("system", RULES), Message("user", self.entry["question"])), state_key=self.state_key()
        )

    async def step(self, action: Message) -> Step:
        given = read_answer(action.content)
        self.said = action.content
        if given is not None:
            self.score = float(self._make(self.seed).score_answer(given, self.entry))
        return Step(
            Observation((), state_key=self.state_key()),
            reward=self.format_penalty if given is None else self.score,
            terminated=True,
            info={"valid": float(given is not None)},
        )

    def metrics(self) -> Metrics:
        return {"success": float(self.score >= 1.0), "score": self.score}

    def oracle(self) -> str | None:
        """The data set's answer, where it gives one."""
        known = self.entry.get("answer")
        return None if known is None else answer(str(known))

    def state_key(self) -> str:
        return self.entry["question"] if self.said is None else f"{self.entry['question']}/answered"

    def render(self) -> str:
        return self.entry["question"] if self.said is None else f"{self.entry['question']}\n{self.said}"
