import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.data import EnvTasks, FileTasks
from arborl.types import Message


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rows = [{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(60)]
    path = tmp_path_factory.mktemp("data") / "sums.json"
    path.write_text(json.dumps(rows))
    return path


def size(source):
    """Rows of a pass."""
    (pool,) = source.pools.values()
    return pool.size


def test_tasks_of_an_environment_follow_from_seed_and_step():
    source = EnvTasks("frozen_lake", seed=7)
    first = source.take(3, 4)
    assert first == EnvTasks("frozen_lake", seed=7).take(3, 4)
    assert [task.id for task in first][:2] == ["frozen_lake/train/000004-000", "frozen_lake/train/000004-001"]
    assert first[0].env == first[0].source == "frozen_lake"
    assert first[0].fields == {"split": "train"}
    assert source.take(3, 2) == first[:2]


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_runs_are_evaluated_on_the_same_tasks_whatever_their_seed(one, other):
    assert EnvTasks("frozen_lake", one).evaluation(5) == EnvTasks("frozen_lake", other).evaluation(5)


def test_no_seed_appears_twice():
    source = EnvTasks("frozen_lake", 0)
    tasks = [task for step in range(30) for task in source.take(step, 16)] + source.evaluation(200)
    assert len({task.seed for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    assert {task.fields["split"] for task in source.evaluation(3)} == {"held_out"}


def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(path):
    sources = [FileTasks(path, seed=seed, evaluation_share=0.3) for seed in range(3)]
    held_out = sources[0].evaluation(1000)
    assert all(source.evaluation(1000) == held_out for source in sources)
    assert sources[0].evaluation(2) == held_out[:2]
    assert 5 <= len(held_out) <= 35
    trained = {task.id for source in sources for task in source.take(0, 60 - len(held_out))}
    assert trained.isdisjoint({task.id for task in held_out})
    assert len(trained) + len(held_out) == 60


@given(st.integers(1, 30), st.floats(0.01, 0.99))
def test_a_small_file_still_has_both_sides_and_a_single_row_is_trained_on(rows, share):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "few.jsonl"
        path.write_text("\n".join(json.dumps({"question": f"q{n}"}) for n in range(rows)))
        source = FileTasks(path, evaluation_share=share)
        held_out = source.evaluation(1000)
    assert size(source) + len(held_out) == rows
    assert size(source) > 0
    assert bool(held_out) == (rows > 1)


def test_adding_and_moving_rows_changes_no_rows_side(tmp_path):
    rows = [{"question": f"q{n}", "id": n} for n in range(40)]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(rows))
    after.write_text(json.dumps([{"question": f"new{n}"} for n in range(20)] + rows[::-1]))
    one = {task.fields["question"] for task in FileTasks(before).evaluation(99)}
    other = {task.fields["question"] for task in FileTasks(after).evaluation(99)}
    assert one == {question for question in other if question.startswith("q")}


def test_equal_rows_fall_on_one_side_whatever_their_ids(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text(json.dumps([{"id": n, "question": f"q{n % 20}"} for n in range(40)]))
    source = FileTasks(path, evaluation_share=0.5)
    both = source.take(0, size(source)), source.evaluation(99)
    sides = [{task.fields["question"] for task in side} for side in both]
    assert sides[0].isdisjoint(sides[1])
    assert source.take(0, 1)[0].id.isdigit()


def test_batches_of_changing_size_leave_nothing_out_and_go_on_from_their_state(path):
    counts = [3, 11, 1, 7, 20, 5, 13]
    source = FileTasks(path, seed=3)
    taken = [source.take(step, count) for step, count in enumerate(counts)]
    names = [task.id for batch in taken for task in batch]
    assert len(set(names[: size(source)])) == size(source)
    for step, count in enumerate(counts):
        assert source.take(step, count) == taken[step]  # requested for again, after all of them
        state = source.state(step)
        other = FileTasks(path, seed=3)
        other.load_state(json.loads(json.dumps(state)))
        assert [other.take(step + n, c) for n, c in enumerate(counts[step:])] == taken[step:]


def test_rows_may_come_in_their_own_order_and_held_out_ones_from_a_function():
    from arborl.config.data_config import DataConfig
    from arborl.data.source_factory import open_source

    def rows():
        return [{"question": str(number)} for number in range(5)]

    def others():
        return [{"question": "held out"}]

    config = DataConfig(rows="object:rows", evaluation_rows="object:others", shuffle=False)
    source = open_source(config, "question", 7, objects={"object:rows": rows, "object:others": others})
    output = [task.messages[0].content for step in range(3) for task in source.take(step, 4)]
    assert output == [*"01234", *"01234", "0", "1"]
    assert [task.messages[0].content for task in source.evaluation(9)] == ["held out"]


def test_what_says_two_things_about_rows_is_refused():
    from arborl.config.data_config import DataConfig

    with pytest.raises(ValueError, match="both give held-out rows"):
        DataConfig(path="a.json", evaluation_path="b.json", evaluation_rows="m:f")
    with pytest.raises(ValueError, match="Leave shuffle out"):
        DataConfig(rows="m:f", endless=True, shuffle=False)


def test_a_row_becomes_a_task(path):
    task = FileTasks(path, "question", 0, 0.1).take(0, 1)[0]
    assert task.messages == (Message("user", task.fields["question"]),)
    assert task.source == "sums"
    assert task.agent is None
    assert task.id.startswith("sums/")


def test_taking_depends_on_the_step_alone(path):
    source = FileTasks(path, seed=1)
    forward = [source.take(step, 7) for step in range(20)]
    backward = [FileTasks(path, seed=1).take(step, 7) for step in reversed(range(20))]
    assert forward == backward[::-1]
    assert source.take(0, 7) != FileTasks(path, seed=2).take(0, 7)


def test_every_pass_gives_every_row_once_in_a_new_order(path):
    source = FileTasks(path, seed=1)
    rows = size(source)
    passes = [[task.id for task in source.take(k, rows)] for k in range(3)]
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert len(set(passes[0])) == rows
    assert passes[0] != passes[1] != passes[2]
    stream = [task.id for step in range(rows) for task in source.take(step, 3)]
    assert set(Counter(stream).values()) == {3}


def test_a_batch_longer_than_the_file_has_names_of_its_own(path):
    tasks = FileTasks(path, seed=1).take(0, 200)
    assert len({task.id for task in tasks}) == len({task.seed for task in tasks}) == 200
    assert any(task.id.endswith("#2") for task in tasks)
