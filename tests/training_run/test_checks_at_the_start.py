"""Mistakes of a new user that are reported before a model is loaded, from Python and from the command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import invoke

import arborl
from arborl.config.load_config import from_kwargs
from arborl.errors import ConfigError
from arborl.training_run.build import build

ROWS = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(40)]


@arborl.reward
def truthful(episode, truth):
    return float(episode.answer == truth)


class NoStep:
    async def reset(self, task, seed): ...


class InheritedStep(arborl.Env):
    async def reset(self, task, seed): ...


class WithoutBase:
    async def reset(self, task, seed): ...

    async def step(self, action): ...


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    """A check that comes too late, after the weights are loaded, fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("arborl.training_run.build.load_policy", refuse)


def refusal(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        arborl.run(**settings)
    return str(caught.value)


def warnings(caplog, **settings) -> str:
    """What is logged until the model would be loaded."""
    with caplog.at_level(logging.WARNING), pytest.raises(AssertionError, match="the model is loaded"):
        build(from_kwargs(**settings))
    return "\n".join(caplog.messages)


def test_a_column_that_a_reward_needs_and_rows_lack_is_named_with_the_columns_and_the_setting(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"question": row["question"], "solution": row["answer"]} for row in ROWS])

    said = refusal(data=file, rewards=["exact"])

    assert f"{file}: the reward 'exact' needs the column 'answer', and the rows have: question, solution." in said
    assert "Write data.fields.answer=solution" in said
    assert "data.fields.answer=solution" in invoke("train", f"data={file}", "rewards=[exact]").output


@pytest.mark.parametrize("reward", [truthful, {"name": "equal", "args": {"field": "truth"}}])
def test_own_rewards_and_those_of_the_library_name_the_column_that_they_need(tmp_path, reward):
    said = refusal(data=write(tmp_path / "rows.jsonl", ROWS), rewards=[reward])

    assert "needs the column 'truth', and the rows have: question, answer." in said


def test_a_reward_that_needs_a_column_is_refused_with_an_environment_that_makes_its_tasks():
    said = refusal(env="frozen_lake", rewards=["exact"])

    assert "the reward 'exact' needs the column 'answer', and the tasks of env=frozen_lake have: split." in said


def test_held_out_rows_of_another_file_are_checked_too(tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    other = write(tmp_path / "test.jsonl", [{"question": "1+1?", "solution": "2"}])

    assert f"{other}: the reward 'exact'" in refusal(data={"path": file, "evaluation_path": other}, rewards=["exact"])


def test_rows_without_an_answer_are_counted(tmp_path, caplog):
    rows = [row | {"answer": None} if number < 12 else row for number, row in enumerate(ROWS)]
    file = write(tmp_path / "rows.jsonl", rows)

    assert f"{file}: 12 of 40 rows have no answer" in warnings(caplog, data=file, rewards=["exact"])


def test_a_null_in_a_column_that_data_fields_names_is_no_missing_column(tmp_path, caplog):
    rows = [{"question": row["question"], "solution": None if n < 3 else "1"} for n, row in enumerate(ROWS)]
    file = write(tmp_path / "rows.jsonl", rows)

    said = warnings(caplog, data={"path": file, "fields": {"answer": "solution"}}, rewards=["exact"])

    assert "3 of 40 rows have no answer" in said


@pytest.mark.parametrize(("rows", "why"), [(ROWS[:1], "it has one row"), (ROWS[:1] * 20, "its 20 rows are equal")])
def test_a_run_without_held_out_rows_says_so(tmp_path, caplog, rows, why):
    file = write(tmp_path / "rows.jsonl", rows)

    said = warnings(caplog, data=file, rewards=["exact"])

    assert f"nothing is held out, because {why}" in said
    assert "Add rows, or write data.evaluation_path=FILE." in said


def test_nothing_is_said_about_rows_in_order(tmp_path, caplog):
    assert warnings(caplog, data=write(tmp_path / "rows.jsonl", ROWS), rewards=["exact"]) == ""


def test_prompts_that_fill_the_context_are_counted(tmp_path, caplog):
    rows = [row | {"question": row["question"] + " word" * 3000 * (n < 7)} for n, row in enumerate(ROWS)]
    file = write(tmp_path / "rows.jsonl", rows)

    said = warnings(caplog, data=file, rewards=["exact"])

    assert f"{file}: the prompts of 7 of 40 rows leave no room for a reply" in said
    assert "data.max_prompt_tokens=1023" in said


def test_a_run_whose_prompts_all_fill_the_context_is_refused(tmp_path):
    rows = [row | {"question": row["question"] + " word" * 3000} for row in ROWS]

    said = refusal(data=write(tmp_path / "rows.jsonl", rows), rewards=["exact"])

    assert "the prompts of 40 of 40 rows leave no room" in said
    assert "sampling.max_context is 1024. Write a larger one" in said


def test_rows_that_max_prompt_tokens_leaves_out_are_counted(tmp_path, caplog):
    rows = [row | {"question": row["question"] + " word" * 300 * (n < 7)} for n, row in enumerate(ROWS)]
    file = write(tmp_path / "rows.jsonl", rows)

    said = warnings(caplog, data={"path": file, "max_prompt_tokens": 100}, rewards=["exact"])

    assert f"{file}: 7 rows are left out: their prompts have more than data.max_prompt_tokens=100 tokens." in said
    assert "Write a larger max_prompt_tokens" in refusal(data={"path": file, "max_prompt_tokens": 1}, rewards=["exact"])


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (NoStep, "NoStep has no step(). Write `async def step(self, action)`"),
        (InheritedStep, "InheritedStep has no step()."),
        (WithoutBase, "WithoutBase has no close(). Write `class WithoutBase(arborl.Env)`"),
    ],
)
def test_an_environment_without_a_method_is_refused_with_the_line_to_write(env, expected):
    assert expected in refusal(env=env)
    assert expected in refusal(env={"name": env, "prompt": {"system": "Play."}})


def test_a_program_whose_file_does_not_exist_is_refused(tmp_path):
    data = write(tmp_path / "rows.jsonl", ROWS)

    said = refusal(
        agent={"name": "endpoint", "args": {"command": ["python", "missing.py"]}}, data=data, rewards=["exact"]
    )

    assert "command: there is no file 'missing.py'" in said


def test_a_device_that_is_not_there_is_refused_before_rows_are_read(tmp_path):
    said = refusal(model={"device": "xpu"}, data=tmp_path / "missing.jsonl", rewards=["exact"])

    assert "model.device=xpu: cannot be used here" in said
    assert "Write model.device=auto" in said


def test_a_learning_rate_above_1_is_reported(caplog):
    assert "learner.lr=5" in warnings(caplog, **{"learner.lr": 5.0})


def test_mistakes_in_rows_are_found_without_torch(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"question": "1+1?", "solution": "2"}] * 3)
    program = f"""
import sys, arborl
try:
    arborl.run(data={str(file)!r}, rewards=["exact"])
except arborl.errors.ConfigError as error:
    print("torch" in sys.modules, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("False "), done.stdout
    assert "needs the column 'answer'" in done.stdout


@pytest.mark.parametrize(
    ("settings", "near"),
    [
        ({"algorithm": "gpro"}, "grpo"),
        ({"env": "frozen_lak"}, "frozen_lake"),
        ({"agent": "tol"}, "tool"),
        ({"agent": "tool", "tools": ["calculater"]}, "calculator"),
        ({"rewards": ["exat"]}, "exact"),
        ({"engine": "locl"}, "local"),
        ({"model": "seedlin"}, "seedling"),
        ({"track.trackers": ["wandbb"]}, "wandb"),
        ({"rollout.group_filter": "varid"}, "varied"),
        ({"placement": "rayy"}, "ray"),
    ],
)
def test_a_misspelt_name_of_a_part_is_answered_with_the_nearest(settings, near):
    assert f"Did you mean {near!r}?" in refusal(**settings)


def untyped(a, b):
    return a + b


def test_a_tool_without_docstring_and_types_is_named_with_what_to_add(caplog):
    said = warnings(caplog, agent="tool", tools=["test_checks_at_the_start:untyped"])

    assert "tool 'untyped' has no docstring and no type for 'a', 'b'." in said
    assert "Write types in its signature, and a docstring with Args." in said
