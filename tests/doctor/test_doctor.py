"""The doctor as people and programs call it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import fault_runs as runs
import pytest
from fault_runs import always, since
from typer.testing import CliRunner, Result

from arborl.cli.main import app
from arborl.config import RunConfig
from arborl.config.config_base import Config
from arborl.config.load_config import load
from arborl.doctor import examine_run, first_step, template
from arborl.doctor.episode_rules import EPISODE_RULES
from arborl.doctor.model import examine_model
from arborl.trainer.diagnosis import DIAGNOSES, Streak, notices
from arborl.trainer.trends import TRENDS

RULES = [*DIAGNOSES, *TRENDS, *EPISODE_RULES]
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_run_that_is_well_exits_with_0_and_says_so(tmp_path):
    done = call(str(runs.write(tmp_path / "run")))
    assert done.exit_code == 0
    assert "Healthy" in done.stdout


def test_a_fault_exits_with_1_and_names_its_episodes(tmp_path):
    folder = runs.write(tmp_path / "run", always(policy__logprob_diff=0.3))
    done = call(str(folder), "--json")
    assert done.exit_code == 1
    fault = next(row for row in json.loads(done.stdout) if row["state"] == "fail")
    assert fault["name"] == "gap_wide"
    assert "model.head=float32" in fault["advice"]
    assert {"step", "task", "episode"} <= set(fault["evidence"][0])
    assert fault["evidence"][0]["episode"].startswith(fault["evidence"][0]["task"])


def test_a_warning_exits_with_0_unless_that_is_asked_for(tmp_path):
    folder = str(runs.write(tmp_path / "run", since(4, always(policy__clipped=0.7))))
    assert call(folder).exit_code == 0
    assert call(folder, "--strict").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "no folder"),
        ((".",), "no run folder"),
        ((".", "--model", "seedling"), "looked at as it is"),
        ((".", "learner.lr=1"), "looked at as it is"),
        (("--modle", "x"), "--model"),
    ],
)
def test_what_cannot_be_looked_at_is_said(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_model_and_settings_are_looked_at_together(tmp_path):
    (tmp_path / "run.yaml").write_text("rollout: {tasks_per_step: 2, group_size: 4}\nthreads: 1\n")
    done = call("--model", "seedling", "--config", str(tmp_path / "run.yaml"), "env.name=frozen_lake", "--json")
    rows = json.loads(done.stdout)
    assert done.exit_code == 0, rows
    assert len(rows) == 1 + len(template.QUESTIONS) + len(first_step.QUESTIONS)
    assert "8 played" in next(row["detail"] for row in rows if row["name"] == "episodes")


def test_given_rows_and_a_reference_are_looked_at_too(tmp_path):
    talk = [{"role": "user", "content": "Say 3."}, {"role": "assistant", "content": "Three, as you wish!"}]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
    for settings in (("algorithm=sft", f"data={tmp_path / 'talks.jsonl'}"), ("algorithm.kl.coef=0.01",)):
        found = examine_model(load(None, ["threads=1", "rollout.tasks_per_step=2", *settings]))
        assert [(one.name, one.detail) for one in found if one.state == "fail"] == []
    assert "nats a token" in next(one.detail for one in found if one.name == "KL at step 0")


# ------------------------------------------------------------------------------------------------ odd folders


def test_a_run_that_has_just_begun_is_no_fault(tmp_path):
    (tmp_path / "config.yaml").write_text("name: new\n")
    (alone,) = examine_run(tmp_path)
    assert alone.state == "warn"
    assert "No step is done yet" in alone.advice


def test_a_running_run_is_looked_at_as_far_as_it_is(tmp_path):
    folder = runs.write(tmp_path / "run")
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "episode/co')
    (alone,) = examine_run(folder)
    assert "running" in alone.detail


def test_torn_and_foreign_files_are_told_and_the_rest_is_looked_at(tmp_path):
    folder = runs.write(tmp_path / "run", always(policy__logprob_diff=0.3))
    (folder / "episodes" / "step-000030.jsonl").write_text('{"id": 3}\n')
    (folder / "summary.json").write_text("[")
    (folder / "config.yaml").write_text("a: [")
    found = {finding.name: finding for finding in examine_run(folder)}
    assert found["gap_wide"].state == "fail"
    assert found["files"].state == "warn"


def test_runs_without_episodes_or_with_given_rows_are_looked_at(tmp_path):
    import shutil

    folder = runs.write(tmp_path / "run")
    shutil.rmtree(folder / "episodes")
    (alone,) = examine_run(folder)
    assert "only metrics were looked at" in alone.detail


def test_run_folders_are_looked_at_without_torch():
    code = "import sys, arborl.doctor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_no_metrics_whatever_end_a_run_or_a_look_at_it():
    names = [*runs.well(1), *(f"evaluation/{name}" for name in ("success", "success_low", "success_high", "loss"))]
    names += [f"episode/tool/{name}" for name in ("offered", "calls", "used", "malformed", "timeout")]
    odd = [None, float("nan"), float("inf"), 0, 0.0, -1.0, 1e300, True, 0.5, 40.0]
    for seed in range(60):
        chance, streak, rows = random.Random(seed), Streak(), []
        kept = chance.sample(names, chance.randrange(len(names)))
        for step in range(chance.randrange(12)):
            own = {name: chance.choice(odd) for name in kept if chance.random() < 0.8}
            rows.append(own | {"step": step, "words": "x", "list": [1]})
            streak.add(rows[-1])
        assert all(found.rule in RULES for found in notices(rows))


# ------------------------------------------------------------------------------------------------ words


def keys(config: type[Config], before: str = "") -> set[str]:
    """Every key of a configuration, dotted."""
    found = set()
    for name, field in config.model_fields.items():
        inner = field.annotation
        found |= {before + name}
        if isinstance(inner, type) and issubclass(inner, Config):
            found |= keys(inner, f"{before}{name}.")
    return found


def test_advice_names_keys_that_there_are():
    known = keys(RunConfig)
    rooms = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    for rule in RULES:
        for key in re.findall(rf"(?<![\w./])((?:{rooms})(?:\.[a-z_]+)+)(?![\w(])", rule.advice):
            assert key in known, (rule.name, key)


def test_every_finding_has_its_paragraph_and_its_own_name():
    text = PAGE.read_text()
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert f"**`{rule.name}`**" in text, rule.name
        assert rule.advice.endswith(".")


def test_a_run_is_told_of_a_trend_once_while_it_goes_on():
    streak = Streak()
    rows = [runs.well(step) | {"policy/clipped": 0.7} for step in range(1, 20)]
    said = [text for row in rows for text in streak.add(row)]
    assert len(said) == 1
    assert said[0].startswith("Much of the batch is clipped: 70% of tokens")
