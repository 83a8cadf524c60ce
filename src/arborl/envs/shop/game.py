"""The shop as an environment: WebShop's two actions, `search[words]` and `click[a word in brackets]`."""

from __future__ import annotations

import re
from itertools import product as combinations
from typing import TYPE_CHECKING

from arborl.envs.answers import read_answer
from arborl.envs.env import Env, Observation, Step
from arborl.envs.shop.catalogue import Catalogue, Goal, Product
from arborl.envs.shop.pages import BACK, BUY, NEXT, PREVIOUS, Page, Site
from arborl.envs.shop.reward import reward
from arborl.envs.shop.stock import draw_goal, generated
from arborl.envs.splits import wanted_split
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

ACTION = re.compile(r"\b(search|click)\[([^\]]*)\]", re.IGNORECASE)
RULES = (
    "Buy what the instruction asks for. On the first page, write search[words]. "
    "On other pages, write click[text] with a text in square brackets. Choose the options before you buy."
)
INVALID = "Not possible here."
SMALLEST, LARGEST = 100, 1_000_000
MAX_COMBINATIONS = 200
"""Options of one product that the oracle tries."""


class Shop(Env):
    """Find and buy what an instruction asks for.

    Args:
        products: size of the generated catalogue; 1,000 to 100,000 is usual.
        catalogue_seed: which generated catalogue.
        per_page: products on a page of results.
        max_steps: the episode is truncated after this many.
        format_penalty: reward of a message that is no action of the page; the page stays.
        data: folder with WebShop's own files, to be used instead of a generated catalogue.
        human: with `data`, the instructions people wrote; else WebShop's synthetic ones.
        repeat_instruction: show the instruction on every page, as WebShop does; else only at the start.
    """

    blocking = False

    def __init__(
        self,
        products: int = 1000,
        catalogue_seed: int = 0,
        per_page: int = 5,
        max_steps: int = 15,
        format_penalty: float = -0.05,
        data: str | None = None,
        human: bool = True,
        repeat_instruction: bool = True,
    ):
        if not SMALLEST <= products <= LARGEST:
            raise ValueError(f"products={products}: give a number from {SMALLEST} to {LARGEST:,}")
        if per_page < 1 or max_steps < 1:
            raise ValueError(f"per_page={per_page}, max_steps={max_steps}: give at least 1 of each")
        if format_penalty > 0:
            raise ValueError(f"format_penalty={format_penalty}: a penalty is negative or zero")
        self.products, self.catalogue_seed, self.per_page = products, catalogue_seed, per_page
        self.max_steps, self.format_penalty = max_steps, format_penalty
        self.data, self.human, self.repeat_instruction = data, human, repeat_instruction
        self.page = Page()
        self.goal: Goal | None = None

    @property
    def catalogue(self) -> Catalogue:
        """Shared by all environments of the process; an environment itself stays small and can be copied."""
        if self.data is None:
            return generated(self.products, self.catalogue_seed)
        from arborl.envs.shop.webshop import from_files

        return from_files(self.data, self.human).catalogue

    @property
    def site(self) -> Site:
        return Site(self.catalogue, self.per_page)

    async def reset(self, task: Task, seed: int) -> Observation:
        split = wanted_split(task, "shop")
        if self.data is None:
            self.goal = draw_goal(self.catalogue, task.seed, split)
        else:
            from arborl.envs.shop.webshop import from_files

            self.goal = from_files(self.data, self.human).draw(task.seed, split)
        self.page = Page()
        self.steps = self.valid = self.effective = 0
        self.score = 0.0
        return Observation((Message("system", RULES), Message("user", self.render())), state_key=self.state_key())

    async def step(self, action: Message) -> Step:
        after = self._follow(action.content)
        effective = after is not None and after != self.page
        self.page = after or self.page
        self.steps += 1
        self.valid += after is not None
        self.effective += effective
        bought = self.page.kind == "done"
        if bought:
            self.score = reward(self.asked, self.site.item(self.page), self.page.options)
        shown = self.render() if self.repeat_instruction else self.site.text(self.page)
        text = shown if after else f"{INVALID}\n{shown}"
        return Step(
            Observation((Message("user", text),), state_key=self.state_key()),
            reward=self.score if after else self.format_penalty,
            terminated=bought,
            truncated=not bought and self.steps >= self.max_steps,
            info={"valid": float(after is not None), "effective": float(effective)},
        )

    def _follow(self, text: str) -> Page | None:
        """The page an action leads to; None where it is none, or not one of this page."""
        found = ACTION.search(read_answer(text) or text)
        if found is None or self.page.kind == "done":
            return None
        verb, argument = found[1].lower(), found[2].strip()
        if verb == "click":
            return self.site.click(self.page, argument)
        return Page("results", words=argument.lower()) if argument and self.page.kind == "search" else None

    @property
    def asked(self) -> Goal:
        if self.goal is None:
            raise RuntimeError("the shop is not open: call reset() first")
        return self.goal

    def metrics(self) -> Metrics:
        """`success` is a purchase worth the full reward; `score` is what it was worth."""
        played = max(self.steps, 1)
        return {
            "success": float(self.score == 1.0),
            "score": self.score,
            "bought": float(self.page.kind == "done"),
            "valid": self.valid / played,
            "effective": self.effective / played,
        }

    def actions(self) -> list[str]:
        """Every click of the page; on the search page, some of the searches one might do."""
        if self.page.kind != "search":
            return [f"click[{button}]" for button in self.site.buttons(self.page)]
        if self.goal is None:
            return ["search[shirt]", "click[B1]", "click[Buy Now]"]
        goal = self.goal
        searches = [goal.words, goal.product.query, *(f"{word} {goal.product.query}" for word in goal.attributes)]
        return [f"search[{words}]" for words in dict.fromkeys(searches)]

    def oracle(self) -> str:
        """Search, take the first product that gives as much as any can, choose its options, buy."""
        page, site, goal = self.page, self.site, self.asked
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
        return f"Instruction: {self.asked.instruction}\n{self.site.text(self.page)}"

    def picture(self) -> Image:
        from arborl.envs.text_picture import write

        return write(self.render(), "Shop")


def best_choice(goal: Goal, item: Product) -> tuple[float, dict[str, str]]:
    """What a product is worth with its best options, and the options that matter."""
    kinds = [kind for kind, _ in item.options]
    wanted = {value for _, value in goal.options}
    # Per kind: the wanted values it offers, else nothing needs to be chosen. All values where words only nearly match.
    likely: list[list[str | None]] = [
        [value for value in offered if value in wanted] or [None] for _, offered in item.options
    ]
    best = _best(goal, item, kinds, likely)
    if best[0] < 1.0 and goal.options:
        best = max(
            best, _best(goal, item, kinds, [[None, *offered] for _, offered in item.options]), key=lambda x: x[0]
        )
    return best


def _best(goal: Goal, item: Product, kinds: list[str], values: list[list[str | None]]) -> tuple[float, dict[str, str]]:
    best: tuple[float, dict[str, str]] = (-1.0, {})
    for number, choice in enumerate(combinations(*values)):
        chosen = {kind: value for kind, value in zip(kinds, choice, strict=True) if value is not None}
        worth = reward(goal, item, chosen)
        if worth > best[0]:
            best = worth, chosen
        if number >= MAX_COMBINATIONS:
            break
    return best
