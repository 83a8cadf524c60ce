"""Mixtures: full batches in exact shares, every row before any twice, and the same again after any restart."""

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.data.mixing.mixture import Mixture, SuccessBand, allocate, normalize_ratios
from arborl.data.mixing.task_pools import EnvPool, RowPool
from arborl.data.reading.row_reader import RowReader
from arborl.data.reading.tables import ListTable
from arborl.data.reading.train_splits import PromptFilters, split_table
from arborl.errors import ConfigError
from arborl.types import Episode, Group

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)
ratio = st.one_of(st.integers(1, 20), st.floats(0.001, 1.0).map(lambda x: round(x, 4)))


def pool(name, rows, seed=0):
    table = ListTable([(f"row {n + 1}", {"question": f"{name} {n}", "id": f"{name}/{n}"}) for n in range(rows)], name)
    reader = RowReader(name)
    return RowPool(table, reader, split_table(table, reader, 0.0, "auto", PromptFilters()), seed)


def mixture(rows, ratios, seed=0, **more):
    names = "abcdefgh"[: len(rows)]
    pools = [pool(name, size, seed) for name, size in zip(names, rows, strict=True)]
    return Mixture(pools, dict(zip(names, ratios, strict=True)), seed, **more)


def row(task):
    return task.id.partition("#")[0]


@st.composite
def mixtures(draw):
    rows = draw(sizes)
    ratios = [draw(ratio) for _ in rows]
    return rows, ratios, draw(st.integers(1, 24)), draw(st.integers(0, 2**31))


@given(mixtures())
@settings(max_examples=30)
def test_every_batch_is_full_and_within_a_row_of_its_quota_and_so_are_all_batches_together(made):
    rows, ratios, size, seed = made
    mixed = mixture(rows, ratios, seed)
    shares = normalize_ratios(mixed.ratios)
    total = Counter()
    for step in range(40):
        batch = mixed.take(step, size)
        counts = Counter(task.source for task in batch)
        assert len(batch) == size
        assert len({task.id for task in batch}) == len({task.seed for task in batch}) == size
        total += counts
        for name, share in shares.items():
            assert floor(share * size) <= counts[name] <= ceil(share * size)
            assert abs(total[name] - share * size * (step + 1)) < 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 30))
@settings(max_examples=20)
def test_shares_keep_within_a_row_for_as_long_as_anyone_looks(weights, size):
    shares = normalize_ratios({str(n): weight for n, weight in enumerate(weights)})
    behind = dict.fromkeys(shares, Fraction(0))
    for _ in range(300):
        counts = allocate(shares, size, behind)
        assert sum(counts.values()) == size
        behind = {name: behind[name] + share * size - counts[name] for name, share in shares.items()}
        assert all(abs(value) < 1 for value in behind.values())


@given(st.lists(st.tuples(st.lists(st.integers(1, 50), min_size=3, max_size=3), st.integers(1, 12)), max_size=60))
def test_where_ratios_and_sizes_change_batches_are_still_full_and_the_error_stays_small(steps):
    behind = dict.fromkeys("abc", Fraction(0))
    for weights, size in steps:
        shares = normalize_ratios(dict(zip("abc", weights, strict=True)))
        counts = allocate(shares, size, behind)
        assert sum(counts.values()) == size
        for name, share in shares.items():
            assert floor(share * size) <= counts[name] <= ceil(share * size)
            behind[name] += share * size - counts[name]
            assert abs(behind[name]) < 2


@given(mixtures(), st.integers(0, 12))
@settings(max_examples=20)
def test_a_run_resumed_at_any_batch_goes_on_as_if_it_had_never_stopped(made, stop):
    rows, ratios, size, seed = made
    whole = mixture(rows, ratios, seed)
    wanted = [whole.take(step, size) for step in range(16)]
    without_state = mixture(rows, ratios, seed)
    assert [without_state.take(step, size) for step in range(stop, 16)] == wanted[stop:]
    stopped = mixture(rows, ratios, seed)
    for step in range(stop):
        stopped.take(step, size)
    state = json.loads(json.dumps(stopped.state(stop)))
    resumed = mixture(rows, ratios, seed)
    resumed.load_state(state)
    assert [resumed.take(step, size) for step in range(stop, 16)] == wanted[stop:]


@given(mixtures())
@settings(max_examples=30)
def test_every_row_of_a_source_comes_before_any_comes_twice_and_every_pass_has_its_own_order(made):
    rows, ratios, size, seed = made
    mixed = mixture(rows, ratios, seed)
    for one in mixed.pools.values():
        passes = [[row(task) for task in one.take(number * one.size, one.size)] for number in range(4)]
        assert all(len(set(each)) == one.size for each in passes)
        assert one.size == 1 or all(earlier != later for earlier, later in pairwise(passes))
    seen = {name: Counter() for name in mixed.pools}
    for step in range(30):
        for task in mixed.take(step, size):
            seen[task.source][row(task)] += 1
        for name, one in mixed.pools.items():
            counts = [seen[name][f"{name}/{n}"] for n in range(one.size)]
            assert max(counts) - min(counts) <= 1


def test_what_is_reported_is_what_was_drawn():
    mixed = mixture([10, 100], [0.75, 0.25])
    for step in range(5):
        mixed.take(step, 4)
    report = mixed.metrics(4)
    assert report["data/a/share"] == report["data/a/share_so_far"] == 0.75
    assert (report["data/a/repeats"], report["data/a/coverage"], report["data/a/unseen"]) == (5.0, 1.0, 0.0)
    assert (report["data/b/repeats"], report["data/b/coverage"], report["data/b/unseen"]) == (0.0, 0.05, 95.0)


def test_ratios_change_on_a_schedule_and_a_resumed_run_knows():
    stages = [(3, {"a": 0.0, "b": 1.0}), (6, {"a": 3.0})]
    mixed = mixture([50, 50], [1, 1], schedule=stages)
    counts = [Counter(task.source for task in mixed.take(step, 8)) for step in range(9)]
    assert counts[:3] == [{"a": 4, "b": 4}] * 3
    assert counts[3:6] == [{"b": 8}] * 3
    assert counts[6:] == [{"a": 6, "b": 2}] * 3
    fresh = mixture([50, 50], [1, 1], schedule=stages)
    assert fresh.take(7, 8) == mixed.take(7, 8)


def test_a_source_that_is_used_up_leaves_its_place_to_the_others_or_ends_the_run():
    mixed = mixture([5, 100, 100], [1, 1, 2], passes={"a": 1}, refuse=False)
    batches = [mixed.take(step, 8) for step in range(10)]
    assert all(len(batch) == 8 for batch in batches)
    drawn = Counter(task.source for batch in batches for task in batch)
    assert drawn["a"] == 5
    after = Counter(task.source for batch in batches[4:] for task in batch)
    assert abs(after["c"] - 32) < 1
    with pytest.raises(ConfigError, match=r"data.sources.a: its rows are exhausted at step 2 \(1 passes over 5\)"):
        mixture([5, 100, 100], [1, 1, 2], passes={"a": 1}).check(10, 8)
    mixture([5, 100, 100], [1, 1, 2], passes={"a": 4}).check(10, 8)
    with pytest.raises(ConfigError, match="exhausted at step 2"):
        mixture([5, 5], [1, 1], passes={"a": 1, "b": 1}, refuse=False).check(10, 5)


def group(mixed, source, success):
    task = mixed.pools[source].take(0, 1)[0]
    return Group(task, [Episode("e", task, metrics={"success": success})])


def test_a_source_that_is_too_easy_or_too_hard_gets_fewer_rows():
    mixed = mixture([50, 50, 50], [1, 1, 1], band=SuccessBand(0.1, 0.9, outside=0.25, decay=0.0))
    for step in range(2):
        mixed.take(step, 6)
        mixed.observe(step, [group(mixed, "a", 1.0), group(mixed, "b", 0.5), group(mixed, "c", 0.0)])
    assert Counter(task.source for task in mixed.take(2, 6)) == {"a": 1, "b": 4, "c": 1}
    again = mixture([50, 50, 50], [1, 1, 1], band=SuccessBand(0.1, 0.9, outside=0.25, decay=0.0))
    again.load_state(mixed.state(2))
    assert again.take(2, 6) == mixed.take(2, 6)
    mixed.observe(2, [group(mixed, "a", 0.5), group(mixed, "c", 0.5)])
    assert Counter(task.source for task in mixed.take(3, 6)) == {"a": 2, "b": 2, "c": 2}


def test_what_no_one_judged_is_no_success_of_its_source():
    mixed = mixture([50, 50], [1, 1], band=SuccessBand(0.1, 0.9, outside=0.25, decay=0.0))
    mixed.take(0, 4)
    silent = group(mixed, "a", 1.0)
    silent.episodes[0].metrics.clear()
    report = mixed.observe(0, [silent, group(mixed, "b", 0.5)])
    assert "data/a/success" not in report
    assert report["data/b/success"] == 0.5
    assert Counter(task.source for task in mixed.take(1, 4)) == {"a": 2, "b": 2}


def test_held_out_tasks_come_from_all_sources_alike():
    names = "ab"
    pools = []
    for name, size in zip(names, (400, 30), strict=True):
        table = ListTable([(f"row {n}", {"question": f"{name}{n}"}) for n in range(size)], name)
        reader = RowReader(name)
        pools.append(RowPool(table, reader, split_table(table, reader, 0.3, "auto", PromptFilters()), 0))
    pools.append(EnvPool("lake", "frozen_lake", 0))
    mixed = Mixture(pools, dict.fromkeys(("a", "b", "lake"), 1), 0)
    held_out = mixed.evaluation(12)
    assert Counter(task.source for task in held_out) == {"a": 4, "b": 4, "lake": 4}
    assert len(mixed.evaluation(90)) == 90
    trained = {row(task) for step in range(60) for task in mixed.take(step, 30)}
    assert trained.isdisjoint({task.id for task in mixed.evaluation(1000)})


def test_a_source_without_a_share_is_not_measured_either():
    pools = [EnvPool(name, "frozen_lake", 0) for name in "abc"]
    mixed = Mixture(pools, {"a": 1, "b": 0, "c": 0}, 0, schedule=[(5, {"c": 1.0})])
    assert {task.source for task in mixed.evaluation(9)} == {"a", "c"}
    assert {task.source for task in mixed.take(0, 9)} == {"a"}


def test_a_checkpoint_with_a_source_that_is_gone_is_refused():
    state = mixture([5, 5], [1, 1]).state(0) | {"drawn": {"z": 3}}
    with pytest.raises(ConfigError, match=r"a source 'z', which the configuration lacks"):
        mixture([5, 5], [1, 1]).load_state(state)
