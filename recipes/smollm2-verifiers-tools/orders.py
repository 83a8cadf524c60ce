"""A `verifiers.ToolEnv` of orders: the price of a product is looked up and multiplied by the ordered quantity, each by
a tool. Also transcripts of a player with errors, for a model that cannot call tools yet.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from itertools import product as product_of
from pathlib import Path
from typing import Any

from arborl import Message, Task
from arborl.envs.env import split_of

MATERIALS = ("copper", "oak", "glass", "steel", "wool", "linen", "clay", "paper", "silver", "bamboo", "cork", "marble")
THINGS = ("kettle", "lamp", "chair", "bowl", "clock", "basket", "mirror", "blanket", "vase", "ladder", "candle",
          "shelf", "tray", "hammer", "bell", "curtain", "bench", "jug", "frame", "stool")  # fmt: skip
PRICES = {name: random.Random(name).randrange(11, 100) for name in map(" ".join, product_of(MATERIALS, THINGS))}
QUANTITIES = range(11, 100)
SELF = f"{Path(__file__).resolve()}:load_environment"


# ------------------------------------------------------------------------------------------------ tools and rubric


def price(product: str) -> int:
    """Look up the price of one piece of a product.

    Args:
        product: the name of the product, for example: oak lamp
    """
    name = product.lower().strip()
    if name not in PRICES:
        raise ValueError(f"there is no {product!r}")
    return PRICES[name]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return int(a) * int(b)


def right_total(completion: Any, answer: str) -> float:
    """Whether the last number of the last message is the total."""
    numbers = re.findall(r"\d+", str(completion[-1].content or ""))
    return float(completion[-1].role == "assistant" and bool(numbers) and numbers[-1] == answer)


def looked_up(completion: Any, info: dict[str, Any]) -> float:
    """Whether the price of the ordered product was looked up."""
    calls = [call for message in completion if message.role == "assistant" for call in message.tool_calls or ()]
    return float(any(call.name == "price" and _product(call.arguments) == info["product"] for call in calls))


def _product(arguments: str) -> str:
    try:
        return str(json.loads(arguments)["product"]).lower().strip()
    except (ValueError, KeyError, TypeError):
        return ""


# ------------------------------------------------------------------------------------------------ the environment


def products_of(split: str) -> list[str]:
    """One product in ten is held out: no question of training is about it."""
    return [name for name in PRICES if split_of(name) == split]


def orders(split: str, count: int) -> list[dict[str, Any]]:
    """Questions about the products of a split."""
    rng = random.Random(f"orders {split}")
    products = products_of(split)
    chosen = [(rng.choice(products), rng.choice(QUANTITIES)) for _ in range(count)]
    return [
        {
            "question": f"A customer orders {quantity} pieces of the product {product}. What is the total price?",
            "answer": str(quantity * PRICES[product]),
            "info": {"product": product, "quantity": quantity},
        }
        for product, quantity in chosen
    ]


def load_environment(train: int = 2000, held_out: int = 200) -> Any:
    """The reward is 0.8 for the right total and 0.2 for a look-up of the right product."""
    import verifiers as vf
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    return vf.ToolEnv(
        tools=[price, multiply],
        max_turns=5,
        dataset=Dataset.from_list(orders("train", train)),
        eval_dataset=Dataset.from_list(orders("held_out", held_out)),
        rubric=vf.Rubric(funcs=[right_total, looked_up], weights=[0.8, 0.2]),
    )


# ------------------------------------------------------------------------------------------------ scripted players


def next_reply(rng: random.Random, row: dict[str, Any], results: list[str], skill: float) -> str:
    """The next message after these results of tools. Each decision is right with probability `skill`.

    The wrong ones: a guess in place of a call, another product, another quantity.
    """
    product, quantity = row["info"]["product"], row["info"]["quantity"]
    if len(results) < 2 and rng.random() >= skill:
        return f"The total is {rng.randrange(121, 9802)}."
    if not results:
        return _call("price", product=product if rng.random() < skill else rng.choice(products_of("train")))
    if len(results) == 1:
        number = quantity if rng.random() < skill else rng.choice(QUANTITIES)
        return _call("multiply", a=number, b=int(results[0]))
    return f"The total is {results[1]}."


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def transcripts(count: int = 1000, seed: int = 0, skill: float = 0.6) -> list[dict[str, Any]]:
    """Conversations of a scripted player with training orders. The environment itself answers, so the messages are
    those of training. With skill=1 the player is an oracle.
    """
    return asyncio.run(play(count, seed, skill))


async def play(count: int, seed: int, skill: float, split: str = "train") -> list[dict[str, Any]]:
    """Play orders; each row has the messages and the environment's metrics of one of them."""
    from arborl.envs.adapters.verifiers_adapter import VerifiersEnv

    env, rng, rows = VerifiersEnv(SELF), random.Random(seed), []
    tasks, _ = env._get().rows(split)
    for _ in range(count):
        index, results, over = rng.randrange(len(tasks)), [], False
        messages = list((await env.reset(Task("order", fields={"index": index, "split": split}), 0)).messages)
        while not over:
            messages.append(Message("assistant", next_reply(rng, tasks[index], results, skill)))
            step = await env.step(messages[-1])
            messages += step.observation.messages
            results += [one.content for one in step.observation.messages if one.role == "tool"]
            over = step.over
        rows.append({"messages": [_as_row(one) for one in messages], "metrics": env.metrics()})
    return rows


def _as_row(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    return row | ({"tool_call_id": message.tool_call_id, "name": message.name} if message.role == "tool" else {})
