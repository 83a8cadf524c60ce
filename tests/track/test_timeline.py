"""The timeline: one file that says who worked when, whole whatever happened to the run."""

from __future__ import annotations

import asyncio
import json

from arborl import spans
from arborl.config.load_config import load
from arborl.spans import add_to_timeline, span
from arborl.track.jsonl import read_metrics
from arborl.track.timeline import Timeline
from arborl.training_run import train


def slices(path) -> list[dict]:
    return [one for one in json.loads(path.read_text()) if one["ph"] == "X"]


def lines(path, name: str) -> set[int]:
    return {one["tid"] for one in slices(path) if one["name"] == name}


def test_what_goes_on_at_the_same_time_has_lines_of_its_own_and_a_free_one_is_used_again(tmp_path):
    path = tmp_path / "timeline.json"

    async def one(seconds):
        with span("arborl.episode") as episode_span:
            episode_span.note(arborl__turns=3)
            await asyncio.sleep(seconds)

    async def several():
        await asyncio.gather(one(0.01), one(0.02), one(0.03))
        await one(0.001)

    with Timeline(path, steps=1):
        asyncio.run(several())
        add_to_timeline("engine", "steps", 1.0, 1.5, steps=7)
    assert lines(path, "arborl.episode") == {1, 2, 3}
    assert slices(path)[0]["args"] == {"arborl.turns": 3}
    (engine,) = [one for one in slices(path) if one["name"] == "steps"]
    assert (engine["ts"], engine["dur"]) == (1_000_000, 500_000)


def test_after_some_steps_only_the_learner_is_drawn_and_afterwards_nothing(tmp_path):
    with Timeline(tmp_path / "a.json", steps=1):
        for _ in range(3):
            with span("arborl.step"), span("arborl.learn"), span("chat"):
                pass
    with span("chat"):
        pass
    names = [one["name"] for one in slices(tmp_path / "a.json")]
    assert names.count("arborl.learn") == 3
    assert names.count("chat") == 1
    assert spans.span("chat") is spans.NO_SPAN


def test_a_file_that_was_left_whole_or_torn_is_gone_on_with(tmp_path):
    path = tmp_path / "timeline.json"
    for torn in (0, 5):
        with Timeline(path, steps=9), span("arborl.step"):
            pass
        path.write_bytes(path.read_bytes()[: -torn or None])
    with Timeline(path, steps=9), span("arborl.step"):
        pass
    assert len(slices(path)) == 2  # the second was torn


def test_a_run_leaves_its_timeline_a_trace_and_says_who_was_idle(tmp_path):
    settings = ["evaluation.tasks=0", "track.gifs=0", "track.tensorboard=false", f"output_dir={tmp_path / 'run'}"]
    train(load(None, [*settings, "rollout.max_lag=1"]), stub=True, profile=True)
    names = {one["name"] for one in slices(tmp_path / "run" / "timeline.json")}
    assert names >= {"arborl.step", "arborl.wait", "arborl.learn", "arborl.publish", "arborl.episode", "chat"}
    trace = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert any("backward" in one.get("name", "").lower() for one in trace["traceEvents"])  # of the learner's thread
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert row["time/idle_learner"] > 0
        assert row["time/idle_engine"] > 0
        assert {"batch/lag_mean", "batch/lag_max", "rollout/dropped_stale"} <= row.keys()
