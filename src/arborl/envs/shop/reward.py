"""What a purchase is worth: WebShop's formula.

    reward = type * (attributes matched + options matched + price within) / (attributes + options + 1)

`type` is 1 where product and goal are of one kind (same query, two shared categories, or shared nouns of the title),
0.5 where not, 0.1 where hardly a noun is shared and 0 where none is. Texts match when their words nearly do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from arborl.envs.shop.catalogue import Goal, Product

NEAR = 85
"""Texts more alike than this, out of 100, are the same."""
COLORS = (
    "beige", "black", "blue", "bronze", "brown", "burgundy", "camel", "charcoal", "clear", "coral", "cream",
    "cyan", "gold", "gray", "green", "grey", "indigo", "ivory", "khaki", "lavender", "lilac", "magenta", "maroon",
    "mint", "navy", "olive", "orange", "peach", "pink", "plum", "purple", "red", "rose", "ruby", "rust", "salmon",
    "silver", "tan", "teal", "turquoise", "violet", "wine", "white", "yellow",
)  # fmt: skip


def reward(goal: Goal, product: Product, chosen: Mapping[str, str]) -> float:
    """From 0 to 1.

    Args:
        goal: what was asked for.
        product: what was bought.
        chosen: kind of option -> the value chosen.
    """
    met = attributes_met(goal, product) + options_met(goal, chosen)
    within = goal.price_upper <= 0 or product.price <= goal.price_upper
    return type_score(goal.product, product) * (met + within) / (len(goal.attributes) + len(goal.options) + 1)


def type_score(wanted: Product, bought: Product) -> float:
    """How far two products are of one kind."""
    if wanted.nouns:
        shared = len(set(wanted.nouns) & set(bought.nouns)) / len(wanted.nouns)
    else:
        shared = 0.2
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    alike = wanted.query == bought.query or _shared_categories(wanted, bought) >= 2 or shared > 0.2
    return 1.0 if alike else 0.5


def _shared_categories(one: Product, other: Product) -> int:
    left, right = ({part.strip() for part in product.category.split("›")} for product in (one, other))
    return len(left & right)


def attributes_met(goal: Goal, product: Product) -> int:
    """Wanted attributes that the product has, or that its texts mention."""
    texts = (product.title.lower(), " ".join(product.features).lower(), product.description.lower())
    return sum(
        any(alike(has, wanted) > NEAR for has in product.attributes) or any(wanted in text for text in texts)
        for wanted in goal.attributes
    )


def options_met(goal: Goal, chosen: Mapping[str, str]) -> int:
    """Wanted options that were chosen, under whatever name."""
    values = [plain_color(value) for value in chosen.values()]
    return sum(any(alike(value, plain_color(wanted)) > NEAR for value in values) for _, wanted in goal.options)


def plain_color(text: str) -> str:
    """The color that an option names, where it names one.

    Example:
        plain_color("light navy stripes")      # 'navy'
    """
    return next((color for color in COLORS if color in text.lower()), text.lower())


@lru_cache(maxsize=65536)
def alike(one: str, other: str) -> float:
    """How alike two texts are as sets of words, 0 to 100: thefuzz's `token_set_ratio`.

    The shared words are compared with each text's shared and own words, and these with one another; the best counts.
    """
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
