"""Tasks that fail again and again are set aside for a while, in favour of other tasks of their source."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixture import mixture, pool, row

import arborl
from arborl.data.mixing.mixture import Mixture
from arborl.data.mixing.quarantine import TaskQuarantine
from arborl.data.mixing.task_pools import EnvPool
from arborl.rollout.episode_store import EpisodeStore
from arborl.types import Episode, Failure, Task

BROKEN = Failure("environment 'lake'", "OSError", "no disk")


def play(tasks, bad, failure=BROKEN) -> list[Episode]:
    """Two episodes of each task; those of bad tasks fail."""
    return [
        Episode(f"{task.id}#{n}", task, n, failure=failure if bad(task) else None, rewards={"r": 0.0})
        for task in tasks
        for n in range(2)
    ]


def draws(mixed, steps, size, bad, start=0, failure=BROKEN) -> list[list[str]]:
    """The rows of each batch of a run."""
    batches = []
    for step in range(start, steps):
        tasks = mixed.take(step, size)
        mixed.observe_episodes(step, play(tasks, bad, failure))
        batches.append([row(task) for task in tasks])
    return batches


def steps_with(batches, name) -> list[int]:
    return [step for step, batch in enumerate(batches) if name in batch]


def is_row(*names):
    return lambda task: row(task) in names


def test_a_task_that_fails_three_times_is_tried_again_after_two_four_and_eight_times_as_long():
    mixed = mixture([4], [1], quarantine=3)  # each row is in every batch
    found = steps_with(draws(mixed, 60, 4, is_row("a/1")), "a/1")
    assert found == [0, 1, 2, 4, 8, 16, 32]


def test_the_time_aside_grows_from_the_usual_time_between_two_draws():
    mixed = mixture([20], [1], quarantine=2)  # a row is in every tenth batch, on average
    found = steps_with(draws(mixed, 400, 2, is_row("a/1")), "a/1")
    gaps = [after - before for before, after in pairwise(found)]
    assert gaps[1] >= 2 * gaps[0]
    assert gaps[2] >= 1.5 * gaps[1]
    assert len(found) <= 6
    assert len(steps_with(draws(mixture([20], [1]), 400, 2, is_row("a/1")), "a/1")) == 40


def test_one_success_ends_it_and_the_count_begins_again():
    mixed, healthy = mixture([4], [1], quarantine=3), []
    for step in range(12):
        tasks = mixed.take(step, 4)
        healthy += [step] if "a/1" not in map(row, tasks) else []
        mixed.observe_episodes(step, play(tasks, lambda task, step=step: row(task) == "a/1" and step != 4))
    assert healthy == [3, 8, 10, 11]  # fails at 0, 1, 2; works at 4; fails at 5, 6, 7 and 9


def test_neither_low_rewards_nor_failures_of_the_engine_nor_single_failures_set_a_task_aside():
    engine = Failure("engine", "timeout", "late")
    whole = draws(mixture([4], [1]), 12, 4, lambda task: False)
    assert draws(mixture([4], [1], quarantine=3), 12, 4, lambda task: False) == whole
    assert draws(mixture([4], [1], quarantine=3), 12, 4, is_row("a/1"), failure=engine) == whole
    mixed = mixture([4], [1], quarantine=3)
    for step, batch in enumerate(whole):
        tasks = mixed.take(step, 4)
        assert [row(task) for task in tasks] == batch
        mixed.observe_episodes(step, play(tasks, lambda task: False)[:-1] + play(tasks[-1:], lambda task: True)[:1])


@given(
    rows=st.lists(st.integers(1, 12), min_size=1, max_size=3), size=st.integers(1, 9), seed=st.integers(0, 99),
    bad=st.sets(st.tuples(st.sampled_from("abc"), st.integers(0, 11)), max_size=12), stop=st.integers(1, 29),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shares_stay_exact_and_a_resumed_mixture_draws_the_same(rows, size, seed, bad, stop):
    names = {f"{source}/{number}" for source, number in bad}
    ratios = range(1, len(rows) + 1)
    mixed, plain = mixture(rows, ratios, seed, quarantine=2), mixture(rows, ratios, seed)
    batches = draws(mixed, 30, size, is_row(*names))
    for batch, other in zip(batches, draws(plain, 30, size, lambda task: False), strict=True):
        assert Counter(name[0] for name in batch) == Counter(name[0] for name in other)
    cut = mixture(rows, ratios, seed, quarantine=2)
    assert draws(cut, stop, size, is_row(*names)) == batches[:stop]
    resumed = mixture(rows, ratios, seed, quarantine=2)
    resumed.load_state(json.loads(json.dumps(cut.state(stop))))
    assert draws(resumed, 30, size, is_row(*names), start=stop) == batches[stop:]
    assert resumed.set_aside() == mixed.set_aside()


def test_the_result_does_not_depend_on_the_order_in_which_episodes_end():
    forward, backward = TaskQuarantine(1), TaskQuarantine(1)
    tasks = [Task(f"a/{n}", source="a", agent="x" if n % 2 else None) for n in range(6)]
    episodes = play(tasks[:5], lambda task: True) + play(tasks[5:], lambda task: False)
    forward.observe(0, episodes, lambda task: True)
    backward.observe(0, episodes[::-1], lambda task: True)
    assert json.dumps(forward.state()) == json.dumps(backward.state())
    assert "agent x of a" not in forward.entries  # one of its tasks works


def test_if_all_tasks_of_a_source_fail_they_are_drawn_as_without_quarantine(caplog):
    mixed = mixture([2, 2], [1, 1], quarantine=2)
    assert draws(mixed, 20, 4, lambda task: task.source == "a") == draws(mixture([2, 2], [1, 1]), 20, 4, bool)
    assert len(mixed.quarantine.entries) == 2
    assert mixed.set_aside() == []
    assert not [record for record in caplog.records if "set aside" in record.message]


class Environments:
    """A source whose tasks name different environments."""

    name, size, counts = "mixed", None, Counter()

    def take(self, start, count):
        return [
            Task(f"mixed/{n}", source="mixed", env=("lake", "shop")[n % 2], seed=n) for n in range(start, start + count)
        ]

    def evaluation(self, count):
        return []


@pytest.mark.parametrize("part", ["env", "agent"])
def test_an_environment_or_agent_that_tasks_name_is_set_aside_as_a_whole(part):
    class Parts(Environments):
        def take(self, start, count):
            return [replace(task, **{"env": None, part: task.env}) for task in super().take(start, count)]

    mixed = Mixture([Parts()], {"mixed": 1}, 0, quarantine=3)
    shown = []
    for step in range(10):
        tasks = mixed.take(step, 4)
        mixed.observe_episodes(step, play(tasks, lambda task: getattr(task, part) == "lake"))
        shown.append(sum(getattr(task, part) == "lake" for task in tasks))
    assert shown == [2, 2, 2, 0, 2, 0, 0, 0, 2, 0]
    [entry] = mixed.set_aside()
    assert entry["what"] == f"{'environment' if part == 'env' else part} lake of mixed"


def test_tasks_that_never_repeat_are_not_remembered():
    mixed = Mixture([EnvPool("lake", "frozen_lake", 0)], {"lake": 1}, 0, quarantine=1)
    draws(mixed, 5, 4, lambda task: task.id.endswith("3"))
    assert list(mixed.quarantine.entries) == []


def test_a_task_that_is_twice_in_a_batch_is_one_task():
    mixed = Mixture([pool("a", 2)], {"a": 1}, 0, quarantine=2)
    batches = draws(mixed, 4, 6, is_row("a/0"))
    assert Counter(batches[1])["a/0"] == 3
    assert "a/0" not in batches[2]


# ------------------------------------------------------------------------------------------------ runs


def grade(episode, word) -> float:
    if word == "bad":
        raise ConnectionError("the judge is offline for this row")
    return float("Up" in episode.answer)


def start(folder, steps=12, **more):
    rows = [{"question": f"Say Up. {n}", "word": "bad" if n == 2 else "good", "id": f"{n}"} for n in range(8)]
    return arborl.run(
        data=rows, rewards=[grade], steps=steps, output_dir=folder, engine="scripted", deterministic=True,
        **{
            "engine.args.replies": ["Up", "Down"], "rollout.tasks_per_step": 4, "rollout.group_size": 2,
            "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0, "threads": 1,
            "data.quarantine": 2, "trainer.save_every": 1,
        },
        **more,
    )  # fmt: skip


def trained_tasks(folder) -> list[list[str]]:
    store = EpisodeStore(folder / "episodes")
    return [[episode.id for episode in store.read(path)] for path in store.paths()]


def test_a_run_sets_a_task_aside_whose_reward_raises_and_a_resumed_run_does_the_same(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        start(tmp_path / "whole")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    [entry] = summary["quarantine"]
    assert "task" in entry["what"]
    assert entry["failure"] == "reward 'grade': ConnectionError"
    assert [record.message for record in caplog.records if "is set aside until step" in record.message]
    batches = trained_tasks(tmp_path / "whole")
    name = entry["what"].split()[1]
    assert 2 <= sum(any(one.startswith(f"{name}#") for one in batch) for batch in batches) <= 4
    assert all(len(batch) == 8 for batch in batches)

    start(tmp_path / "cut", steps=6)
    start(tmp_path / "cut", resume="latest")
    assert trained_tasks(tmp_path / "cut") == batches
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["quarantine"] == summary["quarantine"]
