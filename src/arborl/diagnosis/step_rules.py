"""Rules about the metrics of one step: why it learned nothing. Rules about several steps are in `trend_rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.types import Metrics

NEARLY_ALL = 0.9


class StepMetrics:
    """The metrics of one step, with a default for missing ones."""

    def __init__(self, metrics: Mapping[str, Any]):
        self.metrics = metrics

    def __call__(self, name: str, default: float = 0.0) -> float:
        value = self.metrics.get(name)
        return default if value is None else float(value)

    def is_one(self, name: str) -> bool:
        """Whether a share was measured and is nearly 1."""
        return self(name, -1.0) >= NEARLY_ALL

    def is_zero(self, name: str) -> bool:
        """Whether a number was measured and is 0."""
        return self(name, -1.0) == 0.0

    @property
    def has_updated(self) -> bool:
        """Whether the weights changed."""
        return self("learner/grad_norm") > 0 and self("learner/skipped") < 1

    @property
    def has_no_variance(self) -> bool:
        """Whether every group has zero reward variance, and nothing was learned."""
        return self("group/zero_variance", -1.0) >= 1 and not self.has_updated

    @property
    def nearly_all_failed(self) -> bool:
        episodes = self("episode/count") + self("rollout/filtered_episodes")
        failed = self("episode/failed") + self("rollout/filtered_failed")
        return episodes > 0 and failed >= NEARLY_ALL * episodes


@dataclass(frozen=True, slots=True)
class StepRule:
    """One cause of a step without learning. `summary` ends the step's line on the console; `advice` names settings."""

    name: str
    holds: Callable[[StepMetrics], bool]
    summary: str
    advice: str


STEP_RULES = (
    StepRule(
        "failed", lambda step: step.nearly_all_failed, "nearly all episodes failed",
        "The causes are under `failures` in summary.json and in the report.",
    ),
    StepRule(
        "filtered", lambda step: step.is_zero("episode/count") and step("rollout/filtered") > 0,
        "the group filter dropped every group",
        "No group passes rollout.group_filter. Write a larger rollout.group_size or rollout.spare_groups, use tasks "
        "that are sometimes solved, or remove the filter.",
    ),
    StepRule(
        "no_episodes", lambda step: step.is_zero("episode/count"), "no episodes",
        "No episode finished in time (rollout/expired counts such groups). Write a larger rollout.group_seconds.",
    ),
    StepRule(
        "prompts_too_long", lambda step: step.is_zero("episode/calls") and step.is_one("stop/context_full"),
        "every prompt is longer than the context",
        "The first prompt leaves no room to sample. Write a larger sampling.max_context, or shorten the "
        "environment's observations.",
    ),
    StepRule(
        "model_not_called", lambda step: step.is_zero("episode/calls"), "the agent never calls the model",
        "No episode has a model call, so there is no token to train on. An agent must `await model.chat(messages)`.",
    ),
    StepRule(
        "nothing_sampled", lambda step: step.is_zero("episode/sampled"), "no tokens were sampled",
        "Every completion is empty. Check sampling.stop and the engine's timeout.",
    ),
    StepRule(
        "cut_off",
        lambda step: step.is_one("call/cut_off") and (not step.has_updated or step.is_zero("episode/valid")),
        "every completion is cut off",
        "Completions end at sampling.max_tokens before they are complete. Write a larger sampling.max_tokens, or "
        "prompt for shorter answers.",
    ),
    StepRule(
        "all_invalid", lambda step: step.is_zero("episode/valid"), "no message was valid",
        "The environment could parse none of the model's messages. Read some in the report: does the prompt state the "
        "format, and can this model write it? An example in the prompt or a few steps of algorithm=sft help.",
    ),
    StepRule(
        "no_tools", lambda step: step.is_zero("episode/tool/offered") and not step.has_updated,
        "the agent has no tools",
        "The agent calls tools, but the configuration lists none. Write tools=[calculator], or agent=chat.",
    ),
    StepRule(
        "tools_fail",
        lambda step: step("episode/tool/calls") > 0 and step("episode/tool/failed") >= step("episode/tool/calls"),
        "every tool call failed",
        "episode/tool/<kind> counts the causes: the model causes `unknown_tool`, `malformed` and `arguments`, the tool "
        "`exception` and `timeout`. The report shows the tool results.",
    ),
    StepRule(
        "all_solved", lambda step: step.has_no_variance and step("episode/success") >= 1,
        "every group has zero reward variance (all episodes succeed)",
        "These tasks are solved. Use harder ones, or stop here.",
    ),
    StepRule(
        "none_solved", lambda step: step.has_no_variance and step.is_zero("episode/success"),
        "every group has zero reward variance (no episode succeeds)",
        "There is no success to reinforce. Use easier tasks, a larger rollout.group_size, a reward for partial "
        "progress, or a model that already succeeds sometimes.",
    ),
    StepRule(
        "zero_variance", lambda step: step.has_no_variance, "every group has zero reward variance",
        "All episodes of a task get the same reward, so every advantage is 0. Check that rewards depend on the "
        "model's messages; raise sampling.temperature or rollout.group_size; use tasks of another difficulty.",
    ),
    StepRule(
        "not_finite", lambda step: step("learner/skipped") >= 1 and not step("learner/skipped/no_terms"),
        "a number was not finite",
        "The update was skipped; learner/skipped/<cause> counts why. Write a smaller learner.lr, and check the "
        "rewards.",
    ),
    StepRule(
        "all_dropped", lambda step: step.is_zero("learner/terms"), "every group was dropped",
        "dropped/<cause> counts the groups and episodes that the algorithm could not use.",
    ),
    StepRule(
        "no_gradient", lambda step: step.is_zero("learner/grad_norm"), "every advantage is 0 or every ratio is clipped",
        "See learner/advantage_abs and policy/clipped.",
    ),
)  # fmt: skip
"""From the particular to the general: the first rule that holds is the cause."""
BENIGN_STEP_RULES = frozenset({"all_solved"})
"""Rules that are no fault."""


def diagnose_step(metrics: Mapping[str, Any]) -> StepRule | None:
    """The first rule that holds for a step. A row that holds an evaluation only is no step."""
    if "episode/count" not in metrics:
        return None
    step = StepMetrics(metrics)
    return next((rule for rule in STEP_RULES if rule.holds(step)), None)


def step_remark(metrics: Metrics) -> str:
    """The end of a step's line on the console; mostly empty."""
    rule = diagnose_step(metrics)
    if rule is None:
        return ""
    return rule.summary if StepMetrics(metrics).has_updated else f"no gradient: {rule.summary}"
