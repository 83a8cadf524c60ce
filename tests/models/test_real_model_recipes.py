"""The recipes for SmolLM2: their files are understood, their demonstrations are right, and a small run of each ends."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path

import pytest

from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.envs.env import parse_answer
from arborl.envs.games.frozen_lake import parse_move
from arborl.seedling.problem_transcripts import working
from arborl.seedling.transcript_rows import mixed_transcript_rows, transcript_rows
from arborl.tools.library.calculator import calculator
from arborl.training_run import train
from arborl.types import Call, Completion, Episode, FinishReason, Message, Task, ToolCall, Turn

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(name for file in RECIPES.glob("*/*.yaml") if "smollm2" in (name := str(file.relative_to(RECIPES))))
SMALL = ("track.tensorboard=false", "track.gifs=0", "evaluation.tasks=4", "rollout.group_size=2", "trainer.steps=400",
         "rollout.tasks_per_step=4")  # fmt: skip


def needs(config: RunConfig) -> None:
    sources = [config.env, *(source.env for source in config.data.sources.values() if source.env is not None)]
    names = {env.name for env in sources}
    for package in names & {"reasoning_gym", "textworld"}:
        pytest.importorskip(package)
    if "textworld" in names and not Path(config.env.args["games"]).exists():
        pytest.skip("needs the games of make_games.py")
    if "verifiers" in names and not hasattr(pytest.importorskip("verifiers"), "MultiTurnEnv"):
        pytest.skip("needs verifiers before 0.4")


@pytest.mark.parametrize("file", FILES)
def test_a_recipe_is_understood_and_has_a_readme_that_names_its_command(file):
    config = load(RECIPES / file)
    assert config.model.name == "smollm2"
    assert config.evaluation.tasks >= 24
    assert f"arborl train recipes/{file}" in (RECIPES / file).with_name("README.md").read_text()
    assert f"arborl train recipes/{file}" in (RECIPES / file).read_text()


@pytest.mark.parametrize("file", FILES)
def test_a_small_run_of_a_recipe_with_the_embedded_model_ends(file, tmp_path, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    few = ["model.name=seedling", "model.lora.rank=0", *SMALL]
    config = load(RECIPES / file, [*few, f"output_dir={tmp_path / 'run'}"])
    needs(config)
    train(with_few_demonstrations(config), stub=True)
    assert (tmp_path / "run" / "summary.json").exists()


def with_few_demonstrations(config: RunConfig) -> RunConfig:
    shown = config.demonstrations
    if shown.rows is None:
        return config
    parts = [part | {"count": 4} for part in shown.rows.args.get("parts", [])]
    rows = shown.rows.model_copy(update={"args": {"parts": parts} if parts else shown.rows.args | {"count": 4}})
    return config.model_copy(update={"demonstrations": shown.model_copy(update={"rows": rows, "steps": 1, "batch": 2})})


def sums(count: int) -> list[str]:
    rng = random.Random(0)
    made = []
    for _ in range(count):
        high, terms = 10 ** rng.randint(1, 4) - 1, rng.randint(2, 3)
        signs = ["", *(f" {rng.choice('+-')} " for _ in range(terms - 1))]
        made.append("".join(f"{sign}{rng.randint(0, high)}" for sign in signs))
    return made


def test_every_step_of_a_worked_sum_is_right():
    for expression in sums(2000):
        text = working(expression)
        assert parse_answer(text) == str(eval(expression))
        for left, right in re.findall(r"([\d+-]+)=(-?\d+)", text):
            assert eval(re.sub(r"\b0+(?=\d)", "", left)) == int(right), text
        for line in text.splitlines()[:-1]:
            first, *equal = line.partition(":")[0].split(" = ")
            assert all(eval(first) == eval(other) for other in equal), text
            assert f"So {eval(first)}." in line


def test_worked_sums_ask_what_the_environment_asks_and_never_a_held_out_problem():
    pytest.importorskip("reasoning_gym")
    from arborl.envs.env import split_of

    rows = transcript_rows(40, 1, "worked_sums", None, {"min_terms": 2, "max_terms": 3})
    for row in rows:
        system, user, assistant = row["messages"]
        assert "<answer>answer</answer>" in system["content"]
        assert split_of(user["content"]) == "train"
        expression = user["content"].partition(": ")[2].removesuffix(" =")
        assert parse_answer(assistant["content"]) == str(eval(expression))
    assert rows == transcript_rows(40, 1, "worked_sums", None, {"min_terms": 2, "max_terms": 3})
    assert {len(re.findall(r" [+-] ", row["messages"][1]["content"])) for row in rows} == {1, 2}


def test_players_of_a_lake_move_in_every_message():
    for row in transcript_rows(20, 0, "frozen_lake", 0.5, {"spaced": True}):
        replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert replies
        assert all(parse_move(text) for text in replies)


def test_calls_of_a_calculator_are_answered_as_the_tool_answers_them():
    used = 0
    for row in transcript_rows(60, 0, "calculator"):
        calls = [call for message in row["messages"] for call in message.get("tool_calls", ())]
        answers = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        arguments = [re.search(r'"expression": "([^"]+)"', call["function"]["arguments"]) for call in calls]
        assert [str(calculator(found.group(1))) for found in arguments] == answers
        used += bool(calls)
    assert 20 < used < 50  # careless players: some guess


def test_several_kinds_are_mixed_by_their_counts():
    parts = [{"kind": "frozen_lake", "count": 3, "skill": 1.0}, {"kind": "calculator", "count": 2}]
    rows = mixed_transcript_rows(parts, seed=5)
    assert rows == [*transcript_rows(3, 5, "frozen_lake", 1.0), *transcript_rows(2, 5, "calculator")]


def test_the_rewards_of_the_recipes_with_a_module_of_their_own(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES / "own-tool")
    monkeypatch.syspath_prepend(RECIPES / "smollm2-laptop")
    catalogue, sums = importlib.import_module("catalogue"), importlib.import_module("sums")

    def episode(text, *products):
        calls = tuple(ToolCall("1", "price", {"product": product}) for product in products)
        reply = Call([1], Completion([2], [0.0], FinishReason.STOP), turn=0, reply=Message("assistant", "", calls))
        return Episode("e", Task("t"), turns=[Turn(Message("assistant", text))], calls=[reply])

    def price_reward(*given):
        return sum(catalogue.right_price.function(episode(*given), answer=31, product="oak lamp").values())

    assert price_reward("It costs 31.", "oak lamp") == 1.0
    assert price_reward("It costs 31.", "oak bowl") == pytest.approx(0.8)
    assert price_reward("It costs 30.", "the Oak lamp") == pytest.approx(0.2)
    assert price_reward("") == 0.0
    assert [sums.close.function(episode(text), answer=31) for text in ("31", "1 + 30 = 30", "?")] == [1.0, 0.5, 0.0]
    assert all(set(row["messages"][0]) == {"role", "content"} for row in catalogue.transcripts())
    asked = {row["product"] for row in catalogue.questions()}
    assert not [row for row in catalogue.transcripts() if any(name in row["messages"][0]["content"] for name in asked)]
