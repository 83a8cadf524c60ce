"""Rewards for rows in verl's format: `data_source`, `reward_model.ground_truth`, `extra_info`.

`score_function` calls a custom function with verl's arguments. `data_source` applies verl's default rule of the row's
source; a source without a rule is an error.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from arborl.registry import load
from arborl.rewards.answers import equal, exact_match, field_of, final_part, last_boxed, last_tagged
from arborl.rewards.code_tests import CodeTests
from arborl.rewards.threaded_calls import call
from arborl.types import Episode, Message

HASHES = re.compile(r"#### (-?[0-9.,]+)")
TAIL_CHARS = 300
"""Characters at the end of a solution that are searched for the answer."""


def solution(episode: Episode) -> str:
    """All messages after the opening, as verl decodes a response: without special tokens, with roles."""
    last = episode.calls[-1] if episode.calls else None
    if last is None or last.reply is None:
        return episode.answer
    messages = [*last.messages[len(episode.opening) :], last.reply]
    return "\n".join(
        _text(one) if one.role == "assistant" else f"{one.role}\n{_text(one)}\nassistant" for one in messages
    )


def _text(message: Message) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n</tool_call>"
        for call in message.tool_calls
        if "<tool_call>" not in message.content
    ]
    return "\n".join(filter(None, [message.content, *calls]))


class ScoreFunction:
    """Calls a function with verl's signature: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    It returns a number or a mapping with `score`. It may be async; a sync function runs in a thread.

    Example:
        rewards: [{name: score_function, args: {function: "my_package.reward_fn:compute_score"}}]

    Args:
        function: `package.module:function`, or the function itself.
        kwargs: further arguments.
        blocking: False to call a sync function in the event loop, where it must be fast. Functions that use
            `signal.alarm` need it.
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
        result = await call(scores) if self.blocking else scores()
        result = await result if inspect.isawaitable(result) else result
        return float(result["score"] if isinstance(result, Mapping) else result)


def _gsm8k(text: str, gold: Any) -> float:
    """1 if the number after the last `####` is right."""
    match = HASHES.findall(text[-TAIL_CHARS:])
    return float(bool(match) and equal(match[-1].rstrip(".,"), str(gold)))


def _boxed(text: str, gold: Any) -> float:
    """1 if the last `\\boxed{}` is right."""
    match = last_boxed(text)
    return float(match is not None and equal(match, str(gold)))


def _signed(text: str, gold: Any) -> float:
    """1 if the final answer is right, else -1."""
    golds = gold if isinstance(gold, list) else [gold]
    return 1.0 if any(equal(final_part(text[-TAIL_CHARS:]), str(one)) for one in golds) else -1.0


def _tagged(text: str, gold: Any) -> float:
    """1 if the words in the last `<answer>` match one of the right answers."""
    gold = gold.get("target") if isinstance(gold, Mapping) else gold
    match = last_tagged(text, "answer")
    golds = gold if isinstance(gold, list) else [gold]
    return max((exact_match(match, str(one)) for one in golds), default=0.0) if match else 0.0


def _final(text: str, gold: Any) -> float:
    """1 if the final answer is right."""
    return float(equal(final_part(text), str(gold)))


RULES: dict[str, Callable[[str, Any], float]] = (
    {"openai/gsm8k": _gsm8k}
    | dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), _boxed)
    | dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), _signed)
    | dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
                     "numina_cn_k12", "numina_olympiads"), _final)
)  # fmt: skip
"""Source -> rule."""
FAMILIES = {"aime": _signed, "searchR1_": _tagged}
"""First letters of sources -> rule."""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")


class DataSource:
    """The rule of the row's `data_source`, as in verl without a custom function.

    `openai/gsm8k`: the number after `####`. MATH: the text in `\\boxed{}`. `math_dapo`, `aime…`: 1 or -1.
    `searchR1_…`: the words in `<answer>`. `taco`, `apps`, `codecontests`, `codeforces`: share of tests passed. With
    another source the episode fails.
    """

    name = "data_source"

    def __init__(self) -> None:
        self.code = CodeTests(field="answer", partial=True)

    async def __call__(self, episode: Episode) -> float:
        source = str(field_of(episode, "data_source", "reward 'data_source'"))
        if source in CODE_SOURCES:
            return await self.code(episode)
        families = (rule for family, rule in FAMILIES.items() if source.startswith(family))
        rule = next(families, RULES.get(source))
        if rule is None:
            raise LookupError(
                f"no rule for data_source={source!r}. Write rewards=[equal], or a custom function: "
                "rewards=[{name: score_function, args: {function: package.module:compute_score}}]"
            )
        return rule(episode.answer, field_of(episode, "answer", "reward 'data_source'"))
