"""Products of the shop: full-text search (SQLite FTS5), a generated catalogue, and WebShop's data files."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from arborl.envs.env import check_split, split_of
from arborl.seeds import generator

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Product:
    """One product."""

    id: str
    title: str
    query: str
    """Search query for this kind of product."""
    category: str
    """Categories from general to specific, separated by ›."""
    nouns: tuple[str, ...]
    """Nouns of the title."""
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    """Kind of option (color, size) and its values."""
    price: float
    description: str = ""
    features: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShopGoal:
    """Goal of an episode."""

    instruction: str
    product: Product
    """The product that the goal was made from; others may satisfy it too."""
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """Kind and value; the kind is empty when unknown."""
    price_upper: float
    """Maximum price; 0 for any."""
    words: str
    """A good search query."""


class Products(Protocol):
    """Sequence of products; may create them on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Product: ...


class Catalogue:
    """Products by index and id, with full-text search.

    Args:
        products: the products.
        texts: indexed text of each product.
        ids: id of each product.
    """

    def __init__(self, products: Products, texts: Sequence[str], ids: Sequence[str]):
        self.products = products
        self.places = {id.lower(): place for place, id in enumerate(ids)}
        self.lock = threading.Lock()
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.execute("CREATE VIRTUAL TABLE products USING fts5(text, content='', tokenize='porter unicode61')")
        self.db.executemany("INSERT INTO products(rowid, text) VALUES (?, ?)", enumerate(texts, 1))
        self.db.commit()
        self.found = lru_cache(maxsize=4096)(self._search)

    def __len__(self) -> int:
        return len(self.products)

    def product(self, id: str) -> Product | None:
        place = self.places.get(id.lower())
        return None if place is None else self.products[place]

    def search(self, words: str, limit: int = 50) -> list[Product]:
        """Products that match any of the words, best first (BM25)."""
        return [self.products[place] for place in self.search_indices(words, limit)]

    def search_indices(self, words: str, limit: int = 50) -> tuple[int, ...]:
        """Indices of the matching products."""
        return self.found(" ".join(WORD.findall(words.lower())), limit)

    def _search(self, words: str, limit: int) -> tuple[int, ...]:
        if not words:
            return ()
        match = " OR ".join(f'"{word}"' for word in dict.fromkeys(words.split()))
        # Rounded: the order must be equal on all machines.
        order = "SELECT rowid FROM products WHERE products MATCH ? ORDER BY round(bm25(products), 6), rowid LIMIT ?"
        with self.lock:
            return tuple(row[0] - 1 for row in self.db.execute(order, (match, limit)))


class Department(NamedTuple):
    """Vocabulary of one department: every use combines with every noun and attribute."""

    name: str
    nouns: list[str]
    uses: list[str]
    attributes: list[str]
    options: list[str]


DEPARTMENTS = [
    Department(row["name"], row["nouns"].split(), row["uses"].split(), row["attributes"].split(), row["options"])
    for row in json.loads(Path(__file__).with_name("shop_departments.json").read_text(encoding="utf-8"))
]
OPTIONS = {
    "color": ("red", "blue", "green", "black", "white", "pink", "brown", "yellow"),
    "size": ("small", "medium", "large", "huge", "tiny"),
}
BRANDS = (
    "Norva", "Alder", "Pico", "Lumen", "Tarn", "Velo", "Brim", "Oslo", "Fable", "Quill", "Sable", "Ridge", "Mira",
    "Kestrel", "Dune", "Halden",
)  # fmt: skip


PER_TYPE = 40
"""Average number of products per type."""
CHEAPEST, DEAREST = 5, 96
MAX_DRAWS = 1_000
"""Products drawn before an error."""


class GeneratedProducts:
    """Generated products of one seed. Random numbers are drawn at once; a product is created on access."""

    def __init__(self, size: int, seed: int):
        rng = generator(seed, "shop", size)
        every = [(d, use, noun) for d in DEPARTMENTS for noun in d.nouns for use in d.uses]
        kinds = min(len(every), max(20, size // PER_TYPE))
        self.kinds: list[tuple[Department, str, str]] = [every[i] for i in rng.permutation(len(every))[:kinds]]
        self.kind = rng.integers(kinds, size=size)
        self.order = rng.random((size, max(len(d.attributes) for d in DEPARTMENTS))).astype(np.float32)
        self.price = rng.integers(CHEAPEST, DEAREST, size=size)
        self.brand = rng.integers(len(BRANDS), size=size)
        self.offers = rng.integers(1 << 30, size=(size, 2))

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
        """Two attributes of the department."""
        words = self.kinds[self.kind[place]][0].attributes
        chosen = np.sort(np.argsort(self.order[place][: len(words)])[:2])
        return tuple(words[i] for i in chosen)

    def text(self, place: int) -> str:
        """The indexed text."""
        _, use, noun = self.kinds[self.kind[place]]
        return f"{' '.join(self.attributes(place))} {use} {noun} {BRANDS[self.brand[place]]}"


def _some(values: Sequence[str], offer: int, count: int) -> tuple[str, ...]:
    """`count` of the values, selected by a random number."""
    left, chosen = list(range(len(values))), []
    for _ in range(count):
        offer, which = divmod(offer, len(left))
        chosen.append(left.pop(which))
    return tuple(values[i] for i in sorted(chosen))


@lru_cache(maxsize=64)
def generated_catalogue(size: int, seed: int) -> Catalogue:
    """The catalogue of this size and seed; built once per process."""
    stock = GeneratedProducts(size, seed)
    return Catalogue(stock, [stock.text(place) for place in range(size)], [f"B{place + 1}" for place in range(size)])


def draw_goal(catalogue: Catalogue, seed: int, split: str) -> ShopGoal:
    """A goal. One product in ten is held out from training goals."""
    check_split(split, "shop")
    rng = generator(seed, "goal")
    drawn = (int(place) for place in rng.integers(len(catalogue), size=MAX_DRAWS))
    place = next((place for place in drawn if split_of(("shop", place)) == split), None)
    if place is None:
        raise ValueError(f"no product of split {split!r} among {len(catalogue)}: give more products")
    product = catalogue.products[place]
    count = int(rng.integers(1, len(product.attributes) + 1))
    attributes = tuple(product.attributes[i] for i in sorted(rng.permutation(len(product.attributes))[:count]))
    options = tuple((kind, values[int(rng.integers(len(values)))]) for kind, values in product.options)
    upper = float(10 * (product.price // 10 + 1 + rng.integers(4, size=2).max()))
    words = f"{' '.join(attributes)} {product.query}"
    wanted = "".join(f", {kind} {value}" for kind, value in options)
    instruction = f"Find me {words}{wanted}, price lower than {upper:g} dollars."
    return ShopGoal(instruction, product, attributes, options, upper, words)


FILES = {
    "products": ("items_shuffle.json", "items_shuffle_1000.json"),
    "attributes": ("items_ins_v2.json", "items_ins_v2_1000.json"),
    "people": ("items_human_ins.json",),
}
STOP_WORDS = (
    "and", "the", "for", "with", "from", "set", "pack", "inch", "new", "pcs", "your", "our", "this", "that",
    "are", "has", "men", "women",
)  # fmt: skip
DEFAULT_PRICE = 100.0
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True, slots=True)
class WebShopData:
    """Catalogue and goals of WebShop's data files.

    Expected in one folder: `items_shuffle.json` (or `items_shuffle_1000.json`), `items_ins_v2.json` (or `…_1000.json`)
    and `items_human_ins.json`. Two differences from WebShop: SQLite's ranking instead of Lucene's, and the longer words
    of a title instead of parsed nouns.
    """

    catalogue: Catalogue
    goals: Mapping[str, Sequence[ShopGoal]]
    """Goals by split."""

    def draw(self, seed: int, split: str) -> ShopGoal:
        goals = self.goals[check_split(split, "shop")]
        if not goals:
            raise ValueError(f"the files have no instruction of split {split!r}: give more products")
        return goals[int(generator(seed, "webshop").integers(len(goals)))]


@lru_cache(maxsize=2)
def load_webshop(folder: str, human: bool = True) -> WebShopData:
    """Read the files; once per process."""
    listed, notes = _read(folder, "products"), _read(folder, "attributes")
    rows = [row for row in listed if isinstance(row.get("asin"), str) and row["asin"] != "nan"]
    products = list({row["asin"]: _product(row, notes) for row in rows if len(row["asin"]) <= 10}.values())
    texts = [_indexed_text(product) for product in products]
    people = _read(folder, "people") if human else {}
    goals: dict[str, list[ShopGoal]] = {"train": [], "held_out": []}
    for product in products:
        given = people.get(product.id, ()) if human else _synthetic(product, notes.get(product.id, {}))
        for goal in (_goal(product, one) for one in given):
            if goal is not None:
                goals[split_of(("webshop", product.id))].append(goal)
    return WebShopData(Catalogue(products, texts, [product.id for product in products]), goals)


def prepare_webshop(source: Path, out: Path, products: int | None = None) -> dict[str, int]:
    """Write what `env.args.data` reads of WebShop's files to `out`: the first `products`, and their instructions.

    The file of all 1.18 million products is read one product at a time.

    Args:
        source: the folder of the downloaded files, or the folder that has it as `data/`.

    Returns:
        Rows by file.
    """
    place = next((one for one in (source, source / "data") if _found(one, "products")), source)
    rows: dict[str, dict[str, Any]] = {}
    for row in _array_items(_file(place, "products")):
        if products is not None and len(rows) >= products:
            break
        if isinstance(row, Mapping) and isinstance(row.get("asin"), str):
            rows.setdefault(row["asin"], {name: row[name] for name in COLUMNS if name in row})
    if not rows:
        raise ValueError(f"{_file(place, 'products')}: has no products with an asin")
    written: dict[str, Any] = {FILES["products"][0]: list(rows.values())}
    for what in ("attributes", "people"):
        if what == "attributes" or _found(place, what):
            given = _read(str(place), what)
            if not isinstance(given, Mapping):
                raise ValueError(f"{_file(place, what)}: is not a JSON object by asin")
            written[FILES[what][0]] = {asin: one for asin, one in given.items() if asin in rows}
    out.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        (out / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    load_webshop.cache_clear()
    return {name: len(content) for name, content in written.items()}


COLUMNS = (
    "asin", "name", "query", "product_category", "customization_options", "pricing", "full_description",
    "small_description",
)  # fmt: skip
"""What is read of a product."""
CHUNK = 1 << 20


def _array_items(path: Path) -> Iterator[Any]:
    """The items of a JSON array, without reading the whole file."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8") as file:
        text = file.read(CHUNK).lstrip("\ufeff \t\r\n")
        if not text.startswith("["):
            raise ValueError(f"{path}: is not a JSON list of products")
        at = 1
        while True:
            at = _ITEM.match(text, at).end()  # type: ignore[union-attr]
            if text[at : at + 1] == "]":
                return
            try:
                item, end = decoder.raw_decode(text, at)
            except ValueError as error:
                chunk = file.read(CHUNK)
                if not chunk:
                    raise ValueError(f"{path}: is not complete JSON: {error}") from error
                text, at = text[at:] + chunk, 0
                continue
            yield item
            at = end


_ITEM = re.compile(r"[\s,]*")


def _found(folder: Path, what: str) -> Path | None:
    return next((folder / name for name in FILES[what] if (folder / name).is_file()), None)


def _file(folder: Path, what: str) -> Path:
    if (found := _found(folder, what)) is None:
        raise ValueError(f"{folder}: no {' or '.join(FILES[what])}; give the folder of WebShop's data files")
    return found


def _read(folder: str, what: str) -> Any:
    place = Path(folder).expanduser()
    file = _file(place.parent if place.suffix == ".json" else place, what)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error


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
    """The price, or a random price in a range (`$12.99$15.99`)."""
    numbers = [float(re.sub(r"[^\d.]", "", part)) for part in str(given or "").split("$")[1:]]
    if len(numbers) < 2:
        return numbers[0] if numbers else DEFAULT_PRICE
    return round(float(generator(0, "price", asin).uniform(min(numbers[:2]), max(numbers[:2]))), 2)


def nouns(title: str) -> tuple[str, ...]:
    """Words of a title with three or more letters, without stop words."""
    words = re.findall(r"[a-z]{3,}", title.lower())
    return tuple(dict.fromkeys(word for word in words if word not in STOP_WORDS))


def _indexed_text(product: Product) -> str:
    options = " ".join(value for _, values in product.options for value in values)
    return f"{product.title} {product.query} {product.description} {' '.join(product.features)} {options}"


def _synthetic(product: Product, note: Mapping[str, Any]) -> list[dict[str, Any]]:
    """WebShop's synthetic instruction, with one value of each option."""
    if not note.get("instruction"):
        return []
    rng = generator(0, "options", product.id)
    options = {kind: values[int(rng.integers(len(values)))] for kind, values in product.options}
    wanted = ", and ".join(f"{kind}: {value}" for kind, value in options.items())
    return [
        {
            "instruction": note["instruction"] + (f" with {wanted}" if wanted else ""),
            "instruction_attributes": note.get("instruction_attributes", ()),
            "instruction_options": options,
        }
    ]


def _goal(product: Product, row: Mapping[str, Any]) -> ShopGoal | None:
    """The goal of an instruction; None without attributes, as in WebShop."""
    attributes = tuple(row.get("instruction_attributes") or ())
    if not attributes:
        return None
    given = row.get("instruction_options") or {}
    options = tuple(given.items()) if isinstance(given, Mapping) else tuple(("", value) for value in given)
    above = [10.0 * tens for tens in range(1, 100) if 10.0 * tens > product.price][:4]
    text, upper = str(row["instruction"]).strip(". "), NO_LIMIT
    if len(above) >= 2:
        upper = above[int(generator(0, "upper", product.id).integers(1, len(above)))]
        text += f", and price lower than {upper:.2f} dollars"
    return ShopGoal(text, product, attributes, tuple((str(k), str(v)) for k, v in options), upper, product.title)
