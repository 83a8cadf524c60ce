"""Pictures of what a mixed run was trained on, and of how long an agent's context was."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from arborl.types import Call, Completion, Episode, FinishReason, Task
from arborl.view import context_length, plot_sources, write_report
from arborl.view.curve import edits_itself, lengths, sources_of


def episode(*prompts: int) -> Episode:
    calls = [Call(tuple(range(size)), Completion((1, 2), (-0.1, -0.1), FinishReason.STOP), 0) for size in prompts]
    return Episode("e", Task("t"), calls=calls)


def metrics(folder, sources):
    rows = [
        {"step": step, "episode/success": 0.5}
        | {f"data/{name}/share": 1 / len(sources) for name in sources}
        | {f"data/{name}/success": 0.1 * step for name in sources}
        for step in range(5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_sources_of_a_run_are_read_from_its_metrics_and_drawn(tmp_path):
    metrics(tmp_path, ["math", "code"])
    (tmp_path / "summary.json").write_text(
        json.dumps({"before": {"success/math": 0.2}, "after": {"success/math": 0.9}})
    )
    assert sources_of(tmp_path / "metrics.jsonl") == ["math", "code"]
    assert Image.open(plot_sources(tmp_path, tmp_path / "out" / "sources.png", "both")).size[0] > 600


def test_a_run_without_sources_has_no_such_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "episode/success": 0.5}\n')
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_sources(tmp_path, tmp_path / "sources.png", "none")
    assert "Sources" not in write_report(tmp_path).read_text()


def test_the_report_of_a_run_with_several_sources_shows_them(tmp_path):
    metrics(tmp_path, ["math", "code"])
    assert "<h2>Sources</h2>" in write_report(tmp_path).read_text()


def test_a_context_that_became_shorter_was_edited():
    assert lengths(episode(5, 9, 14)) == [7, 11, 16]
    assert edits_itself(episode(5, 9, 6))
    assert not edits_itself(episode(5, 9, 14))


def test_the_contexts_of_episodes_are_drawn_under_their_window(tmp_path):
    picture = context_length([episode(5, 9, 6), episode(5, 9)], tmp_path / "context.png", "sawtooth", window=16)
    assert Image.open(picture).size[0] > 600
    with pytest.raises(ValueError, match="no episodes"):
        context_length([], tmp_path / "none.png", "none")
