"""The shop's pages: what each shows, which of its words can be clicked, and where a click leads.

A page is a small frozen record, so a state is one value. Whatever stands in square brackets can be clicked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from arborl.envs.shop.catalogue import Catalogue, Product

BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
TOPICS = ("Description", "Features", "Reviews")
RESULTS = 50
"""A search finds at most this many products."""


@dataclass(frozen=True, slots=True)
class Page:
    """Where the buyer is."""

    kind: str = "search"
    """`search`, `results`, `item`, `topic` or `done`."""
    words: str = ""
    """What was searched for."""
    number: int = 0
    """Page of the results, from 0."""
    item: str = ""
    """Id of the product that is looked at."""
    topic: str = ""
    chosen: tuple[tuple[str, str], ...] = ()
    """Kind of option and its value, in the order of choosing."""

    @property
    def options(self) -> Mapping[str, str]:
        return dict(self.chosen)


@dataclass(frozen=True, slots=True)
class Site:
    """The pages over one catalogue."""

    catalogue: Catalogue
    per_page: int

    def results(self, page: Page) -> list[Product]:
        """The products shown on a page of results."""
        found = self.catalogue.places_of(page.words, RESULTS)
        return [self.catalogue.products[i] for i in found[page.number * self.per_page :][: self.per_page]]

    def last(self, page: Page) -> int:
        """Number of the last page of results."""
        return max(len(self.catalogue.places_of(page.words, RESULTS)) - 1, 0) // self.per_page

    def item(self, page: Page) -> Product:
        found = self.catalogue.product(page.item)
        if found is None:
            raise KeyError(f"no product {page.item!r}")
        return found

    def buttons(self, page: Page) -> list[str]:
        """What can be clicked, in the order it is shown."""
        if page.kind == "results":
            back = [PREVIOUS] if page.number else []
            onward = [NEXT] if page.number < self.last(page) else []
            return [BACK, *back, *onward, *(product.id for product in self.results(page))]
        if page.kind == "item":
            values = [value for _, offered in self.item(page).options for value in offered]
            return [BACK, PREVIOUS, *values, *TOPICS, BUY]
        return [BACK, PREVIOUS] if page.kind == "topic" else []

    def click(self, page: Page, label: str) -> Page | None:
        """The page that a button leads to; None where there is no such button."""
        button = {text.lower(): text for text in self.buttons(page)}.get(label.strip().lower())
        if button is None:
            return None
        if button == BACK:
            return Page()
        if button == PREVIOUS:
            return self._previous(page)
        if button == NEXT:
            return replace(page, number=page.number + 1)
        if page.kind == "results":
            return replace(page, kind="item", item=button, chosen=())
        if button == BUY:
            return replace(page, kind="done")
        if button in TOPICS:
            return replace(page, kind="topic", topic=button)
        return self._choose(page, button)

    def _previous(self, page: Page) -> Page:
        if page.kind == "results":
            return replace(page, number=page.number - 1)
        if page.kind == "item":
            return replace(page, kind="results", item="", chosen=())
        return replace(page, kind="item", topic="")

    def _choose(self, page: Page, value: str) -> Page:
        kind = next(kind for kind, offered in self.item(page).options if value in offered)
        rest = tuple(pair for pair in page.chosen if pair[0] != kind)
        return replace(page, chosen=(*rest, (kind, value)))

    def text(self, page: Page) -> str:
        """The page as the buyer reads it."""
        match page.kind:
            case "search":
                return "[Search]"
            case "results":
                return self._results_text(page)
            case "item":
                return self._item_text(page)
            case "topic":
                return f"[{BACK}] [{PREVIOUS}]\n{self._topic_text(page)}"
            case _:
                return "Thank you for shopping with us."

    def _results_text(self, page: Page) -> str:
        shown = self.results(page)
        moves = " ".join(f"[{button}]" for button in self.buttons(page)[: -len(shown) or None])
        if not shown:
            return f"{moves}\nNothing found."
        lines = [f"[{product.id}] {product.title} ${product.price:g}" for product in shown]
        return "\n".join([f"{moves} Page {page.number + 1} of {self.last(page) + 1}", *lines])

    def _item_text(self, page: Page) -> str:
        product = self.item(page)
        lines = [f"[{BACK}] [{PREVIOUS}]", product.title, f"Price: ${product.price:g}"]
        lines += [f"{kind}: {' '.join(f'[{value}]' for value in offered)}" for kind, offered in product.options]
        if page.chosen:
            lines.append("Chosen: " + ", ".join(value for _, value in page.chosen))
        lines.append(" ".join(f"[{button}]" for button in (*TOPICS, BUY)))
        return "\n".join(lines)

    def _topic_text(self, page: Page) -> str:
        product = self.item(page)
        texts = {"Description": [product.description], "Features": product.features, "Reviews": product.reviews}
        return "\n".join(texts[page.topic]) or "Nothing here."
