"""What holds of every environment that makes its own tasks."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.envs import ENVS
from arborl.envs.checker import check_env
from arborl.seeds import generator
from arborl.types import Message, Task

MAKERS = {
    "frozen_lake": lambda: ENVS["frozen_lake"](),
    "frozen_lake_slippery": lambda: ENVS["frozen_lake"](size=5, slippery=True),
    "frozen_lake_large": lambda: ENVS["frozen_lake"](size=24, max_steps=12),
    "sokoban": lambda: ENVS["sokoban"](),
    "sokoban_10x10": lambda: ENVS["sokoban"]("10x10"),
    "shop": lambda: ENVS["shop"](),
    "shop_terse": lambda: ENVS["shop"](products=5000, catalogue_seed=3, per_page=3, repeat_instruction=False),
    "countdown": lambda: ENVS["countdown"](),
    "countdown_6": lambda: ENVS["countdown"](count=6, largest=50, max_target=500),
    "conversation": lambda: ENVS["conversation"](),
    "conversation_shuffled": lambda: ENVS["conversation"]("sales", order="random"),
    "rooms": lambda: ENVS["rooms"](),
    "rooms_large": lambda: ENVS["rooms"](rooms=12, doors=4, max_steps=60),
}
SOLVABLE = [name for name in MAKERS if "slippery" not in name]
seeds = st.integers(0, 2**63 - 1)
splits = st.sampled_from(["train", "held_out"])


def task(seed, split="train"):
    return Task("t", seed=seed, fields={"split": split})


async def play(env, chosen, seed, policy):
    """The opening, and every text with the step it led to."""
    opening = await env.reset(chosen, seed)
    steps = []
    while not steps or not steps[-1][1].over:
        text = policy(env)
        steps.append((text, await env.step(Message("assistant", text))))
    return opening, steps


def randomly(seed):
    rng = generator(seed, "test")
    return lambda env: env.random(rng)


def transcript(name, seed, split="train"):
    return asyncio.run(play(MAKERS[name](), task(seed, split), seed + 1, randomly(seed)))


def digest_of_all():
    """One number for some episodes of every environment; `python test_all_envs.py` prints it."""
    shown = [repr(transcript(name, seed)) for name in MAKERS for seed in range(3)]
    return hashlib.blake2b("\n".join(shown).encode()).hexdigest()


@pytest.mark.parametrize("name", MAKERS)
def test_it_keeps_the_contract(name):
    for seed, split in ((0, "train"), (1, "held_out"), (2**62, "train")):
        assert check_env(MAKERS[name], task(seed, split), seed=seed % 7) == []


@pytest.mark.parametrize("name", SOLVABLE)
def test_the_oracle_solves_at_least_99_in_100(name):
    plays = 100
    solved = 0
    for seed in range(plays):
        env = MAKERS[name]()
        asyncio.run(play(env, task(seed, "held_out" if seed % 4 == 0 else "train"), seed, lambda env: env.oracle()))
        solved += env.metrics()["success"] == 1.0
    assert solved >= 0.99 * plays


@pytest.mark.parametrize("name", MAKERS)
@given(seeds, splits)
@settings(max_examples=15)
def test_a_random_player_makes_only_valid_moves(name, seed, split):
    env = MAKERS[name]()
    _, steps = asyncio.run(play(env, task(seed, split), seed, randomly(seed)))
    assert all(step.info["valid"] == 1.0 for _, step in steps)
    assert env.metrics()["valid"] == 1.0


@pytest.mark.parametrize("name", [*MAKERS, "sokoban_dear", "rooms_dear"])
def test_silence_earns_less_than_random_play(name):
    """Also where every step costs something."""
    makers = MAKERS | {
        "sokoban_dear": lambda: ENVS["sokoban"](step_reward=-1.0, box_reward=0.0),
        "rooms_dear": lambda: ENVS["rooms"](step_reward=-1.0),
    }

    def mean(policy):
        plays = [asyncio.run(play(makers[name](), task(seed), seed, policy(seed)))[1] for seed in range(12)]
        return sum(step.reward for steps in plays for _, step in steps) / 12

    for silence in ("", "I will not."):
        if "conversation" not in name or not silence:  # whatever is received to a user is a reply
            assert mean(lambda seed, silence=silence: lambda env: silence) < mean(randomly)


@pytest.mark.parametrize("name", MAKERS)
@given(seeds, seeds, st.integers(0, 12))
@settings(max_examples=12)
def test_a_snapshot_continues_as_the_original_did_also_elsewhere_and_twice(name, seed, rng, cut):
    async def check():
        env = MAKERS[name]()
        _, steps = await play(env, task(seed), rng, randomly(seed))
        texts, answers = [text for text, _ in steps], [step for _, step in steps]
        here = min(cut, len(texts) - 1)
        await env.reset(task(seed), rng)
        for text in texts[:here]:
            await env.step(Message("assistant", text))
        kept, key = env.snapshot(), env.state_key()
        for place in (env, MAKERS[name](), env):
            place.restore(kept)
            assert place.state_key() == key
            assert [await place.step(Message("assistant", text)) for text in texts[here:]] == answers[here:]

    asyncio.run(check())


@pytest.mark.parametrize("name", MAKERS)
def test_episodes_do_not_depend_on_their_order_their_neighbours_or_the_thread(name):
    alone = {seed: transcript(name, seed) for seed in range(6)}
    with ThreadPoolExecutor(3) as pool:
        threads = dict(zip(range(5, -1, -1), pool.map(lambda s: transcript(name, s), range(5, -1, -1)), strict=True))

    async def together():
        return await asyncio.gather(*(play(MAKERS[name](), task(s), s + 1, randomly(s)) for s in range(6)))

    assert threads == alone
    assert dict(enumerate(asyncio.run(together()))) == alone


def test_episodes_are_the_same_in_another_process_with_other_string_hashes():
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command, env = [sys.executable, __file__], {**os.environ, "PYTHONHASHSEED": salt}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as elsewhere:
        here = digest_of_all()
        assert elsewhere.communicate()[0].strip() == here


@pytest.mark.parametrize("name", MAKERS)
@given(seeds, st.text(max_size=60))
@settings(max_examples=12)
def test_nonsense_is_answered_costs_at_least_as_much_as_a_move_and_changes_nothing(name, seed, text):
    async def check():
        env = MAKERS[name]()
        opening = await env.reset(task(seed), 0)
        step = await env.step(Message("assistant", f"{text} <answer>\x00{text}</answer>"))
        if name.startswith("conversation"):  # any words are a reply; none are not
            await env.reset(task(seed), 0)
            step = await env.step(Message("assistant", " \n"))
        assert step.info["valid"] == 0.0
        assert step.reward < 0
        assert not step.terminated
        if not name.startswith(("conversation", "countdown")):  # what was received is part of those states
            assert step.observation.state_key == opening.state_key
        assert env.metrics()["valid"] == 0.0
        assert env.metrics()["success"] == 0.0

    asyncio.run(check())


@pytest.mark.parametrize("name", MAKERS)
def test_no_held_out_task_is_trained_on(name):
    def problem(seed, split):
        env = MAKERS[name]()
        opening = asyncio.run(env.reset(task(seed, split), 0))
        return repr(env.map if name.startswith("rooms") else opening.messages)

    train = {problem(seed, "train") for seed in range(150)}
    held_out = {problem(seed, "held_out") for seed in range(40)}
    assert len(train) > 1
    assert train.isdisjoint(held_out)
    with pytest.raises(ValueError, match="split='test'"):
        asyncio.run(MAKERS[name]().reset(task(0, "test"), 0))


@pytest.mark.parametrize("name", MAKERS)
def test_it_can_be_copied_before_it_is_opened_and_lists_moves_for_scripted_players(name):
    env = copy.deepcopy(MAKERS[name]())
    assert all(isinstance(text, str) for text in env.actions())


@pytest.mark.parametrize("name", MAKERS)
def test_it_shows_itself_as_text_and_as_a_picture(name):
    env = MAKERS[name]()
    asyncio.run(env.reset(task(1), 0))
    assert env.render()
    picture = env.picture()
    assert picture.mode == "RGB"
    assert min(picture.size) >= 90
    assert len(set(picture.getdata())) > 4


WRONG = {
    "frozen_lake": [{"size": 1}, {"frozen": 0}, {"frozen": 1.5}],
    "sokoban": [{"preset": "7x7"}, {"size": 4}, {"boxes": 0}, {"walls": 1.0}, {"pulls": 0}],
    "rooms": [{"rooms": 1}, {"rooms": 99}, {"doors": -1}, {"doors": 6}],
    "shop": [{"products": 10}, {"products": 10**7}, {"per_page": 0}],
    "countdown": [{"count": 1}, {"count": 9}, {"largest": 1}, {"max_target": 1}, {"tries": 0}],
    "conversation": [{"preset": "x"}, {"order": "x"}, {"topics": ["x"]}, {"personas": []}],
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_make_no_game_are_refused_by_name(name):
    limit = {"countdown": "tries", "conversation": "max_turns"}.get(name, "max_steps")
    for wrong in (*WRONG[name], {limit: 0}, {"format_penalty": 0.5}):
        (key,) = wrong
        with pytest.raises(ValueError, match="max_" if key == "max_turns" else key):
            ENVS[name](**wrong)


@pytest.mark.parametrize(("name", "longest"), [("sokoban", 30), ("sokoban_10x10", 90), ("shop", 420), ("rooms", 230)])
def test_what_a_turn_shows_is_short_enough_for_a_small_model(name, longest):
    for seed in range(30):
        opening, steps = transcript(name, seed)
        shown = [opening.messages[-1], *(message for _, step in steps for message in step.observation.messages)]
        assert max(len(message.content) for message in shown) <= longest
        assert len(opening.messages[0].content) <= 300


if __name__ == "__main__":
    print(digest_of_all())  # noqa: T201
