"""A small agent on the OpenAI SDK: it answers the question on standard input, with a calculator, and prints the answer.

    echo "What is 12 times 30? Answer as <answer>number</answer>." | python examples/endpoint/openai_loop.py

There is nothing of Arbor in it. The SDK finds the model by OPENAI_BASE_URL; to train it as it is:

    arborl data make arithmetic --out data
    arborl train data.path=data/arithmetic.json 'rewards=[equal]' agent=endpoint \\
      'agent.args.command=[python,examples/endpoint/openai_loop.py]' sampling.max_context=512 trainer.steps=10
"""

import ast
import json
import operator
import sys

from openai import OpenAI

TOOL = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (2 + 3) * 4 or sqrt(2) ** 2."}},
        "required": ["expression"],
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return ast.literal_eval(node)

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except Exception as error:
        return f"Error: {error}"


def main() -> None:
    client, messages = OpenAI(), [{"role": "user", "content": sys.stdin.read()}]
    for _ in range(4):
        answer = client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, tools=[{"type": "function", "function": TOOL}]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(str(json.loads(call.function.arguments).get("expression", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)


if __name__ == "__main__":
    main()
