"""Small complete runs through the command line and the Python API."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from forked import Forked, forked
from small_runs import LAKE, invoke, settled, weights

import arborl
from arborl.checkpoint.manifest import write_manifest
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics

SMALL = [*LAKE, "trainer.steps=4", "trainer.save_every=2", "evaluation.tasks=1", "deterministic=true"]


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
    """A run on scripted replies."""
    folder = tmp_path_factory.mktemp("stub") / "x"
    done = invoke("train", "--stub", f"output_dir={folder}", "seed=7")
    assert done.exit_code == 0, done.output
    return folder


def test_a_run_killed_with_9_and_resumed_ends_bit_equal_to_one_that_was_not(tmp_path):
    # each in a process of its own: what other tests have left in this one may change how sums are rounded
    code, output = forked("-m", "arborl", "train", *SMALL, "output_dir=whole", cwd=tmp_path)
    assert code == 0, output
    victim = Forked(["-m", "arborl", "train", *SMALL, "output_dir=cut"], cwd=tmp_path)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (
        metrics.exists() and metrics.read_text().count("\n") >= 4
    ):  # past the checkpoint of step 2: the first is step 0's
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert not (tmp_path / "cut" / "summary.json").exists()

    code, output = forked("-m", "arborl", "train", "--resume", "latest", "output_dir=cut", cwd=tmp_path)
    assert code == 0, output
    assert settled(tmp_path / "cut") == settled(tmp_path / "whole")
    assert any(row["learner/grad_norm"] > 0 for row in settled(tmp_path / "whole")[3:])  # or equal weights show nothing
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("cut", "whole")]
    for summary in summaries:
        del summary["train_seconds"]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),  # each alone is in tests/training_run/test_signals.py
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    words = ["-m", "arborl", "train", *SMALL, "trainer.steps=500", "evaluation.tasks=0", "output_dir=stopped"]
    victim = Forked(words, cwd=tmp_path)
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim.send_signal(number)
    output, _ = victim.communicate(timeout=60)
    assert victim.returncode == code
    assert "--resume latest output_dir=stopped" in output
    assert "Traceback" not in output
    saved = sorted((tmp_path / "stopped" / "checkpoints").iterdir())[-1]
    assert json.loads((saved / "state.json").read_text())["step"] == metrics.read_text().count("\n")


def test_stub_runs_the_whole_loop_and_leaves_everything_a_run_leaves(stub):
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "curve.png", "report.html", "frames/episodes.json",
                 "episodes/step-000003.jsonl", "checkpoints/step-000003/MANIFEST", "tensorboard"):  # fmt: skip
        assert (stub / name).exists(), name
    assert any((stub / "frames").glob("step-000003-*#0.gif"))
    summary = json.loads((stub / "summary.json").read_text())
    assert summary["seed"] == 7
    assert summary["steps"] == 3
    assert {"success", "reward"} <= summary["before"].keys() & summary["after"].keys()
    assert summary["train_seconds"] > 0


def test_steps_are_numbered_alike_everywhere_and_the_curve_has_its_ends(stub):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = list(read_metrics(stub / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "evaluation/success" in row] == [0, 3]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3]
    shown = EventAccumulator(str(stub / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("evaluation/success")] == [0, 3]
    assert [event.step for event in shown.Scalars("reward/mean")] == [1, 2, 3]
    store = EpisodeStore(stub / "episodes")
    assert [path.stem for path in store.paths()] == ["step-000001", "step-000002", "step-000003"]
    held_out = EpisodeStore(stub / "episodes" / "evaluation")
    assert [path.stem for path in held_out.paths()] == ["step-000000", "step-000003"]
    for step in (1, 2, 3):
        episodes = list(store.read(stub / "episodes" / f"step-{step:06}.jsonl"))
        assert {episode.task.id.split("/")[2].split("-")[0] for episode in episodes} == {f"{step:06}"}
        assert {call.completion.version for episode in episodes for call in episode.calls} == {step - 1}


def test_an_evaluation_on_the_way_is_printed_kept_and_written_with_its_step(tmp_path):
    words = ["train", "--stub", f"output_dir={tmp_path / 'run'}", "evaluation.every=2", "track.tensorboard=false"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows if "evaluation/success_low" in row] == [0, 2, 3]
    lines = [line for line in done.output.splitlines() if "held out, " in line]
    assert [line.split()[1] for line in lines] == ["0/3", "2/3", "3/3"]
    assert all("8 tasks:" in line and "(" in line for line in lines)
    assert len(EpisodeStore(tmp_path / "run" / "episodes" / "evaluation").paths()) == 3
    assert "95 % intervals" in done.output


def test_counters_that_are_0_are_written_from_the_first_line_on(stub):
    first, *others = (row for row in read_metrics(stub / "metrics.jsonl") if row["step"] > 0)
    zero = (
        *("episode/failed", "dropped/failed", "dropped/zero_variance", "dropped/empty_group", "learner/skipped"),
        *("rollout/cancelled", "rollout/filtered", "rollout/missing", "stop/max_turns", "stop/context_full"),
    )
    for name in zero:
        assert name in first, name
    for row in others:
        measured = ("policy/", "evaluation/", "learner/grad_norm", "learner/lr", "learner/micro_batch_tokens")
        assert row.keys() - first.keys() <= {name for name in row if name.startswith(measured)}


def test_a_checkpoint_is_a_model_that_plain_transformers_loads_and_evaluate_measures(stub):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = stub / "checkpoints" / "step-000003" / "model"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 1_000_000
    assert AutoTokenizer.from_pretrained(folder).decode([65]) != ""
    for path in (stub, folder.parent, "seedling"):
        done = invoke("evaluate", str(path), "evaluation.tasks=4")
        assert done.exit_code == 0, done.output
        assert "success" in done.output


def test_a_model_whose_bytes_changed_is_not_used(stub, tmp_path):
    """However it is named: as a run, as a checkpoint, or as the model's own folder."""
    run = shutil.copytree(stub, tmp_path / "run")
    folder = run / "checkpoints" / "step-000003"
    weights = folder / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for path in (folder, folder / "model"):
        done = invoke("evaluate", str(path), "evaluation.tasks=4")
        assert done.exit_code == 2
        assert "model.safetensors has the right size, but not the content that was written" in done.output
    done = invoke("train", "--resume", "3", f"output_dir={run}")
    assert "not the content that was written" in done.output


@pytest.mark.parametrize("state", [{}, {"step": "many"}, {"step": 1, "train_seconds": 1, "algorithm": 3}])
def test_a_state_of_another_shape_is_one_line(stub, tmp_path, state):
    run = shutil.copytree(stub, tmp_path / "run")
    folder = run / "checkpoints" / "step-000003"
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder, 3)
    done = invoke("train", "--stub", "--resume", "3", f"output_dir={run}", "trainer.steps=4")
    assert done.exit_code == 2, done.output
    assert "state.json" in done.output
    assert "Traceback" not in done.output


def test_trouble_costs_single_episodes_is_named_in_the_metrics_and_the_run_goes_on(tmp_path, caplog):
    rules = [
        {"part": "environment", "kind": "raise", "rate": 0.1},
        {"part": "environment", "kind": "hang", "rate": 0.1},
        {"part": "reward", "kind": "nan", "rate": 0.2},
    ]
    done = arborl.run(
        output_dir=tmp_path / "r", steps=2, engine="scripted", faults={"rules": rules},
        **{"rollout.tasks_per_step": 4, "rollout.group_size": 6, "rollout.step_seconds": 0.3, "evaluation.tasks": 0,
           "env.args.max_steps": 2, "track.tensorboard": False},
    )  # fmt: skip
    rows, counts = list(read_metrics(done.folder / "metrics.jsonl")), done.summary["faults"]
    assert len(rows) == 2
    assert all(count > 0 for count in counts.values())
    by_env = counts["faults/environment/raise"] + counts["faults/environment/hang"]
    assert sum(row.get("failed/environment 'frozen_lake'", 0) for row in rows) == by_env
    assert sum(row.get("failed/reward 'environment'", 0) for row in rows) == counts["faults/reward/nan"]
    assert "environment 'frozen_lake': InjectedFault" in caplog.text
    assert "took longer than 0.3 s" in caplog.text
    assert "reward 'environment': ValueError" in caplog.text
    stored = [e for path in EpisodeStore(done.folder / "episodes").paths() for e in EpisodeStore.read(path)]
    assert sum(episode.failure is not None for episode in stored) == sum(counts.values())


def test_any_async_function_is_an_agent_and_an_environment_may_be_an_object(tmp_path):
    async def twice(task, env, model):
        opening = await env.reset(task, task.seed)
        await model.chat(opening.messages)  # a first thought, recorded like any other call
        step = await env.step(await model.chat(opening.messages))
        assert step.observation.messages

    done = arborl.run(
        agent=twice, env=FrozenLake(size=3), steps=1, engine="scripted", output_dir=tmp_path / "run",
        **{"rollout.tasks_per_step": 2, "evaluation.tasks": 0, "track.tensorboard": False},
    )  # fmt: skip
    (path,) = EpisodeStore(done.folder / "episodes").paths()
    episodes = list(EpisodeStore.read(path))
    assert all(episode.failure is None for episode in episodes)
    assert all(len(episode.calls) == 2 and len(episode.turns) == 1 for episode in episodes)
    assert len(episodes[0].opening[-1].content.splitlines()) == 3


def test_python_trains_a_tool_agent_on_a_file_with_its_own_tool_and_reward(tmp_path):
    rows = [{"question": f"What is {a} + 2? Answer as <answer>number</answer>.", "answer": a + 2} for a in range(30)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    requested: list[str] = []

    @arborl.tool
    def adder(expression: str) -> int:
        """Add two numbers.

        Args:
            expression: such as 1 + 2.
        """
        requested.append(expression)
        return sum(map(int, expression.split("+")))

    @arborl.reward
    def right(episode, answer: int) -> float:
        return float(f"<answer>{answer}</answer>" in episode.answer)

    call = '<tool_call>{"name": "adder", "arguments": {"expression": "1 + 2"}}</tool_call>'
    done = arborl.run(
        model="seedling", data=tmp_path / "train.json", agent="tool", tools=[adder], rewards=[right], algorithm="grpo",
        steps=1, engine="scripted", output_dir=tmp_path / "run",
        **{"engine.args.replies": [call, "<answer>3</answer>"], "sampling.max_tokens": 64, "rollout.tasks_per_step": 2,
           "rollout.group_size": 4, "evaluation.tasks": 2, "track.tensorboard": False},
    )  # fmt: skip
    assert requested
    _, row = read_metrics(done.folder / "metrics.jsonl")
    assert row["episode/tool/calls"] > 0
    assert done.summary["steps"] == 1
    assert (done.folder / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["env=frozen_lak"], "Did you mean 'frozen_lake'?"),
        (["agent=chatt"], "Did you mean 'chat'?"),
        (["model=seedlin"], "Did you mean 'seedling'?"),
        (["engine=locl"], "Did you mean 'local'?"),
        (["rewards=[envv]"], "Did you mean 'env'?"),
        (["env.args.sise=4"], "Did you mean 'size'?"),
        (["env.args.size=1"], "2 or more"),
        (["data.path=missing.json", "rewards=[exact]"], "missing.json"),
        (["sampling.max_context=100000"], "max_context"),
        (["tools=[calculator]"], "agent=tool"),
        (["model.device=toaster"], "toaster"),
        (["engine.kv_tokens=100"], "engine.kv_tokens=1024 or more"),
    ],
)
def test_bad_input_is_one_clear_line_exit_code_2_and_nothing_written(tmp_path, monkeypatch, words, complaint):
    monkeypatch.chdir(tmp_path)
    done = invoke("train", *words)
    assert done.exit_code == 2, done.output
    assert complaint in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run_is_not_written_over(stub):
    again = invoke("train", f"output_dir={stub}")
    assert again.exit_code == 2
    assert "--resume latest" in again.output
