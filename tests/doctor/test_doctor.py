"""`arborl doctor` on run folders, models and settings."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fault_runs as runs
import pytest
from fault_runs import always, since
from typer.testing import CliRunner, Result

from arborl.cli.main import app
from arborl.config import RunConfig
from arborl.config.algorithm_config import AlgorithmArgs
from arborl.config.config_base import Config
from arborl.config.engine_config import EngineArgs
from arborl.config.load_config import load
from arborl.diagnosis import examine_run
from arborl.diagnosis.episode_rules import EPISODE_RULES
from arborl.diagnosis.folder_diagnosis import match_rules
from arborl.diagnosis.run_monitor import DiagnosisMonitor
from arborl.diagnosis.step_rules import STEP_RULES
from arborl.diagnosis.trend_rules import TREND_RULES
from arborl.doctor.chat_template_check import TEMPLATE_CHECKS
from arborl.doctor.model_check import STEP_CHECKS, examine_model

RULES = [*STEP_RULES, *TREND_RULES, *EPISODE_RULES]
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
DISAGREE = always({"policy/logprob_diff": 0.3})


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_healthy_run_exits_with_0_and_one_of_three_steps_is_not_judged(tmp_path):
    folder = runs.write(tmp_path / "run")
    result = call(str(folder))
    assert result.exit_code == 0
    assert "No problems found" in result.stdout
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    learning = next(one for one in examine_run(folder) if one.name == "learning")
    assert learning.state == "warn"
    assert "too few" in learning.detail


def test_a_fault_exits_with_1_and_names_its_episodes(tmp_path):
    result = call(str(runs.write(tmp_path / "run", DISAGREE)), "--json")
    assert result.exit_code == 1
    fault = next(row for row in json.loads(result.stdout) if row["state"] == "fail")
    assert fault["name"] == "logprob_diff_high"
    assert "model.head=float32" in fault["advice"]
    assert {"step", "task", "episode"} <= set(fault["evidence"][0])
    assert fault["evidence"][0]["episode"].startswith(fault["evidence"][0]["task"])


def test_a_warning_exits_with_1_only_with_strict(tmp_path):
    folder = str(runs.write(tmp_path / "run", since(4, always({"policy/clipped": 0.7}))))
    assert call(folder).exit_code == 0
    assert call(folder, "--strict").exit_code == 1


@pytest.mark.parametrize(
    "arguments", [("nowhere",), (".",), (".", "--model", "seedling"), (".", "learner.lr=1"), ("--modle", "x")]
)
def test_wrong_arguments_exit_with_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*arguments).exit_code == 2


def test_a_model_is_examined_with_settings(tmp_path):
    (tmp_path / "run.yaml").write_text("rollout: {tasks_per_step: 2, group_size: 4}\nthreads: 1\n")
    result = call("--model", "seedling", "--config", str(tmp_path / "run.yaml"), "env.name=frozen_lake", "--json")
    rows = json.loads(result.stdout)
    assert result.exit_code == 0, rows
    assert len(rows) == 1 + len(TEMPLATE_CHECKS) + len(STEP_CHECKS)
    assert "8 collected" in next(row["detail"] for row in rows if row["name"] == "episodes")


def test_demonstrations_and_a_reference_model_are_examined(tmp_path):
    messages = [{"role": "user", "content": "Say 3."}, {"role": "assistant", "content": "Three, as you wish!"}]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 20)
    for settings in (("algorithm=sft", f"data={tmp_path / 'talks.jsonl'}"), ("algorithm.kl.coef=0.01",)):
        findings = examine_model(load(None, ["threads=1", "rollout.tasks_per_step=2", *settings]))
        assert [(one.name, one.detail) for one in findings if one.state == "fail"] == []
    assert "nats per token" in next(one.detail for one in findings if one.name == "KL at step 0")


# ------------------------------------------------------------------------------------------------ unusual folders


def test_a_run_without_steps_is_a_warning(tmp_path):
    (tmp_path / "config.yaml").write_text("name: new\n")
    (state,) = examine_run(tmp_path)
    assert state.state == "warn"


def test_a_running_run_without_episode_files_is_examined_up_to_its_last_whole_line(tmp_path):
    folder = runs.write(tmp_path / "run")
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "episode/co')
    shutil.rmtree(folder / "episodes")
    state, _ = examine_run(folder)
    assert "running" in state.detail
    assert "only metrics" in state.detail


def test_damaged_files_are_reported_and_the_others_examined(tmp_path):
    folder = runs.write(tmp_path / "run", DISAGREE)
    (folder / "episodes" / "step-000030.jsonl").write_text('{"id": 3}\n')
    (folder / "summary.json").write_text("[")
    (folder / "config.yaml").write_text("a: [")
    findings = {finding.name: finding for finding in examine_run(folder)}
    assert findings["logprob_diff_high"].state == "fail"
    assert findings["files"].state == "warn"


def test_run_folders_are_examined_without_torch():
    code = "import sys, arborl.diagnosis; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_no_metrics_break_the_rules():
    names = [*runs.well(1), *(f"evaluation/{name}" for name in ("success", "success_low", "success_high", "loss"))]
    names += [f"episode/tool/{name}" for name in ("offered", "calls", "used", "malformed", "timeout")]
    values = [None, float("nan"), float("inf"), 0, 0.0, -1.0, 1e300, True, 0.5, 40.0]
    for seed in range(60):
        rng, monitor, rows = random.Random(seed), DiagnosisMonitor(), []
        kept = rng.sample(names, rng.randrange(len(names)))
        for step in range(rng.randrange(12)):
            row = {name: rng.choice(values) for name in kept if rng.random() < 0.8}
            rows.append(row | {"step": step, "words": "x", "list": [1]})
            monitor.add(rows[-1])
        assert all(match.rule in RULES for match in match_rules(rows))


# ------------------------------------------------------------------------------------------------ texts


def keys(config: type[Config], prefix: str = "") -> set[str]:
    """Every dotted key of a configuration."""
    found = set()
    for name, field in config.model_fields.items():
        inner = field.annotation
        found |= {prefix + name}
        if isinstance(inner, type) and issubclass(inner, Config):
            found |= keys(inner, f"{prefix}{name}.")
    return found


def test_advice_names_existing_keys():
    known = keys(RunConfig) | keys(EngineArgs, "engine.args.") | keys(AlgorithmArgs, "algorithm.args.")
    sections = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    for rule in RULES:
        for key in re.findall(rf"(?<![\w./])((?:{sections})(?:\.[a-z_]+)+)(?![\w(])", rule.advice):
            assert key in known, (rule.name, key)


def test_every_rule_has_a_unique_name_and_a_paragraph_in_the_docs():
    text = PAGE.read_text()
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert f"**`{rule.name}`**" in text, rule.name
        assert rule.advice.endswith(".")


def test_a_trend_is_reported_once_during_a_run():
    monitor = DiagnosisMonitor()
    rows = [runs.well(step) | {"policy/clipped": 0.7} for step in range(1, 20)]
    warnings = [text for row in rows for text in monitor.add(row)]
    assert len(warnings) == 1
    assert warnings[0].startswith("Many tokens are clipped: 70% of tokens")


@pytest.mark.parametrize(("change", "state"), [(DISAGREE, "fail"), (dict, "warn")])
def test_a_learning_rate_above_1_is_the_first_cause(tmp_path, change, state):
    folder = runs.write(tmp_path / "run", change)
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "learner: {lr: 5.0}\n")
    if change is DISAGREE:  # and nothing was learned
        metrics = folder / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    faults = [finding for finding in examine_run(folder) if finding.state != "ok" and finding.name != "learning"]
    assert (faults[0].name, faults[0].state) == ("learning_rate", state)
    assert "learner.lr is 5" in faults[0].detail
    assert "Write learner.lr=1e-6" in faults[0].advice
