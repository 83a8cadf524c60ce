"""Steps in which nothing is learned, and why: a table of diagnoses, each a question about a step's metrics.

Pure functions of what `metrics.jsonl` holds, so that a run can be told while it goes on, and a folder looked at later.
What shows only over several steps is in `trends.py`, and told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.trainer.course import Course
from arborl.trainer.trends import TRENDS, Trend
from arborl.types import Metrics

PATIENCE = 3
"""Steps in a row after which the cause is spelt out."""
NEARLY = 0.9
"""A share that counts as all."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that can be wrong with a step."""

    name: str
    holds: Callable[[Step], bool]
    short: str
    """For the step's own line."""
    advice: str
    """The likely cause, and what to try."""


class Step:
    """A step's metrics, asked without fear of missing ones."""

    def __init__(self, metrics: Mapping[str, Any]):
        self.metrics = metrics

    def __call__(self, name: str, otherwise: float = 0.0) -> float:
        value = self.metrics.get(name)
        return otherwise if value is None else float(value)

    def all(self, name: str) -> bool:
        """Whether a share is known, and is all."""
        return self(name, -1.0) >= NEARLY

    def none(self, name: str) -> bool:
        """Whether a number is known, and is 0."""
        return self(name, -1.0) == 0.0

    @property
    def moved(self) -> bool:
        """Whether the weights have changed."""
        return self("learner/grad_norm") > 0 and self("learner/skipped") < 1

    @property
    def flat(self) -> bool:
        """Whether no group had anything to compare, and so nothing was learned."""
        return self("group/zero_variance", -1.0) >= 1 and not self.moved

    @property
    def failed(self) -> bool:
        played = self("episode/count") + self("rollout/filtered_episodes")
        return played > 0 and self("episode/failed") + self("rollout/filtered_failed") >= NEARLY * played


DIAGNOSES = (
    Diagnosis(
        "failed",
        lambda step: step.failed,
        "nearly all episodes failed",
        "What failed, how often and where is under `failures` in summary.json and in the report.",
    ),
    Diagnosis(
        "filtered",
        lambda step: step.none("episode/count") and step("rollout/filtered") > 0,
        "every group was dropped by the filter",
        "No group passes rollout.group_filter. Write a larger rollout.group_size or rollout.spare_groups, take tasks "
        "that are sometimes solved, or leave the filter out.",
    ),
    Diagnosis(
        "no_episodes",
        lambda step: step.none("episode/count"),
        "no episodes",
        "No episode was finished in time (rollout/expired counts such groups): write a larger rollout.group_seconds.",
    ),
    Diagnosis(
        "prompts_too_long",
        lambda step: step.none("episode/calls") and step.all("stop/context_full"),
        "every prompt is longer than the context",
        "The very first prompt leaves no room to sample. Write a larger sampling.max_context, or shorten what the "
        "environment says.",
    ),
    Diagnosis(
        "model_not_called",
        lambda step: step.none("episode/calls"),
        "the agent never calls the model",
        "No episode has a model call, so there is no token to learn from. An agent must `await model.chat(messages)`.",
    ),
    Diagnosis(
        "nothing_sampled",
        lambda step: step.none("episode/sampled"),
        "no tokens were sampled",
        "Every reply of the model is empty. Check sampling.stop, and that the engine answers within its time.",
    ),
    Diagnosis(
        "cut_off",
        lambda step: step.all("call/cut_off") and (not step.moved or step.none("episode/valid")),
        "every reply is cut off",
        "Replies end at sampling.max_tokens before they are complete. Write a larger sampling.max_tokens, or ask for "
        "shorter answers.",
    ),
    Diagnosis(
        "all_invalid",
        lambda step: step.none("episode/valid"),
        "no reply was valid",
        "The environment understood none of the model's messages. Look at some in the report: does the prompt say what "
        "to write, and can this model write it? An example in the prompt, or a few steps of algorithm=sft, may help.",
    ),
    Diagnosis(
        "no_tools",
        lambda step: step.none("episode/tool/offered") and not step.moved,
        "the agent has no tools",
        "The agent is one that calls tools, and none are given. Write tools=[calculator], or agent=chat.",
    ),
    Diagnosis(
        "tools_fail",
        lambda step: step("episode/tool/calls") > 0 and step("episode/tool/failed") >= step("episode/tool/calls"),
        "every tool call failed",
        "episode/tool/<kind> says how: `unknown_tool`, `malformed` and `arguments` are the model's, `exception` and "
        "`timeout` the tool's. The report shows what the tools answered.",
    ),
    Diagnosis(
        "all_solved",
        lambda step: step.flat and step("episode/success") >= 1,
        "all groups are flat: every episode succeeds",
        "There is nothing left to learn from these tasks. Take harder ones, or stop here.",
    ),
    Diagnosis(
        "none_solved",
        lambda step: step.flat and step.none("episode/success"),
        "all groups are flat: no episode succeeds",
        "Without an occasional success there is nothing to reinforce. Take easier tasks, a larger rollout.group_size, "
        "a reward for parts of the way, or a model that already succeeds sometimes.",
    ),
    Diagnosis(
        "all_flat",
        lambda step: step.flat,
        "all groups are flat",
        "The episodes of a task all get the same reward, so none is better than another. Check that rewards depend on "
        "what the model says; raise sampling.temperature or rollout.group_size; take tasks of another difficulty.",
    ),
    Diagnosis(
        "not_finite",
        lambda step: step("learner/skipped") >= 1 and not step("learner/skipped/no_terms"),
        "the update was skipped",
        "learner/skipped/<what> says what was not finite, or found no step. Write a smaller learner.lr, and check the "
        "rewards.",
    ),
    Diagnosis(
        "all_dropped",
        lambda step: step.none("learner/terms"),
        "every group was dropped",
        "dropped/<why> counts the groups and episodes that the algorithm could not use.",
    ),
    Diagnosis(
        "no_gradient",
        lambda step: step.none("learner/grad_norm"),
        "the gradient is 0",
        "Every advantage is 0 or every ratio clipped: see learner/advantage_abs and policy/clipped.",
    ),
)
"""From the particular to the general: the first that holds is the cause."""
FINE_STEP = frozenset({"all_solved"})
"""Those that are nothing to worry about: there is nothing left to learn."""


def diagnose(metrics: Mapping[str, Any]) -> Diagnosis | None:
    """What is wrong with a step, if anything; a row with an evaluation alone is no step."""
    if "episode/count" not in metrics:
        return None
    step = Step(metrics)
    return next((diagnosis for diagnosis in DIAGNOSES if diagnosis.holds(step)), None)


def remark(metrics: Metrics) -> str:
    """What ends a step's line: nothing, mostly.

    Example:
        remark(metrics)     # nothing learned: all groups are flat
    """
    found = diagnose(metrics)
    if found is None:
        return ""
    return found.short if Step(metrics).moved else f"nothing learned: {found.short}"


class Streak:
    """Counts steps in a row with the same diagnosis, and spells it out once there are enough; each trend too, once."""

    def __init__(self) -> None:
        self.name, self.count = "", 0
        self.course, self.told = Course(), set[str]()

    def add(self, metrics: Metrics) -> list[str]:
        """A step was taken, whose number is among its metrics; returns sentences where some are due."""
        found = diagnose(metrics)
        name = "" if found is None else found.name
        self.count = self.count + 1 if name == self.name else 1
        self.name = name
        due = found is not None and self.count == PATIENCE
        said = [f"The last {PATIENCE} steps: {remark(metrics)}. {found.advice}"] if found and due else []
        return said + self._trends(metrics)

    def _trends(self, metrics: Metrics) -> list[str]:
        self.course.add(metrics)
        unsaid = [trend for trend in TRENDS if trend.name not in self.told]
        new = [(trend, seen) for trend in unsaid if (seen := trend.look(self.course)) is not None]
        self.told |= {trend.name for trend, _ in new}
        return [f"{trend.short[0].upper()}{trend.short[1:]}: {seen.detail}. {trend.advice}" for trend, seen in new]


@dataclass(frozen=True, slots=True)
class Notice:
    """A diagnosis or a trend, and the steps it shows in."""

    rule: Diagnosis | Trend
    steps: tuple[int, ...]
    detail: str = ""
    """Of a trend, with its numbers."""


def notices(rows: Iterable[Mapping[str, Any]]) -> list[Notice]:
    """What was wrong with the steps of a run, the commonest first, and then with its course.

    Example:
        notices(read_metrics(folder / "metrics.jsonl"))
    """
    rows = list(rows)
    steps: dict[str, list[int]] = {}
    for row in rows:
        if found := diagnose(row):
            steps.setdefault(found.name, []).append(int(row["step"]))
    known = {diagnosis.name: diagnosis for diagnosis in DIAGNOSES}
    single = sorted((Notice(known[name], tuple(own)) for name, own in steps.items()), key=lambda it: -len(it.steps))
    course = Course(rows)
    seen = [(trend, trend.look(course)) for trend in TRENDS]
    return single + [Notice(trend, found.steps, found.detail) for trend, found in seen if found is not None]
