"""Shop: find and buy what the instruction asks for. WebShop's pages, actions and reward (Yao et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from itertools import product as combinations

from arborl.envs.env import Observation, Step, parse_answer, task_split
from arborl.envs.games.shop_catalogue import Catalogue, Product, ShopGoal, draw_goal, generated_catalogue, load_webshop
from arborl.envs.games.text_game import TextGame, require
from arborl.types import Message, Metrics, Task

ACTION = re.compile(r"\b(search|click)\[([^\]]*)\]", re.IGNORECASE)
RULES = (
    "Buy what the instruction asks for. On the first page, write search[words]. "
    "On other pages, write click[text] with a text in square brackets. Choose the options before you buy."
)
SMALLEST, LARGEST = 100, 1_000_000
MAX_COMBINATIONS = 200
"""Combinations of options that the oracle tries per product."""


@dataclass(eq=False)
class Shop(TextGame):
    """Find and buy what an instruction asks for."""

    blocking = False
    rules, invalid = RULES, "Not possible here."

    products: int = 1000
    """Size of the generated catalogue; typically 1,000 to 100,000."""
    catalogue_seed: int = 0
    """Seed of the generated catalogue."""
    per_page: int = 5
    """Products per result page."""
    max_steps: int = 15
    """The episode is truncated after this many steps."""
    format_penalty: float = -0.05
    """Reward of an illegal message; the page does not change."""
    data: str | None = None
    """Folder with WebShop's data files (`arborl data prepare webshop`), instead of a generated catalogue."""
    human: bool = True
    """With `data`, use the human instructions; else WebShop's synthetic ones."""
    repeat_instruction: bool = True
    """Show the instruction on every page, as WebShop does; else only on the first."""

    def __post_init__(self) -> None:
        enough = SMALLEST <= self.products <= LARGEST
        require(enough, f"products={self.products}: give a number from {SMALLEST} to {LARGEST:,}")
        require(self.per_page >= 1, f"per_page={self.per_page}: give at least 1")
        self.check_limits()
        self.page = ShopPage()
        self.goal: ShopGoal | None = None

    @property
    def catalogue(self) -> Catalogue:
        """Shared by all environments of the process."""
        if self.data is None:
            return generated_catalogue(self.products, self.catalogue_seed)
        return load_webshop(self.data, self.human).catalogue

    @property
    def site(self) -> ShopSite:
        return ShopSite(self.catalogue, self.per_page)

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "shop")
        if self.data is None:
            self.goal = draw_goal(self.catalogue, task.seed, split)
        else:
            self.goal = load_webshop(self.data, self.human).draw(task.seed, split)
        self.page = ShopPage()
        self.score = 0.0
        return self.opening(self.render())

    async def step(self, action: Message) -> Step:
        after = self._follow(action.content)
        effective = after is not None and after != self.page
        self.page = after or self.page
        bought = self.page.kind == "done"
        if bought:
            self.score = purchase_reward(self.current_goal, self.site.item(self.page), self.page.options)
        text = self.render() if self.repeat_instruction else self.site.text(self.page)
        reward = self.score if after else self.format_penalty
        return self.next_step(after is not None, effective, reward, bought, text)

    def _follow(self, text: str) -> ShopPage | None:
        """The next page; None for an illegal action."""
        found = ACTION.search(parse_answer(text) or text)
        if found is None or self.page.kind == "done":
            return None
        verb, argument = found[1].lower(), found[2].strip()
        if verb == "click":
            return self.site.click(self.page, argument)
        return ShopPage("results", words=argument.lower()) if argument and self.page.kind == "search" else None

    @property
    def current_goal(self) -> ShopGoal:
        if self.goal is None:
            raise RuntimeError("no episode: call reset() first")
        return self.goal

    def metrics(self) -> Metrics:
        """`score` is the reward of the purchase; `success` is 1 for the full reward."""
        bought = float(self.page.kind == "done")
        return {"success": float(self.score == 1.0), "score": self.score, "bought": bought, **self.shares()}

    def actions(self) -> list[str]:
        """Every click of the page; on the search page, some reasonable searches."""
        if self.page.kind != "search":
            return [f"click[{button}]" for button in self.site.buttons(self.page)]
        if self.goal is None:
            return ["search[shirt]", "click[B1]", "click[Buy Now]"]
        goal = self.goal
        searches = [goal.words, goal.product.query, *(f"{word} {goal.product.query}" for word in goal.attributes)]
        return [f"search[{words}]" for words in dict.fromkeys(searches)]

    def oracle(self) -> str:
        """Search, open the first product with the maximum reward, choose its options, buy."""
        page, site, goal = self.page, self.site, self.current_goal
        if page.kind == "search":
            return f"search[{goal.words}]"
        if page.kind == "topic":
            return f"click[{PREVIOUS}]"
        best = best_choice(goal, goal.product)[0]
        if page.kind == "results":
            shown = site.results(page)
            good = next((item for item in shown if best_choice(goal, item)[0] >= best), None)
            if good is not None:
                return f"click[{good.id}]"
            return f"click[{NEXT if page.number < site.last(page) else BACK}]"
        worth, wanted = best_choice(goal, site.item(page))
        if worth < best:
            return f"click[{PREVIOUS}]"
        missing = [value for kind, value in wanted.items() if page.options.get(kind) != value]
        return f"click[{missing[0] if missing else BUY}]"

    def state_key(self) -> str:
        page = self.page
        chosen = ",".join(sorted(f"{kind}={value}" for kind, value in page.chosen))
        return "/".join((page.kind, page.words, str(page.number), page.item, page.topic, chosen))

    def render(self) -> str:
        return f"Instruction: {self.current_goal.instruction}\n{self.site.text(self.page)}"


def best_choice(goal: ShopGoal, item: Product) -> tuple[float, dict[str, str]]:
    """Maximum reward of a product over its options, and those options."""
    kinds = [kind for kind, _ in item.options]
    wanted = {value for _, value in goal.options}
    # Per option kind: the wanted values, else none. All values when texts match only approximately.
    likely: list[list[str | None]] = [
        [value for value in offered if value in wanted] or [None] for _, offered in item.options
    ]
    best = _best(goal, item, kinds, likely)
    if best[0] < 1.0 and goal.options:
        every = _best(goal, item, kinds, [[None, *offered] for _, offered in item.options])
        best = every if every[0] > best[0] else best
    return best


def _best(
    goal: ShopGoal, item: Product, kinds: list[str], values: list[list[str | None]]
) -> tuple[float, dict[str, str]]:
    best: tuple[float, dict[str, str]] = (-1.0, {})
    for choice in islice(combinations(*values), MAX_COMBINATIONS + 1):
        chosen = {kind: value for kind, value in zip(kinds, choice, strict=True) if value is not None}
        worth = purchase_reward(goal, item, chosen)
        if worth > best[0]:
            best = worth, chosen
    return best


BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
TOPICS = ("Description", "Features", "Reviews")
RESULTS = 50
"""Maximum number of search results."""


@dataclass(frozen=True, slots=True)
class ShopPage:
    """State of the site. Texts in square brackets can be clicked."""

    kind: str = "search"
    """`search`, `results`, `item`, `topic` or `done`."""
    words: str = ""
    """Search query."""
    number: int = 0
    """Number of the result page, from 0."""
    item: str = ""
    """Product id."""
    topic: str = ""
    chosen: tuple[tuple[str, str], ...] = ()
    """Chosen options: kind and value."""

    @property
    def options(self) -> Mapping[str, str]:
        return dict(self.chosen)


@dataclass(frozen=True, slots=True)
class ShopSite:
    """The pages of one catalogue."""

    catalogue: Catalogue
    per_page: int

    def results(self, page: ShopPage) -> list[Product]:
        found = self.catalogue.search_indices(page.words, RESULTS)
        return [self.catalogue.products[i] for i in found[page.number * self.per_page :][: self.per_page]]

    def last(self, page: ShopPage) -> int:
        return max(len(self.catalogue.search_indices(page.words, RESULTS)) - 1, 0) // self.per_page

    def item(self, page: ShopPage) -> Product:
        found = self.catalogue.product(page.item)
        if found is None:
            raise KeyError(f"no product {page.item!r}")
        return found

    def buttons(self, page: ShopPage) -> list[str]:
        """Texts that can be clicked, in display order."""
        if page.kind == "results":
            back = [PREVIOUS] if page.number else []
            onward = [NEXT] if page.number < self.last(page) else []
            return [BACK, *back, *onward, *(product.id for product in self.results(page))]
        if page.kind == "item":
            values = [value for _, offered in self.item(page).options for value in offered]
            return [BACK, PREVIOUS, *values, *TOPICS, BUY]
        return [BACK, PREVIOUS] if page.kind == "topic" else []

    def click(self, page: ShopPage, label: str) -> ShopPage | None:
        """The next page; None without such a button."""
        button = {text.lower(): text for text in self.buttons(page)}.get(label.strip().lower())
        if button is None:
            return None
        if button == BACK:
            return ShopPage()
        if button == PREVIOUS and page.kind == "results":
            return replace(page, number=page.number - 1)
        if button == PREVIOUS and page.kind == "item":
            return replace(page, kind="results", item="", chosen=())
        if button == PREVIOUS:
            return replace(page, kind="item", topic="")
        if button == NEXT:
            return replace(page, number=page.number + 1)
        if page.kind == "results":
            return replace(page, kind="item", item=button, chosen=())
        if button == BUY:
            return replace(page, kind="done")
        if button in TOPICS:
            return replace(page, kind="topic", topic=button)
        kind = next(kind for kind, offered in self.item(page).options if button in offered)
        rest = tuple(pair for pair in page.chosen if pair[0] != kind)
        return replace(page, chosen=(*rest, (kind, button)))

    def text(self, page: ShopPage) -> str:
        match page.kind:
            case "search":
                return "[Search]"
            case "results":
                return self._results_text(page)
            case "item":
                return self._item_text(page)
            case "topic":
                item = self.item(page)
                texts = {"Description": [item.description], "Features": item.features, "Reviews": item.reviews}
                return f"[{BACK}] [{PREVIOUS}]\n" + ("\n".join(texts[page.topic]) or "Nothing here.")
            case _:
                return "Thank you for shopping with us."

    def _results_text(self, page: ShopPage) -> str:
        shown = self.results(page)
        moves = " ".join(f"[{button}]" for button in self.buttons(page)[: -len(shown) or None])
        if not shown:
            return f"{moves}\nNothing found."
        lines = [f"[{product.id}] {product.title} ${product.price:g}" for product in shown]
        return "\n".join([f"{moves} Page {page.number + 1} of {self.last(page) + 1}", *lines])

    def _item_text(self, page: ShopPage) -> str:
        product = self.item(page)
        lines = [f"[{BACK}] [{PREVIOUS}]", product.title, f"Price: ${product.price:g}"]
        lines += [f"{kind}: {' '.join(f'[{value}]' for value in offered)}" for kind, offered in product.options]
        if page.chosen:
            lines.append("Chosen: " + ", ".join(value for _, value in page.chosen))
        lines.append(" ".join(f"[{button}]" for button in (*TOPICS, BUY)))
        return "\n".join(lines)


MATCH_THRESHOLD = 85
"""Texts with a higher `token_set_ratio` match."""
COLORS = (
    "beige", "black", "blue", "bronze", "brown", "burgundy", "camel", "charcoal", "clear", "coral", "cream",
    "cyan", "gold", "gray", "green", "grey", "indigo", "ivory", "khaki", "lavender", "lilac", "magenta", "maroon",
    "mint", "navy", "olive", "orange", "peach", "pink", "plum", "purple", "red", "rose", "ruby", "rust", "salmon",
    "silver", "tan", "teal", "turquoise", "violet", "wine", "white", "yellow",
)  # fmt: skip


def purchase_reward(goal: ShopGoal, product: Product, chosen: Mapping[str, str]) -> float:
    """WebShop's reward, from 0 to 1.

    type_score * (attributes matched + options matched + price within limit) / (attributes + options + 1)
    """
    met = num_attributes_met(goal, product) + num_options_met(goal, chosen)
    within = goal.price_upper <= 0 or product.price <= goal.price_upper
    return type_score(goal.product, product) * (met + within) / (len(goal.attributes) + len(goal.options) + 1)


def type_score(wanted: Product, bought: Product) -> float:
    """1 for products of one kind (same query, two shared categories, or shared title nouns), 0.5 otherwise, 0.1 with
    hardly a shared noun, 0 without any."""
    shared = len(set(wanted.nouns) & set(bought.nouns)) / len(wanted.nouns) if wanted.nouns else 0.2
    if shared < 0.1:
        return 0.1 if shared else 0.0
    left, right = ({part.strip() for part in product.category.split("›")} for product in (wanted, bought))
    return 1.0 if wanted.query == bought.query or len(left & right) >= 2 or shared > 0.2 else 0.5


def num_attributes_met(goal: ShopGoal, product: Product) -> int:
    """Number of wanted attributes that the product has or its texts contain."""
    texts = (product.title.lower(), " ".join(product.features).lower(), product.description.lower())
    return sum(
        any(token_set_ratio(has, wanted) > MATCH_THRESHOLD for has in product.attributes)
        or any(wanted in text for text in texts)
        for wanted in goal.attributes
    )


def num_options_met(goal: ShopGoal, chosen: Mapping[str, str]) -> int:
    """Number of wanted options that were chosen."""
    values = [plain_color(value) for value in chosen.values()]
    return sum(
        any(token_set_ratio(value, plain_color(wanted)) > MATCH_THRESHOLD for value in values)
        for _, wanted in goal.options
    )


def plain_color(text: str) -> str:
    """The basic color in an option's text, else the text."""
    return next((color for color in COLORS if color in text.lower()), text.lower())


@lru_cache(maxsize=65536)
def token_set_ratio(one: str, other: str) -> float:
    """Similarity of two texts as sets of words, 0 to 100, as `token_set_ratio` of the package thefuzz."""
    left, right = set(_words(one)), set(_words(other))
    if not left or not right:
        return 0.0
    shared = " ".join(sorted(left & right))
    first = f"{shared} {' '.join(sorted(left - right))}".strip()
    second = f"{shared} {' '.join(sorted(right - left))}".strip()
    if shared and (left <= right or right <= left):
        return 100.0
    pairs = [(first, second)] + ([(shared, first), (shared, second)] if shared else [])
    return max(_ratio(a, b) for a, b in pairs)


def _words(text: str) -> list[str]:
    return "".join(character if character.isalnum() else " " for character in text.lower()).split()


def _ratio(one: str, other: str) -> float:
    """Twice the longest common subsequence over both lengths, as a whole percentage."""
    row = [0] * (len(other) + 1)
    for a in one:
        before = 0
        for place, b in enumerate(other, 1):
            here = row[place]
            row[place] = before + 1 if a == b else max(here, row[place - 1])
            before = here
    return round(200 * row[-1] / (len(one) + len(other)))
