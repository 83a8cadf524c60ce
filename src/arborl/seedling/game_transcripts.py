"""Transcripts of games. The environment itself runs, so the prompts are those that the model sees in training.

Each game has several kinds of scripted players. Skilled players follow a shortest solution with probability 0.9; the
others act at random or by a fixed bias. The model learns the formats and only a little of good play.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from numpy.random import Generator

from arborl.envs.env import Env
from arborl.envs.games.frozen_lake import MOVES, FrozenLake, best_moves
from arborl.envs.games.rooms import Rooms
from arborl.envs.games.shop import BUY, Shop, ShopPage
from arborl.envs.games.sokoban import Sokoban
from arborl.seedling.transcript_base import Transcript, draw, pick
from arborl.types import Message, Task

INVALID_ACTIONS = ("Right", "<answer></answer>", "<answer>Jump</answer>", "I go down.", "<answer>Left, Up</answer>")
INVALID_SHARE = 0.02
LAKE_PLAYERS = {"random": 0.44, "right_and_down": 0.41, "skilled": 0.15}
LAKE_POLICY_SHARE = {"random": 0.0, "right_and_down": 0.7, "skilled": 0.9}
"""Probability that a player follows its policy; otherwise the move is uniform."""
SHOP_PLAYERS = {"skilled": 0.4, "hasty": 0.35, "random": 0.25}
CATALOGUES = range(1, 5)
"""Seeds of the catalogues in the corpus. Recipes use catalogue 0."""


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
    size = int(rng.choice([3, 4, 5, 6], p=[0.05, 0.85, 0.05, 0.05]))
    env, player = FrozenLake(size=size, slippery=bool(rng.random() < 0.03)), draw(rng, LAKE_PLAYERS)

    def next_action() -> str:
        moves = best_moves(env.grid, env.player) if player == "skilled" else ("Right", "Down")
        move = pick(rng, moves if moves and rng.random() < LAKE_POLICY_SHARE[player] else tuple(MOVES))
        return f"<answer>{move}</answer>"

    return play_game(env, next_action, rng)


def random_or_oracle(env: Env, skilled: bool, rng: Generator) -> Callable[[], str]:
    """A player that acts uniformly; a skilled one takes the oracle's action with probability 0.9."""

    def next_action() -> str:
        best = env.oracle() if skilled and rng.random() < 0.9 else None
        return best or pick(rng, env.actions())

    return next_action


def sokoban(rng: Generator) -> Transcript:
    size = int(rng.choice([5, 6, 7], p=[0.05, 0.9, 0.05]))
    env = Sokoban(size=size)
    return play_game(env, random_or_oracle(env, bool(rng.random() < 0.3), rng), rng)


def rooms(rng: Generator) -> Transcript:
    count = int(rng.integers(3, 7))
    env = Rooms(rooms=count, doors=int(rng.integers(0, 3)), max_steps=18)
    return play_game(env, random_or_oracle(env, bool(rng.random() < 0.35), rng), rng)


def shop(rng: Generator) -> Transcript:
    """Hasty players take any product, skip the options and buy."""
    env = Shop(catalogue_seed=pick(rng, CATALOGUES), max_steps=8)
    player = draw(rng, SHOP_PLAYERS)
    if player == "hasty":
        return play_game(env, lambda: _hasty_action(env, rng), rng)
    return play_game(env, random_or_oracle(env, player == "skilled", rng), rng)


def _hasty_action(env: Shop, rng: Generator) -> str:
    page: ShopPage = env.page
    if page.kind == "results":
        shown: Sequence[str] = [product.id for product in env.site.results(page)]
        if shown and rng.random() < 0.95:
            return f"click[{pick(rng, shown)}]"
    if page.kind == "item" and rng.random() < 0.5:
        return f"click[{BUY}]"
    return env.oracle() if page.kind == "item" and rng.random() < 0.5 else pick(rng, env.actions())
