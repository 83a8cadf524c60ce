"""Problems that we make ourselves: solvable, different, and the same for the same seed."""

import asyncio
from fractions import Fraction
from pathlib import Path

import pytest

from arborl.config.load_config import load
from arborl.data import FileTasks
from arborl.data.generated.datasets import make
from arborl.data.generated.problems import CODE_KINDS, code_problems, problems, show
from arborl.rewards.answers import equal
from arborl.rewards.code_tests import read_cases, run_cases
from arborl.sandbox import run_code
from arborl.tools.library.calculator import calculator

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_calculator_solves_every_problem_by_its_expression(level):
    rows = problems(300, seed=1, level=level)
    assert len({row["question"] for row in rows}) == 300
    for row in rows:
        assert equal(calculator(row["expression"]), row["answer"]), row
        assert Fraction(row["answer"]) >= 0
    assert problems(300, seed=1, level=level) == rows
    assert problems(300, seed=2, level=level) != rows


def test_no_problem_tells_its_answer_by_its_numbers():
    """A guesser who repeats a number of the question is seldom right."""
    rows = problems(500)
    reported = sum(row["answer"] in row["question"].replace("?", " ").replace(".", " ").split() for row in rows)
    assert reported / len(rows) < 0.05


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="level=4"):
        problems(1, level=4)
    with pytest.raises(ValueError, match="kind='essay'"):
        code_problems(1, kind="essay")
    assert show(Fraction(7, 2)) == "3.5"
    assert show(Fraction(-4)) == "-4"


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_the_code_of_a_row_solves_it_in_the_sandbox(kind):
    rows = code_problems(8, seed=3, kind=kind)

    async def solve(row):
        if "tests" in row:
            return await run_cases(row["code"], read_cases(row["tests"]), run_code)
        return [(await run_code(row["code"])).stdout.strip() == row["answer"]]

    async def everything():
        return await asyncio.gather(*map(solve, rows))

    assert all(all(passed) for passed in asyncio.run(everything()))
    assert code_problems(8, seed=3, kind=kind) == rows


@pytest.mark.parametrize(
    ("config", "name", "given"),
    [
        ("calculator/run.yaml", "arithmetic", {}),
        ("code/run.yaml", "code", {}),
        ("code/tests.yaml", "code", {"kind": "function"}),
    ],
)
def test_recipes_read_the_data_that_is_made_for_them(config, name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load(RECIPES / config)
    out = Path(settings.data.path)
    assert make(name, out.parent, count=60, **given) == {out: 60}
    assert settings.env.name == "question"
    source = FileTasks(out, settings.data.question, 0, settings.data.evaluation_share)
    assert source.take(0, 8)
    assert source.evaluation(5)
