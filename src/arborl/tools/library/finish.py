"""Ways to say that the work is done: a call that ends the episode with the answer it was given."""

from __future__ import annotations

from arborl.tools.tool import Tool, tool


@tool(terminal=True, max_tokens=4096, max_chars=20_000)
def finish(answer: str) -> str:
    """Finish with your final answer.

    Args:
        answer: the answer alone, without explanation.
    """
    return answer


answer = Tool(
    finish.function,
    name="answer",
    description="Give your final answer.",
    terminal=True,
    max_tokens=finish.max_tokens,
    max_chars=finish.max_chars,
)
