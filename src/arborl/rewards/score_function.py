"""Rewards for rows in verl's form: `data_source`, `reward_model.ground_truth`, `extra_info`.

`score_function` calls a function of one's own, with the arguments that verl gives it. `data_source` does what verl does
where there is none: the row's source decides the rule, and a source without a rule is an error.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from arborl.registry import load
from arborl.rewards.choice import exactly
from arborl.rewards.code import CodeTests
from arborl.rewards.fields import field_of
from arborl.rewards.numbers import equal, final_part, last_boxed
from arborl.rewards.plain_calls import call
from arborl.rewards.tags import last_tagged
from arborl.types import Episode, Message

HASHES = re.compile(r"#### (-?[0-9.,]+)")
LAST = 300
"""Characters at the end of a solution in which an answer is looked for."""


def solution(episode: Episode) -> str:
    """All that was said after the opening: the agent's words and, between them, what answered them with its role.

    verl decodes the whole response, of which special tokens are left out, and roles stay.
    """
    last = episode.calls[-1] if episode.calls else None
    if last is None or last.reply is None:
        return episode.answer
    said = [*last.messages[len(episode.opening) :], last.reply]
    return "\n".join(_text(one) if one.role == "assistant" else f"{one.role}\n{_text(one)}\nassistant" for one in said)


def _text(message: Message) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n</tool_call>"
        for call in message.tool_calls
        if "<tool_call>" not in message.content
    ]
    return "\n".join(filter(None, [message.content, *calls]))


class ScoreFunction:
    """What a function in verl's form says: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    It gives a number, or an object whose `score` counts. It may be async; a plain one is called in a thread.

    Example:
        rewards: [{name: score_function, args: {function: "my_package.reward_fn:compute_score"}}]

    Args:
        function: `package.module:function`, or the function itself.
        kwargs: further arguments.
        blocking: False to call a plain function in the event loop. It must be quick there; one that keeps its time with
            `signal.alarm` works nowhere else.
    """

    name = "score"

    def __init__(
        self, function: str | Callable[..., Any], kwargs: Mapping[str, Any] | None = None, blocking: bool = True
    ):
        self.function = load(function, "function") if isinstance(function, str) else function
        if not callable(self.function):
            raise ValueError(f"function={function!r} cannot be called; name a function")
        self.kwargs, self.blocking = dict(kwargs or {}), blocking

    async def __call__(self, episode: Episode) -> float:
        fields = episode.task.fields
        model = fields.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        scores = functools.partial(
            self.function,
            data_source=fields.get("data_source", episode.task.source),
            solution_str=solution(episode),
            ground_truth=field_of(episode, "answer", "reward 'score_function'") if truth is None else truth,
            extra_info=fields.get("extra_info") or {},
            **self.kwargs,
        )
        found = await call(scores) if self.blocking else scores()
        found = await found if inspect.isawaitable(found) else found
        return float(found["score"] if isinstance(found, Mapping) else found)


def _gsm8k(said: str, gold: Any) -> float:
    """1 for the number behind the last `####`."""
    found = HASHES.findall(said[-LAST:])
    return float(bool(found) and equal(found[-1].rstrip(".,"), str(gold)))


def _boxed(said: str, gold: Any) -> float:
    """1 for what stands in the last `\\boxed{}`."""
    found = last_boxed(said)
    return float(found is not None and equal(found, str(gold)))


def _signed(said: str, gold: Any) -> float:
    """1 for the final answer, and -1 for another."""
    golds = gold if isinstance(gold, list) else [gold]
    return 1.0 if any(equal(final_part(said[-LAST:]), str(one)) for one in golds) else -1.0


def _tagged(said: str, gold: Any) -> float:
    """1 for the words between the last `<answer>` tags, of which one right answer suffices."""
    gold = gold.get("target") if isinstance(gold, Mapping) else gold
    found = last_tagged(said, "answer")
    return (
        max((exactly(found, str(one)) for one in (gold if isinstance(gold, list) else [gold])), default=0.0)
        if found
        else 0.0
    )


def _final(said: str, gold: Any) -> float:
    return float(equal(final_part(said), str(gold)))


RULES: dict[str, Callable[[str, Any], float]] = (
    {"openai/gsm8k": _gsm8k}
    | dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), _boxed)
    | dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), _signed)
    | dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
                     "numina_cn_k12", "numina_olympiads"), _final)
)  # fmt: skip
"""By the row's source; see `rule_of` for families of sources."""
CODE = ("codecontests", "apps", "codeforces", "taco")


def rule_of(source: str) -> Callable[[str, Any], float] | None:
    """The rule of a source; None where there is none."""
    if source.startswith("aime"):
        return _signed
    return _tagged if source.startswith("searchR1_") else RULES.get(source)


class DataSource:
    """A row's `data_source` decides what its answer is worth, as in verl without a function of one's own.

    `openai/gsm8k`: 1 for the number behind `####`. MATH: 1 for what is in `\\boxed{}`. `math_dapo`, `aime…`: 1 or -1.
    `searchR1_…`: 1 for the words in `<answer>`. `taco`, `apps`, `codecontests`, `codeforces`: the share of tests
    passed. Another source costs the episode, with a word on what to do.
    """

    name = "data_source"

    def __init__(self) -> None:
        self.code = CodeTests(field="answer", partial=True)

    async def __call__(self, episode: Episode) -> float:
        source = str(field_of(episode, "data_source", "reward 'data_source'"))
        if source in CODE:
            return await self.code(episode)
        rule = rule_of(source)
        if rule is None:
            raise LookupError(
                f"no rule for data_source={source!r}. Write rewards=[equal], or name your own: "
                "rewards=[{name: score_function, args: {function: package.module:compute_score}}]"
            )
        return rule(episode.answer, field_of(episode, "answer", "reward 'data_source'"))
