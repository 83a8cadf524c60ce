"""Injected faults cost their episodes only, are attributed and counted, and are the same for the same seed."""

import json

import pytest
from small_runs import invoke

import arborl
from arborl.config.load_config import from_kwargs
from arborl.envs.env import Env, Observation, Step
from arborl.errors import ConfigError, DiskWriteError
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.types import Message

SMALL = {
    "engine": "scripted", "engine.args.replies": ["Yes.", "No."], "rollout.tasks_per_step": 3, "rollout.group_size": 4,
    "rollout.step_seconds": 0.5, "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0, "steps": 2,
    "track.timeline": 0,
}  # fmt: skip


class Parrot(Env):
    """Three turns; pays for yes."""

    blocking = False

    async def reset(self, task, seed):
        self.turns = 0
        return Observation((Message("user", f"Say yes. {task.seed}"),))

    async def step(self, action):
        self.turns += 1
        paid = float("yes" in action.content.lower())
        return Step(Observation((Message("user", "Again."),)), paid, terminated=self.turns == 3)


def run(folder, *rules, **more):
    return arborl.run(**{**SMALL, "env": Parrot, **more}, faults={"rules": list(rules)}, output_dir=folder)


def read(folder):
    episodes = [e for path in EpisodeStore(folder / "episodes").paths() for e in EpisodeStore.read(path)]
    return episodes, list(read_metrics(folder / "metrics.jsonl"))


CAUSES = {
    "environment": {"raise": "InjectedFault: injected by faults", "hang": "longer than 0.5 s", "lie": "ValueError"},
    "reward": {"raise": "InjectedFault", "hang": "longer than 0.5 s", "nan": "ValueError: environment is nan"},
    "engine": {"raise": "EngineError: the request failed", "die": "EngineError: the request was lost"},
}
"""What the failure of an episode says."""


@pytest.mark.parametrize("part", CAUSES)
def test_a_fault_costs_its_episode_and_is_attributed_and_counted(tmp_path, part):
    rules = [{"part": part, "kind": kind, "rate": 0.1} for kind in CAUSES[part]]
    done = run(tmp_path / "run", *rules, **{"rollout.group_size": 8})
    episodes, rows = read(done.folder)
    failed = [episode for episode in episodes if episode.failure is not None]
    assert 0 < len(failed) < len(episodes) == 48
    assert len(rows) == 2
    assert all(episode.failure.where.startswith(part) for episode in failed)
    for kind, cause in CAUSES[part].items():
        count = sum(cause in str(episode.failure) for episode in failed)
        assert 0 < count == sum(row[f"faults/{part}/{kind}"] for row in rows)
        assert done.summary["faults"][f"faults/{part}/{kind}"] == count
    assert sum(row["episode/failed"] for row in rows) == len(failed) == sum(done.summary["faults"].values())
    assert "rules:" in (done.folder / "config.yaml").read_text()


def test_late_answers_cost_no_episode(tmp_path):
    rules = [
        {"part": part, "kind": "late", "rate": 0.3, "seconds": 0.01} for part in ("environment", "reward", "engine")
    ]
    done = run(tmp_path / "run", *rules)
    episodes, _ = read(done.folder)
    assert all(episode.failure is None for episode in episodes)
    assert all(count > 0 for count in done.summary["faults"].values())
    assert len(done.summary["faults"]) == 3


def test_the_same_seed_has_the_same_faults_and_another_seed_has_others(tmp_path):
    rule = {"part": "environment", "kind": "raise", "rate": 0.2}

    def failed(name, **more):
        config = {**SMALL, "env": Parrot, "output_dir": tmp_path / name, "faults": {"rules": [rule], **more}}
        episodes, _ = read(arborl.run(**config).folder)
        return [episode.id for episode in episodes if episode.failure is not None]

    first = failed("a")
    assert first
    assert failed("b") == first
    assert failed("c", seed=5) != first


def test_a_fault_can_wait_for_a_step_and_happen_once(tmp_path):
    rules = [
        {"part": "environment", "kind": "raise", "at": {"step": 2}, "rate": 0.3},
        {"part": "reward", "kind": "raise", "at": {"step": [2, 3]}, "once": True},
    ]
    done = run(tmp_path / "run", *rules, **{"steps": 3})
    _, rows = read(done.folder)
    assert rows[0]["faults/environment/raise"] == rows[2]["faults/environment/raise"] == 0
    assert rows[1]["faults/environment/raise"] > 0
    assert [row["faults/reward/raise"] for row in rows] == [0, 1, 0]


def test_a_hanging_environment_blocks_its_thread_and_no_other_episode(tmp_path):
    rule = {"part": "environment", "kind": "hang", "rate": 0.1}
    done = run(tmp_path / "run", rule, **{"rollout.workers": "thread"})
    episodes, rows = read(done.folder)
    failed = sum(episode.failure is not None for episode in episodes)
    assert 0 < failed == done.summary["faults"]["faults/environment/hang"] < len(episodes)
    assert sum(row["rollout/threads_abandoned"] for row in rows) == failed


@pytest.mark.parametrize(("kind", "text"), [("raise", "InjectedFault"), ("hang", "TimeoutError"), ("late", None)])
def test_a_tool_that_fails_is_a_result_for_the_model(tmp_path, kind, text):
    @arborl.tool(timeout=0.2)
    def adder(expression: str) -> int:
        """Add.

        Args:
            expression: numbers.
        """
        return 4

    rows = [{"question": f"What is 2 + {number}?", "answer": "4"} for number in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    call = '<tool_call>{"name": "adder", "arguments": {"expression": "2 + 2"}}</tool_call>'
    more = {
        "data": str(tmp_path / "rows.json"), "agent": "tool", "tools": [adder], "rewards": ["exact"],
        "engine.args.replies": [call, "4"], "rollout.max_turns": 3,
    }  # fmt: skip
    settings = {key: value for key, value in (SMALL | more).items() if key != "env"}
    faults = {"rules": [{"part": "tool", "kind": kind, "rate": 0.5, "name": "adder"}]}
    done = arborl.run(**settings, faults=faults, output_dir=tmp_path / "run")
    episodes, _ = read(done.folder)
    assert all(episode.failure is None for episode in episodes)
    failed = sum((text or "no text") in str(call.messages[-1].content) for one in episodes for call in one.calls)
    assert (failed > 0) == (text is not None)
    assert failed <= done.summary["faults"][f"faults/tool/{kind}"] > 0
    with pytest.raises(ConfigError, match=r"faults.rules.0.name: no tool 'addr'. Did you mean 'adder'\?"):
        arborl.run(**settings, faults={"rules": [faults["rules"][0] | {"name": "addr"}]}, output_dir=tmp_path / "other")


def test_a_killed_process_is_replaced_and_the_run_goes_on(tmp_path):
    rule = {"part": "environment", "kind": "die", "rate": 0.05}
    more = {"env": "frozen_lake", "rollout.workers": "process", "env.args.size": 3, "env.args.max_steps": 3}
    more |= {"engine.args.replies": ["<answer>Right</answer>", "<answer>Down</answer>"], "rollout.step_seconds": 20}
    done = run(tmp_path / "run", rule, **more)
    episodes, rows = read(done.folder)
    assert done.summary["steps"] == 2
    assert len(episodes) == 24
    assert done.summary["faults"]["faults/environment/die"] > 0
    assert sum(row["rollout/processes_replaced"] for row in rows) > 0


@pytest.mark.parametrize(
    ("name", "step", "file"), [("checkpoint", 4, "step-000004"), ("episodes", 2, "step-000002.jsonl")]
)
def test_a_full_disk_ends_the_run_with_one_sentence_and_it_resumes(tmp_path, name, step, file):
    rule = {"part": "disk", "kind": "full", "name": name, "at": {"step": step}, "once": True}
    more = {"trainer.save_every": 1, "steps": 4}
    with pytest.raises(DiskWriteError, match=f"{file}: cannot be written: No space left on device"):
        run(tmp_path / "run", rule, **more)
    folder = tmp_path / "run"
    done = arborl.run(**{**SMALL, **more, "env": Parrot}, output_dir=folder, resume="latest")
    assert done.summary["steps"] == 4
    assert "faults" not in done.summary


def test_counts_continue_when_a_run_is_resumed(tmp_path):
    rule = {"part": "environment", "kind": "raise", "once": True}
    run(tmp_path / "run", rule, **{"steps": 1})
    faults = {"rules": [rule]}
    done = arborl.run(**{**SMALL, "env": Parrot}, faults=faults, output_dir=tmp_path / "run", resume="latest")
    assert done.summary["faults"] == {"faults/environment/raise": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {part: enviroment, kind: raise}", "enviroment"),
        ("- {part: environment, kind: rase}", "environment can raise, hang, late, lie, die. Did you mean 'raise'?"),
        ("- {part: disk, kind: full, name: log}", "part=disk writes checkpoint or episodes"),
        ("- {part: reward, kind: nan, seconds: 3}", "seconds is for kind=late"),
        ("- {part: reward, kind: nan, rate: 2}", "rate"),
        ("- {part: reward, kind: nan, at: {step: 0}}", "counted from 1"),
        ("part: reward", "part"),
        ("[]", "has no rules"),
        ("just text", "Known here: seed, rules"),
    ],
)
def test_mistakes_in_the_file_say_where_and_what_to_write(tmp_path, text, message):
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    done = invoke("train", "--faults", str(path), "--print")
    assert done.exit_code == 2
    assert message in done.stderr
    assert "faults.yaml" in done.stderr


def test_the_command_writes_the_faults_into_the_configuration(tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text("faults:\n  seed: 3\n  rules:\n  - {part: environment, kind: raise, rate: 0.1, at: {step: 12}}\n")
    done = invoke("train", "--faults", str(path), "--print")
    assert done.exit_code == 0
    assert "kind: raise" in done.stdout
    assert "seed: 3" in done.stdout


def test_only_processes_can_die():
    rule = {"part": "environment", "kind": "die"}
    config = from_kwargs(faults={"rules": [rule]}, **{"rollout.workers": "thread"})
    with pytest.raises(ConfigError, match=r"rollout\.workers=process"):
        arborl.training_run.train(config)
