"""The environment manager: tags, their groups and limits, validation by tag, and configurations that do not add up."""

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
    "custom_envs": {
        "Small": {"env_type": "frozen_lake", "env_config": {"size": 3}, "max_steps": 2, "max_tokens_per_step": 3},
        "Large": {"env_type": "frozen_lake", "env_config": {"size": 6, "frozen": 0.9}},
        "Slippery": {"env_type": "frozen_lake", "env_config": {"slippery": True}},
    },
    "tags": ["Small", "Large", "countdown"],
    "num_groups_partition": [3, 2, 1],
    "num_env_groups": 6,
    "group_size": 2,
}


def config(envs=None, val=None, **more) -> RunConfig:
    tree = {
        "rollout": {"envs": envs or LAKES, "val_envs": val or {}},
        "engine": {"name": "scripted", "replies": ["<answer>Up</answer>"]},
        "model": {"device": "cpu"},
        "evaluation": {"greedy": False},
    }
    return validate(RunConfig, tree | more)


def test_ten_groups_of_eight_with_tags_that_sum_to_nine_are_refused_with_the_arithmetic():
    envs = {"num_env_groups": 10, "group_size": 8, "tags": ["frozen_lake", "sokoban"], "num_groups_partition": [5, 4]}
    with pytest.raises(ConfigError) as refused:
        config(envs)
    for part in ("5 + 4 = 9 groups", "10 groups x 8 episodes = 80", "num_env_groups=9", "sum of 10"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_groups_partition": [3, 3]}, "2 numbers for 3 tags"),
        ({"num_groups_partition": [5, 1, 0]}, "a tag has at least 1 group"),
        ({"tags": ["Small", "Small", "Large"]}, "names one twice"),
        ({"tags": ["Small", "Large", "countdwn"], "custom_envs": {}}, "no environment is called 'Small'"),
        ({"num_groups_partition": [], "num_env_groups": 7}, "7 / 3 = 2.333"),
        ({"max_env_num_per_worker": 4}, "write workers=process"),
        ({"tags": [], "num_groups_partition": []}, "Write envs.tags=[Small, Large, Slippery]"),
        ({"num_env_group": 6}, "Did you mean 'rollout.envs.num_env_groups'"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(change, complaint):
    with pytest.raises(ConfigError) as refused:
        build(config(LAKES | change))
    assert complaint.lower() in str(refused.value).lower()


def test_the_same_number_under_two_names_must_be_the_same():
    with pytest.raises(ConfigError, match="are the same setting"):
        validate(RunConfig, {"rollout": {"tasks_per_step": 4, "envs": {"num_env_groups": 6}}})
    same = validate(RunConfig, {"rollout": {"tasks_per_step": 6, "envs": {"num_env_groups": 6}}})
    assert same.rollout.tasks_per_step == 6


def test_without_tags_the_keys_mean_what_tasks_per_step_and_group_size_mean():
    ours = validate(RunConfig, {"rollout": {"tasks_per_step": 5, "group_size": 3}})
    theirs = validate(RunConfig, {"rollout": {"envs": {"num_env_groups": 5, "group_size": 3}}})
    assert (theirs.rollout.tasks_per_step, theirs.rollout.group_size) == (5, 3)
    assert theirs.data == ours.data


def test_a_resolved_configuration_reads_back_as_itself(tmp_path):
    given = config(val={"tags": ["Small", "Slippery"], "num_groups_partition": [3, 2]})
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(given))
    assert load(file, []) == given


def test_every_batch_has_the_partitions_groups_each_with_its_own_environment_and_limits():
    parts = build(config())
    for step in range(2):
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


def test_spares_keep_a_partition_what_it_is():
    tree = {"envs": LAKES, "spare_groups": 6, "group_filter": "varied"}
    parts = build(validate(RunConfig, {"rollout": tree, "engine": {"name": "scripted"}, "model": {"device": "cpu"}}))
    seen = []
    parts.rollout.training = type(parts.rollout.training)(keep=lambda group: seen.append(group) or len(seen) > 2)
    groups = asyncio.run(parts.rollout.train(parts.source.take(0, 12), seed=0, group_size=1, count=6))
    assert Counter(group.task.source for group in groups) == {"Small": 3, "Large": 2, "countdown": 1}
    assert len(seen) == 8


def test_validation_is_by_tag_and_may_have_tags_that_are_never_trained_on():
    given = config(val={"tags": ["Slippery", "Small"], "num_groups_partition": [4, 2], "group_size": 3})
    assert given.evaluation.tasks == 6
    parts = build(given)
    assert {task.source for step in range(3) for task in parts.source.take(step, 6)} == {"Small", "Large", "countdown"}
    measured = asyncio.run(parts.evaluator.measure())
    assert [group.task.source for group in measured.groups] == ["Slippery"] * 4 + ["Small"] * 2
    assert all(len(group.episodes) == 3 for group in measured.groups)
    assert {"success", "success/Slippery", "success/Small"} <= set(measured.metrics)
    with pytest.raises(ConfigError, match=r"adds up to 6 tasks, but evaluation\.tasks=9"):
        config(val={"tags": ["Slippery", "Small"], "num_groups_partition": [4, 2]}, evaluation={"tasks": 9})


def test_a_run_with_tags_trains_from_end_to_end(tmp_path):
    run = arborl.run(
        stub=True,
        output_dir=tmp_path / "run",
        **{
            "rollout.envs.tags": ["frozen_lake", "sokoban"],
            "rollout.envs.num_groups_partition": [3, 1],
            "rollout.envs.num_env_groups": 4,
            "rollout.envs.group_size": 2,
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
