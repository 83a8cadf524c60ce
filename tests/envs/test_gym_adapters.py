import asyncio
import re
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check

from arborl.envs import ENVS, from_gymnasium, to_gymnasium
from arborl.envs.adapters.gymnasium_adapter import GymnasiumEnv, is_textual_space, observation_text
from arborl.envs.checker import check_env
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.types import Message, Task

LAKE = {"names": ("Left", "Down", "Right", "Up")}


class Echo(gymnasium.Env[str, str]):
    """Text in, text out, with a little chance."""

    observation_space = spaces.Text(40)
    action_space = spaces.Text(10, charset="abc")
    render_mode = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.start = int(self.np_random.integers(100))
        return f"say {self.start}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        dice = int(self.np_random.integers(6))
        return f"{action} {dice}", np.float32(dice), action == "abc", False, {}


def say(env, *texts, seed=0, task=None):
    async def run():
        opening = await env.reset(task or Task("t", seed=1), seed)
        return opening, [await env.step(Message("assistant", text)) for text in texts]

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "shop", "countdown", "conversation", "rooms"])
@pytest.mark.parametrize("mode", ["ansi", "rgb_array"])
def test_ours_pass_gymnasiums_own_check_without_a_warning(name, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check(to_gymnasium(ENVS[name](), render_mode=mode))


def test_an_environment_in_gymnasiums_shape_plays_the_episode_that_it_is():
    lake = to_gymnasium(FrozenLake())
    text, info = lake.reset(seed=5)
    assert text.endswith(info["state_key"])
    assert (text, info) == lake.reset(seed=5)
    total = 0.0
    while True:
        text, reward, terminated, truncated, info = lake.step(lake.env.oracle())
        total += reward
        if terminated or truncated:
            break
    assert total == 1.0
    assert info["metrics"]["success"] == 1.0
    assert info["valid"] == 1.0


def test_samples_of_the_action_space_are_valid_moves():
    shop = to_gymnasium(ENVS["shop"]())
    shop.reset(seed=1)
    shop.action_space.seed(3)
    for _ in range(12):
        *_, over, cut, info = shop.step(shop.action_space.sample())
        assert info["valid"] == 1.0
        if over or cut:
            shop.reset()


def test_a_task_may_be_handed_in():
    lake = to_gymnasium(FrozenLake())
    given = Task("mine", seed=77, fields={"split": "held_out"})
    text, _ = lake.reset(options={"task": given})
    assert text == "\n".join(m.content for m in asyncio.run(FrozenLake().reset(given, 0)).messages)


def test_it_runs_inside_an_event_loop_too():
    async def inside():
        lake = to_gymnasium(FrozenLake())
        lake.reset(seed=1)
        return lake.step("<answer>Left</answer>")[1]

    assert asyncio.run(inside()) in (0.0, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_gymnasium("FrozenLake-v1", **LAKE),
        lambda: from_gymnasium("FrozenLake-v1", kwargs={"is_slippery": False, "map_name": "8x8"}, **LAKE),
        lambda: from_gymnasium("CliffWalking-v1", max_steps=9),
        lambda: from_gymnasium("Blackjack-v1"),
        lambda: GymnasiumEnv(Echo()),
    ],
)
def test_theirs_keep_our_contract(make):
    assert check_env(make, Task("t", seed=3), seed=2) == []


def test_there_and_back_again_passes_both_checks():
    back = to_gymnasium(from_gymnasium("FrozenLake-v1", **LAKE))
    gymnasium_check(back)
    assert check_env(lambda: GymnasiumEnv(to_gymnasium(FrozenLake()), describe=str), Task("t", seed=3)) == []


def test_a_known_walk_over_gymnasiums_lake_is_the_same_walk():
    path = ["Down", "Down", "Right", "Right", "Down", "Right"]
    env = from_gymnasium("FrozenLake-v1", kwargs={"is_slippery": False}, **LAKE)
    opening, steps = say(env, *(f"<answer>{move}</answer>" for move in path))
    assert opening.messages[1].content == "0"
    assert [step.observation.messages[0].content for step in steps] == ["4", "8", "9", "10", "14", "15"]
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert steps[-1].terminated
    assert env.metrics() == {"success": 1.0, "return": 1.0, "valid": 1.0}


def test_the_start_is_the_tasks_and_chance_the_episodes():
    def play(task_seed, seed):
        opening, steps = say(GymnasiumEnv(Echo()), "a", "b", "c", task=Task("t", seed=task_seed), seed=seed)
        return opening, [step.reward for step in steps]

    assert play(1, 0)[0] == play(1, 9)[0]
    assert play(1, 0) == play(1, 0)
    assert len({tuple(play(1, seed)[1]) for seed in range(5)}) > 1
    assert len({play(task, 0)[0].messages[1].content for task in range(5)}) > 1


def test_what_is_no_action_is_replaced_by_a_random_one_and_costs_the_penalty_on_top():
    env = GymnasiumEnv(Echo(), format_penalty=-0.5)
    _, (step,) = say(env, "xyz")
    instead = re.match(r"Not an action. ([abc]*) was taken instead.", step.observation.messages[0].content)[1]
    assert step.info["valid"] == 0.0
    _, (same,) = say(env, f"<answer>{instead}</answer>")
    assert same.info["valid"] == 1.0
    assert step.reward == same.reward - 0.5
    _, (step,) = say(env, "<answer>abc</answer>")
    assert step.terminated


TAKEN = re.compile(r"Not an action. (\S+) was taken instead.")


@pytest.mark.parametrize("id", ["CliffWalking-v1", "FrozenLake-v1", "Taxi-v4"])
def test_silence_is_worth_what_random_play_is_less_the_penalties(id):
    """Where every step costs something, to do nothing must not be the best one can do."""
    for seed in range(10):
        _, silent = say(from_gymnasium(id, max_steps=30), *[""] * 30, seed=seed)
        silent = silent[: 1 + next((at for at, step in enumerate(silent) if step.over), 30)]
        moves = [TAKEN.match(step.observation.messages[0].content)[1] for step in silent]
        env = from_gymnasium(id, max_steps=30)
        _, spoken = say(env, *(f"<answer>{move}</answer>" for move in moves), seed=seed)
        assert [step.over for step in spoken] == [step.over for step in silent]
        gap = sum(step.reward for step in spoken) - sum(step.reward for step in silent)
        assert gap == pytest.approx(0.05 * len(silent))
    assert len(set(moves)) > 1


def test_walking_along_the_cliff_is_worth_more_than_silence():
    walk = [f"<answer>{move}</answer>" for move in "0" + "1" * 11 + "2"]
    _, steps = say(from_gymnasium("CliffWalking-v1", max_steps=30), *walk)
    assert steps[-1].terminated
    assert sum(step.reward for step in steps) == -13.0
    for seed in range(10):
        _, silent = say(from_gymnasium("CliffWalking-v1", max_steps=30), *[""] * 30, seed=seed)
        assert sum(step.reward for step in silent) <= -30.0


def test_success_can_be_defined_and_is_not_reported_when_undefined():
    path = [f"<answer>{move}</answer>" for move in "0" + "1" * 11 + "2"]

    def metrics(*texts, **arguments):
        env = from_gymnasium("CliffWalking-v1", max_steps=30, **arguments)
        say(env, *texts)
        return env.metrics()

    assert "success" not in metrics(*path)
    assert metrics(*path)["judged"] == 0.0
    assert metrics(*path, success="terminated")["success"] == 1.0
    assert metrics(*path, success=-13)["success"] == 1.0
    assert metrics(*path, success=-12)["success"] == 0.0
    assert metrics(*path[:5], success="terminated")["success"] == 0.0
    assert metrics("", success=-1000)["success"] == 0.0  # the last move was not the agent's
    assert metrics("", *path[:1], success=-1000)["success"] == 1.0
    for wrong in ("won", True):
        with pytest.raises(ValueError, match="give 'terminated', or the minimum return of a success"):
            from_gymnasium("CliffWalking-v1", success=wrong)


def test_spaces_without_words_are_refused_with_what_to_give():
    with pytest.raises(ValueError, match=r"observations of .*CartPole.* neither discrete nor text\. Give describe="):
        from_gymnasium("CartPole-v1")
    with pytest.raises(ValueError, match="only discrete and text actions"):
        from_gymnasium("Pendulum-v1", describe=str)
    with pytest.raises(ValueError, match=r"names=\['Left'\]: .* has 4 actions"):
        from_gymnasium("FrozenLake-v1", names=("Left",))
    with pytest.raises(ValueError, match="Gymnasium cannot make 'NoSuchLake-v1'"):
        from_gymnasium("NoSuchLake-v1")
    cart = from_gymnasium("CartPole-v1", names=("left", "right"), describe=lambda seen: str(len(seen)))
    assert check_env(lambda: cart, Task("t", seed=3)) == []


def test_observations_are_rendered_as_text():
    space = spaces.Dict({"row": spaces.Discrete(4), "seen": spaces.Tuple((spaces.Text(3), spaces.MultiBinary(2)))})
    assert is_textual_space(space)
    assert not is_textual_space(spaces.Dict({"x": spaces.Box(0, 1)}))
    assert observation_text({"row": np.int64(3), "seen": ("ab", np.array([0, 1]))}) == "row: 3, seen: ab 0 1"
