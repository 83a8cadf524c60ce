"""The faults that the doctor must find: one table, run by the tests and listed in docs/results/doctor.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fault_parts as parts
import fault_runs as runs
from fault_parts import AGAIN, CONTENT, NO_THOUGHTS, model, swap
from fault_runs import always, both, grows, since

import arborl
from arborl.config.load_config import load
from arborl.diagnosis import Finding, examine_run
from arborl.diagnosis.finding import run_checks
from arborl.doctor.chat_template_check import TEMPLATE_CHECKS, Renderer, TemplateSubject
from arborl.doctor.model_check import BROKEN, examine_model
from arborl.errors import RunStopped
from arborl.models.model_files import read_model_config
from arborl.types import Failure, FinishReason


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is made wrong, and the finding that must say so."""

    what: str
    finding: str
    find: Callable[[Path], list[Finding]]
    how: str
    state: str = "fail"
    is_covered: bool = False
    """Whether `tests/trainer/test_diagnosis.py` plays such a run too, so that this one may be left for slow tests."""


# ------------------------------------------------------------------------------------------------ models


def twice(text: str) -> str:
    """The template with the begin token in front, twice."""
    return "{{- bos_token }}{{- bos_token }}" + text


def shown(what: str, finding: str, state: str = "fail", tool_format: str = "auto", **changes: Any) -> Fault:
    """A fault of a model's folder, found without its weights."""

    def find(tmp: Path) -> list[Finding]:
        folder = model(tmp / "model", **changes)
        renderer = Renderer.from_folder(folder, tool_format)
        subject = TemplateSubject(renderer, read_model_config(folder), tools=True)
        return run_checks(TEMPLATE_CHECKS, BROKEN, subject)

    return Fault(what, finding, find, "doctor --model", state)


SMALL = ("threads=1", "rollout.tasks_per_step=2", "rollout.group_size=4", "env.name=fault_parts:Yes")


def stepped(what: str, finding: str, *settings: str, state: str = "fail") -> Fault:
    """A fault of a configuration, found by a first step."""
    return Fault(what, finding, lambda tmp: examine_model(load(None, [*SMALL, *settings])), "doctor --model", state)


ENDS = "{{- '<|im_end|>\\n' }}"
"""Behind every message of the template."""
MODELS = (
    shown("template strips thoughts from the history", "append-only template", "warn",
          template=swap(CONTENT, NO_THOUGHTS)),
    shown("template appends a space to earlier replies", "append-only template", "warn",
          template=swap(ENDS, AGAIN)),
    shown("template renders only the last message", "messages kept",
          template=swap("for message in messages", "for message in messages[-1:]")),
    shown("template drops system messages", "messages kept", "warn",
          template=swap("{{- messages[0].content + '\\n' }}", "{{- '' }}")),
    shown("template drops tool results", "messages kept",
          template=swap("message.content + '</tool_response>", "'</tool_response>")),
    shown("template rejects tool messages", "messages kept",
          template=swap("{{- '<|im_start|>tool\\n", "{{- raise_exception('no tools') }}{{- '<|im_start|>tool\\n")),
    shown("template writes the begin token twice", "begin token",
          template=twice, tokenizer_config=parts.begin),
    shown("template omits the begin token that the tokenizer adds", "begin token", "warn",
          tokenizer_config=parts.begin_added),
    shown("replies end with text that is not a stop token", "stop token",
          template=swap(ENDS, "{{- '\\n###\\n' }}")),
    shown("stop token differs from the template's", "stop token",
          template=swap(ENDS, "{{- '<|endoftext|>\\n' }}")),
    shown("template ignores add_generation_prompt", "generation prompt",
          template=swap("{%- if add_generation_prompt %}", "{%- if false %}")),
    shown("template renders tool calls in another format", "tool round trip",
          template=swap("'<tool_call>' + (", "'CALL ' + (")),
    shown("tool calls are parsed in another format", "tool round trip", tool_format="mistral"),
    shown("tokenizer loses upper case", "tokenizer", "warn", tokenizer=parts.lower),
    shown("tokenizer of a larger model", "vocabulary", config=parts.few),
    stepped("model does not exist", "model", "model.name=no/such-model"),
    stepped("reward that is always 0", "reward variance", "rewards=[fault_parts:nothing]", state="warn"),
    stepped("learner.lr=10", "update", "learner.lr=10", "env.name=frozen_lake"),
    stepped("environment that raises", "episodes", "env.name=fault_parts:Broken", "env.args.always=true"),
    stepped("environment with several first observations of one task", "environment",
            "env.name=fault_parts:Forgetful", state="warn"),
    stepped("engine with wrong log-probabilities", "engine and learner",
            "engine.name=scripted", "engine.args.replies=[Yes.,No.]"),
    stepped("replies cut off after two tokens", "completions",
            "sampling.max_tokens=2", "env.name=frozen_lake", state="warn"),
    stepped("context smaller than the prompt", "context",
            "sampling.max_context=40", "sampling.max_tokens=8", "env.name=frozen_lake"),
    stepped("micro-batch exceeds the memory", "memory forecast", "learner.micro_batch_tokens=900000000", state="warn"),
    stepped("tool calls that are not JSON", "format", "agent.name=tool", "tools=[calculator]", "engine.name=scripted",
            "engine.args.replies=['<tool_call>{calculator: 2</tool_call>']"),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ real runs

CALL = '<tool_call>{"name": "divide", "arguments": {"number": 1}}</tool_call>'
SCRIPTED: Mapping[str, Any] = {"engine.name": "scripted", "engine.args.replies": ["Yes.", "No."]}
QUICK: Mapping[str, Any] = {
    "rollout.tasks_per_step": 4, "rollout.group_size": 4,
    "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0, "threads": 1,
}  # fmt: skip
SEEDLING: Mapping[str, Any] = {"engine.name": "local", "env.name": "frozen_lake"}


def ran(
    what: str, finding: str, state: str = "fail", steps: int = 6, is_covered: bool = False, **settings: Any
) -> Fault:
    """A fault of a whole small run, found in its folder."""

    def find(tmp: Path) -> list[Finding]:
        given = {name: value(tmp) if callable(value) and name == "model" else value for name, value in settings.items()}
        more = given.pop("more", {})
        quick = {**QUICK, **SCRIPTED} if "engine.name" not in more else QUICK
        with suppress(RunStopped):
            arborl.run(output_dir=tmp / "run", steps=steps, **{**quick, **more, **given})
        return examine_run(tmp / "run")

    return Fault(what, finding, find, "run", state, is_covered)


REAL = (
    ran("reward that is always 0", "reward_constant", env=parts.Yes(pays=False)),
    ran("environment that raises for every other task", "episodes_fail", "warn", env=parts.Broken()),
    ran("environment that always raises", "run", env=parts.Broken(always=True)),
    ran("constant observation", "environment_unresponsive", env=parts.Yes(pays=False, turns=4), steps=3),
    ran("agent without tools", "no_tools", env=parts.Yes(pays=False), agent="tool", steps=3, is_covered=True),
    ran("tool that always raises", "tools_fail", env=parts.Yes(), agent="tool", tools=[parts.divide], steps=3,
        is_covered=True, more={"engine.args.replies": [CALL]}),
    ran("tools that are never called", "tools_unused", "warn", env=parts.Yes(), agent="tool", tools=[parts.divide]),
    ran("tool calls parsed in another format", "wrong_tool_format", env=parts.Yes(), agent="tool", tools=[parts.divide],
        steps=3, more={"engine.args.replies": [CALL, f"Yes. {CALL}"], "agent.tool_format": "mistral"}),
    ran("prompts longer than the context", "prompts_too_long", env=parts.Yes(opening="word " * 400), steps=3,
        is_covered=True, more={"sampling.max_context": 100, "sampling.max_tokens": 8}),
    ran("replies cut off", "cut_off", env=parts.Yes(pays=False), steps=3,
        more={"sampling.max_tokens": 2, "engine.args.replies": ["No, no, no, no.", "Never, not at all."]}),
    ran("group filter that no group passes", "filtered", env=parts.Yes(pays=False), steps=3,
        is_covered=True, more={"rollout.group_filter": "varied"}),
    ran("reward that is sometimes not a number", "episodes_fail", "warn", env=parts.Yes(), rewards=[parts.not_a_number],
        steps=3),
    ran("reward with the wrong sign", "failures_rewarded", steps=2,
        more={**SEEDLING, "rollout.group_size": 8, "rewards": [{"name": "env", "weight": -1.0}]}),
    ran("learner.lr=10", "lr_too_high", steps=3,
        more={**SEEDLING, "learner.lr": 10.0, "sampling.max_tokens": 6, "rollout.max_turns": 4}),
    ran("template that writes the begin token twice", "double_bos", steps=2, env=parts.Yes(),
        model=lambda tmp: model(tmp / "model", twice, tokenizer_config=parts.begin)),
    ran("template that rewrites the history", "history_rewritten", "warn", steps=2, env=parts.Yes(turns=3),
        model=lambda tmp: model(tmp / "model", swap(ENDS, AGAIN))),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ written ones


def written(what: str, finding: str, change: runs.Change = dict, state: str = "fail", **more: Any) -> Fault:
    """A fault written into the files of a run that is well."""
    return Fault(what, finding, lambda tmp: examine_run(runs.write(tmp / "run", change, **more)), "run files", state)


def looping(step: int, task: int, member: int) -> Any:
    return runs.episode(step, task, member, ids=[20, 21, 22] * 20)


def same(step: int, task: int, member: int) -> Any:
    return runs.episode(step, task, member, replies=["Go left.", "Go left."])


def silent(step: int, task: int, member: int) -> Any:
    made = runs.episode(step, task, member)
    made.calls = [
        replace(call, completion=replace(call.completion, tokens=(2,), logprobs=(-0.1,), finish=FinishReason.STOP))
        for call in made.calls
    ]
    return made


def trained(step: int, task: int, member: int) -> Any:
    return runs.episode(1, task % runs.TASKS, member)


def failing(step: int, task: int, member: int) -> Any:
    made = runs.episode(step, task, member)
    if task == 1:
        made.failure, made.rewards = Failure("tool 'search'", "timeout", "no answer"), {}
    return made


TOOLS = {"episode/tool/offered": 2.0, "episode/tool/calls": 2.0, "episode/tool/used": 0.9}
HALF = runs.STEPS // 2
WORSE = always({"evaluation/success": 0.02, "evaluation/success_low": 0.0, "evaluation/success_high": 0.05})
WRITTEN = (
    written("entropy collapses in the middle of the run", "entropy_collapsed",
            since(HALF, always({"policy/entropy": 0.001, "group/zero_variance": 0.75, "episode/success": 0.3,
                              "reward/mean": 0.3}))),
    written("entropy jumps and the reward drops", "lr_too_high",
            since(HALF, always({"policy/entropy": 5.0, "episode/success": 0.02, "reward/mean": 0.02}))),
    written("gradient of 400 at one step", "gradient_spikes",
            lambda row: {"learner/grad_norm": 400.0} if row["step"] == 9 else {}, "warn"),
    written("KL to the reference model grows", "far_from_reference", grows("policy/kl", 0.01, 5.0), "warn"),
    written("most tokens are clipped", "clipped", always({"policy/clipped": 0.7}), "warn"),
    written("loss is not a number", "not_a_number", since(HALF, always({"policy/loss": None}))),
    written("engine log-probabilities differ", "logprob_diff_high", always({"policy/logprob_diff": 0.3})),
    written("engine log-probabilities drift", "logprob_diff_grows", grows("policy/logprob_diff", 1e-6, 0.2), "warn"),
    written("server with other weights", "engine_stale", since(HALF, always({"engine/probe_gap": 3.0}))),
    written("half of the episodes are too stale", "stale_dropped", always({"rollout/dropped_stale": 16.0}), "warn"),
    written("replies ten times as long, no more success", "length_explodes",
            both(grows("episode/sampled", 20.0, 250.0), always({"episode/success": 0.4, "reward/mean": 0.4})), "warn"),
    written("half of the replies are cut off", "cut_off_often", since(HALF, always({"call/cut_off": 0.5})), "warn"),
    written("the context is full in half of the episodes", "context_often_full",
            always({"stop/context_full": 0.5}), "warn"),
    written("every episode reaches the turn limit", "out_of_turns",
            always({"stop/max_turns": 1.0, "stop/done": 0.0, "episode/success": 0.1}), "warn"),
    written("replies lose their format", "format_lost", since(HALF, always({"episode/valid": 0.2})), "warn"),
    written("nine of ten groups have zero variance", "mostly_zero_variance",
            since(3, always({"group/zero_variance": 0.9, "episode/success": 0.1, "reward/mean": 0.1})), "warn"),
    written("reward falls", "reward_falls", both(grows("reward/mean", 0.6, 0.1), grows("episode/success", 0.6, 0.1))),
    written("reward rises while success falls", "reward_hacked", grows("episode/success", 0.6, 0.1)),
    written("reward rises while held-out success falls", "reward_hacked",
            since(runs.STEPS, WORSE)),
    written("worse on held-out tasks than at the start", "evaluation_worse",
            since(runs.STEPS, WORSE)),
    written("reward does not change", "reward_unchanged",
            both(always({"reward/mean": 0.3, "episode/success": 0.3}),
                 since(runs.STEPS, always({"evaluation/success": 0.2}))),
            "warn"),
    written("environment that hangs", "calls_hang", since(HALF, always({"rollout/threads_stuck": 3.0})), "warn"),
    written("node that is lost and returns", "processes_lost",
            since(HALF, always({"engine/lost": 1.0, "engine/seconds_lost": 30.0})), "warn"),
    written("learner rank that is lost", "processes_lost",
            since(HALF, always({"learner/lost": 1.0, "learner/seconds_lost": 16.0})), "warn"),
    written("half of the groups are missing", "groups_missing", always({"rollout/missing": 4.0}), "warn"),
    written("tool with occasional timeouts", "episodes_fail",
            always({"episode/failed": 4.0, "failed/tool 'search'": 4.0}), "warn", make=failing),
    written("tool calls with wrong arguments", "tool_misused",
            always({**TOOLS, "episode/tool/arguments": 1.5}), "warn"),
    written("tool that is down", "tool_broken", since(3, always({**TOOLS, "episode/tool/timeout": 1.8}))),
    written("tool calls that cannot be parsed", "calls_unreadable", always({**TOOLS, "episode/tool/malformed": 1.9})),
    written("replies that repeat themselves", "replies_loop", make=looping),
    written("one reply for every task", "identical_replies", make=same),
    written("empty replies", "empty_replies", make=silent),
    written("held-out tasks that are trained on", "held_out_leaked", held_out=trained),
)  # fmt: skip

FAULTS = (*MODELS, *REAL, *WRITTEN)
