"""The run on MLflow."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from arborl.track.configured_trackers import MlflowTracker
from arborl.track.tracker import RunStart
from arborl.types import Episode, Message, Task, Turn

CONFIG = {"rollout": {"group_size": 2}, "agent": {"args": {"api_key": "***"}}, "tools": []}
PLAYED = Episode("t#0", Task("t"), turns=[Turn(Message("assistant", "Left"))], rewards={"r": 0.5})


def follow(uri: str, folder, steps, done: int = 0) -> None:
    """One life of a run."""
    tracker = MlflowTracker(uri, experiment="lakes")
    tracker.begin(RunStart("run-001", folder, CONFIG, done))
    for step in steps:
        tracker.log(
            {"reward/mean": step / 10, "learner/skipped": 0.0, "learner/skipped/no_terms": 1.0, "x": float("nan")}, step
        )
    tracker.episodes([PLAYED], steps[0], "train")
    tracker.finish({"steps": steps[-1]}, "finished")
    tracker.close()


@pytest.mark.slow
def test_numbers_parameters_and_artifacts_are_there_under_one_run_also_after_a_resume(tmp_path):
    from mlflow import MlflowClient

    follow(str(tmp_path / "mlruns"), tmp_path, [1, 2])
    follow(str(tmp_path / "mlruns"), tmp_path, [3], done=2)
    client = MlflowClient(str(tmp_path / "mlruns"))
    (run,) = client.search_runs([client.get_experiment_by_name("lakes").experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run-001")
    sent = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "reward/mean")}
    assert sent == {1: 0.1, 2: 0.2, 3: 0.3}
    assert set(run.data.metrics) == {"reward/mean", "learner/skipped", "learner/skipped.no_terms"}
    assert run.data.params["rollout.group_size"] == "2"
    assert run.data.params["agent.args.api_key"] == "***"
    listed = [found.path for found in client.list_artifacts(run.info.run_id, "episodes")]
    assert listed == ["episodes/train-step-000001.jsonl", "episodes/train-step-000003.jsonl"]


def test_what_is_sent_is_by_step_and_a_resumed_run_makes_no_second_one(tmp_path, monkeypatch):
    client = MagicMock()
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "r1"
    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient = lambda uri: client
    entities.Param, entities.Metric = (lambda *given: given), (lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    follow("http://server", tmp_path, [1, 2])
    follow("http://server", tmp_path, [3], done=2)
    assert client.create_run.call_count == 1
    changes = [call for call in client.mock_calls if call[0] in ("update_run", "set_terminated")]
    assert [call.kwargs.get("status") or call.args[1] for call in changes] == ["FINISHED", "RUNNING", "FINISHED"]
    batches = [call.kwargs for call in client.log_batch.call_args_list]
    metrics = [metric for batch in batches for metric in batch.get("metrics", ())]
    assert [(name, value) for name, value, _, step in metrics if step == 3] == [
        ("reward/mean", 0.3), ("learner/skipped", 0.0), ("learner/skipped.no_terms", 1.0),
    ]  # fmt: skip
    assert ("rollout.group_size", "2") in [param for batch in batches for param in batch.get("params", ())]
    texts = {call.args[2]: call.args[1] for call in client.log_text.call_args_list}
    assert json.loads(texts["episodes/train-step-000001.jsonl"])["transcript"] == "assistant: Left"
