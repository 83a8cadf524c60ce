"""Reward functions written for other systems, called with the arguments of those systems.

`score_function` calls a function written for verl, on rows in verl's format (`data_source`,
`reward_model.ground_truth`, `extra_info`). `data_source` applies verl's default rule of the row's source; a source
without a rule is an error. `trl_function` calls a function written for TRL.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arborl.registry import load, short_name
from arborl.rewards.answers import equal, exact_match, field_of, final_part, gold_of, last_boxed, last_tagged
from arborl.rewards.code_tests import CodeTests
from arborl.rewards.threaded_calls import call
from arborl.types import Episode, Message

HASHES = re.compile(r"#### (-?[0-9.,]+)")
MAX_TAGS = 10
TAIL_CHARS = 300
"""Characters at the end of a solution that are searched for the answer."""


def solution(episode: Episode) -> str:
    """All messages after the opening, as verl decodes a response: without special tokens, with roles."""
    return "\n".join(
        _text(one) if one.role == "assistant" else f"{one.role}\n{_text(one)}\nassistant" for one in written(episode)
    )


def written(episode: Episode) -> list[Message]:
    """The agent's messages, with those of tools and environment between them."""
    last = episode.calls[-1] if episode.calls else None
    if last is None or last.reply is None:
        return [Message("assistant", episode.answer)]
    given = sum(one.role == "assistant" for one in episode.opening)  # a system prompt may precede the opening
    own = [number for number, one in enumerate(last.messages) if one.role == "assistant"][given:]
    return [*(last.messages[own[0] :] if own else ()), last.reply]


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


TRL_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids", "log_extra", "log_metric"})
"""Arguments that `TrlFunction` gives besides the columns."""


class TrlFunction:
    """Calls a function with TRL's signature: `f(prompts, completions, completion_ids, **columns)` returns a list.

    It is called once for each group, with one entry per episode in every list, and with those arguments that it has. A
    completion is a list of messages if the row's `prompt` is one, else text. `None` in the returned list counts as 0.
    `log_extra` and `log_metric` do nothing; there is no `trainer_state`. The function may be async.

    Example:
        rewards: [{name: trl_function, args: {function: "my_package.rewards:correctness"}}]

    Args:
        function: `package.module:function`, or the function itself.
    """

    def __init__(self, function: str | Callable[..., Any]):
        self.function = load(function, "function") if isinstance(function, str) else function
        if not callable(self.function):
            raise ValueError(f"function={function!r} cannot be called; name a function")
        self.name = str(getattr(self.function, "__name__", "")) or short_name(str(function))
        parameters = inspect.signature(self.function).parameters.values()
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._takes = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        self._needs = {one.name for one in parameters if one.default is one.empty} & self._takes
        self.required_fields = tuple(sorted(self._needs - TRL_ARGUMENTS))

    async def __call__(self, episode: Episode) -> float:
        return 0.0  # `across` calls the function

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> Any:
        """The rewards of the episodes of a group; of an async function an awaitable of them."""
        if not episodes:
            return []
        given = self.arguments(episodes)
        if missing := sorted(self._needs - given.keys()):
            raise LookupError(
                f"the function {self.name!r} needs {missing[0]!r}, and there are: {', '.join(given)}. Write a column "
                "of that name, or data.fields."
            )
        known = {name: value for name, value in given.items() if self._takes_all or name in self._takes}
        result, count = self.function(**known), len(episodes)
        return self._awaited(result, count) if inspect.isawaitable(result) else self._read(result, count)

    def arguments(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """All arguments that TRL passes, but `trainer_state`: columns are lists with one entry per episode."""
        rows = [episode.task.fields for episode in episodes]
        prompts = [
            row.get("prompt", [_openai(one) for one in e.opening]) for row, e in zip(rows, episodes, strict=True)
        ]
        names = dict.fromkeys(key for row in rows for key in row if key not in ("prompt", "completion"))
        columns = {name: [row.get(name) for row in rows] for name in names}
        return columns | {
            "prompts": prompts,
            "completions": [
                solution(episode) if isinstance(prompt, str) else [_openai(one) for one in written(episode)]
                for episode, prompt in zip(episodes, prompts, strict=True)
            ],
            "completion_ids": [[token for call in e.calls for token in call.completion.tokens] for e in episodes],
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: None,
        }

    async def _awaited(self, result: Any, count: int) -> list[float]:
        return self._read(await result, count)

    def _read(self, result: Any, count: int) -> list[float]:
        values = list(result) if not isinstance(result, str | Mapping) and hasattr(result, "__iter__") else None
        if values is None or len(values) != count:
            found = f"{type(result).__name__} {str(result)[:60]!r}" if values is None else f"{len(values)} values"
            raise TypeError(f"the function {self.name!r} returned {found}; return a list of {count} numbers")
        return [0.0 if value is None else value for value in values]


def _openai(message: Message) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": one.name, "arguments": dict(one.arguments)}}
        for one in message.tool_calls
    ]
    return {"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {})


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
    """1 if the words in the last `<answer>` match one of the right answers; a quarter with many such tags."""
    match = last_tagged(text, "answer")
    golds = gold if isinstance(gold, list | tuple) else [gold]
    if match is None or not any(exact_match(match, str(one)) for one in golds):
        return 0.0
    return 0.25 if max(text.count("<answer>"), text.count("</answer>")) > MAX_TAGS else 1.0


def _final(text: str, gold: Any) -> float:
    """1 if the final answer is right."""
    return float(equal(final_part(text), str(gold)))


RULES: dict[str, Callable[[str, Any], float]] = (
    {"openai/gsm8k": _gsm8k}
    | dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), _boxed)
    | dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), _signed)
    | dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
                     "numina_cn_k12", "numina_olympiads"), _final)
    | dict.fromkeys(("nq", "triviaqa", "popqa", "web_questions", "hotpotqa", "2wikimultihopqa", "musique",
                     "bamboogle", "strategyqa"), _tagged)
)  # fmt: skip
"""Source -> rule."""
FAMILIES = {"aime": _signed, "searchR1_": _tagged}
"""First letters of sources -> rule."""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")


class DataSource:
    """The rule of the row's `data_source`, as in verl without a custom function.

    `openai/gsm8k`: the number after `####`. MATH: the text in `\\boxed{}`. `math_dapo`, `aime…`: 1 or -1.
    `searchR1_…` and Search-R1's own sources (`nq`, `triviaqa`, `popqa`, `web_questions`, `hotpotqa`,
    `2wikimultihopqa`, `musique`, `bamboogle`, `strategyqa`): the words in the last `<answer>` against all right
    answers, as `short_answer`. `taco`, `apps`, `codecontests`, `codeforces`: share of tests passed. With
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
        return rule(episode.answer, gold_of(episode, "answer", "reward 'data_source'"))
