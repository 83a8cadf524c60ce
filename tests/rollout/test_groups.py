"""Groups: who counts, who is cancelled, which groups stay; and that statistics are over those that count alone."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms import make_algorithm
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.rollout.groups import DEFAULT_OPTIONS, GroupCollector, GroupOptions, split_spares
from arborl.rollout.token_trees import build_token_trees
from arborl.seeds import derive
from arborl.types import Episode, Failure, Group, Message, Task


def member(name: str) -> int:
    return int(name.rpartition("#")[2])


def play(tasks, size, options, seconds, fails=(), count=None):
    """Episodes that do nothing but take their time; `seconds` and `fails` by member. Returns groups, counts, wall."""
    counts: Counter[str] = Counter()

    async def one(task, seed, name, begin):
        begin()
        await asyncio.sleep(seconds(task, member(name)))
        episode = Episode(name, task, seed)
        if member(name) in fails:
            episode.failure = Failure("x", "y", "z")
        return episode

    began = time.perf_counter()
    groups = asyncio.run(GroupCollector(one, options, counts).collect(tasks, 0, size, count))
    return groups, counts, time.perf_counter() - began


def test_the_first_to_finish_count_and_the_rest_are_cancelled():
    groups, counts, wall = play([Task("a"), Task("b")], 3, GroupOptions(redundancy=2), lambda task, m: 0.02 * (5 - m))
    for group in groups:
        assert [member(episode.id) for episode in group.episodes] == [2, 3, 4]  # in order of number, not of time
    assert counts["cancelled"] == 4
    assert wall < 1.0


def test_a_redundant_member_takes_the_place_of_one_that_failed_which_is_reported():
    groups, counts, _ = play([Task("a")], 3, GroupOptions(redundancy=1), lambda task, m: 0.01 * m, fails=(1,))
    assert [member(episode.id) for episode in groups[0].valid_episodes] == [0, 2, 3]
    assert len(groups[0].episodes) == 4
    assert counts["cancelled"] == 0


def test_with_too_many_failures_a_group_is_what_is_left():
    groups, _, _ = play([Task("a")], 3, GroupOptions(redundancy=1), lambda task, m: 0.0, fails=(0, 1, 2))
    assert [member(episode.id) for episode in groups[0].valid_episodes] == [3]


def test_a_group_whose_time_is_up_goes_on_with_who_has_finished():
    groups, counts, wall = play(
        [Task("a"), Task("b")], 3, GroupOptions(seconds=0.2), lambda task, m: 0.01 if m else 30.0
    )
    assert [member(episode.id) for group in groups for episode in group.episodes] == [1, 2, 1, 2]
    assert (counts["expired"], counts["cancelled"]) == (2, 2)
    assert wall < 5


def test_without_redundancy_everybody_is_waited_for():
    groups, counts, _ = play([Task("a")], 4, DEFAULT_OPTIONS, lambda task, m: 0.02 * (4 - m))
    assert [member(episode.id) for episode in groups[0].episodes] == [0, 1, 2, 3]
    assert not +counts


async def test_a_defect_ends_the_batch_and_leaves_no_one_playing():
    ended = []

    async def one(task, seed, name, begin):
        try:
            if member(name) == 1:
                raise AssertionError("a defect")
            await asyncio.sleep(30)
        finally:
            ended.append(name)

    with pytest.raises(ExceptionGroup) as caught:
        await GroupCollector(one, DEFAULT_OPTIONS, Counter()).collect([Task("a"), Task("b")], 0, 3)
    await asyncio.sleep(0.05)
    assert caught.group_contains(AssertionError, match="a defect")
    assert len(ended) == 6


# ------------------------------------------------------------------------------------------------ filter and spares


def named(*sources: str) -> list[Task]:
    return [Task(f"{source}{i}", source=source) for i, source in enumerate(sources)]


def test_a_dropped_group_is_replaced_by_the_next_spare_of_its_source():
    tasks = named("a", "b", "a", "b", "a", "b")
    keep = lambda group: group.task.id not in ("a0", "b3")  # noqa: E731
    groups, counts, _ = play(tasks, 1, GroupOptions(keep=keep), lambda task, m: 0.0, count=2)
    assert [group.task.id for group in groups] == ["b1", "a2"]
    assert counts["filtered"] == 1


def test_when_spares_run_out_the_batch_is_smaller_and_that_is_counted():
    groups, counts, _ = play(named("a", "a", "a"), 1, GroupOptions(keep=lambda g: False), lambda task, m: 0.0, count=2)
    assert groups == []
    assert (counts["filtered"], counts["missing"]) == (3, 2)


@given(st.data())
def test_which_tasks_end_up_in_a_batch_does_not_depend_on_who_finishes_when(data):
    """Law 6, for a filter: the order of events is drawn, the outcome is not."""
    tasks = named(*data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=12)))
    bad = data.draw(st.sets(st.sampled_from([task.id for task in tasks])))
    count = data.draw(st.integers(1, len(tasks)))

    def outcome(order):
        loop_turns = dict(zip((task.id for task in tasks), order, strict=True))

        async def one(task, seed, name, begin):
            for _ in range(loop_turns[task.id]):
                await asyncio.sleep(0)
            return Episode(name, task, seed)

        options = GroupOptions(keep=lambda group: group.task.id not in bad)
        groups = asyncio.run(GroupCollector(one, options, Counter()).collect(tasks, 0, 1, count))
        return [(group.task.id, group.episodes[0].seed) for group in groups]

    orders = st.permutations(range(len(tasks)))
    assert outcome(data.draw(orders)) == outcome(data.draw(orders))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.data())
def test_places_and_spares_are_all_tasks_once_and_shares_are_kept(sources, data):
    count = data.draw(st.integers(0, len(sources)))
    places, spares = split_spares(sources, count)
    assert sorted([*places, *(place for line in spares.values() for place in line)]) == list(range(len(sources)))
    assert len(places) == count
    for source in set(sources):
        share = sources.count(source) * count / len(sources)
        assert abs(sum(sources[place] == source for place in places) - share) < 1


def test_a_filter_that_breaks_keeps_the_group_and_is_counted(caplog):
    def broken(group):
        raise KeyError("reward")

    groups, counts, _ = play([Task("a")], 2, GroupOptions(keep=broken), lambda task, m: 0.0)
    assert len(groups) == 1
    assert counts["filter_failed"] == 1
    assert "the group filter failed on task a" in caplog.text


# ------------------------------------------------------------------------------------------------ the whole rollout


class Uneven(Env):
    """Some members are stuck for a long while; a reward that differs by member."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self.draw = derive(seed, "luck") % 100
        return Observation((Message("user", "hello"),), "hello")

    async def step(self, action: Message) -> Step:
        await asyncio.sleep(60 if self.draw % 4 == 0 else 0.001)
        return Step(Observation((), "end"), reward=float(self.draw), terminated=True)


def test_statistics_are_over_the_members_that_count_one_vote_each(make_rollout):
    """Law 4: advantages of a redundant group are those of its finishers alone, computed here by hand."""
    run = make_rollout(lambda task: Uneven(), training=GroupOptions(redundancy=6))
    groups = asyncio.run(run.train([Task(f"t{i}") for i in range(4)], seed=1, group_size=4, count=4))
    assert run.metrics()["rollout/cancelled"] == 4 * 6
    for group in groups:
        assert len(group.valid_episodes) == 4
        for episode in group.episodes:
            episode.rewards["env"] = episode.turns[0].reward
    algorithm = make_algorithm(AlgorithmConfig(std="none"))
    terms = algorithm.credit(groups, build_token_trees(groups).terms)
    rewards = np.array([[episode.reward for episode in group.episodes] for group in groups])
    by_hand = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
    assert terms.episode.max() == 15
    for number, advantage in enumerate(by_hand):
        np.testing.assert_allclose(terms.advantage[terms.episode == number], advantage)
    assert terms.weight.sum() == pytest.approx(1.0)
    sampled = [token for group in groups for e in group.episodes for c in e.calls for token in c.completion.tokens]
    assert terms.token.tolist() == sampled  # of cancelled members nothing is trained


def test_evaluation_waits_for_everybody_whatever_training_does(make_rollout):
    run = make_rollout(lambda task: FrozenLake(), training=GroupOptions(redundancy=3, keep=lambda group: False))
    tasks = [Task(f"t{i}", seed=i, fields={"split": "held_out"}) for i in range(5)]
    groups = asyncio.run(run.collect(tasks, seed=0, group_size=2))
    assert [len(group.episodes) for group in groups] == [2] * 5
    assert run.metrics()["rollout/cancelled"] == 0.0


def test_members_share_their_task_and_its_seed_and_have_seeds_of_their_own_from_the_runs_tree(make_rollout):
    run = make_rollout(lambda task: FrozenLake())
    tasks = [Task(f"t{i}", seed=100 + i, fields={"split": "train"}) for i in range(3)]
    groups = asyncio.run(run.collect(tasks, seed=7, group_size=4))
    for place, group in enumerate(groups):
        assert {episode.task.seed for episode in group.episodes} == {100 + place}
        assert len({episode.opening for episode in group.episodes}) == 1
        assert [e.seed for e in group.episodes] == [derive(7, "task", place, "episode", n) for n in range(4)]


def test_new_episodes_wait_while_the_engine_is_crowded(make_rollout):
    class Full(ScriptedEngine):
        playing = most = 0

        @property
        def is_saturated(self) -> bool:
            return self.playing >= 3

        async def generate(self, prompt, sampling, *, session):
            self.playing += 1
            self.most = max(self.most, self.playing)
            await asyncio.sleep(0.002)
            self.playing -= 1
            return await super().generate(prompt, sampling, session=session)

    run = make_rollout(lambda task: FrozenLake())
    run.engine = Full(run.engine.replies)
    tasks = [Task(f"t{i}", seed=i, fields={"split": "train"}) for i in range(10)]
    groups = asyncio.run(run.collect(tasks, seed=0, group_size=2))
    assert all(episode.failure is None for group in groups for episode in group.episodes)
    assert run.engine.most <= 4


def test_groups_with_equal_rewards_are_not_varied_and_those_without_success_not_solvable():
    from arborl.rollout.groups import solvable, varied

    flat = Group(Task("t"), [Episode(str(i), Task("t"), rewards={"env": 1.0}) for i in range(3)])
    mixed = Group(Task("t"), [Episode(str(i), Task("t"), rewards={"env": float(i)}) for i in range(3)])
    assert not varied(flat)
    assert varied(mixed)
    assert not solvable(mixed)
    mixed.episodes[1].metrics["success"] = 1.0
    assert solvable(mixed)
    mixed.episodes[1].failure = Failure("x", "y", "z")
    assert not solvable(mixed)
