"""Tools that end the episode with an answer (`finish`, `answer`), or check one (`check`)."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from arborl.tools.core.tool import Tool, tool
from arborl.tools.core.tool_context import TaskField


@tool(terminal=True, max_tokens=4096, max_chars=20_000)
def finish(answer: str) -> str:
    """Finish with your final answer.

    Args:
        answer: the answer alone, without explanation.
    """
    return answer


answer = Tool(finish.function, "answer", "Give your final answer.", terminal=True, max_tokens=4096, max_chars=20_000)


class Check(Tool):
    """Compares an answer with the task's field `answer`: numbers as numbers, other values as text.

    Example:
        tools: [check]
        agent: {name: tool, tool_args: {check: {name: calc_gsm8k_reward}}}

    Args:
        name: name for the model.
        description: description for the model.
    """

    def __init__(self, name: str = "check", description: str = "Check whether your answer is right."):
        super().__init__(check, name=name, description=description)


def check(answer: str, right: Annotated[Any, TaskField("answer")]) -> str:
    """Check whether your answer is right.

    Args:
        answer: the answer alone, without explanation.
    """
    options = right if isinstance(right, list | tuple) else [right]
    return "right" if any(_normalize(answer) == _normalize(one) for one in options) else "wrong"


def _normalize(value: Any) -> Decimal | str:
    text = " ".join(str(value).split()).strip(" .$").casefold()
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return text
