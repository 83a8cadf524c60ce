"""Several environments: their groups and limits, held-out tasks by source, and configurations that do not fit."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import arborl
from arborl.config import RunConfig
from arborl.config.config_base import dump_yaml, validate
from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.training_run.build import build

LAKES = {
    "Small": {
        "env": {"name": "frozen_lake", "args": {"size": 3}}, "ratio": 3, "rollout": {"max_turns": 2},
        "sampling": {"max_tokens": 3},
    },
    "Large": {"env": {"name": "frozen_lake", "args": {"size": 6, "frozen": 0.9}}, "ratio": 2},
    "countdown": {"env": "countdown", "ratio": 1},
}  # fmt: skip
HELD_OUT = {
    "Small": LAKES["Small"] | {"evaluation_tasks": 2},
    "Large": LAKES["Large"] | {"evaluation_tasks": 0},
    "countdown": LAKES["countdown"] | {"evaluation_tasks": 0},
    "Slippery": {
        "env": {"name": "frozen_lake", "args": {"slippery": True}}, "ratio": 0, "evaluation_tasks": 4,
    },
}  # fmt: skip


def config(sources=LAKES, rollout=None, **more) -> RunConfig:
    tree = {
        "data": {"sources": sources},
        "rollout": {"tasks_per_step": 6, "group_size": 2} | (rollout or {}),
        "engine": {"name": "scripted", "args": {"replies": ["<answer>Up</answer>"]}},
        "model": {"device": "cpu"},
        "evaluation": {"greedy": False, "group_size": 3},
    }
    return validate(RunConfig, tree | more)


@pytest.mark.parametrize(
    ("sources", "rollout", "complaint"),
    [
        ({"Lake": {"env": "frozen_lak"}}, {}, "no environment is called 'frozen_lak'"),
        (
            {"Lake": {"env": "frozen_lake", "offline": True}},
            {},
            "data: sources.Lake.offline: is not of a single source",
        ),
        ({"Lake": {"env": "frozen_lake", "limits": 1}}, {}, "data.sources.Lake.limits: unknown key"),
        (
            {"Lake": {"env": "frozen_lake", "rollout": {"max_turn": 1}}},
            {},
            "data.sources.Lake.rollout.max_turn: unknown",
        ),
        ({"Lake": LAKES["Small"], "Other": {"env": "sokoban", "ratio": 1, "evaluation_tasks": 1}}, {}, "is missing"),
        (LAKES, {"envs_per_process": 4}, "Write workers=process"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(sources, rollout, complaint):
    with pytest.raises(ConfigError) as refused:
        build(config(sources, rollout))
    assert complaint in str(refused.value)


def test_settings_of_one_source_are_refused_beside_the_sources():
    for key, value in {"ratio": 1.0, "env": "sokoban", "sampling": {"top_k": 1}}.items():
        with pytest.raises(ConfigError, match=rf"data\.{key}: is of one source"):
            validate(RunConfig, {"data": {key: value}})


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    given = config(HELD_OUT)
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(given))
    assert load(file, []) == given


def test_every_batch_has_the_partitions_groups_each_with_its_own_environment_and_limits():
    parts = build(config())
    for step in range(4):
        tasks = parts.source.take(step, 6)
        assert Counter(task.source for task in tasks) == {"Small": 3, "Large": 2, "countdown": 1}
        groups = asyncio.run(parts.rollout.train(tasks, seed=step, group_size=2, count=6))
        for group in groups:
            rows = len(group.episodes[0].opening[-1].content.splitlines())
            sampled = [len(call.completion.tokens) for episode in group.episodes for call in episode.calls]
            assert all(episode.failure is None for episode in group.episodes)
            if group.task.source == "Small":
                assert rows == 3
                assert max(len(episode.turns) for episode in group.episodes) <= 2
                assert max(sampled) == 3
            elif group.task.source == "Large":
                assert rows == 6
                assert max(sampled) == 4
            else:
                assert "Make" in group.episodes[0].opening[-1].content


def test_spares_keep_the_ratios():
    parts = build(config(rollout={"spare_groups": 6, "group_filter": "varied"}))
    seen = []
    parts.rollout.training = type(parts.rollout.training)(keep=lambda group: seen.append(group) or len(seen) > 2)
    groups = asyncio.run(parts.rollout.train(parts.source.take(0, 12), seed=0, group_size=1, count=6))
    assert Counter(group.task.source for group in groups) == {"Small": 3, "Large": 2, "countdown": 1}
    assert len(seen) == 8


def test_held_out_tasks_are_counted_by_source_also_of_sources_that_are_never_trained_on():
    given = config(HELD_OUT)
    assert given.evaluation.tasks == 6
    parts = build(given)
    assert {task.source for step in range(3) for task in parts.source.take(step, 6)} == {"Small", "Large", "countdown"}
    measured = asyncio.run(parts.evaluator.measure())
    assert [group.task.source for group in measured.groups] == ["Small"] * 2 + ["Slippery"] * 4
    assert all(len(group.episodes) == 3 for group in measured.groups)
    assert {"success", "success/Slippery", "success/Small"} <= set(measured.metrics)
    with pytest.raises(ConfigError, match=r"add up to 6, but evaluation\.tasks=9"):
        config(HELD_OUT, evaluation={"tasks": 9})


def test_a_run_with_several_environments_trains_from_end_to_end(tmp_path):
    run = arborl.run(
        stub=True,
        output_dir=tmp_path / "run",
        data={
            "sources": {"frozen_lake": {"env": "frozen_lake", "ratio": 3}, "sokoban": {"env": "sokoban", "ratio": 1}}
        },
        **{
            "rollout.tasks_per_step": 4,
            "rollout.group_size": 2,
            "rollout.redundancy": 1,
            "evaluation.tasks": 4,
            "track.tensorboard": False,
        },
    )
    assert {"success/frozen_lake", "success/sokoban"} <= set(run.summary["after"])


def test_redundancy_is_refused_where_a_run_must_not_depend_on_the_clock():
    for key, value in (("redundancy", 2), ("group_seconds", 5.0)):
        with pytest.raises(ConfigError, match="depends on time"):
            validate(RunConfig, {"deterministic": True, "rollout": {key: value}})
