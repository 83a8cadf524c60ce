"""A catalogue, a tool that looks up its prices, a reward for answers, questions, and transcripts for small models."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from itertools import product as product_of
from typing import Any

import arborl
from arborl import Episode

SIZES = ("small", "large")
MATERIALS = ("copper", "oak", "glass", "steel", "wool", "linen", "clay", "paper", "silver", "bamboo", "cork", "marble")
THINGS = ("kettle", "lamp", "chair", "bowl", "clock", "basket", "mirror", "blanket", "vase", "ladder", "candle",
          "shelf", "tray", "hammer", "bell", "curtain", "bench", "jug", "frame", "stool")  # fmt: skip
PRICES = {name: random.Random(name).randrange(10, 1000) for name in map(" ".join, product_of(SIZES, MATERIALS, THINGS))}
"""In your own task: a database, a search index, an HTTP service."""


@arborl.tool
def price(product: str) -> int:
    """Look up the price of a product in the catalogue.

    Args:
        product: the name of the product, for example: small oak lamp
    """
    name = product.lower().removeprefix("the ").strip()
    if name not in PRICES:
        raise ValueError(f"the catalogue has no {product!r}")
    return PRICES[name]


@arborl.reward
def right_price(episode: Episode, answer: int, product: str) -> dict[str, float]:
    """0.2 for a look-up of the product and 0.8 for the right number at the end of the answer."""
    looked_up = any(one.name == "price" and product in str(one.arguments).lower() for one in episode.tool_calls)
    numbers = re.findall(r"\d+", episode.answer)
    right = bool(numbers) and int(numbers[-1]) == answer
    return {"looked_up": 0.2 * looked_up, "right": 0.8 * right}


def question(product: str) -> str:
    return f"What is the price of the {product}?"


def questions() -> list[dict[str, Any]]:
    """One question for each product. A tenth of them is held out."""
    return [{"question": question(product), "product": product, "answer": value} for product, value in PRICES.items()]


def transcripts(count: int = 400, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations for a model that cannot call tools yet, about products that are not in the catalogue. Half of them
    call the tool; a third of these look up another product. The others guess a price.
    """
    rng = random.Random(seed)
    tool = {"type": "function", "function": asdict(price.spec)}
    products = [" ".join(words) for words in product_of(SIZES, ("iron", "felt", "pine", "stone", "cotton"), THINGS)]
    rows = []
    for _ in range(count):
        product, value = rng.choice(products), rng.randrange(10, 1000)
        messages = [{"role": "user", "content": question(product)}]
        if rng.random() < 0.5:
            searched = product if rng.random() < 2 / 3 else rng.choice(products)
            function = {"name": "price", "arguments": json.dumps({"product": searched})}
            messages += [
                {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
                {"role": "tool", "content": str(value), "tool_call_id": "1", "name": "price"},
            ]
        messages.append({"role": "assistant", "content": f"The price is {value}."})
        rows.append({"messages": messages, "tools": [tool]})
    return rows
