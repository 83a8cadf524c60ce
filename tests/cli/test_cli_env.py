"""`arborl env`: list, play, check."""

from __future__ import annotations

import sys
import time

import pytest
from typer.testing import CliRunner

from arborl.cli.env_commands import colored, parse_environment, play_config, typed_action
from arborl.cli.main import app
from arborl.config.config_base import dump_yaml
from arborl.config.load_config import from_kwargs
from arborl.envs import ENVS
from arborl.envs.env import Env, Observation, Step
from arborl.errors import ConfigError
from arborl.models.model_files import SEEDLING_DIR
from arborl.types import Message

MOVES = ["<answer>Left</answer>", "<answer>Down</answer>", "<answer>Right</answer>", "<answer>Up</answer>"]


class Broken(Env):
    """Violates the contract."""

    async def reset(self, task, seed):
        return Observation((Message("user", "hi"),))

    async def step(self, action):
        return Step(Observation((Message("user", 7),)), reward=float("nan"))


class Blocking(Env):
    """Async, and holds the event loop it runs in; where, its first argument message."""

    def __init__(self, where: str = "step"):
        self.where = where
        self.hang("init")

    def hang(self, here):
        if here == self.where:
            time.sleep(300)

    async def reset(self, task, seed):
        self.hang("reset")
        return Observation((Message("user", "hi"),))

    async def step(self, action):
        self.hang("step")
        return Step(Observation((Message("user", "hi"),)), terminated=True)

    async def close(self):
        self.hang("close")

    def actions(self):
        self.hang("actions")
        return ["go"]


class Quitting(Env):
    async def reset(self, task, seed):
        sys.exit("enough")

    async def step(self, action):
        raise KeyboardInterrupt


INSTANCE = Broken()


def factory(where: str = "never") -> Env:
    return Blocking(where)


def nothing() -> None:
    """Makes no environment."""


def missing() -> Env:
    raise FileNotFoundError("no such level")


def call(*arguments, typed=None):
    return CliRunner().invoke(app, ["env", *arguments], input=typed)


def test_list_prints_every_environment_and_its_arguments():
    done = call("list")
    assert done.exit_code == 0
    for name in ENVS:
        assert name in done.output
    assert "preset=6x6" in done.output


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "shop", "countdown", "conversation", "rooms"])
def test_built_in_environments_pass_the_check(name):
    done = call("check", name, "--tasks", "2")
    assert done.exit_code == 0, done.output
    assert f"{name} satisfies the contract of an environment (2 tasks" in done.output


def test_check_names_the_violations_of_the_contract():
    done = call("check", f"{__name__}:Broken", "--tasks", "2")
    assert done.exit_code == 1
    assert "reward=nan (float): return a finite float. (2 of 2 tasks)" in done.output
    assert "content is 7 (int): return a str" in done.output


@pytest.mark.parametrize("where", ["reset", "step", "close", "actions"])
def test_check_stops_at_a_call_that_hangs(where):
    began = time.monotonic()
    done = call("check", f"{__name__}:Blocking", f"where={where}", "--seconds", "0.2")
    assert done.exit_code == 1
    assert f"{where}() did not return within 0.2 s" in done.output
    assert "(1 of 1 tasks)" in done.output
    assert time.monotonic() - began < 60


def test_check_accepts_a_factory_and_survives_sys_exit():
    assert call("check", f"{__name__}:factory", "--tasks", "1").exit_code in (0, 1)
    done = call("check", f"{__name__}:Quitting", "--tasks", "1")
    assert done.exit_code == 1
    assert "reset() raised SystemExit: enough" in done.output


def test_play_stops_at_a_call_that_hangs(monkeypatch):
    monkeypatch.setattr("arborl.cli.env_commands.CALL_SECONDS", 0.2)
    done = call("play", f"{__name__}:Blocking", "--random")
    assert done.exit_code == 2
    assert "Blocking.step() did not return within 0.2 s" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", f"{__name__}:INSTANCE"], "is an instance of Broken, and every episode needs"),
        (["play", f"{__name__}:INSTANCE"], f"Write the class, {__name__}:Broken, or a function"),
        (["check", f"{__name__}:MOVES"], "is an instance of list"),
        (["check", f"{__name__}:nothing"], "which has no reset() and step()"),
        (["check", f"{__name__}:missing"], "cannot be made: FileNotFoundError: no such level"),
        (["check", f"{__name__}:Blocking", "where=init", "--seconds", "0.2"], "Open files and connections in reset()."),
        (["check", "sokobann"], "Did you mean 'sokoban'?"),
        (["check", "sokoban", "boxes=0"], "boxes=0, pulls=5: give at least 1 of each"),
        (["check", "sokoban", "box=1"], "sokoban.box: unknown argument. Did you mean 'boxes'?"),
        (["check", "a=1"], "no environment. Write"),
        (["play", "sokoban", "--orcale"], "--orcale: unknown option. Did you mean '--oracle'?"),
        (["play", "sokoban", "--oracle", "--random"], "Write one of them"),
        (["play", "gymnasium", "--oracle"], "has no perfect player"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message):
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_the_oracle_solves_its_task():
    done = call("play", "sokoban", "preset=10x10", "--oracle", "--seed", "4", "--pause", "0")
    assert done.exit_code == 0, done.output
    assert "success 1" in done.output
    assert call("play", "shop", "--oracle", "--split", "held_out").output.count("click[Buy Now]") == 1


def test_a_random_player_is_reproducible():
    first, again, other = (call("play", "rooms", "--random", "--seed", seed).output for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_human_player_types_keys_numbers_words_or_any_text():
    done = call("play", "frozen_lake", "frozen=1.0", typed="a\n2\nright\nbanana\nq\n")
    assert done.exit_code == 0, done.output
    assert "1> <answer>Left</answer>" in done.output
    assert "2> <answer>Down</answer>" in done.output
    assert "3> <answer>Right</answer>" in done.output
    assert "4> banana" in done.output
    assert "Not a move." in done.output
    assert "left the game" in done.output
    assert call("play", "frozen_lake", typed="").exit_code == 0


def test_a_model_plays(monkeypatch):
    done = call("play", "frozen_lake", "--model", "seedling", "--seed", "3")
    assert done.exit_code == 0, done.output
    assert "1> " in done.output
    assert "return " in done.output


def test_prompt_settings_apply_to_play_and_check():
    prompt = ["env.prompt.observation=Turn {turn_idx}: {observation}", r"env.prompt.action_pattern=\[(.*?)\]"]
    done = call("play", "frozen_lake", *prompt, "--oracle", "--seed", "3")
    assert done.exit_code == 0, done.output
    assert "Turn 2: " in done.output
    assert "1> [" in done.output
    assert "success 1" in done.output
    assert call("check", "frozen_lake", *prompt, "--tasks", "2").exit_code == 0
    wrong = call("play", "frozen_lake", "env.prompt.observation={obs}", "--oracle")
    assert wrong.exit_code == 2
    assert "observation: unknown field {obs}" in wrong.output


def test_the_model_of_a_run_plays_with_the_prompt_of_its_run(tmp_path):
    prompt = {"observation": "Turn {turn_idx}\n{observation}", "instruction": "Go."}
    config = from_kwargs(
        agent={"name": "tool", "system": "You."}, env={"name": "rooms", "prompt": prompt}, **{"sampling.max_tokens": 9}
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    place = tmp_path / "checkpoints" / "step-000001"
    place.mkdir(parents=True)
    (place / "model").symlink_to(SEEDLING_DIR)
    made = play_config(str(place), "rooms", {"doors": 1}, {"instruction": ""})
    assert (made.agent.name, made.agent.system, made.sampling.max_tokens) == ("tool", "You.", 9)
    assert made.env.prompt.model_dump(exclude_none=True) == {**prompt, "instruction": ""}
    assert made.env.args == {"doors": 1}
    assert made.model.name == str(place / "model")
    other = play_config(str(place), "frozen_lake", {}, {})
    assert not other.env.prompt.is_set


@pytest.mark.parametrize(
    ("typed", "action"), [("w", MOVES[3]), ("DOWN", MOVES[1]), ("3", MOVES[2]), ("9", "9"), ("buy it", "buy it")]
)
def test_typed_text_selects_an_action(typed, action):
    assert typed_action(typed, MOVES) == action


def test_arguments_are_parsed_as_yaml():
    assert parse_environment(["shop", "products=2000", "human=false", "env.args.data=null"]) == (
        "shop",
        {"products": 2000, "human": False, "data": None},
        {},
    )
    assert parse_environment(["shop", "env.prompt.system=1: {env_instruction}"])[2] == {
        "system": "1: {env_instruction}"
    }
    with pytest.raises(ConfigError, match="not YAML"):
        parse_environment(["shop", "products=[1"])


def test_boards_and_buttons_are_colored():
    shown = colored("P_\nOG\nsee [Buy Now]")
    assert shown.plain == "P _ \nO G \nsee [Buy Now]"
    assert {span.style for span in shown.spans} >= {"bold dark_orange", "bold blue"}
