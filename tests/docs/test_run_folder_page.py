"""The page about the run folder knows every metric and every field."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import arborl
from arborl.algorithms.selection import reasons
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.track.jsonl import read_metrics
from arborl.types import StopReason

PAGE = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text(encoding="utf-8")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
SMALL = {
    "steps": 1, "engine": "scripted", "rollout.tasks_per_step": 2, "rollout.group_size": 3, "evaluation.tasks": 4,
    "track.tensorboard": False, "track.gifs": 0, "threads": 1,
}  # fmt: skip
RUNS = {
    "demo": {"engine": "local", "env.args.size": 3, "algorithm.skip_zero_variance": False},
    "tools": {"agent": "tool", "tools": ["calculator"], "engine.args.replies": [CALL, "<answer>Up</answer>"]},
    "ppo": {"algorithm": "ppo", "algorithm.kl.coef": 0.1, "engine.args.replies": ["Up", "Down"]},
    "dpo": {"algorithm": "dpo"},
}


def documented() -> list[re.Pattern[str]]:
    """The names in the first columns of the page's tables, `<x>` standing for anything."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)] + ["learner/skipped/<why>"]
    return [
        re.compile(re.sub(r"<\w+>", ".+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))) for name in names
    ]


@pytest.mark.parametrize("name", list(RUNS))
def test_every_metric_that_a_run_writes_is_explained(name, tmp_path):
    done = arborl.run(output_dir=tmp_path / "run", **SMALL | RUNS[name])
    known = documented()
    written = {key for row in read_metrics(done.folder / "metrics.jsonl") for key in row}
    assert len(written) > 40
    assert [key for key in sorted(written) if not any(pattern.fullmatch(key) for pattern in known)] == []


def test_an_undocumented_name_is_detected():
    assert not any(pattern.fullmatch("learner/unheard_of") for pattern in documented())


def test_stops_and_reasons_for_dropping_are_all_listed():
    losses = ({"name": name} for name in ("grpo", "dpo", "sft", "remax", "maxrl"))
    why = {reason for one in losses for reason in reasons(AlgorithmConfig(**one))}
    for word in (*(stop.value for stop in StopReason), *why):
        assert f"`{word}`" in PAGE, word


def test_every_field_of_an_episode_file_is_explained(tmp_path):
    done = arborl.run(output_dir=tmp_path / "run", **SMALL | RUNS["tools"])
    row = json.loads((done.folder / "episodes" / "step-000001.jsonl").read_text().splitlines()[0])
    fields = {*row, *row["task"], *row["turns"][0], *row["calls"][0], *row["calls"][0]["reply"]}
    assert [field for field in sorted(fields) if f"`{field}`" not in PAGE] == []
    output = [message for call in row["calls"] for message in call["messages"][2]]
    assert {"user"} <= {message["role"] for message in output}
