"""Parts given as objects: a folder names them so that they are found again, or says that they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import parts_of_mine as mine
import pytest
from small_runs import invoke

import arborl
from arborl.config.load_config import load
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.training_run.object_names import name_objects

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
SMALL = {
    "engine": {"name": "scripted", "args": {"replies": ["wrong"]}}, "rollout.tasks_per_step": 2,
    "rollout.group_size": 2,
    "evaluation.tasks": 4, "evaluation.greedy": False, "track.tensorboard": False, "track.gifs": 0, "steps": 1,
    "sampling.max_tokens": 64,
}  # fmt: skip


def nested():
    """What a script has: a tool with a library tool's name, and a reward, that no import leads to."""
    requested: list[str] = []

    @arborl.tool
    def calculator(expression: str) -> str:
        """Compute."""
        requested.append(expression)
        return "3"

    @arborl.reward
    def half(episode) -> float:
        return 0.5

    return calculator, half, requested


def test_what_can_be_imported_again_is_called_by_its_path_and_the_command_line_evaluates_the_run(tmp_path):
    done = arborl.run(
        data=mine.requested, agent=mine.Talker, rewards=[mine.right], output_dir=tmp_path / "run",
        **SMALL | {"rollout.group_filter": mine.all_of_them},
    )  # fmt: skip
    config = load(done.folder / "config.yaml")
    assert config.agent.name == "parts_of_mine:Talker"
    assert config.rewards[0].name == "parts_of_mine:right"
    assert config.data.rows.name == "parts_of_mine:requested"
    assert config.rollout.group_filter == "parts_of_mine:all_of_them"
    output = invoke("evaluate", str(done.folder))
    assert output.exit_code == 0, output.output
    assert done.evaluate()["sampled"]["success"] == 1


def test_a_tool_object_with_a_library_name_is_never_swapped_for_the_librarys(tmp_path):
    calculator, half, requested = nested()
    more = SMALL | {"engine": {"name": "scripted", "args": {"replies": [CALL]}}, "rollout.max_turns": 1}
    done = arborl.run(
        data=[{"question": f"{n}?"} for n in range(40)], agent={"name": "tool", "args": {"max_tool_rounds": 1}},
        tools=[calculator], rewards=[half], output_dir=tmp_path / "run", **more,
    )  # fmt: skip
    config = load(done.folder / "config.yaml")
    assert (config.tools[0].name, config.rewards[0].name) == ("object:calculator", "object:half")
    assert config.data.rows.name == "object:rows"
    before = len(requested)
    assert done.evaluate()["sampled"]["reward"] == 0.5
    assert len(requested) > before > 0
    for words in (["evaluate", str(done.folder)], ["train", "--resume", str(done.folder), "trainer.steps=2"]):
        output = invoke(*words)
        assert output.exit_code == 2, output.output
        assert "was given to the run as a Python object" in output.output
        assert "run.evaluate()" in output.output
        assert len(output.output.strip().splitlines()) == 1
    assert "can be evaluated and resumed from" in (done.folder / "config.yaml").read_text()


def test_a_run_with_objects_is_resumed_from_python_with_them(tmp_path):
    _, half, _ = nested()
    given = {"rewards": ["env", half], "env": FrozenLake(size=3), "output_dir": tmp_path / "run", **SMALL}
    arborl.run(**given)
    assert arborl.run(**given | {"steps": 2, "resume": "latest"}).summary["steps"] == 2


def test_two_objects_of_one_name_are_two_parts(tmp_path):
    class Constant:
        def __init__(self, value: float):
            self.value = value

        async def __call__(self, episode) -> float:
            return self.value

    done = arborl.run(rewards=[Constant(1.0), Constant(0.5)], output_dir=tmp_path / "run", **SMALL)
    assert done.summary["after"]["reward"] == 1.5


def test_names_reach_wherever_a_part_may_stand():
    named, objects = name_objects(
        {
            "env": {"name": mine.Lake, "args": {"size": 3}},
            "rewards": [{"name": mine.right, "weight": 2}, "exact"],
            "data": {
                "sources": {"a": mine.requested, "b": {"env": mine.Lake, "tools": [mine.calculator]}, "c": "x.json"}
            },
            "data.agents": {"echo": mine.Talker},
            "model": "seedling",
        }
    )
    assert named["env"] == {"name": "parts_of_mine:Lake", "args": {"size": 3}}
    assert named["rewards"] == [{"name": "parts_of_mine:right", "weight": 2}, "exact"]
    assert named["data"]["sources"] == {
        "a": {"rows": "parts_of_mine:requested"},
        "b": {"env": "parts_of_mine:Lake", "tools": ["parts_of_mine:calculator"]},
        "c": "x.json",
    }
    assert named["data.agents"] == {"echo": "parts_of_mine:Talker"}
    assert set(objects.values()) == {mine.Lake, mine.right, mine.requested, mine.calculator, mine.Talker}


def test_arguments_of_a_tool_given_as_a_class_go_by_its_short_name(tmp_path, monkeypatch):
    from arborl.config.load_config import from_kwargs
    from arborl.tools.library.search import Search
    from arborl.training_run.part_factory import RunPartFactory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "docs.jsonl").write_text('{"text": "a frozen lake"}\n')
    args = {"Search": {"corpus": str(tmp_path / "docs.jsonl")}}
    named, objects = name_objects({"agent": {"name": "tool", "tool_args": args}, "tools": [Search]})
    workshop = RunPartFactory(from_kwargs(**named), objects)
    (made,) = workshop.tools().values()
    assert [tool.name for tool in made] == ["search"]


@pytest.mark.parametrize("data", [[], ["no row"], (row for row in ())], ids=["none", "text", "an empty generator"])
def test_rows_that_are_none_are_refused(tmp_path: Path, data):
    with pytest.raises(arborl.errors.ConfigError, match="row"):
        arborl.run(data=data, rewards=["exact"], output_dir=tmp_path / "run", **SMALL)


# ------------------------------------------------------------------------------------------------ forms of data

QUESTIONS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": None}]


def rows_given(data) -> list[dict]:
    named, objects = name_objects({"data": data})
    return objects[named["data"]["rows"]]()


class Dataset:
    """Like a dataset of Hugging Face: a sequence of rows with column names."""

    column_names: ClassVar[list[str]] = ["question", "answer"]

    def __init__(self, rows=QUESTIONS):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_rows_may_be_a_list_an_iterator_a_dataset_or_a_table():
    pyarrow = pytest.importorskip("pyarrow")
    for data in (QUESTIONS, iter(QUESTIONS), Dataset(), pyarrow.Table.from_pylist(QUESTIONS)):
        assert rows_given(data) == QUESTIONS


def test_rows_may_be_a_dataframe_whose_missing_values_are_none():
    pandas = pytest.importorskip("pandas")
    messages = pandas.Series([[{"role": "user", "content": "1+1?"}], [{"role": "user", "content": "2+2?"}]])
    frame = pandas.DataFrame(QUESTIONS).assign(level=[1.0, float("nan")], messages=messages.map(np.array))
    assert rows_given(frame) == [
        {"question": "1+1?", "answer": "2", "level": 1.0, "messages": [{"role": "user", "content": "1+1?"}]},
        {"question": "2+2?", "answer": None, "level": None, "messages": [{"role": "user", "content": "2+2?"}]},
    ]


def test_splits_by_name_are_training_and_held_out_rows():
    named, objects = name_objects({"data": {"train": Dataset(), "test": Dataset(QUESTIONS[:1])}})
    assert objects[named["data"]["rows"]]() == QUESTIONS
    assert objects[named["data"]["evaluation_rows"]]() == QUESTIONS[:1]


def test_a_dataframe_is_trained_on(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(20)])
    done = arborl.run(data=frame, rewards="exact", stub=True, output_dir=tmp_path / "run")
    assert done.summary["steps"] > 0
