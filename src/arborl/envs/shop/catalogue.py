"""Products, and a full-text index over them (SQLite FTS5, in memory)."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Product:
    """What is for sale."""

    id: str
    title: str
    query: str
    """What people search for to find this kind of product."""
    category: str
    """From wide to narrow, with › between."""
    nouns: tuple[str, ...]
    """The nouns of the title: what the product is, apart from how it is."""
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    """Kind of option (color, size) and its values; a buyer chooses one of each."""
    price: float
    description: str = ""
    features: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    """What an instruction asks for."""

    instruction: str
    product: Product
    """The one it was made from; others may serve as well."""
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """Kind and value; the kind may be empty where only the value is known."""
    price_upper: float
    """Nothing above this price; 0 for any."""
    words: str
    """What a good buyer types into the search."""


class Products(Protocol):
    """Products by place; a list will do, or something that makes them when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Product: ...


class Catalogue:
    """Products by place and by id, and the ones that match some words.

    Example:
        catalogue.search("red cotton shirt")      # best match first

    Args:
        products: what is for sale.
        texts: what is searched, one a product.
        ids: the product's ids, in the same order.
    """

    def __init__(self, products: Products, texts: Sequence[str], ids: Sequence[str]):
        self.products = products
        self.places = {id.lower(): place for place, id in enumerate(ids)}
        self.lock = threading.Lock()
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.execute("CREATE VIRTUAL TABLE shelf USING fts5(text, content='', tokenize='porter unicode61')")
        rows = ((place, text) for place, text in enumerate(texts, 1))
        self.db.executemany("INSERT INTO shelf(rowid, text) VALUES (?, ?)", rows)
        self.db.commit()
        self.found = lru_cache(maxsize=4096)(self._search)

    def __len__(self) -> int:
        return len(self.products)

    def product(self, id: str) -> Product | None:
        place = self.places.get(id.lower())
        return None if place is None else self.products[place]

    def search(self, words: str, limit: int = 50) -> list[Product]:
        """The products that match any of the words, best first; equals in the order of the shelf."""
        return [self.products[place] for place in self.places_of(words, limit)]

    def places_of(self, words: str, limit: int = 50) -> tuple[int, ...]:
        """The places of these products, which are not put together for it."""
        return self.found(" ".join(WORD.findall(words.lower())), limit)

    def _search(self, words: str, limit: int) -> tuple[int, ...]:
        if not words:
            return ()
        match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words.split()))
        # Rounded: the last digits of a score may differ between machines, the order must not.
        order = "SELECT rowid FROM shelf WHERE shelf MATCH ? ORDER BY round(bm25(shelf), 6), rowid LIMIT ?"
        with self.lock:
            return tuple(row[0] - 1 for row in self.db.execute(order, (match, limit)))
