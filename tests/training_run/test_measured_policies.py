"""Who is meant by a name that is measured or exported."""

from __future__ import annotations

import shutil

from arborl.models.model_loading import resolve
from arborl.training_run.measure import MeasureOptions, policies, settings_of


def test_a_checkpoint_that_was_taken_out_of_its_run_stands_for_its_model(tmp_path):
    moved = tmp_path / "kept"
    shutil.copytree(resolve("seedling"), moved / "model")
    (policy,) = policies([str(moved)], MeasureOptions())
    assert policy.config.model.name == settings_of(str(moved), MeasureOptions()).model.name == str(moved / "model")


def test_a_model_beside_a_file_is_measured_with_the_files_settings(tmp_path):
    (tmp_path / "run.yaml").write_text("evaluation:\n  tasks: 7\n")
    first, second = policies([str(tmp_path / "run.yaml"), "seedling"], MeasureOptions())
    assert first.config.evaluation.tasks == second.config.evaluation.tasks == 7
    assert second.config.model.name == "seedling"
