"""Transcripts of games. The environment itself runs, so the prompts are those that the model sees in training.

Each game has several kinds of scripted players. Skilled players follow the oracle with probability 0.9. They are a
minority: the others act at random or by a simple rule that rarely succeeds, such as walking towards the box and pushing
it. So the most likely action of the trained model is a poor one, and good play is left for training with rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from numpy.random import Generator

from arborl.envs.env import Env, format_answer
from arborl.envs.games.frozen_lake import MOVES, FrozenLake, best_moves
from arborl.envs.games.rooms import Rooms
from arborl.envs.games.shop import BACK, BUY, NEXT, Shop, ShopPage, num_attributes_met
from arborl.envs.games.sokoban import Sokoban
from arborl.seedling.transcript_base import Transcript, draw, pick
from arborl.types import Message, Task

INVALID_ACTIONS = ("Right", "<answer></answer>", "<answer>Jump</answer>", "I go down.", "<answer>Left, Up</answer>")
INVALID_SHARE = 0.02
LAKE_SIZES = {3: 0.02, 4: 0.52, 5: 0.06, 6: 0.4}
"""Cells per side -> share of the lakes."""
SLIPPERY_SHARE = 0.1
LAKE_PLAYERS = {
    "small": {"random": 0.44, "right_and_down": 0.41, "skilled": 0.15},
    "large": {"random": 0.33, "right_and_down": 0.42, "skilled": 0.25},
    "slippery": {"random": 0.4, "right_and_down": 0.3, "skilled": 0.3},
}
LAKE_POLICY_SHARE = {"random": 0.0, "right_and_down": 0.7, "skilled": 0.9}
"""Probability that a player follows its policy; otherwise the move is uniform."""
SOKOBAN_PLAYERS = {"skilled": 0.25, "pusher": 0.5, "random": 0.25}
PUSHER_POLICY_SHARE = 0.8
SHOP_PLAYERS = {"skilled": 0.28, "hasty": 0.6, "random": 0.12}
CATALOGUES = range(1, 65)
"""Seeds of the catalogues in the corpus: many, so that the model copies words instead of remembering kinds of products.
Recipes use catalogue 0."""


def play_game(
    env: Env, next_action: Callable[[], str], rng: Generator, invalid_share: float = INVALID_SHARE
) -> Transcript:
    """Play one game of the training split to its end. These environments never wait, so one `send` runs the game."""
    game = _play(env, next_action, rng, invalid_share)
    try:
        game.send(None)
    except StopIteration as result:
        return result.value
    raise RuntimeError(f"{type(env).__name__} waited: only environments without input or output can be played here")


async def _play(env: Env, next_action: Callable[[], str], rng: Generator, invalid_share: float) -> Transcript:
    seed = int(rng.integers(1 << 62))
    messages = list((await env.reset(Task(id="game", seed=seed), seed)).messages)
    while True:
        text = pick(rng, INVALID_ACTIONS) if rng.random() < invalid_share else next_action()
        messages.append(Message("assistant", text))
        step = await env.step(messages[-1])
        if step.over:
            return Transcript(messages)
        messages.extend(step.observation.messages)


def frozen_lake(rng: Generator) -> Transcript:
    size = int(rng.choice(list(LAKE_SIZES), p=list(LAKE_SIZES.values())))
    env = FrozenLake(size=size, slippery=bool(rng.random() < SLIPPERY_SHARE))
    player = draw(rng, LAKE_PLAYERS["slippery" if env.slippery else "small" if size <= 4 else "large"])

    def next_action() -> str:
        if rng.random() >= LAKE_POLICY_SHARE[player]:
            return format_answer(pick(rng, tuple(MOVES)))
        if player == "right_and_down":
            return format_answer(pick(rng, ("Right", "Down")))
        if env.slippery:
            return env.oracle()
        return format_answer(pick(rng, best_moves(env.grid, env.player) or tuple(MOVES)))

    return play_game(env, next_action, rng)


def random_or_oracle(env: Env, skilled: bool, rng: Generator) -> Callable[[], str]:
    """A player that acts uniformly; a skilled one takes the oracle's action with probability 0.9."""

    def next_action() -> str:
        best = env.oracle() if skilled and rng.random() < 0.9 else None
        return best or pick(rng, env.actions())

    return next_action


def sokoban(rng: Generator) -> Transcript:
    size = int(rng.choice([5, 6, 7], p=[0.05, 0.9, 0.05]))
    env, player = Sokoban(size=size), draw(rng, SOKOBAN_PLAYERS)
    if player != "pusher":
        return play_game(env, random_or_oracle(env, player == "skilled", rng), rng)

    def next_action() -> str:
        return push_action(env) if rng.random() < PUSHER_POLICY_SHARE else pick(rng, env.actions())

    return play_game(env, next_action, rng)


def push_action(env: Sokoban) -> str:
    """A move towards a box, first along its column, and into it: the box is pushed wherever it goes."""
    columns = env.level.deltas["Down"]
    row, column = divmod(env.state.player, columns)
    box_row, box_column = divmod(min(env.state.boxes - env.level.targets or env.state.boxes), columns)
    if row != box_row:
        return format_answer("Down" if box_row > row else "Up")
    return format_answer("Right" if box_column > column else "Left")


def rooms(rng: Generator) -> Transcript:
    count = int(rng.integers(3, 7))
    env = Rooms(rooms=count, doors=int(rng.integers(0, 3)), max_steps=18)
    return play_game(env, random_or_oracle(env, bool(rng.random() < 0.35), rng), rng)


def shop(rng: Generator) -> Transcript:
    """Hasty players search for the right words, take the first product or another one, and buy without the options."""
    env = Shop(catalogue_seed=pick(rng, CATALOGUES), max_steps=8)
    player, opened = draw(rng, SHOP_PLAYERS), set[str]()

    def next_action() -> str:
        if player == "hasty":
            return _hasty_action(env, rng)
        return _fitting_action(env, opened) if player == "skilled" and rng.random() < 0.9 else pick(rng, env.actions())

    return play_game(env, next_action, rng)


def _fitting_action(env: Shop, opened: set[str]) -> str:
    """Open the first product that fits by its title and price. The oracle goes back if it lacks a wanted option."""
    page, goal = env.page, env.current_goal
    if page.kind != "results":
        return env.oracle()
    fitting = [
        product.id
        for product in env.site.results(page)
        if product.id not in opened
        and product.price <= goal.price_upper
        and num_attributes_met(goal, product) == len(goal.attributes)
    ]
    if not fitting:
        return f"click[{NEXT if page.number < env.site.last(page) else BACK}]"
    opened.add(fitting[0])
    return f"click[{fitting[0]}]"


def _hasty_action(env: Shop, rng: Generator) -> str:
    page: ShopPage = env.page
    if page.kind == "search" and rng.random() < 0.7:
        return env.oracle()
    if page.kind == "results":
        shown: Sequence[str] = [product.id for product in env.site.results(page)]
        if shown and rng.random() < 0.95:
            return f"click[{shown[0] if rng.random() < 0.7 else pick(rng, shown)}]"
    if page.kind == "item" and rng.random() < 0.8:
        return f"click[{BUY}]"
    return env.oracle() if page.kind == "item" and rng.random() < 0.5 else pick(rng, env.actions())
