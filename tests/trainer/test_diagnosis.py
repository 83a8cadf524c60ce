"""Steps without learning are diagnosed from their metrics."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

import arborl
from arborl.diagnosis.folder_diagnosis import match_rules
from arborl.diagnosis.metric_history import PATIENCE
from arborl.diagnosis.run_monitor import DiagnosisMonitor
from arborl.diagnosis.step_rules import STEP_RULES, diagnose_step, step_remark
from arborl.envs.env import Env, Observation, Step
from arborl.track.jsonl import read_metrics
from arborl.types import Message

FINE = {
    "step": 1, "episode/count": 8.0, "episode/failed": 0.0, "episode/calls": 1.0, "episode/sampled": 9.0,
    "episode/success": 0.5, "episode/valid": 1.0, "group/zero_variance": 0.25, "call/cut_off": 0.0,
    "stop/context_full": 0.0,
    "learner/terms": 72.0, "learner/grad_norm": 0.3, "learner/skipped": 0.0, "rollout/filtered": 0.0,
}  # fmt: skip
NOTHING = {"learner/terms": 0.0, "learner/grad_norm": None, "learner/skipped": 1.0, "learner/skipped/no_terms": 1.0}
FLAT = NOTHING | {"group/zero_variance": 1.0}
CASES = {
    "failed": NOTHING | {"episode/failed": 8.0, "group/zero_variance": 1.0},
    "filtered": NOTHING | {"episode/count": 0.0, "rollout/filtered": 4.0, "rollout/missing": 4.0},
    "no_episodes": NOTHING | {"episode/count": 0.0, "rollout/expired": 4.0},
    "prompts_too_long": FLAT | {"episode/calls": 0.0, "episode/sampled": 0.0, "stop/context_full": 1.0},
    "model_not_called": FLAT | {"episode/calls": 0.0, "episode/sampled": 0.0},
    "nothing_sampled": FLAT | {"episode/sampled": 0.0},
    "cut_off": FLAT | {"call/cut_off": 1.0, "episode/valid": 0.0},
    "all_invalid": FLAT | {"episode/valid": 0.0, "episode/success": 0.0},
    "no_tools": FLAT | {"episode/tool/offered": 0.0, "episode/tool/calls": 0.0},
    "calls_cut_off": FLAT
    | {"episode/tool/calls": 0.6, "episode/tool/failed": 0.6, "episode/tool/malformed": 0.6, "call/cut_off": 0.4},
    "tools_fail": FLAT | {"episode/tool/offered": 1.0, "episode/tool/calls": 2.0, "episode/tool/failed": 2.0},
    "all_solved": FLAT | {"episode/success": 1.0},
    "none_solved": FLAT | {"episode/success": 0.0},
    "zero_variance": FLAT,
    "not_finite": {"learner/skipped": 1.0, "learner/skipped/gradient": 1.0},
    "all_dropped": NOTHING,
    "no_gradient": {"learner/grad_norm": 0.0},
}


def test_every_rule_has_a_case_and_advice():
    assert [rule.name for rule in STEP_RULES] == list(CASES)
    for rule in STEP_RULES:
        assert rule.advice.endswith(".")
        assert not rule.summary.endswith(".")


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_is_diagnosed_by_its_metrics(name):
    found = diagnose_step(FINE | CASES[name])
    assert found is not None
    assert found.name == name
    assert step_remark(FINE | CASES[name]) == f"no gradient: {found.summary}"


def test_a_step_that_learns_has_no_diagnosis():
    assert diagnose_step(FINE) is None
    assert step_remark(FINE) == ""
    assert diagnose_step({"step": 0, "evaluation/success": 0.0}) is None
    assert diagnose_step(FINE | {"group/zero_variance": 1.0}) is None  # an algorithm that does not compare


def test_failing_tools_are_reported_for_a_step_that_learns():
    assert step_remark(FINE | {"episode/tool/calls": 2.0, "episode/tool/failed": 2.0}) == "every tool call failed"


def test_the_cause_is_logged_once_after_some_steps_in_a_row():
    monitor = DiagnosisMonitor()
    flat = FINE | CASES["zero_variance"]
    warnings = [monitor.add(metrics) for metrics in (flat, flat, FINE, *[flat] * (PATIENCE + 4))]
    assert [len(texts) for texts in warnings] == [0] * 3 + [step == PATIENCE - 1 for step in range(PATIENCE + 4)]
    (warning,) = next(filter(None, warnings))
    assert warning.startswith("The last 3 steps: no gradient: every group has zero reward variance. ")
    assert "rollout.group_size" in warning


def test_the_rows_of_a_metrics_file_are_diagnosed():
    kinds = ["zero_variance", "all_solved", None, "all_solved"]
    rows = [FINE | (CASES[kind] if kind else {}) | {"step": step} for step, kind in enumerate(kinds, 1)]
    assert [(found.rule.name, found.steps) for found in match_rules([{"step": 0, "evaluation/tasks": 4.0}, *rows])] == [
        ("all_solved", (2, 4)),
        ("zero_variance", (1,)),
    ]


class Yes(Env):
    """Pays for yes, or always the same."""

    def __init__(self, pays: bool = False, opening: str = "Say yes."):
        self.pays, self.opening = pays, opening

    async def reset(self, task, seed):
        return Observation((Message("user", self.opening),))

    async def step(self, action):
        return Step(Observation(()), float(self.pays and "yes" in action.content.lower()), terminated=True)


@arborl.tool
def divide(number: int) -> float:
    """Divide by zero.

    Args:
        number: any.
    """
    return number / 0


async def silent(task, env, model):
    await env.reset(task, task.seed)
    await env.step(Message("assistant", "Yes."))


CALL = '<tool_call>{"name": "divide", "arguments": {"number": 1}}</tool_call>'
RUNS = {
    "none_solved": {"env": Yes()},
    "prompts_too_long": {"env": Yes(opening="word " * 400), "sampling.max_context": 100, "sampling.max_tokens": 8},
    "model_not_called": {"env": Yes(), "agent": silent},
    "no_tools": {"env": Yes(), "agent": "tool"},
    "calls_cut_off": {
        "env": Yes(),
        "agent": "tool",
        "tools": [divide],
        "sampling.max_tokens": 8,
        "engine.args.replies": [CALL, "Yes."],
    },
    "tools_fail": {"env": Yes(), "agent": "tool", "tools": [divide], "engine.args.replies": [CALL]},
    "filtered": {"env": Yes(), "rollout.group_filter": "varied"},
}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_without_learning_reports_it_in_each_line_and_once_as_a_warning(name, tmp_path, capsys, caplog):
    small = {"rollout.tasks_per_step": 2, "rollout.group_size": 3, "evaluation.tasks": 0, "track.tensorboard": False,
             "track.gifs": 0, "track.episodes": False, "threads": 1,
             "engine.args.replies": ["Yes.", "No."]}  # fmt: skip
    done = arborl.run(steps=PATIENCE, engine="scripted", output_dir=tmp_path / "run", **small | RUNS[name])
    rule = next(rule for rule in STEP_RULES if rule.name == name)
    rows = list(read_metrics(done.folder / "metrics.jsonl"))
    assert [found.rule.name for found in match_rules(rows)] == [name], rows[0]
    assert capsys.readouterr().out.count(f"no gradient: {rule.summary}") == PATIENCE
    assert caplog.text.count(rule.advice) == 1


def test_the_diagnosis_of_a_step_costs_as_much_late_in_a_run_as_early():
    """Python calls are counted, which a loop over the steps of the run would multiply."""
    rng, monitor, calls = random.Random(0), DiagnosisMonitor(), {}
    names = [*FINE, "reward/mean", "reward/std", "policy/entropy", "policy/kl", "policy/logprob_diff", "batch/lag_mean"]
    for step in range(1, 1201):
        metrics = {name: 0.5 + 0.1 * rng.random() for name in names} | {"step": step, "episode/count": 8.0}
        if step in (100, 1200):
            counted = Counter()
            sys.setprofile(lambda frame, event, _, counted=counted: counted.update([event]))
            try:
                monitor.add(metrics)
                monitor.alarm()
            finally:
                sys.setprofile(None)
            calls[step] = counted["call"] + counted["c_call"]
        else:
            monitor.history.add(metrics)
    assert calls[1200] <= 1.05 * calls[100]
