"""Adapters to other packages: for real where the package is there, with a stand-in of the same shape where not."""

import asyncio
import random
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from arborl.envs import ENVS
from arborl.envs.adapters.other_packages import OpenEnv
from arborl.envs.checker import check_env
from arborl.errors import ConfigError
from arborl.types import Message, Task


@dataclass
class Result:
    """As OpenEnv's `StepResult`."""

    observation: dict[str, object]
    reward: float | None = None
    done: bool = False


class Server:
    """A client of a server that echoes; three steps long."""

    def __init__(self):
        self.steps, self.closed, self.heard = 0, 0, []

    async def reset(self, **given):
        self.steps = 0
        self.heard.append(given)
        return Result({"text": f"ready {given['seed']}"})

    async def step(self, action):
        self.steps += 1
        self.heard.append(action)
        return Result({"text": f"{action['message']}!", "n": self.steps}, 0.5, self.steps >= 3)

    async def close(self):
        self.closed += 1


def test_an_openenv_server_keeps_our_contract():
    assert check_env(lambda: OpenEnv(client=Server, observation_field="text"), Task("t", seed=3)) == []


def test_messages_reach_the_server_in_its_field_and_what_it_says_comes_back():
    client = Server()

    async def play():
        env = OpenEnv(client=lambda: client)
        opening = await env.reset(Task("t", seed=1), 0)
        steps = [await env.step(Message("assistant", text)) for text in ("a", "b", "c")]
        await env.close()
        await env.close()
        return env, opening, steps

    env, opening, steps = asyncio.run(play())
    assert client.heard[1:] == [{"message": "a"}, {"message": "b"}, {"message": "c"}]
    assert opening.messages[0].content.startswith('{"text": "ready ')
    assert steps[0].observation.messages[0].content == '{"n": 1, "text": "a!"}'
    assert [step.terminated for step in steps] == [False, False, True]
    assert env.metrics() == {"return": 1.5}
    assert client.closed == 1


def test_a_field_the_server_does_not_have_is_named_and_a_step_limit_cuts():
    async def play(**arguments):
        env = OpenEnv(client=Server, **arguments)
        await env.reset(Task("t"), 0)
        return await env.step(Message("assistant", "a"))

    with pytest.raises(ValueError, match="observation_field='words': the observation has text"):
        asyncio.run(play(observation_field="words"))
    assert asyncio.run(play(max_steps=1)).truncated


@pytest.mark.parametrize(
    "name",
    ["reasoning_gym", "textarena", "openenv", "textworld", "alfworld", "scienceworld", "chess", "verifiers", "miniwob"],
)
def test_a_package_that_is_not_there_is_named_with_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'arborl\[{name}\]'"):
        ENVS.build(name, {}, "env.args")


class Sums:
    """As a data set of reasoning_gym."""

    def __init__(self, seed, size, largest=9):
        self.seed, self.largest = seed, largest

    def __getitem__(self, place):
        a, b = (random.Random(self.seed).randint(1, self.largest) for _ in "ab")
        return {"question": f"{a} + {b} + {self.seed % 50}?", "answer": str(a + b + self.seed % 50), "metadata": {}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.1


@pytest.fixture
def sums(monkeypatch):
    module = ModuleType("reasoning_gym")

    def create_dataset(name, **config):
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return Sums(**config)

    vars(module)["create_dataset"] = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def reason(text, split="train", **arguments):
    async def run():
        env = ENVS["reasoning_gym"]("sums", **arguments)
        opening = await env.reset(Task("t", seed=4, fields={"split": split}), 0)
        step = await env.step(Message("assistant", env.oracle() if text is None else text))
        return env, opening, step

    return asyncio.run(run())


def test_a_problem_of_reasoning_gym_is_scored_by_its_data_set(sums):
    assert check_env(lambda: ENVS["reasoning_gym"]("sums"), Task("t", seed=3)) == []
    env, opening, step = reason(None)
    assert step.reward == 1.0
    assert step.terminated
    assert env.metrics() == {"success": 1.0, "score": 1.0}
    assert reason("<answer>no</answer>")[2].reward == 0.1
    assert reason("no idea", format_penalty=-0.3)[2].reward == -0.3
    assert reason(None, "held_out")[1] != opening
    assert reason("x", config={"largest": 1})[1].messages[1].content.startswith("1 + 1")


def test_a_data_set_or_argument_that_reasoning_gym_does_not_have_is_a_configuration_error(sums):
    with pytest.raises(ConfigError, match="'nope' not registered"):
        ENVS.build("reasoning_gym", {"dataset": "nope"}, "env.args")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'deep'"):
        ENVS.build("reasoning_gym", {"dataset": "sums", "config": {"deep": 1}}, "env.args")


class Dice:
    """As a raw game of textarena: it draws from Python's shared random numbers, at the start and at every step."""

    class State:
        error_count = 0

    def __init__(self):
        self.state = Dice.State()

    def reset(self, num_players, seed):
        random.seed(seed)
        self.turn, self.number, self.received = 0, random.randint(1, 1000), []
        self.received.append((-1, f"I think of {self.number}.", None))

    def step(self, action):
        self.turn += 1
        self.state.error_count = 0 if action == "roll" else 1
        self.received += [(0, action, None), (-1, f"A {random.randint(1, 1000)}.", None)]
        return self.turn >= 3, {}

    def get_observation(self):
        received, self.received = self.received, []
        return 0, received

    def close(self):
        return {0: 1.0}, {0: {"invalid_move": False}}


def test_games_of_textarena_do_not_disturb_one_another_or_anyone_elses_chance(monkeypatch):
    module = ModuleType("textarena")
    vars(module)["make"] = lambda name, **kwargs: {"Dice-v0-raw": Dice}[name](**kwargs)
    monkeypatch.setitem(sys.modules, "textarena", module)
    arena = ENVS["textarena"]

    async def start(seed):
        env = arena("Dice-v0")
        return env, [(await env.reset(Task("t", seed=seed), seed)).messages[0].content]

    async def roll(env, heard):
        heard.append((await env.step(Message("assistant", "roll"))).observation.messages[0].content)

    async def alone(seed):
        env, heard = await start(seed)
        for _ in range(3):
            await roll(env, heard)
        return heard

    async def together():
        (one, first), (other, second) = await start(1), await start(2)
        for _ in range(3):
            await roll(one, first)
            await roll(other, second)
        return first, second

    random.seed(5)
    expected = random.Random(5).random()
    assert asyncio.run(together()) == (asyncio.run(alone(1)), asyncio.run(alone(2)))
    assert random.random() == expected
    assert check_env(lambda: arena("Dice-v0"), Task("t", seed=3)) == []


@pytest.mark.parametrize("name", ["reasoning_gym", "textarena"])
def test_the_real_package_keeps_our_contract(name):
    pytest.importorskip(name)
    assert check_env(ENVS[name], Task("t", seed=3)) == []
