"""A generated catalogue: 1,000 to 100,000 products from a few hundred words and a seed.

All that is random is drawn at once into arrays of small numbers, and a product is put together when somebody looks at
it; a large catalogue is then built in the time its index takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from arborl.envs.shop.catalogue import Catalogue, Goal, Product
from arborl.envs.shop.words import BRANDS, DEPARTMENTS, OPTIONS, Department
from arborl.envs.splits import check_split, split_of
from arborl.seeds import generator

PER_TYPE = 40
"""Products of one type that compete with one another, as far as there are enough types."""
CHEAPEST, DEAREST = 5, 96
TRIES = 1_000
"""Products drawn before giving up: a handful may have none of a split."""


class Stock:
    """The products of one seed; item 17 is made when it is asked for.

    Args:
        size: how many.
        seed: decides everything.
    """

    def __init__(self, size: int, seed: int):
        chance = generator(seed, "shop", size)
        every = [(d, use, noun) for d in DEPARTMENTS for noun in d.nouns for use in d.uses]
        kinds = min(len(every), max(20, size // PER_TYPE))
        self.kinds: list[tuple[Department, str, str]] = [every[i] for i in chance.permutation(len(every))[:kinds]]
        self.kind = chance.integers(kinds, size=size)
        self.order = chance.random((size, max(len(d.attributes) for d in DEPARTMENTS))).astype(np.float32)
        self.price = chance.integers(CHEAPEST, DEAREST, size=size)
        self.brand = chance.integers(len(BRANDS), size=size)
        self.offers = chance.integers(1 << 30, size=(size, 2))

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, place: int, /) -> Product:
        department, use, noun = self.kinds[self.kind[place]]
        attributes = self.attributes(place)
        title = f"{' '.join(attributes)} {use} {noun}"
        return Product(
            id=f"B{place + 1}",
            title=title,
            query=f"{use} {noun}",
            category=f"{department.name} › {noun}",
            nouns=(use, noun),
            attributes=attributes,
            options=tuple(
                (kind, _some(OPTIONS[kind], int(offer), 3))
                for kind, offer in zip(department.options, self.offers[place], strict=False)
            ),
            price=float(self.price[place]),
            description=f"A {use} {noun} by {BRANDS[self.brand[place]]}.",
            features=tuple(f"It is {attribute}." for attribute in attributes),
            reviews=(f"A good {noun}.",),
        )

    def attributes(self, place: int) -> tuple[str, ...]:
        """Two of the department's, in the department's order."""
        words = self.kinds[self.kind[place]][0].attributes
        chosen = np.sort(np.argsort(self.order[place][: len(words)])[:2])
        return tuple(words[i] for i in chosen)

    def text(self, place: int) -> str:
        """What is searched."""
        _, use, noun = self.kinds[self.kind[place]]
        return f"{' '.join(self.attributes(place))} {use} {noun} {BRANDS[self.brand[place]]}"


def _some(values: Sequence[str], offer: int, count: int) -> tuple[str, ...]:
    """`count` of the values, chosen by a number, in their usual order."""
    left, chosen = list(range(len(values))), []
    for _ in range(count):
        offer, which = divmod(offer, len(left))
        chosen.append(left.pop(which))
    return tuple(values[i] for i in sorted(chosen))


@lru_cache(maxsize=4)
def generated(size: int, seed: int) -> Catalogue:
    """The catalogue of this size and seed; built once a process."""
    stock = Stock(size, seed)
    return Catalogue(stock, [stock.text(place) for place in range(size)], [f"B{place + 1}" for place in range(size)])


def draw_goal(catalogue: Catalogue, seed: int, split: str) -> Goal:
    """What to buy. One product in ten is held out: no training goal is made from it."""
    check_split(split, "shop")
    chance = generator(seed, "goal")
    drawn = (int(place) for place in chance.integers(len(catalogue), size=TRIES))
    place = next((place for place in drawn if split_of(("shop", place)) == split), None)
    if place is None:
        raise ValueError(f"none of {len(catalogue)} products is of split {split!r}: give more products")
    product = catalogue.products[place]
    count = int(chance.integers(1, len(product.attributes) + 1))
    attributes = tuple(product.attributes[i] for i in sorted(chance.permutation(len(product.attributes))[:count]))
    options = tuple((kind, values[int(chance.integers(len(values)))]) for kind, values in product.options)
    upper = float(10 * (product.price // 10 + 1 + chance.integers(4, size=2).max()))
    words = f"{' '.join(attributes)} {product.query}"
    asked = "".join(f", {kind} {value}" for kind, value in options)
    instruction = f"Find me {words}{asked}, price lower than {upper:g} dollars."
    return Goal(instruction, product, attributes, options, upper, words)
