"""One small run, followed by everybody: files, Weights & Biases, a tracker of one's own, OpenTelemetry."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
from wandb_file import config, history, summary

from arborl.config.load_config import from_kwargs, load
from arborl.track.jsonl import read_metrics
from arborl.training_run import train

SECRET = "sk-very-secret-123"
GOOD = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
BAD = '<tool_call>{"name": "broken", "arguments": {"expression": "1"}}</tool_call>'


class Followed:
    """The folder, spans and console output of a run."""

    def __init__(self, folder: Path, spans: list, console: str):
        self.folder, self.spans, self.console = folder, spans, console


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """Trained for two steps, stopped by its settings, and resumed for one more."""
    import wandb  # before the clock runs
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    home = tmp_path_factory.mktemp("followed")
    rows = [{"question": f"{n}?", "answer": "42"} for n in range(20)]
    (home / "rows.json").write_text(json.dumps(rows))
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    settings = {
        "data": str(home / "rows.json"),
        "agent": {"name": "test_followed_run:keyed", "args": {"api_key": SECRET}},
        "tools": ["calculator", "track_parts:broken"],
        "rewards": ["equal"],
        "engine": {"name": "scripted", "args": {"replies": [GOOD, BAD, "42"]}},
        "rollout": {"tasks_per_step": 2, "group_size": 2},
        "evaluation": {"tasks": 2, "greedy": False},
        "trainer": {"steps": 2, "save_every": 1},
        "track": {
            "tensorboard": False,
            "gifs": 0,
            "trackers": [
                {"name": "wandb", "args": {"project": "lakes", "name": "one", "mode": "offline"}},
                {"name": "track_parts:Mine", "args": {"path": str(home / "own.txt")}},
                "track_parts:Grumpy",
            ],
        },
        "output_dir": str(home / "run"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        patch.setattr("arborl.training_run.artifacts.write_report", curve_alone)
        patch.setenv("MY_HOST_API_KEY", "another-secret-456")
        patch.setenv("WANDB_SILENT", "true")
        patch.chdir(home)
        train(from_kwargs(**settings))
        again = load(home / "run" / "config.yaml", ["trainer.steps=3", f"agent.args.api_key={SECRET}"])
        train(again, resume="latest")
    wandb.teardown()  # or its process stays until this one ends
    return Followed(home / "run", list(memory.get_finished_spans()), (home / "own.txt").read_text())


def curve_alone(folder: Path, decode) -> Path:
    """In place of the whole report, which takes seconds to draw."""
    from PIL import Image

    Image.new("RGB", (4, 4)).save(folder / "curve.png")
    return folder / "report.html"


def keyed(tools, api_key: str):
    """An agent that wants a key."""
    from arborl.agents.tool_agents import ToolAgent

    logging.getLogger("arborl.mine").info("a line that ends in %s", api_key)
    return ToolAgent(tools, max_tool_rounds=2)


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)


def test_numbers_are_on_wandb_by_step_and_a_resumed_run_goes_on_as_the_same(followed):
    ids = json.loads((followed.folder / "trackers.json").read_text())
    first, second = wandb_files(followed.folder)
    assert first.name == second.name == f"run-{ids['wandb']}.wandb"
    rows = {row["step"]: row for row in read_metrics(followed.folder / "metrics.jsonl")}
    sent = history(first) | history(second)
    assert sorted(sent) == [0, 1, 2, 3]
    assert sorted(history(second)) == [2, 3]  # a kill would have lost the second, for it is sent with the third
    for step in (1, 2, 3):
        numbers = {name: value for name, value in rows[step].items() if isinstance(value, float)}
        assert {"reward/mean", "episode/count", "learner/terms", "time/step"} <= numbers.keys()
        for name, value in numbers.items():
            assert sent[step][name] == pytest.approx(value), name
    assert sent[0]["evaluation/reward"] == rows[0]["evaluation/reward"]
    assert summary(second)["state"] == "finished"


def test_configuration_table_and_curve_are_on_wandb_too(followed):
    first, _ = wandb_files(followed.folder)
    given = config(first)
    assert given["agent"]["args"] == {"api_key": "***"}
    assert given["rollout"]["group_size"] == 2
    table = history(first)[1]["episodes/train"]
    assert table["_type"] == "table-file"
    assert (table["nrows"], table["ncols"]) == (4, 11)
    written = json.loads((first.parent / "files" / table["path"]).read_text())
    assert written["columns"][:3] == ["step", "kind", "episode"]
    assert any("user: " in row[-1] for row in written["data"])
    assert history(first)[2]["pictures/curve/1"]["_type"] == "image-file"


def test_a_tracker_of_ones_own_hears_it_all_and_one_that_breaks_does_not_matter(followed):
    assert followed.console.splitlines() == [
        "begin 0 ***", "episodes 0 evaluation 2", "log 0", "episodes 1 train 4", "log 1", "log 2",
        "episodes 2 evaluation 2", "log 2", "picture 2 curve curve.png", "finish 2 finished", "close",
        "begin 2 ***", "log 3", "episodes 3 evaluation 2", "log 3", "picture 3 curve curve.png", "finish 3 finished",
        "close",
    ]  # fmt: skip


def test_the_log_contains_the_console_output_and_more_and_continues_after_a_resume(followed):
    text = (followed.folder / "run.log").read_text()
    lines = text.splitlines()
    assert all(line[:2] == "20" and line.split()[1] in ("DEBUG", "INFO", "WARNING", "ERROR") for line in lines)
    for expected in (
        "step   1/2  reward",
        "step   3/3  reward",
        "Resumes from step 2",
        "held-out tasks, with 95 %",
        "saved",
    ):
        assert expected in text, expected
    assert text.count("process ") == 2  # two lives
    assert (
        "WARNING arborl.track.background_tracker: the tracker Grumpy failed "
        "(log: RuntimeError: not today) and is dropped" in text
    )


def test_no_file_of_the_run_holds_a_secret(followed):
    files = [path for path in followed.folder.parent.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert b"another-secret-456" not in content, path
    assert "a line that ends in ***" in (followed.folder / "run.log").read_text()


def test_spans_are_nested_and_say_what_they_are_of(followed):
    spans = {span.context.span_id: span for span in followed.spans}
    named = {}
    for span in followed.spans:
        named.setdefault(span.name.split()[0], []).append(span)
    assert {name: len(some) for name, some in named.items() if name.startswith("arborl.")} == {
        "arborl.run": 2, "arborl.step": 3, "arborl.evaluation": 3, "arborl.episode": 3 * 4 + 3 * 2,
        "arborl.wait": 3, "arborl.learn": 3, "arborl.publish": 3 + 3,
    }  # fmt: skip
    inside = {"chat": "arborl.episode", "execute_tool": "arborl.episode", "arborl.step": "arborl.run"}
    for name, outer in inside.items():
        assert {spans[span.parent.span_id].name for span in named[name]} == {outer}
    assert {spans[span.parent.span_id].name for span in named["arborl.episode"]} == {"arborl.step", "arborl.evaluation"}
    for span in named["arborl.episode"]:
        attributes = dict(span.attributes)
        assert attributes["arborl.run"] == "run"
        assert attributes["arborl.stop"] == "done"
        assert attributes["arborl.reward"] in (0.0, 1.0)
        assert attributes["arborl.episode"].count("#") == 1
        outer = spans[span.parent.span_id]
        assert attributes.get("arborl.step") == outer.attributes.get("arborl.step")
        assert outer.start_time <= span.start_time <= span.end_time <= outer.end_time
    for call in named["chat"]:
        assert call.attributes["gen_ai.usage.input_tokens"] > call.attributes["gen_ai.usage.output_tokens"] > 0
        assert call.attributes["arborl.episode"] == spans[call.parent.span_id].attributes["arborl.episode"]
    sampled = {span.context.span_id: 0 for span in named["arborl.episode"]}
    for call in named["chat"]:
        sampled[call.parent.span_id] += call.attributes["gen_ai.usage.output_tokens"]
    assert sampled == {span.context.span_id: span.attributes["arborl.sampled"] for span in named["arborl.episode"]}


def test_a_tool_that_fails_is_a_span_with_its_kind_of_failure(followed):
    tools = [span for span in followed.spans if span.name.startswith("execute_tool")]
    by_name = {
        name: [s for s in tools if s.attributes["gen_ai.tool.name"] == name] for name in ("calculator", "broken")
    }
    assert all(len(some) > 1 for some in by_name.values())
    assert {(s.status.status_code.name, s.attributes.get("error.type")) for s in by_name["calculator"]} == {
        ("UNSET", None)
    }
    assert {(s.status.status_code.name, s.attributes.get("error.type")) for s in by_name["broken"]} == {
        ("ERROR", "exception")
    }


def test_without_a_listener_nothing_of_opentelemetry_is_imported():
    import subprocess

    code = (
        "import sys, arborl.spans as s, arborl.track.tracing as t\n"
        "with t.traced('x'), s.span('a', inside_b=1) as own: own.note(c=2); own.fail('d')\n"
        "assert s.span('a') is s.NO_SPAN and not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=bare)
