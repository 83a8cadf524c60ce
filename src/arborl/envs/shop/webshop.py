"""WebShop's own data files, where the user has them: real products, and instructions by people or synthetic ones.

Wanted in one folder: `items_shuffle.json` (or `items_shuffle_1000.json`), `items_ins_v2.json` (or `…_1000.json`) and
`items_human_ins.json`. Two things differ from WebShop: search is SQLite's ranking and not Lucene's, and the nouns of a
title are its longer words and not what a parser calls a noun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from arborl.envs.shop.catalogue import Catalogue, Goal, Product
from arborl.envs.splits import check_split, split_of
from arborl.seeds import generator

FILES = {
    "products": ("items_shuffle.json", "items_shuffle_1000.json"),
    "attributes": ("items_ins_v2.json", "items_ins_v2_1000.json"),
    "people": ("items_human_ins.json",),
}
DULL = (
    "and", "the", "for", "with", "from", "set", "pack", "inch", "new", "pcs", "your", "our", "this", "that",
    "are", "has", "men", "women",
)  # fmt: skip
DEFAULT_PRICE = 100.0
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Shelf:
    """What the files hold."""

    catalogue: Catalogue
    goals: Mapping[str, Sequence[Goal]]
    """By split."""

    def draw(self, seed: int, split: str) -> Goal:
        goals = self.goals[check_split(split, "shop")]
        if not goals:
            raise ValueError(f"the files hold no instruction of split {split!r}: give more products")
        return goals[int(generator(seed, "webshop").integers(len(goals)))]


@lru_cache(maxsize=2)
def from_files(folder: str, human: bool = True) -> Shelf:
    """Read the files; once a process."""
    rows, notes = _read(folder, "products"), _read(folder, "attributes")
    products = list({row["asin"]: _product(row, notes) for row in rows if _is_asin(row.get("asin"))}.values())
    texts = [_searched(product) for product in products]
    people = _read(folder, "people") if human else {}
    goals: dict[str, list[Goal]] = {"train": [], "held_out": []}
    for product in products:
        asked = people.get(product.id, ()) if human else _synthetic(product, notes.get(product.id, {}))
        for goal in (_goal(product, one) for one in asked):
            if goal is not None:
                goals[split_of(("webshop", product.id))].append(goal)
    return Shelf(Catalogue(products, texts, [product.id for product in products]), goals)


def _read(folder: str, what: str) -> Any:
    place = Path(folder).expanduser()
    for name in FILES[what]:
        if (place / name).is_file():
            return json.loads((place / name).read_text(encoding="utf-8"))
    raise ValueError(f"{place}: no {' or '.join(FILES[what])} there; give the folder of WebShop's data files")


def _is_asin(text: Any) -> bool:
    return isinstance(text, str) and text != "nan" and len(text) <= 10


def _product(row: Mapping[str, Any], notes: Mapping[str, Any]) -> Product:
    title = str(row.get("name") or "")
    points = row.get("small_description") or []
    return Product(
        id=row["asin"],
        title=title,
        query=str(row.get("query") or "").lower().strip(),
        category=str(row.get("product_category") or ""),
        nouns=nouns(title),
        attributes=tuple(notes.get(row["asin"], {}).get("attributes", ())),
        options=tuple(_options(row.get("customization_options") or {})),
        price=_price(row["asin"], row.get("pricing")),
        description=str(row.get("full_description") or ""),
        features=tuple(map(str, points if isinstance(points, list) else [points])),
    )


def _options(given: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (kind.lower(), tuple(str(value["value"]).strip().replace("/", " | ").lower() for value in values))
        for kind, values in given.items()
        if values
    ]


def _price(asin: str, given: Any) -> float:
    """A price, or one between two; `$12.99$15.99` is how the files write a range."""
    numbers = [float(re.sub(r"[^\d.]", "", part)) for part in str(given or "").split("$")[1:]]
    if len(numbers) < 2:
        return numbers[0] if numbers else DEFAULT_PRICE
    return round(float(generator(0, "price", asin).uniform(min(numbers[:2]), max(numbers[:2]))), 2)


def nouns(title: str) -> tuple[str, ...]:
    """The words of a title that may say what the thing is: letters only, three or more, nothing dull."""
    words = re.findall(r"[a-z]{3,}", title.lower())
    return tuple(dict.fromkeys(word for word in words if word not in DULL))


def _searched(product: Product) -> str:
    options = " ".join(value for _, values in product.options for value in values)
    return f"{product.title} {product.query} {product.description} {' '.join(product.features)} {options}"


def _synthetic(product: Product, note: Mapping[str, Any]) -> list[dict[str, Any]]:
    """WebShop's own instruction for a product, with one value of each of its options."""
    if not note.get("instruction"):
        return []
    chance = generator(0, "options", product.id)
    options = {kind: values[int(chance.integers(len(values)))] for kind, values in product.options}
    asked = ", and ".join(f"{kind}: {value}" for kind, value in options.items())
    return [
        {
            "instruction": note["instruction"] + (f" with {asked}" if asked else ""),
            "instruction_attributes": note.get("instruction_attributes", ()),
            "instruction_options": options,
        }
    ]


def _goal(product: Product, asked: Mapping[str, Any]) -> Goal | None:
    """What an instruction of the files asks for; one without attributes is left out, as WebShop does."""
    attributes = tuple(asked.get("instruction_attributes") or ())
    if not attributes:
        return None
    given = asked.get("instruction_options") or {}
    options = tuple(given.items()) if isinstance(given, Mapping) else tuple(("", value) for value in given)
    above = [10.0 * tens for tens in range(1, 100) if 10.0 * tens > product.price][:4]
    text, upper = str(asked["instruction"]).strip(". "), NO_LIMIT
    if len(above) >= 2:
        upper = above[int(generator(0, "upper", product.id).integers(1, len(above)))]
        text += f", and price lower than {upper:.2f} dollars"
    return Goal(text, product, attributes, tuple((str(k), str(v)) for k, v in options), upper, product.title)
