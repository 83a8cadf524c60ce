"""What goes wrong with a run over its steps: a table of trends, each a question about its course (`trend_rules.py`).

What is wrong with one step alone is in `diagnosis.py`. Both are asked while a run goes on, and of its folder later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from arborl.trainer import trend_rules as rules
from arborl.trainer.course import Course
from arborl.trainer.trend_rules import Seen


@dataclass(frozen=True, slots=True)
class Trend:
    """One thing that can be wrong with a run."""

    name: str
    look: Callable[[Course], Seen | None]
    short: str
    advice: str
    state: Literal["warn", "fail"] = "warn"


TRENDS = (
    Trend(
        "not_a_number", rules.not_a_number, "numbers that are not finite",
        "Write a smaller learner.lr, and check that every reward returns a finite number; in float16 write "
        "model.dtype=bfloat16.", "fail",
    ),
    Trend(
        "lr_too_high", rules.too_far_at_once, "the policy leaps, and what it earned is lost",
        "The learning rate is too high: write learner.lr_scale=0.1, or algorithm.kl.coef=0.01, and go on from a "
        "checkpoint before the leap.", "fail",
    ),
    Trend(
        "gradient_spikes", rules.gradient_spikes, "the gradient has spikes",
        "A few episodes move the weights far: look at those steps; write a smaller learner.max_grad_norm or "
        "learner.lr.",
    ),
    Trend(
        "far_from_reference", rules.far_from_reference, "the policy is far from its reference",
        "Write a larger algorithm.kl.coef, or a smaller learner.lr_scale; look whether replies still read "
        "as language.",
    ),
    Trend(
        "entropy_collapsed", rules.entropy_collapsed, "the policy has become certain before it was good",
        "Its attempts are all alike, so there is nothing to compare. Write a smaller learner.lr_scale, "
        "algorithm.entropy_coef=0.01, or a higher sampling.temperature, and go on from an earlier checkpoint.", "fail",
    ),
    Trend(
        "clipped", rules.clipped, "much of the batch is clipped",
        "Tokens outside the clip range teach nothing: write fewer learner.epochs or learner.minibatches, a smaller "
        "learner.lr_scale, or a smaller rollout.max_lag.",
    ),
    Trend(
        "gap_wide", rules.wide_gap, "engine and learner disagree about the same weights",
        "Ratios are then wrong from the start. Write model.head=float32, or model.dtype=float32; with a server of "
        "others, check that it has the same weights and samples as asked.", "fail",
    ),
    Trend(
        "gap_growing", rules.growing_gap, "engine and learner drift apart",
        "The engine samples from other weights than the learner has, or its numbers get coarser as the policy gets "
        "sharper: write model.head=float32, a smaller rollout.max_lag, or algorithm.importance_weights.kind=tis.",
    ),
    Trend(
        "engine_stale", rules.stale_engine, "the server's copy of the weights is not the learner's",
        "Check that every server of engine.urls took the last update, and has the same model and precision.", "fail",
    ),
    Trend(
        "stale_dropped", rules.stale_tokens, "much of what is played is too old to be learned from",
        "Write a larger rollout.max_lag, fewer rollout.concurrency, or shorter episodes.",
    ),
    Trend(
        "length_explodes", rules.length_explodes, "replies get longer and no better",
        "Write algorithm.aggregation=fixed (length is then not paid for), a reward of brevity, or a smaller "
        "sampling.max_tokens.",
    ),
    Trend(
        "cut_off_often", rules.cut_off_often, "many replies are cut off",
        "What is cut off cannot earn what it was about to: write a larger sampling.max_tokens, or ask for shorter "
        "answers.",
    ),
    Trend(
        "context_often_full", rules.context_often_full, "many episodes do not fit the context",
        "Write a larger sampling.max_context, a context.policy, fewer rollout.max_turns, or shorter tool results.",
    ),
    Trend(
        "out_of_turns", rules.out_of_turns, "nearly every episode runs out of turns",
        "Write a larger rollout.max_turns, or say in the prompt how an episode is ended.",
    ),
    Trend(
        "form_lost", rules.form_lost, "the model forgets how to answer",
        "Write a reward for the form, a KL penalty, or a smaller learner.lr_scale.",
    ),
    Trend(
        "reward_always_same", rules.reward_always_same, "the reward never changes",
        "Let the reward depend on what the model says: try it alone on a right and on a wrong answer.", "fail",
    ),
    Trend(
        "mostly_flat", rules.mostly_flat, "most groups are flat",
        "Most of what is played teaches nothing: take tasks of another difficulty, a larger rollout.group_size, or "
        "rollout.group_filter=varied with rollout.spare_groups.",
    ),
    Trend(
        "reward_falls", rules.reward_falls, "the reward falls",
        "Write a smaller learner.lr_scale; check the sign and weight of each reward.", "fail",
    ),
    Trend(
        "reward_hacked", rules.reward_hacked, "the reward rises and what it stands for does not",
        "Read the best paid episodes: the reward pays for something else than success. Mend it, or add a KL penalty.",
        "fail",
    ),
    Trend(
        "evaluation_worse", rules.evaluation_worse, "worse on held-out tasks than at the start",
        "Take an earlier checkpoint, a smaller learner.lr_scale, a KL penalty, or more different tasks.", "fail",
    ),
    Trend(
        "nothing_gained", rules.nothing_gained, "the reward is where it was",
        "Write a larger learner.lr_scale or more rollout.tasks_per_step, and look whether better episodes differ from "
        "worse ones in anything the model decides.",
    ),
    Trend(
        "some_fail", rules.some_fail, "episodes fail",
        "What failed, how often and where is under `failures` in summary.json; `arborl env check NAME` tries an "
        "environment alone.",
    ),
    Trend(
        "hanging", rules.hanging, "something hangs",
        "A call of an environment, a tool or a reward does not come back: give it a time limit of its own, or write a "
        "smaller rollout.step_seconds.",
    ),
    Trend(
        "parts_lost", rules.parts_lost, "processes of the run were lost and replaced",
        "What they were asked was asked again, and nothing is trained twice; the seconds are what that cost. "
        "run.log names each: look at its node where one goes again and again.",
    ),
    Trend(
        "groups_missing", rules.groups_missing, "batches lack groups",
        "Groups ran out of rollout.group_seconds or did not pass rollout.group_filter: write more of the first, or "
        "rollout.spare_groups.",
    ),
    Trend(
        "calls_unreadable", rules.calls_unreadable, "tool calls cannot be read",
        "Write agent.tool_format as the model was taught, or an example of a call in the prompt.", "fail",
    ),
    Trend(
        "tool_misused", rules.tool_misused, "tools are called wrongly",
        "Say more in the tools' descriptions and names of arguments; a few steps of algorithm=sft teach the form.",
    ),
    Trend(
        "tool_dead", rules.tool_dead, "a tool does not work",
        "The tool itself fails: `arborl rollout` shows what it answers; check its server, keys and time limit.", "fail",
    ),
    Trend(
        "tools_unused", rules.tools_unused, "tools are offered and not called",
        "Say in the prompt when to call them; check with `arborl rollout` that the model is shown them, and that "
        "agent.tool_format is what it writes.",
    ),
)  # fmt: skip
"""Of equals, the one further up says more."""
