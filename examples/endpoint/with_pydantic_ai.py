"""A small agent on pydantic-ai: `solve` answers a question, with a calculator.

There is nothing of Arbor in it. It is told where the model is, as all that calls one must be; to train it as it is:

    pip install 'arborl[endpoint]'
    arborl data make arithmetic --out data
    PYTHONPATH=examples/endpoint arborl train data.path=data/arithmetic.json 'rewards=[equal]' agent=endpoint \\
      agent.args.call=with_pydantic_ai:solve sampling.max_context=512 trainer.steps=10
"""

import ast
import operator

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
agent = Agent(retries=3)


@agent.tool_plain
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example (2 + 3) * 4 or sqrt(2) ** 2.
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return ast.literal_eval(node)

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except Exception as error:
        return f"Error: {error}"


async def solve(question: str, base_url: str, api_key: str) -> str:
    """The agent's answer."""
    model = OpenAIChatModel("gpt-4o-mini", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    return (await agent.run(question, model=model)).output
