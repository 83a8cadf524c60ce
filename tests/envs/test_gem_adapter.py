"""GEM: the package where it is installed, otherwise a game of the same shape."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from arborl.envs import ENVS
from arborl.envs.adapters import gem_adapter
from arborl.envs.checker import check_env
from arborl.errors import ConfigError
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
from arborl.types import Message, Task

HELD_OUT = {"split": "held_out"}


class Guess:
    """As a game of GEM: it draws from the global generators, also when it answers."""

    made = 0

    def __init__(self, largest=500, **_):
        Guess.made += 1
        self.largest, self.idx, self.words = largest, 0, ["word"] * 5000
        self.unwrapped = self

    def reset(self, seed=None):
        random.seed(seed)
        np.random.seed(seed)
        self.idx += 1
        self.number, self.turns = random.randint(1, self.largest), 0
        return f"Guess, for example {self.sample_random_action()}.", {"suffix": f"Episode {self.idx}."}

    def step(self, action):
        self.turns += 1
        if action == f"\\boxed{{{self.number}}}":
            return "<end>", 1.0, True, True, {}
        if "\\boxed" not in action:
            return "That is no guess.", -0.1, True, self.turns == 3, {}
        return f"No. Lucky number: {np.random.randint(1000)}.", 0.0, False, self.turns == 3, {"suffix": "Again."}

    def sample_random_action(self):
        return str(random.randint(1, self.largest))


def make(name, **args):
    if name == "game:Words":
        raise LookupError("\n****\n  Resource \x1b[93mwords\x1b[0m not found.\n")
    if name == "code:Missing":
        raise ImportError("no module called nothing")
    return Guess(**args)


@pytest.fixture
def stand_in(monkeypatch):
    names = ("gem", "gem.envs", "gem.envs.registration", "gem.utils", "gem.utils.constants")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["gem"])["make"] = make
    known = dict.fromkeys(("game:Guess", "game:Words", "code:Missing"), SimpleNamespace())
    vars(modules["gem.envs.registration"])["ENV_REGISTRY"] = known
    vars(modules["gem.utils.constants"])["TERMINAL_STATE"] = "<end>"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gem_adapter, "POOLS", {})
    monkeypatch.setattr(Guess, "made", 0)


def gem(id="game:Guess", **args):
    return ENVS.build("gem", {"id": id} | args, "env.args")


def play(env, *texts, task=None):
    async def run():
        opening = await env.reset(task or Task("t", seed=3), 0)
        number = getattr(env.game.unwrapped, "number", None)
        steps = [await env.step(Message("assistant", text.replace("NUMBER", str(number)))) for text in texts]
        numbers = env.metrics()
        await env.close()
        return opening.messages[0].content, steps, numbers, number

    return asyncio.run(run())


def test_a_game_keeps_our_contract_and_leaves_the_global_generators_alone(stand_in):
    random.seed(5)
    np.random.seed(5)
    assert check_env(gem, Task("t", seed=3)) == []
    assert random.random() == random.Random(5).random()
    assert np.random.random() == np.random.RandomState(5).random_sample()


def test_rewards_ends_and_texts_are_gems(stand_in):
    text, (miss, hit), numbers, _ = play(gem(), "\\boxed{0}", "\\boxed{NUMBER}")
    assert text.endswith("Episode 1.")
    assert miss.observation.messages[0].content.endswith("\nAgain.")
    assert (hit.reward, hit.terminated, hit.truncated, hit.observation.messages) == (1.0, True, False, ())
    assert numbers == {"success": 1.0, "return": 1.0, "steps": 2.0}
    _, steps, numbers, _ = play(gem(), *["\\boxed{0}"] * 3)
    assert (steps[-1].terminated, steps[-1].truncated, numbers["success"]) == (False, True, 0.0)


def test_environments_are_used_again_without_a_trace_of_the_last_episode(stand_in):
    first, second = play(gem(), "\\boxed{0}"), play(gem(), "\\boxed{0}")
    assert first == second
    assert Guess.made == 1


def test_problems_or_seeds_are_held_out(stand_in):
    def problems(fields, **args):
        return {play(gem(**args), task=Task("t", seed=seed, fields=fields))[3] for seed in range(150)}

    train, held_out = problems({}), problems(HELD_OUT)
    assert len(held_out) > 5
    assert not train & held_out
    few = {"kwargs": {"largest": 1}}
    with pytest.raises(ValueError, match="few different problems"):
        problems({}, **few), problems(HELD_OUT, **few)
    assert problems(HELD_OUT, hold_out="seed", **few) == {1}


def test_the_random_player_does_not_change_the_episode_and_always_marks_its_action(stand_in):
    async def run(asks):
        env = gem()
        await env.reset(Task("t", seed=3), 0)
        drawn = [env.random(np.random.default_rng(4)) for _ in range(asks)]
        answer = await env.step(Message("assistant", "\\boxed{0}"))
        return drawn, answer

    (drawn, answer), (_, untouched) = asyncio.run(run(3)), asyncio.run(run(0))
    assert answer == untouched
    assert len(set(drawn)) == 1
    assert drawn[0].startswith("\\boxed{")


def test_what_cannot_be_made_is_named(stand_in):
    with pytest.raises(ConfigError, match="id='game:Gess': GEM has game:Guess"):
        gem("game:Gess")
    with pytest.raises(ConfigError, match=r"python -m nltk\.downloader words$"):
        gem("game:Words")
    with pytest.raises(ConfigError, match="no module called nothing"):
        gem("code:Missing")
    with pytest.raises(ConfigError, match="hold_out='row'"):
        gem(hold_out="row")


def test_without_the_package_both_commands_are_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", None)
    monkeypatch.setitem(sys.modules, "gem.envs", None)
    monkeypatch.setattr(gem_adapter, "POOLS", {})
    with pytest.raises(ConfigError, match=r"pip install 'arborl\[gem\]', then: pip install --no-deps gem-llm"):
        gem()


# ------------------------------------------------------------------------------------------------ the package


@pytest.fixture
def real():
    pytest.importorskip("gem.envs", reason="needs pip install 'arborl[gem]' and pip install --no-deps gem-llm")


@pytest.mark.parametrize("id", ["game:Sokoban-v0-easy", "game:GuessTheNumber-v0-hard", "rg:leg_counting"])
def test_the_package_keeps_our_contract_and_does_not_set_up_logging(real, id):
    before = list(logging.getLogger().handlers)
    assert check_env(lambda: gem(id), Task("t", seed=3)) == []
    assert logging.getLogger().handlers == before


def test_code_is_run_in_the_sandbox_and_answered(real):
    env = gem("rg:leg_counting", python=True)
    text, (ran, answered), _, _ = play(env, "<python>print(6 * 7)</python>", "\\boxed{-1}")
    assert "<python>" in text
    assert ran.observation.messages[0].content == "Code execution result: 42"
    assert not ran.over
    assert answered.terminated


def test_a_killed_process_costs_no_other_episode(real):
    async def episodes():
        pool = ProcessPool(most=2)
        envs = [ProcessEnv(gem("game:GuessTheNumber-v0-hard"), pool, "gem", 120.0) for _ in range(2)]
        for env in envs:
            await env.reset(Task("t", seed=3), 0)
        first = [await env.step(Message("assistant", "\\boxed{50}")) for env in envs]
        killed = pool.alive[0]
        os.killpg(killed.child.pid, signal.SIGKILL)
        second = [await env.step(Message("assistant", "\\boxed{50}")) for env in envs]
        for env in envs:
            await env.close()
        pool.close()
        return first, second, killed.lost

    first, second, lost = asyncio.run(episodes())
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert "already guessed" in second[0].observation.messages[0].content
    assert lost
