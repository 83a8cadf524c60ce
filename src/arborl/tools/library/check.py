"""A tool that tells the model whether its answer is right, before it gives it: the task knows."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from arborl.tools.injection import Given
from arborl.tools.tool import Tool


class Check(Tool):
    """A tool that compares an answer with the task's field `answer`: numbers as numbers, everything else as text.

    Example:
        tools: [check]
        agent: {name: tool, tool_args: {check: {name: calc_gsm8k_reward}}}

    Args:
        name: what the model calls it.
        description: what the model is told about it.
    """

    def __init__(self, name: str = "check", description: str = "Check whether your answer is right."):
        super().__init__(check, name=name, description=description)


def check(answer: str, right: Annotated[Any, Given("answer")]) -> str:
    """Check whether your answer is right.

    Args:
        answer: the answer alone, without explanation.
    """
    options = right if isinstance(right, list | tuple) else [right]
    return "right" if any(_plain(answer) == _plain(one) for one in options) else "wrong"


def _plain(value: Any) -> Decimal | str:
    text = " ".join(str(value).split()).strip(" .$").casefold()
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return text
