"""Each source with its own agent, environment, tools, rewards, sampling, limits and weight, in one run."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter

import numpy as np
import pytest

from arborl import checkpoint
from arborl.algorithms import make_algorithm
from arborl.algorithms.combined_algorithms import SourceWeightedAlgorithm
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.config_base import dump_yaml
from arborl.config.load_config import from_kwargs, load
from arborl.data import Mixture
from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.token_trees import build_token_trees
from arborl.track.jsonl import read_metrics
from arborl.training_run import train
from arborl.training_run.build import build
from arborl.types import Message, Task

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'


class Echo:
    """An agent of a user: answers what it was given, in its own words."""

    def __init__(self, word: str = "echo"):
        self.word = word

    async def run(self, task, env, model):
        await env.reset(task, task.seed)
        output = await model.chat([Message("user", self.word)])
        await env.step(output)


@pytest.fixture
def files(tmp_path):
    """A file for each of two sources."""
    for name, answer in (("sums", "42"), ("words", "Yes.")):
        rows = [{"question": f"{name} {n}?", "answer": answer, "hint": f"h{n}"} for n in range(40)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    return tmp_path


def settings(files, **more):
    return {
        "data": {
            "sources": {
                "sums": {
                    "path": str(files / "sums.json"), "ratio": 0.5,
                    "agent": {"name": "tool", "args": {"max_tool_rounds": 1}},
                    "tools": ["calculator"], "rewards": ["equal"], "rollout": {"max_turns": 3},
                    "sampling": {"max_tokens": 40},
                },
                "words": {
                    "path": str(files / "words.json"), "ratio": 0.25, "rewards": [{"name": "exact", "weight": 2}],
                },
                "lake": {"env": {"name": "frozen_lake", "args": {"size": 3}}, "ratio": 0.25, "rewards": ["env"]},
            }
        },
        "rewards": ["exact"],
        "engine": {"name": "scripted", "args": {"replies": [CALL, "Yes.", "Left"]}},
        "rollout": {"tasks_per_step": 8, "group_size": 2},
        "evaluation": {"tasks": 9},
        "track": {"tensorboard": False},
        "trainer": {"steps": 2},
    } | more  # fmt: skip


def test_one_step_plays_three_agents_with_rewards_of_their_own(files):
    config = from_kwargs(**settings(files))
    assert config.env.name == "question"
    parts = build(config)
    tasks = parts.source.take(0, 8)
    assert Counter(task.source for task in tasks) == {"sums": 4, "words": 2, "lake": 2}
    groups = asyncio.run(parts.rollout.collect(tasks, 1, 4))
    asyncio.run(parts.rewards.score(groups))
    named = {
        source: [e for g in groups if g.task.source == source for e in g.valid_episodes]
        for source in config.data.sources
    }
    assert all(len(episodes) >= 8 for episodes in named.values())
    assert {name for episode in named["sums"] for name in episode.rewards} == {"equal"}
    assert {name for episode in named["words"] for name in episode.rewards} == {"exact"}
    assert {episode.rewards["exact"] for episode in named["words"]} == {0.0, 2.0}  # its weight
    assert {name for episode in named["lake"] for name in episode.rewards} == {"environment"}
    assert any(episode.metrics.get("tool/calls") for episode in named["sums"])
    assert not any("tool/calls" in episode.metrics for episode in named["words"] + named["lake"])
    assert all("P" in episode.opening[-1].content for episode in named["lake"])  # a board, and one of three rows
    assert {episode.opening[-1].content.count("\n") for episode in named["lake"]} != {0}


def test_sampling_and_limits_of_a_source_hold_for_it_alone(files):
    given = settings(files)
    given["data"]["sources"]["words"] |= {"sampling": {"max_tokens": 1}, "rollout": {"episode_seconds": 7.0}}
    given["data"]["sources"]["lake"]["rollout"] = {"max_turns": 2}
    parts = build(from_kwargs(**given))
    limits = {
        name: parts.episode_factories.limits(Task("t", source=name), parts.rollout.limits)
        for name in ("sums", "words", "lake")
    }
    assert [limits[name].max_turns for name in limits] == [3, 32, 2]
    assert [limits[name].episode_seconds for name in limits] == [120.0, 7.0, 120.0]
    groups = asyncio.run(parts.rollout.collect(parts.source.take(0, 8), 1, 2))
    for group in groups:
        for episode in group.valid_episodes:
            longest = max(len(call.completion.tokens) for call in episode.calls)
            assert longest <= {"sums": 40, "words": 1, "lake": 64}[group.task.source]
            assert len(episode.turns) <= {"lake": 2}.get(group.task.source, 3)


def test_a_whole_run_reports_where_its_tasks_came_from_and_how_each_source_does(files):
    run = train(from_kwargs(**settings(files), output_dir=str(files / "run")))
    start, *rows = read_metrics(files / "run" / "metrics.jsonl")
    assert {"evaluation/success/sums", "evaluation/tasks/lake"} <= start.keys()
    for row in rows:
        assert (row["data/sums/share"], row["data/words/share"], row["data/lake/share"]) == (0.5, 0.25, 0.25)
        assert row["data/sums/repeats"] == 0
        assert {"data/sums/success", "data/words/reward", "data/sums/coverage", "data/words/unseen"} <= row.keys()
    assert rows[1]["data/sums/unseen"] == rows[0]["data/sums/unseen"] - 4
    assert {"success/sums", "success/words", "success/lake", "success"} <= run.summary["after"].keys()
    written = next((files / "run" / "episodes").glob("step-*.jsonl"))
    assert {episode.task.source for episode in EpisodeStore(files).read(written)} == {"sums", "words", "lake"}
    requests = from_kwargs(**settings(files), output_dir=str(files / "run"))
    model = requests.model.model_copy(update={"dtype": "float32"})  # what `auto` is on a CPU
    assert load(files / "run" / "config.yaml") == requests.model_copy(update={"model": model})


def test_a_mixed_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(files):
    small = settings(files, deterministic=True, threads=1, model={"name": "seedling", "device": "cpu"})
    small |= {"rollout": {"tasks_per_step": 4, "group_size": 2, "max_turns": 2}, "evaluation": {"tasks": 0}}
    small |= {"trainer": {"steps": 3, "save_every": 1}, "algorithm": {"skip_zero_variance": False}}
    whole = from_kwargs(**small, output_dir=str(files / "whole"))
    train(whole)
    shutil.copytree(files / "whole", files / "cut")
    train(whole.model_copy(update={"output_dir": files / "cut"}), resume="2")
    output = [
        [(e.id, e.seed, e.answer) for e in EpisodeStore(files).read(path / "episodes" / "step-000003.jsonl")]
        for path in (files / "whole", files / "cut")
    ]
    assert output[0] == output[1]
    states = [checkpoint.load_state(files / name / "checkpoints" / "step-000003") for name in ("whole", "cut")]
    assert states[0]["data"] == states[1]["data"]
    assert states[0]["data"]["drawn"] == {"sums": 6, "words": 3, "lake": 3}


def test_rows_may_name_their_agents_and_the_configuration_says_what_the_names_stand_for(tmp_path):
    rows = [{"question": f"q{n}", "answer": "1", "agent_name": "my_agent"} for n in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    given = {"data": {"path": str(tmp_path / "rows.json")}, "rewards": ["exact"], "engine": {"name": "scripted"}}
    with pytest.raises(ConfigError, match=r"rows of rows, agent_name: .*'my_agent'.*Or write data\.agents\."):
        build(from_kwargs(**given))
    given["data"]["agents"] = {"my_agent": {"name": "code", "args": {"max_tool_rounds": 2}}}
    parts = build(from_kwargs(**given))
    agent = parts.episode_factories.agent(parts.source.take(0, 1)[0])
    assert (type(agent).__name__, agent.max_tool_rounds) == ("CodeAgent", 2)
    given["data"] = {"sources": {"a": {"path": str(tmp_path / "rows.json"), "agent": "chat"}}}
    parts = build(from_kwargs(**given))
    assert type(parts.episode_factories.agent(parts.source.take(0, 1)[0])).__name__ == "ChatAgent"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("tool_agent", "ToolAgent"), ("single_turn_agent", "ChatAgent"), ("code_agent", "CodeAgent"),
     ("code_execution_agent", "CodeAgent"), ("statelm_tool_agent", "StateLM")],
)  # fmt: skip
def test_names_that_other_systems_give_agents_are_understood(theirs, ours, tmp_path):
    rows = [{"question": f"q{n}", "answer": "1", "agent_name": theirs} for n in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    given = {"data": {"path": str(tmp_path / "rows.json")}, "rewards": ["exact"], "engine": {"name": "scripted"}}
    parts = build(from_kwargs(**given, agent={"name": "tool", "args": {"max_tool_rounds": 3}}, tools=["calculator"]))
    agent = parts.episode_factories.agent(parts.source.take(0, 1)[0])
    assert type(agent).__name__ == ours
    assert theirs != "tool_agent" or agent.max_tool_rounds == 3  # the run's own, with its arguments
    given["data"]["agents"] = {theirs: "react"}
    parts = build(from_kwargs(**given, tools=["calculator"], agent="tool"))
    assert type(parts.episode_factories.agent(parts.source.take(0, 1)[0])).__name__ == "ReactAgent"


def test_several_files_are_read_as_one(tmp_path):
    for name in ("a", "b"):
        rows = [{"question": f"{name}{n}", "answer": "1"} for n in range(5)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    given = {"data": {"path": files, "evaluation_path": [files[0]]}, "rewards": ["exact"]}
    config = from_kwargs(**given, engine={"name": "scripted"})
    source = build(config).source
    assert sorted(task.messages[0].content for task in source.take(0, 10)) == [
        f"{x}{n}" for x in "ab" for n in range(5)
    ]
    assert len(source.evaluation(50)) == 5
    assert source.take(0, 1)[0].source == "a-b"
    with pytest.raises(ConfigError, match=r"data.path: an empty list"):
        from_kwargs(data={"path": []}, rewards=["exact"])


def test_an_agent_may_be_written_as_hydra_does(files):
    given = settings(files)
    given["data"]["sources"]["words"]["agent"] = {"_target_": f"{__name__}.Echo", "word": "hello"}
    config = from_kwargs(**given)
    assert config.data.sources["words"].agent.name == f"{__name__}:Echo"
    agent = build(config).episode_factories.agent(Task("t", source="words"))
    assert (type(agent), agent.word) == (Echo, "hello")
    (files / "run.yaml").write_text(dump_yaml(config))
    assert load(files / "run.yaml") == config


def test_a_source_can_weigh_more_than_its_episodes(files):
    given = settings(files)
    given["data"]["sources"]["sums"]["weight"] = 3.0
    parts = build(from_kwargs(**given, **{"algorithm.skip_zero_variance": False}))
    assert isinstance(parts.algorithm, SourceWeightedAlgorithm)
    groups = asyncio.run(parts.rollout.collect(parts.source.take(0, 8), 1, 2))
    asyncio.run(parts.rewards.score(groups))
    plain = make_algorithm(AlgorithmConfig(skip_zero_variance=False))
    forest = build_token_trees(plain.keep(groups))
    before, after = plain.credit(groups, forest.terms).weight, parts.algorithm.credit(groups, forest.terms).weight
    heavy = np.array([groups[tree].task.source == "sums" for tree in forest.terms.tree])
    assert np.allclose(after[heavy] / before[heavy], 3 / 2)  # half of the episodes weigh 3, the others 1
    assert np.allclose(after[~heavy] / before[~heavy], 1 / 2)
    assert np.isclose(after.sum(), before.sum())
    assert make_algorithm(AlgorithmConfig()).needs == parts.algorithm.needs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sums": {"path": "x.json", "tols": ["a"]}}, "data.sources.sums.tols: unknown key"),
        ({"sums": {"ratio": 0.5}}, "has neither rows nor an environment"),
        ({"sums": {"path": "x.json"}, "words": {"path": "y.json", "ratio": 1}}, "sums.ratio: is missing"),
        ({"sums": {"path": "x.json", "agent": "chat", "tools": ["calculator"]}}, "agent=chat calls none"),
        ({"sums": {"path": "x.json", "rewards": ["env"]}}, "gives no reward of its own"),
        ({"sums": {"path": "x.json", "hub": "y"}}, "path and hub are given"),
        (
            {"sums": {"path": "x.json", "agent": {"name": "tool", "tool_format": "react"}}},
            "a model has one format of tool calls",
        ),
        ({"sums": {"path": "x.json", "sampling": {"temprature": 0.5}}}, "unknown key"),
        (
            {"sums": {"path": "x.json", "sampling": {"max_context": 4096}}},
            "data.sources.sums.sampling.max_context=4096",
        ),
        ({"a/b": {"path": "x.json"}}, "is no name for a source"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(change, says):
    with pytest.raises(ConfigError) as caught:
        from_kwargs(data={"sources": change}, rewards=["exact"])
    assert says in str(caught.value)


def test_tool_arguments_must_be_for_tools_that_are_there(files):
    given = settings(files)
    given["data"]["sources"]["sums"]["agent"]["tool_args"] = {"search": {"corpus": "x"}}
    with pytest.raises(ConfigError, match=r"data\.sources\.sums\.agent\.tool_args\.search: no such tool here"):
        build(from_kwargs(**given))


def test_an_algorithm_for_an_unknown_source_is_refused(files):
    with pytest.raises(ConfigError, match=r"algorithm\.by_source\.sum: no such source\. Did you mean 'sums'\?"):
        from_kwargs(**settings(files), algorithm={"by_source": {"sum": "rloo"}})
    assert isinstance(build(from_kwargs(**settings(files), algorithm={"by_source": {"sums": "rloo"}})).source, Mixture)


def test_a_seed_among_the_arguments_of_a_function_of_rows_counts_and_not_the_runs():
    from functools import partial

    from arborl.data.mixing.task_pools import call_rows

    def rows(seed: int, count: int = 1):
        return [{"question": str(seed)}] * count

    assert list(call_rows(rows, 7)) == [{"question": "7"}]
    assert list(call_rows(partial(rows, count=2), 7)) == [{"question": "7"}] * 2
    assert list(call_rows(partial(rows, seed=3), 7)) == [{"question": "3"}]
