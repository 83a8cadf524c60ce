"""The length of a run in passes over its rows, and the evaluation of its policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest

from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.trainer.evaluation import warn_of_failures
from arborl.training_run import train
from arborl.training_run.build import build, count_steps
from arborl.types import Episode, Failure, Group, Task

ROWS, SHARE = 12, 0.2
SMALL = [
    "engine=scripted", "engine.args.replies=[Yes.,No.]", "rewards=[exact]", f"data.evaluation_share={SHARE}",
    "rollout.group_size=2", "algorithm.skip_zero_variance=false", "evaluation.tasks=0", "track.tensorboard=false",
    "track.gifs=0", "threads=1", "model.device=cpu", "trainer.save_every=1", "trainer.keep=9", "sampling.max_tokens=8",
    "deterministic=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "pairs.json"
    path.write_text(json.dumps([{"question": f"Is it {n}?", "answer": "Yes."} for n in range(ROWS)]))
    return path


@pytest.fixture(scope="module")
def passed(rows, tmp_path_factory) -> Path:
    """Two passes in batches of seven."""
    folder = tmp_path_factory.mktemp("epochs") / "run"
    words = [f"data.path={rows}", "trainer.epochs=2", "rollout.tasks_per_step=7", "learner.warmup=0.5"]
    train(load(None, [*SMALL, *words, f"output_dir={folder}"]))
    return folder


def again(folder: Path, *settings: str, which: str = "latest"):
    return train(load(folder / "config.yaml", [*settings, f"output_dir={folder}"]), resume=which)


def requested(folder: Path) -> list[str]:
    store = EpisodeStore(folder / "episodes")
    return [e.task.messages[-1].content for path in store.paths() for e in store.read(path)][::2]  # groups of two


def test_a_pass_shows_every_row_once_and_schedule_and_checkpoints_know_its_end(passed):
    trained = len(set(requested(passed)))
    assert 7 < trained < ROWS  # some rows are held out
    steps = -(-2 * trained // 7)
    assert [row["step"] for row in read_metrics(passed / "metrics.jsonl")] == list(range(1, steps + 1))
    first, second = requested(passed)[:trained], requested(passed)[trained : 2 * trained]
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second
    rates = [row["learner/lr"] / 6e-4 for row in read_metrics(passed / "metrics.jsonl")]
    rising = -(-steps // 2)
    expected = [n / rising if n < rising else (steps - n) / (steps - rising) for n in range(steps)]
    assert rates == pytest.approx(expected)
    assert (passed / "checkpoints" / f"step-{steps:06}").is_dir()
    assert load(passed / "config.yaml").trainer.epochs == 2


def test_a_run_by_passes_resumes_exactly_ends_and_can_be_made_longer(passed, tmp_path, capsys):
    steps = json.loads((passed / "summary.json").read_text())["steps"]
    cut = shutil.copytree(passed, tmp_path / "run")
    again(cut, which="1")
    assert requested(cut) == requested(passed)
    model = f"checkpoints/step-{steps:06}/model/model.safetensors"
    assert (cut / model).read_bytes() == (passed / model).read_bytes()
    again(cut)
    assert "is finished" in (output := capsys.readouterr().out)
    assert "Write trainer.epochs=4 to continue." in output
    assert count_steps(load(cut / "config.yaml", ["trainer.epochs=3"])) > steps
    with pytest.raises(ConfigError, match=r"trainer.epochs=1, \d+ steps: \d+ steps are done"):
        again(cut, "trainer.epochs=1")
    again(cut, "trainer.steps=5")  # replaces the epochs of the run
    assert "trainer.steps: none -> 5" in capsys.readouterr().out


def test_passes_of_what_has_no_end_are_refused_and_those_of_sources_are_over_all_rows(rows):
    with pytest.raises(ConfigError, match=r"tasks without end\. Write trainer.steps"):
        build(load(None, ["trainer.epochs=1"]))
    two = [f"data.sources.a.path={rows}", f"data.sources.b.path={rows}", "data.sources.b.ratio=3", "trainer.epochs=1"]
    both = [*SMALL, *two, "data.sources.a.ratio=1", "rollout.tasks_per_step=5"]
    one = build(load(None, [*SMALL, f"data.path={rows}", "trainer.epochs=2", "rollout.tasks_per_step=5"])).steps
    assert build(load(None, both)).steps == one
    assert build(load(None, [*both, "data.sources.a.ratio=0"])).steps in (one // 2, one // 2 + 1)
    lake = ["data.sources.lake.env=frozen_lake", "data.sources.lake.ratio=1"]
    with pytest.raises(ConfigError, match=r"trainer\.epochs=1: the source lake is endless"):
        build(load(None, [*both, *lake]))


# ------------------------------------------------------------------------------------------------ evaluation


def test_without_the_first_measurement_the_others_are_as_ever(rows, tmp_path):
    folder = tmp_path / "run"
    words = [f"data.path={rows}", "trainer.steps=2", "rollout.tasks_per_step=2", "evaluation.before=false"]
    done = train(load(None, [*SMALL, *words, "evaluation.tasks=2", "evaluation.every=1", f"output_dir={folder}"]))
    measured = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "evaluation/reward" in row]
    assert measured == [1, 2]
    assert done.summary["before"] == {}
    assert done.summary["after"]["tasks"] == 2


def test_evaluation_uses_its_own_sampling_settings_and_else_those_of_training(rows):
    words = [f"data.path={rows}", "sampling.top_k=7", "sampling.temperature=0.5", "evaluation.tasks=2"]
    own = [
        "evaluation.sampling.top_p=0.9",
        "evaluation.sampling.min_p=0.1",
        "evaluation.sampling.max_tokens=3",
        "evaluation.sampling.temperature=0.3",
    ]
    for more, expected in (([], (1.0, 7, 1.0, 0.0, 8)), (own, (0.3, 7, 0.9, 0.1, 3))):
        evaluator = build(load(None, [*SMALL, *words, *more])).evaluator
        seen = []

        async def collect(tasks, seed, size, sampling, seen=seen):
            seen.append(sampling)
            return [Group(task, []) for task in tasks]

        evaluator.rollout.collect = collect

        asyncio.run(evaluator.play(evaluator.config.temperature))
        drawn = dataclasses.replace(evaluator.rollout.sampling, **seen[0])
        assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, drawn.max_tokens) == expected
    with pytest.raises(ConfigError, match=r"evaluation\.sampling\.max_tokens=2000"):
        load(None, ["evaluation.sampling.max_tokens=2000"])


def test_many_failed_episodes_of_an_evaluation_are_warned_of(caplog):
    def group(failed: bool) -> Group:
        return Group(Task("t"), [Episode("e", Task("t"), failure=Failure("engine", "x", "gone") if failed else None)])

    with caplog.at_level(logging.WARNING):
        warn_of_failures([group(n == 0) for n in range(20)])
        assert caplog.text == ""
        warn_of_failures([group(n < 2) for n in range(20)])
    assert "2 of 20 held-out episodes failed and count as 0" in caplog.text
    assert "engine: x: gone" in caplog.text
