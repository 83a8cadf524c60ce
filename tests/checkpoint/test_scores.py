"""The best checkpoint by a metric."""

from __future__ import annotations

import json
import math

import pytest

from arborl.checkpoint import CheckpointScores, complete_steps, find, resolve_path, save
from arborl.errors import ConfigError


def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text(folder.name)


def test_the_best_is_kept_besides_the_newest_and_has_a_name(tmp_path):
    root, scores = tmp_path / "run" / "checkpoints", CheckpointScores("evaluation/success")

    def kept(steps):
        scores.write(root)
        return [one for one in [scores.best(steps)] if one is not None]

    for step, value in enumerate([0.2, 0.9, 0.5, None, 0.4], start=1):
        scores.add(step, {"evaluation/success": value} if value is not None else {})
        save(root, step, write, {}, 2, kept)
    assert complete_steps(root) == [2, 4, 5]
    assert find(root, "best").name == "step-000002"
    assert resolve_path(tmp_path / "run" / "best") == root / "step-000002"
    assert find(root, "latest").name == "step-000005"


def test_of_equal_values_the_first_is_the_best_and_a_missing_value_is_none():
    scores = CheckpointScores("reward/mean")
    given = [0.5, 0.5, None, math.nan, 0.4]
    better = [scores.add(step, {"reward/mean": value}) for step, value in enumerate(given, start=1)]
    assert better == [True, False, False, False, False]
    assert scores.best([1, 2, 3, 4, 5]) == 1
    assert scores.best([2, 3, 4, 5]) == 2
    assert scores.best([3, 4]) is None
    assert scores.best([]) is None


def test_a_name_with_a_minus_means_that_lower_is_better():
    scores = CheckpointScores("-evaluation/loss")
    assert [scores.add(step, {"evaluation/loss": value}) for step, value in ((1, 2.0), (2, 3.0), (3, 1.5))] == [
        True, False, True,
    ]  # fmt: skip
    assert scores.best([1, 2]) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"metric": 1}', '{"metric": "a", "values": {"x": 1}}', "[" * 99_999])
def test_a_damaged_file_has_no_scores(tmp_path, text):
    save(tmp_path, 1, write, {}, 2)
    (tmp_path / "scores.json").write_text(text)
    assert CheckpointScores.read(tmp_path).values == {}
    with pytest.raises(ConfigError, match="no best checkpoint"):
        find(tmp_path, "best")


def test_values_of_another_metric_are_not_read(tmp_path):
    (tmp_path / "scores.json").write_text(json.dumps({"metric": "a", "values": {"3": 1.0, "4": None}}))
    assert CheckpointScores.read(tmp_path, "b") == CheckpointScores("b")
    (tmp_path / "scores.json").write_text(json.dumps({"metric": "a", "values": {"3": 1.0}}))
    assert CheckpointScores.read(tmp_path, "a").values == {3: 1.0}
