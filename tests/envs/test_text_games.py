"""TextWorld, ALFWorld, ScienceWorld and chess puzzles: for real where the package is installed."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from arborl.envs import ENVS
from arborl.envs.checker import check_env
from arborl.errors import ConfigError
from arborl.registry import load
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
from arborl.types import Message, Task


def solve(env, task):
    """Play the oracle's commands; the opening text, the rewards and the metrics."""

    async def run():
        opening = await env.reset(task, 0)
        rewards, over = [], False
        while not over and (text := env.oracle()) is not None:
            step = await env.step(Message("assistant", text))
            rewards.append(step.reward)
            over = step.over
        numbers = env.metrics()
        await env.close()
        return opening.messages[-1].content, rewards, numbers

    return asyncio.run(run())


def say(env, task, *texts):
    """The steps that answer these messages."""

    async def run():
        await env.reset(task, 0)
        steps = [await env.step(Message("assistant", text)) for text in texts]
        await env.close()
        return steps

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------ TextWorld


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    pytest.importorskip("textworld", reason="needs pip install 'arborl[textworld]'")
    return str(tmp_path_factory.mktemp("games"))


def textworld(cache, **args):
    return ENVS.build("textworld", {"cache": cache, "rooms": 2, "objects": 2, "quest_length": 2} | args, "env.args")


def test_a_made_game_of_textworld_keeps_our_contract_and_its_policy_wins(cache):
    task = Task("t", seed=3)
    assert check_env(lambda: textworld(cache), task, seconds=300) == []  # compiling a game may take long
    text, rewards, numbers = solve(textworld(cache), task)
    assert (rewards[-1], sum(rewards), numbers["success"], numbers["score"]) == (1.0, 1.0, 1.0, 1.0)
    assert "-=" in text
    assert "$$$$" not in text  # the banner is left out
    _, shaped, _ = solve(textworld(cache, step_reward=0.1), task)
    assert shaped == pytest.approx([0.1] * (len(rewards) - 1) + [1.1])


def test_the_commands_are_listed_on_request_and_others_are_answered_and_penalized(cache):
    task = Task("t", seed=3)
    wrong, listed = say(
        textworld(cache, list_actions=True, format_penalty=-0.2), task, "banana", "<answer>look</answer>"
    )
    assert (wrong.reward, wrong.info["valid"], listed.reward, listed.info["valid"]) == (-0.2, 0.0, 0.0, 1.0)
    assert "Commands: " in listed.observation.messages[0].content
    assert ">" not in listed.observation.messages[0].content


def test_a_split_of_textworld_has_its_own_games_and_a_folder_of_files_is_played(cache, tmp_path):
    env = textworld(cache)
    held_out = env._file(3, "held_out")
    assert held_out != env._file(3, "train")
    assert held_out == env._file(3, "held_out")
    shutil.copytree(held_out.parent, tmp_path / "mine")
    assert solve(textworld(cache, games=str(tmp_path)), Task("t", seed=1))[2]["success"] == 1.0
    with pytest.raises(ConfigError, match="no game file is there"):
        textworld(cache, games=str(tmp_path / "nothing"))


def files_of(env, split):
    return {env._file(seed, split).relative_to(env.games).as_posix() for seed in range(200)}


def test_game_files_have_the_split_of_their_subfolder_or_of_their_path(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", ModuleType("textworld"))
    for name in ("train/1.z8", "train/2.z8", "held_out/1.z8", "held_out/deep/2.z8"):
        (tmp_path / "split" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "split" / name).touch()
    env = ENVS.build("textworld", {"games": str(tmp_path / "split")}, "env.args")
    assert files_of(env, "train") == {"train/1.z8", "train/2.z8"}
    assert files_of(env, "held_out") == {"held_out/1.z8", "held_out/deep/2.z8"}
    for number in range(40):  # as in the cache: every file has the same name
        (tmp_path / "cache" / f"seed{number}").mkdir(parents=True)
        (tmp_path / "cache" / f"seed{number}" / "game.z8").touch()
    env = ENVS.build("textworld", {"games": str(tmp_path / "cache")}, "env.args")
    train, held_out = files_of(env, "train"), files_of(env, "held_out")
    assert train
    assert held_out
    assert not train & held_out
    one = ENVS.build("textworld", {"games": str(tmp_path / "split" / "train" / "1.z8")}, "env.args")
    assert one._file(5, "train") == one._file(6, "held_out") == tmp_path / "split" / "train" / "1.z8"


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_subfolder_of_one_split_alone_is_refused_because_its_games_would_be_in_both(tmp_path, monkeypatch, split):
    monkeypatch.setitem(sys.modules, "textworld", ModuleType("textworld"))
    (tmp_path / split).mkdir()
    (tmp_path / split / "1.z8").touch()
    with pytest.raises(ConfigError, match=r"the subfolder '(train|held_out)' has no game file; make some") as refused:
        ENVS.build("textworld", {"games": str(tmp_path)}, "env.args")
    assert repr({"train": "held_out", "held_out": "train"}[split]) in str(refused.value)


class NoQuest(Exception):
    """As `textworld.generator.chaining.QuestGenerationError`."""


def write_game(options):
    """As `textworld.make`: the first world has no quest, the files lie beside each other."""
    if options.seeds == 0:
        raise NoQuest
    for end in (".ni", ".json", ".z8"):
        Path(options.path).with_suffix(end).write_text(f"{options.seeds} {options.nb_rooms} {options.quest_length}")
    return options.path, None


@pytest.fixture
def compiler(monkeypatch):
    """TextWorld without its compiler."""
    names = ("textworld", "textworld.generator", "textworld.generator.chaining")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["textworld"]).update(GameOptions=type("GameOptions", (), {}), make=write_game)
    vars(modules["textworld.generator.chaining"])["QuestGenerationError"] = NoQuest
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_the_games_of_the_recipe_have_different_seeds_and_only_missing_ones_are_made(compiler, tmp_path):
    file = Path(__file__).parents[2] / "recipes" / "smollm2-textworld" / "make_games.py"
    make_game, missing_games = (load(f"{file}:{name}", "recipe") for name in ("make_game", "missing_games"))
    wanted = argparse.Namespace(folder=tmp_path, train=3, held_out=2, rooms=4, objects=6, quest_length=5)
    for split in ("train", "held_out"):
        (tmp_path / split).mkdir()
    games = missing_games(wanted)
    assert [game.file.relative_to(tmp_path).as_posix() for game in games] == [
        "train/0.z8", "train/1.z8", "train/2.z8", "held_out/0.z8", "held_out/1.z8"
    ]  # fmt: skip
    texts = [make_game(game).read_text() for game in games[:-1]]
    assert texts[0] == "1 4 5"  # the next seed after a world without a quest
    assert len(set(texts)) == 4
    assert missing_games(wanted) == games[-1:]
    assert sorted(file.suffix for file in tmp_path.rglob("*.*")) == [".json"] * 4 + [".z8"] * 4


# ------------------------------------------------------------------------------------------------ ALFWorld

PROBLEM = """(define (problem small) (:domain alfred)
(:objects agent1 - agent Mug_bar_1 - object CounterTop_bar_1 - receptacle Cabinet_bar_1 - receptacle
 loc_bar_1 - location loc_bar_2 - location loc_bar_3 - location
 CounterTopType - rtype CabinetType - rtype MugType - otype)
(:init (= (total-cost) 0) (atLocation agent1 loc_bar_3)
 (receptacleType CounterTop_bar_1 CounterTopType) (receptacleType Cabinet_bar_1 CabinetType)
 (receptacleAtLocation CounterTop_bar_1 loc_bar_1) (receptacleAtLocation Cabinet_bar_1 loc_bar_2)
 (openable Cabinet_bar_1) (objectType Mug_bar_1 MugType)
 (canContain CounterTopType MugType) (canContain CabinetType MugType) (pickupable Mug_bar_1)
 (inReceptacle Mug_bar_1 Cabinet_bar_1) (objectAtLocation Mug_bar_1 loc_bar_2))
(:goal (exists (?r - receptacle) (exists (?o - object)
 (and (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r CounterTopType))))))"""
WALKTHROUGH = [
    *("go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1"),
    *("go to countertop 1", "move mug 1 to countertop 1"),
]


@pytest.fixture
def games(tmp_path):
    """A folder with one small game for each split, in ALFWorld's format and with its domain and grammar."""
    alfworld = pytest.importorskip("alfworld", reason="needs pip install 'arborl[alfworld]'")
    pytest.importorskip("fast_downward", reason="needs pip install 'arborl[alfworld]'")
    data = Path(next(iter(alfworld.__path__)), "data")
    texts = [(data / f"alfred.{end}").read_text() for end in ("pddl", "twl2")]
    game = {"pddl_domain": texts[0], "grammar": texts[1].replace("UNKNOWN GOAL", "put a mug on the countertop")}
    game |= {"pddl_problem": PROBLEM, "walkthrough": WALKTHROUGH}
    for split, trial, solvable in (("train", "a", True), ("train", "b", False), ("valid_seen", "c", True)):
        folder = tmp_path / "json_2.1.1" / split / "pick_and_place_simple-Mug-None-CounterTop-1" / f"trial_{trial}"
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps(game | {"solvable": solvable}))
    return tmp_path


def alfworld(games, **args):
    return ENVS.build("alfworld", {"data": str(games)} | args, "env.args")


def test_a_game_of_alfworld_keeps_our_contract_and_its_walkthrough_wins(games):
    assert check_env(lambda: alfworld(games), Task("t", seed=3), steps=6) == []
    text, rewards, numbers = solve(alfworld(games), Task("t", seed=3))
    assert text.endswith("Your task is to: put a mug on the countertop.")
    assert (rewards, numbers["success"]) == ([0.0, 0.0, 0.0, 0.0, 1.0], 1.0)


def test_the_older_command_to_put_something_down_is_understood(games):
    *_, last = say(alfworld(games), Task("t"), *WALKTHROUGH[:-1], "put mug 1 in/on countertop 1")
    assert (last.reward, last.terminated, last.info["valid"]) == (1.0, True, 1.0)


def test_a_row_selects_the_game_and_unsolvable_games_are_not_drawn(games):
    env = alfworld(games)
    assert {env._file(Task("t", seed=seed)).parent.name for seed in range(20)} == {"trial_a"}
    assert env._file(Task("t", fields={"task_id": "trial_b"})).parent.name == "trial_b"
    assert env._file(Task("t", fields={"split": "held_out"})).parent.name == "trial_c"
    assert env._file(Task("t", fields={"task_id": "trial_c"})).parent.name == "trial_c"  # of whatever split
    with pytest.raises(ValueError, match="task_id='trial_x': no such game"):
        env._file(Task("t", fields={"task_id": "trial_x"}))
    with pytest.raises(ValueError, match="split='exam': ALFWorld has train, valid_seen, valid_unseen"):
        env._file(Task("t", fields={"split": "exam"}))


def test_games_that_are_not_there_are_an_error_at_once_with_the_command_that_gets_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "alfworld", ModuleType("alfworld"))
    start = time.monotonic()
    with pytest.raises(ConfigError, match="alfworld-download"):
        ENVS.build("alfworld", {"data": str(tmp_path)}, "env.args")
    assert time.monotonic() - start < 5


# ------------------------------------------------------------------------------------------------ ScienceWorld


class Server:
    """As the Java side: two commands finish the task."""

    def __init__(self):
        self.done = []

    def reset(self):
        self.done = []

    def step(self, command):
        if command not in ("focus on it", "boil it", "look around", "spoil it"):
            return "No known action matches that input."
        self.done.append(command)
        return f"You {command}."

    def getScore(self):
        return -1.0 if "spoil it" in self.done else 0.5 * len({"focus on it", "boil it"} & set(self.done))

    def getCompleted(self):
        return self.getScore() == 1


class Simulator:
    """As `scienceworld.ScienceWorldEnv`."""

    started, closed = 0, 0

    def __init__(self, name):
        Simulator.started += 1
        self.server = Server()

    def load(self, name, variation, simplifications, generateGoldPath=False):
        self.loaded = (name, variation, simplifications)
        self.server.reset()

    def get_max_variations(self, name):
        return 10

    def get_variations_train(self):
        return [0, 1, 2]

    def get_variations_dev(self):
        return [7]

    def get_gold_action_sequence(self):
        return ["focus on it", "boil it", "wait1"]

    def get_task_description(self):
        return f"Task Description:\nYour task is to boil {self.loaded[1]}."

    def get_valid_action_object_combinations(self):
        return ["focus on it", "boil it", "look around"]

    def look(self):
        return f"You see {len(self.server.done)} things."

    def inventory(self):
        return "You have nothing."

    def close(self):
        Simulator.closed += 1


@pytest.fixture
def stand_in(monkeypatch):
    from arborl.envs.adapters import text_games

    package, constants = ModuleType("scienceworld"), ModuleType("scienceworld.constants")
    vars(package)["ScienceWorldEnv"], vars(constants)["ID2TASK"] = Simulator, {"1": "boil", "2": "melt"}
    monkeypatch.setitem(sys.modules, "scienceworld", package)
    monkeypatch.setitem(sys.modules, "scienceworld.constants", constants)
    monkeypatch.setattr(text_games.SIMULATORS, "idle", [])
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/java")
    monkeypatch.setattr(Simulator, "started", 0)
    monkeypatch.setattr(Simulator, "closed", 0)
    text_games._gold_path.cache_clear()


def scienceworld(**args):
    return ENVS.build("scienceworld", args, "env.args")


def test_gains_of_score_are_rewards_or_only_the_finished_task_is(stand_in):
    assert check_env(scienceworld, Task("t", seed=3)) == []
    text, rewards, numbers = solve(scienceworld(), Task("t", fields={"task_name": "boil", "variation_idx": 4}))
    assert (text.splitlines()[0], rewards) == ("Your task is to boil 4.", [0.5, 0.5])
    assert numbers == {"success": 1.0, "score": 1.0, "valid": 1.0}
    assert solve(scienceworld(intermediate=False), Task("t"))[1] == [0.0, 1.0]
    unknown, spoilt = say(scienceworld(format_penalty=-0.1), Task("t"), "banana", "spoil it")
    assert (unknown.reward, unknown.info["valid"]) == (-0.1, 0.0)
    assert (spoilt.reward, spoilt.terminated) == (-1.0, True)


def test_variations_are_of_the_split_or_of_the_row(stand_in):
    held_out = Task("t", fields={"split": "held_out"})
    assert solve(scienceworld(), held_out)[0].startswith("Your task is to boil 7.")
    with pytest.raises(ValueError, match="variation_idx=10: boil has variations 0 to 9"):
        say(scienceworld(), Task("t", fields={"variation_idx": 10}))
    with pytest.raises(ConfigError, match="unknown fry; give some of boil, melt"):
        scienceworld(tasks=["fry"])


def test_a_simulator_is_used_again_unless_a_call_was_left_in_it(stand_in):
    say(scienceworld(), Task("t"), "focus on it")
    say(scienceworld(), Task("t"), "boil it")
    assert (Simulator.started, Simulator.closed) == (1, 0)
    env = scienceworld()
    asyncio.run(env.reset(Task("t"), 0))
    env.simulator.server.step = None  # the call fails in the middle
    with pytest.raises(TypeError):
        asyncio.run(env.step(Message("assistant", "boil it")))
    asyncio.run(env.close())
    assert (Simulator.started, Simulator.closed) == (1, 1)


def test_without_java_the_error_says_so(stand_in, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs Java"):
        scienceworld()


def test_the_real_scienceworld_keeps_our_contract_and_its_gold_path_wins():
    pytest.importorskip("scienceworld", reason="needs pip install 'arborl[scienceworld]'")
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    task = Task("t", seed=3)
    assert check_env(lambda: scienceworld(tasks=["find-plant"]), task, steps=5, seconds=120) == []
    _, rewards, numbers = solve(scienceworld(tasks=["find-plant"]), task)
    assert (sum(rewards), numbers["success"]) == (pytest.approx(1.0), 1.0)


# ------------------------------------------------------------------------------------------------ chess

MATE = {"fen": "r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4", "moves": "h5f7"}
LONG = {
    "FEN": "r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2R1/PqP2bPP/7K b - - 0 24",
    "Moves": "f2g3 e6e7 b2b1 b3c1 b1c1 h6c1",  # the first puzzle of Lichess's file
}


@pytest.fixture
def chess():
    pytest.importorskip("chess", reason="needs pip install 'arborl[chess]'")
    return lambda **args: ENVS.build("chess", args, "env.args")


def test_made_puzzles_keep_our_contract_are_solved_and_differ_by_split(chess):
    assert check_env(chess, Task("t", seed=3)) == []
    texts = [solve(chess(), Task("t", seed=3, fields={"split": split})) for split in ("train", "held_out")]
    assert texts[0][0] != texts[1][0]
    assert [(rewards, numbers["success"]) for _, rewards, numbers in texts] == [([1.0], 1.0)] * 2


def test_the_opponents_moves_are_played_and_moves_are_read_in_both_notations(chess):
    steps = say(chess(), Task("t", fields=LONG), "<answer>Rxe7</answer>", "b3c1", "<answer>Qxc1</answer>")
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert steps[0].observation.messages[0].content.startswith("Correct: Rxe7\nThe opponent plays Qb1+.")
    assert "The puzzle is solved." in steps[2].observation.messages[0].content


def test_a_wrong_move_ends_the_puzzle_and_what_is_no_move_does_not(chess):
    asked, illegal, wrong = say(chess(format_penalty=-0.1), Task("t", fields=MATE), "moves", "Kxe8", "Qxe5+")
    assert "h5f7 (Qxf7#)" in asked.observation.messages[0].content
    assert (asked.reward, illegal.reward, illegal.info["valid"], illegal.over) == (0.0, -0.1, 0.0, False)
    assert (wrong.reward, wrong.terminated, wrong.info["valid"]) == (0.0, True, 1.0)


def test_the_dense_reward_is_agentflys_formula_with_the_solution_as_judge(chess):
    env = chess(dense=True, max_steps=2)
    assert [step.reward for step in say(env, Task("t", fields=MATE), "Qxf7#")] == [1.0]
    assert [step.reward for step in say(env, Task("t", fields=MATE), "Qxe5+")] == [0.0]
    halfway = say(env, Task("t", fields=LONG), "e6e7", "e7e1")[-1]  # 2 of 5 moves after the first; 1 of 2 good
    assert halfway.reward == pytest.approx(0.6 * 0.5 * 2 / 5 + 0.4 * 1 / 2)
    late = say(env, Task("t", fields=LONG), "e6e7", "board")[-1]
    assert (late.truncated, late.reward) == (True, pytest.approx(0.6 * 0.5 * 2 / 5 + 0.4))


def test_an_engine_judges_moves_the_same_way_every_time(chess):
    program = shutil.which("stockfish") or "/usr/games/stockfish"
    if shutil.which(program) is None:
        pytest.skip("needs stockfish")
    env = chess(dense=True, engine=program, engine_nodes=2000)
    start = {"fen": "4k3/8/8/8/8/8/4P3/4K3 w - - 0 1", "moves": "e1d2"}
    rewards = [say(env, Task("t", fields=start), "e1f2")[-1].reward for _ in range(3)]
    assert len(set(rewards)) == 1
    assert 0.2 < rewards[0] <= 0.4  # not the solution, but hardly worse


def test_puzzles_that_cannot_be_and_programs_that_are_not_there_are_named(chess):
    with pytest.raises(ValueError, match="task t: fen='8/8', moves='e2e4'"):
        say(chess(), Task("t", fields={"fen": "8/8", "moves": "e2e4"}))
    with pytest.raises(ValueError, match="a1a8 is no legal move there"):
        say(chess(), Task("t", fields=MATE | {"moves": "a1a8"}))
    with pytest.raises(ConfigError, match="engine='no-such-engine': no such program"):
        chess(engine="no-such-engine")


def test_an_episode_in_a_process_is_as_in_this_one(chess):
    async def play(env):
        opening = await env.reset(Task("t", seed=5), 0)
        step = await env.step(Message("assistant", env.oracle()))
        await env.close()
        return opening, step

    pool = ProcessPool(most=1)
    try:
        assert asyncio.run(play(ProcessEnv(chess(), pool, "chess", 60.0))) == asyncio.run(play(chess()))
    finally:
        pool.close()
