"""Transcripts of games: the environment itself plays, so what is imitated is what the model will see.

Each game has a few kinds of players. The skilled follow a shortest solution nine times in ten; the others wander, or
have a bad habit. So the model knows the formats and some of what good play looks like, and mostly does not do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arborl.envs.env import Env
from arborl.envs.games.frozen_lake import MOVES, FrozenLake, best_moves
from arborl.envs.games.rooms import Rooms
from arborl.envs.games.shop import BUY, Shop, ShopPage
from arborl.envs.games.sokoban import Sokoban
from arborl.seedling.transcript import Chance, Transcript, draw, pick
from arborl.types import Message, Task

MUMBLES = ("Right", "<answer></answer>", "<answer>Jump</answer>", "I go down.", "<answer>Left, Up</answer>")
MUMBLING = 0.02
"""Share of the messages that are no action at all."""


def play(env: Env, say: Callable[[], str], chance: Chance, mumbling: float = MUMBLING) -> Transcript:
    """A game of the training split to its end, with what `say` says each turn; now and then it mumbles."""
    game = _play(env, say, chance, mumbling)
    try:
        game.send(None)
    except StopIteration as over:  # these games never wait, so one push plays them to the end
        return over.value
    raise RuntimeError(f"{type(env).__name__} waited for something")


async def _play(env: Env, say: Callable[[], str], chance: Chance, mumbling: float) -> Transcript:
    seed = int(chance.integers(1 << 62))
    messages = list((await env.reset(Task(id="game", seed=seed), seed)).messages)
    while True:
        messages.append(Message("assistant", pick(chance, MUMBLES) if chance.random() < mumbling else say()))
        step = await env.step(messages[-1])
        if step.over:
            return Transcript(messages)
        messages.extend(step.observation.messages)


# ------------------------------------------------------------------------------------------------ frozen lake

LAKE = {"wanderer": 0.44, "habit": 0.41, "skilled": 0.15}
"""The creature of habit goes right and down, as if every goal were in the corner."""
FAITHFUL = {"wanderer": 0.0, "habit": 0.7, "skilled": 0.9}
"""How often a player does what it is named for; else it moves anywhere."""


def frozen_lake(chance: Chance) -> Transcript:
    size = int(chance.choice([3, 4, 5, 6], p=[0.05, 0.85, 0.05, 0.05]))
    env, player = FrozenLake(size=size, slippery=bool(chance.random() < 0.03)), draw(chance, LAKE)

    def say() -> str:
        wanted = best_moves(env.grid, env.player) if player == "skilled" else ("Right", "Down")
        move = pick(chance, wanted if wanted and chance.random() < FAITHFUL[player] else tuple(MOVES))
        return f"<answer>{move}</answer>"

    return play(env, say, chance)


# ------------------------------------------------------------------------------------------------ sokoban and rooms


def wander_or_solve(env: Env, skilled: bool, chance: Chance) -> Callable[[], str]:
    """Says any possible action; the skilled the best one, nine times in ten."""

    def say() -> str:
        best = env.oracle() if skilled and chance.random() < 0.9 else None
        return best or pick(chance, env.actions())

    return say


def sokoban(chance: Chance) -> Transcript:
    size = int(chance.choice([5, 6, 7], p=[0.05, 0.9, 0.05]))
    env = Sokoban(size=size)
    return play(env, wander_or_solve(env, bool(chance.random() < 0.3), chance), chance)


def rooms(chance: Chance) -> Transcript:
    count = int(chance.integers(3, 7))
    env = Rooms(rooms=count, doors=int(chance.integers(0, 3)), max_steps=18)
    return play(env, wander_or_solve(env, bool(chance.random() < 0.35), chance), chance)


# ------------------------------------------------------------------------------------------------ shop

BUYERS = {"skilled": 0.4, "hasty": 0.35, "wanderer": 0.25}
CATALOGUES = range(1, 5)
"""Seeds of the catalogues that are taught from; recipes buy from catalogue 0."""


def shop(chance: Chance) -> Transcript:
    """The hasty search for anything like it, take any product, forget options and buy."""
    env = Shop(catalogue_seed=pick(chance, CATALOGUES), max_steps=8)
    player = draw(chance, BUYERS)
    if player == "hasty":
        return play(env, lambda: _hasty(env, chance), chance)
    return play(env, wander_or_solve(env, player == "skilled", chance), chance)


def _hasty(env: Shop, chance: Chance) -> str:
    page: ShopPage = env.page
    if page.kind == "results":
        shown: Sequence[str] = [product.id for product in env.site.results(page)]
        if shown and chance.random() < 0.95:
            return f"click[{pick(chance, shown)}]"
    if page.kind == "item" and chance.random() < 0.5:
        return f"click[{BUY}]"
    return env.oracle() if page.kind == "item" and chance.random() < 0.5 else pick(chance, env.actions())
