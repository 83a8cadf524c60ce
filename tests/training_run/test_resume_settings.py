"""Settings that change on resume are listed and applied, or refused; a finished run stays as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from small_runs import LAKE

import arborl
from arborl.config.config_base import to_plain, validate
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError
from arborl.track.jsonl import read_metrics
from arborl.training_run import train
from arborl.training_run.resume import changes

SMALL = [
    *LAKE,
    "engine=scripted",
    "trainer.steps=2",
    "trainer.save_every=1",
    "trainer.keep=9",
    "evaluation.tasks=1",
    "evaluation.greedy=false",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A run of two steps, finished."""
    folder = tmp_path_factory.mktemp("resume") / "run"
    train(load(None, [*SMALL, f"output_dir={folder}"]))
    return folder


@pytest.fixture
def run(done, tmp_path) -> Path:
    return shutil.copytree(done, tmp_path / "run")


def again(folder: Path, *settings: str, which: str = "latest") -> arborl.Run:
    return train(load(folder / "config.yaml", [*settings, f"output_dir={folder}"]), resume=which)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def adam(folder: Path, step: int) -> list[dict]:
    state = torch.load(folder / "checkpoints" / f"step-{step:06}" / "optimizer.pt", weights_only=True)
    return state["optimizer"]["adam"]["param_groups"]


def test_another_rate_decay_and_betas_reach_the_optimiser_and_are_listed(run, capsys):
    given = ["learner.lr=0.5", "learner.weight_decay=0.25", "learner.betas=[0.5,0.6]", "learner.decay=none"]
    again(run, "trainer.steps=3", *given)
    group = adam(run, 3)[0]
    assert (group["base"], group["weight_decay"], tuple(group["betas"])) == (0.5, 0.25, (0.5, 0.6))
    assert list(read_metrics(run / "metrics.jsonl"))[-1]["learner/lr"] == 0.5
    output = capsys.readouterr().out
    assert "learner.lr: none -> 0.5" in output
    assert "learner.betas: [0.9, 0.95] -> [0.5, 0.6]" in output
    assert "trainer.steps: 2 -> 3" in output
    assert "has the former settings" not in output


def test_the_moments_of_the_optimiser_are_still_those_of_the_checkpoint(run):
    again(run, "trainer.steps=3", "learner.lr=0.5")
    state = torch.load(run / "checkpoints" / "step-000003" / "optimizer.pt", weights_only=True)
    assert {float(one["step"]) for one in state["optimizer"]["adam"]["state"].values()} == {3.0}


def test_the_former_configuration_and_summary_stay_beside_the_new_ones(run):
    before = load(run / "config.yaml", [f"output_dir={run}"])
    again(run, "trainer.steps=3", "learner.lr=0.5")
    assert load(run / "config.yaml").learner.lr == 0.5
    assert load(run / "config.before-step-000002.yaml") == before
    assert json.loads((run / "summary.before-step-000002.json").read_text())["steps"] == 2
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_a_change_of_settings_that_affect_evaluation_is_reported(run, capsys):
    again(run, "trainer.steps=3", "env.args.size=4")
    assert "evaluation before training has the former settings" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [(), ("learner.lr=0.5",), ("seed=9",)])
def test_a_finished_run_says_so_and_nothing_in_it_changes(run, capsys, settings):
    before = files(run)
    summary = again(run, *settings).summary
    output = capsys.readouterr().out
    assert "is finished: all 2 steps are done. Nothing is changed." in output
    assert all(setting.partition("=")[0] in output for setting in settings)
    assert files(run) == before
    assert summary == json.loads((run / "summary.json").read_text())


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_goes_on_to_the_summary(run):
    (run / "summary.json").unlink()
    again(run)
    assert json.loads((run / "summary.json").read_text())["steps"] == 2


def test_without_changes_the_configuration_is_not_touched(run):
    before = (run / "config.yaml").stat().st_mtime_ns
    again(run, which="1")
    assert (run / "config.yaml").stat().st_mtime_ns == before
    assert not list(run.glob("config.before-*"))


def test_settings_written_into_the_runs_own_file_by_hand_are_changes_too(run, capsys):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        text.replace("steps: 2", "steps: 3").replace("max_grad_norm: 1.0", "max_grad_norm: 2.0")
    )
    again(run)
    assert "learner.max_grad_norm: 1.0 -> 2.0" in capsys.readouterr().out
    assert load(run / "config.before-step-000002.yaml").learner.max_grad_norm == 1.0


REFUSED = {
    "seed": (["seed=1"], "seed=1: the checkpoint was made with 0, and all steps so far"),
    "model": (["model=smollm2"], "model.name=smollm2: the checkpoint was made with seedling"),
    "dtype": (["model.dtype=bfloat16"], "model.dtype=bfloat16"),
    "adapters": (["model.lora.rank=4"], "model.lora.rank=4"),
    "masters": (["learner.master=none"], "learner.master=none"),
    "a critic": (["algorithm=ppo", "~algorithm.skip_zero_variance"], "needs a critic of the kind shared"),
    "a reference": (["algorithm.kl.coef=0.1"], "reference model, which was not kept"),
    "the split": (["data.evaluation_share=0.2"], "training rows would become held-out rows"),
    "too few steps": (["trainer.steps=1"], "trainer.steps=1: 2 steps are done"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "output"), REFUSED.values(), ids=REFUSED)
def test_what_the_checkpoint_is_of_cannot_change_and_nothing_is_written(run, settings, output):
    before = files(run)
    more = [] if "trainer.steps=1" in settings else ["trainer.steps=3"]
    with pytest.raises(ConfigError, match="start a new run") as refused:
        again(run, *more, *settings)
    assert output in str(refused.value)
    assert files(run) == before


def test_a_coefficient_that_moves_by_itself_cannot_be_set_anew():
    from arborl.training_run.resume import _coefficients

    kl = {"coef": 0.1, "where": "reward", "target": 1.0}
    before = RunConfig.model_validate({"algorithm": {"kl": kl}}).algorithm
    other = RunConfig.model_validate({"algorithm": {"kl": {**kl, "coef": 0.2}}}).algorithm
    nearer = RunConfig.model_validate({"algorithm": {"kl": {**kl, "target": 0.5}}}).algorithm
    assert list(_coefficients(before, other))
    assert not list(_coefficients(before, nearer))


def test_a_checkpoint_from_before_checkpoints_had_a_configuration_goes_by_the_file(run, capsys):
    from arborl.checkpoint.manifest import write_manifest

    folder = run / "checkpoints" / "step-000002"
    state = json.loads((folder / "state.json").read_text())
    del state["config"]
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder, 2)
    again(run, "trainer.steps=3", "learner.lr=0.5")
    assert "learner.lr: none -> 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": "two"}', '{"step": 2, "before": 3}'])
def test_a_state_of_another_shape_is_one_sentence(run, text):
    from arborl.checkpoint.manifest import write_manifest

    folder = run / "checkpoints" / "step-000002"
    (folder / "state.json").write_text(text)
    write_manifest(folder, 2)
    with pytest.raises(ConfigError, match=r"state\.json"):
        again(run, "trainer.steps=3")


def test_a_configuration_in_json_is_read_back_equal():
    config = load(None, ["name=a\\${b}", "env.args.size=3", "rewards=[env]", "rollout.record=x/y"])
    assert list(changes(validate(RunConfig, json.loads(json.dumps(to_plain(config)))), config)) == []


def test_a_run_killed_before_its_first_checkpoint_goes_on_from_its_beginning(run):
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    assert again(run).summary["steps"] == 2
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]


def test_a_precision_that_is_left_to_be_chosen_stays_that_of_the_checkpoint(run):
    """What a run of another device would choose is not what its weights are."""
    assert load(run / "config.yaml").model.dtype == "float32"
    again(run, "trainer.steps=3", "model.dtype=auto")
    assert load(run / "config.yaml").model.dtype == "float32"
