"""Checks of a model and a configuration before a run: first without weights, then with one small training step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.checkpoint import check_model
from arborl.config.run_config import RunConfig
from arborl.diagnosis.finding import Evidence, Finding, State, run_checks
from arborl.diagnosis.step_rules import BENIGN_STEP_RULES, diagnose_step
from arborl.doctor.chat_template_check import TEMPLATE_CHECKS, TemplateSubject
from arborl.envs.checker import check_env
from arborl.errors import ArborError
from arborl.models.model_files import check_supported, read_model_config, resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.seeds import derive
from arborl.trainer.step_metrics import batch_metrics, episode_metrics
from arborl.trainer.training_batch import prepare_batch
from arborl.trainer.weight_probe import StaleEngine, WeightSyncProbe
from arborl.training_run.build import RunParts, build, make_renderer
from arborl.types import NOT_SAMPLED, Episode, Forest, Group, Metrics, Terms

BROKEN = "The model, or a part that the configuration names, is broken: fix it, or name another."
MAX_TASKS, MAX_GROUP_SIZE = 4, 8
MAX_DIFF_FLOAT32, MAX_DIFF_BFLOAT16 = 1e-3, 0.05
"""Of mean exp|Δ| - 1 between the log-probabilities of engine and learner."""
MAX_UPDATE = 0.5
"""Mean change of log-probabilities by one update, in nats per token, from which a run can continue."""
ENV_SECONDS = 10.0
"""Timeout of one environment call during its contract check."""


def examine_model(config: RunConfig) -> list[Finding]:
    """The findings about a configuration: model, template, tasks, rewards and learner."""
    findings: list[Finding] = []
    try:
        folder = check_model(resolve(config.model.name))
        model_config = read_model_config(folder)
        check_supported(model_config, config.model.name, config.sampling.max_context)
        findings.append(Finding("model", "ok", f"{model_config.get('model_type', 'a model')} in {folder}"))
        has_tools = bool(config.tools) or any(source.tools for source in config.data.sources.values())
        subject = TemplateSubject(make_renderer(config, folder), model_config, has_tools)
    except (ArborError, OSError, ValueError) as error:
        return [*findings, Finding("model", "fail", str(error), "Do what the message says, or name another model.")]
    findings += run_checks(TEMPLATE_CHECKS, BROKEN, subject)
    try:
        with _without_warnings():
            parts = build(config)
    except (ArborError, OSError, ValueError, RuntimeError) as error:
        advice = "Do what the message says; `arborl train --print` shows all keys."
        return [*findings, Finding("configuration", "fail", str(error), advice)]
    return findings + asyncio.run(_run_first_step(parts))


async def _run_first_step(parts: RunParts) -> list[Finding]:
    try:
        with _without_warnings():
            step = await first_step(parts)
        return run_checks(STEP_CHECKS, BROKEN, step)
    except Exception as error:
        return [Finding("first step", "fail", f"{type(error).__name__}: {error}", BROKEN)]
    finally:
        await parts.close()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Warnings of the parts become findings here."""
    logger = logging.getLogger("arborl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class FirstStep:
    """One training step: its episodes, the models' log-probabilities, and the effect of the update."""

    parts: RunParts
    groups: list[Group]
    forest: Forest
    terms: Terms
    """Of all episodes that did not fail, with log-probabilities of learner and reference model."""
    metrics: Metrics
    update_size: float
    """Mean |Δ| of log-probabilities by the update; NaN without an update."""
    stale_message: str = ""
    """Message of the weight probe after the update."""

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def sampled(self) -> np.ndarray:
        """Mask of the terms that an engine sampled."""
        return np.asarray(self.terms.version != NOT_SAMPLED)


async def first_step(parts: RunParts) -> FirstStep:
    """Collect episodes and update, as the trainer does; the weights change in memory only."""
    config, learner, algorithm = parts.config, parts.learner, parts.algorithm
    tasks = parts.source.take(0, min(MAX_TASKS, config.rollout.tasks_per_step))
    await parts.engine.load(learner.weights(), version=0)
    probe = WeightSyncProbe(parts.engine)
    await probe.start()
    if config.data.offline:
        groups = parts.rollout.offline_groups(tasks)
    else:
        seed = derive(config.seed, "step", 0)
        groups = await parts.rollout.collect(tasks, seed, min(MAX_GROUP_SIZE, config.rollout.group_size))
        await parts.rewards.score(groups)
    forest = build_token_trees([Group(group.task, group.valid_episodes) for group in groups if group.valid_episodes])
    needs = AlgorithmNeeds(proximal=True, reference=algorithm.needs.reference)
    terms = learner.score_terms(forest.trees, forest.terms, needs)
    kept, batch, batch_terms = prepare_batch(algorithm, learner, groups)
    batch_terms = algorithm.credit(kept, batch_terms)
    metrics = episode_metrics(groups) | batch_metrics(batch, batch_terms, 0) | algorithm.metrics()
    metrics |= learner.update(batch.trees, batch_terms, algorithm, [])
    update_size, stale_message = float("nan"), ""
    if metrics.get("learner/steps") and len(terms):
        after = learner.score_terms(forest.trees, forest.terms, AlgorithmNeeds(proximal=True))
        update_size = float(np.mean(np.abs(after.proximal - terms.proximal)))
        await parts.engine.load(learner.weights(), version=1)
        try:
            await probe.check(metrics)
        except StaleEngine as error:
            stale_message = str(error)
    return FirstStep(parts, groups, forest, terms, metrics, update_size, stale_message)


# ------------------------------------------------------------------------------------------------ checks of the step


def check_episodes(step: FirstStep) -> Finding:
    failed = [episode for episode in step.episodes if episode.failure is not None]
    if not failed:
        return Finding("episodes", "ok", f"{len(step.episodes)} collected, none failed")
    state: State = "fail" if len(failed) > len(step.episodes) / 2 else "warn"
    detail = f"{len(failed)} of {len(step.episodes)} failed: {failed[0].failure}"
    advice = "Fix the part that the message names; `arborl rollout` runs one episode and prints it."
    return Finding("episodes", state, detail[:400], advice, _evidence(failed))


def check_environment(step: FirstStep) -> Finding:
    if step.parts.config.data.offline:
        return Finding("environment", "ok", "none: the data are demonstrations")
    task = step.parts.source.take(0, 1)[0]
    problems = check_env(lambda: step.parts.episode_factories.env(task), task, steps=8, seconds=ENV_SECONDS)
    if not problems:
        return Finding("environment", "ok", "keeps its contract")
    advice = "`arborl env check NAME` lists all problems; docs/environments.md has the contract."
    return Finding("environment", "warn", problems[0], advice)


def check_context(step: FirstStep) -> Finding:
    max_context = step.parts.config.sampling.max_context
    longest = max((len(call.prompt) for episode in step.episodes for call in episode.calls), default=0)
    full = [episode for episode in step.episodes if episode.stop == "context_full"]
    detail = f"the longest prompt has {longest} of {max_context} tokens"
    if not full:
        return Finding("context", "ok", detail)
    detail += f", and {len(full)} of {len(step.episodes)} episodes end because the context is full"
    state: State = "fail" if 2 * len(full) > len(step.episodes) else "warn"
    return Finding("context", state, detail, "Write a larger sampling.max_context, or context.policy.", _evidence(full))


def check_mask(step: FirstStep) -> Finding:
    """Every sampled token is one loss term, and nothing else is."""
    episodes = [episode for episode in step.episodes if episode.failure is None]
    sampled = sum(len(call.completion.tokens) for episode in episodes for call in episode.calls if call.trained)
    if sampled != len(step.terms):
        advice = "The agent or this library has a fault: `arborl rollout --ids` shows the tokens; please report it."
        return Finding("mask", "fail", f"{sampled} tokens were sampled, {len(step.terms)} are loss terms", advice)
    if not sampled:
        advice = "Check sampling.stop and sampling.max_tokens, and that the agent calls the model."
        return Finding("mask", "fail", "no token was sampled, so none can be trained on", advice)
    num_tokens = sum(len(tree) for tree in step.forest.trees)
    return Finding("mask", "ok", f"{sampled} sampled tokens, each one loss term; {num_tokens} tokens are computed")


def check_logprobs(step: FirstStep) -> Finding:
    """Engine and learner compute the same log-probabilities with the same weights."""
    name, sampled = "engine and learner", step.sampled
    if not sampled.any():
        return Finding(name, "ok", "nothing was sampled")
    difference = np.abs(step.terms.proximal[sampled] - step.terms.logprob[sampled])
    if not np.isfinite(difference).all():
        advice = "The weights are damaged, or float16 overflows: write model.dtype=bfloat16, or use another checkpoint."
        return Finding(name, "fail", "log-probabilities are not finite", advice)
    mean = float(np.mean(np.exp(np.minimum(difference, 20.0)) - 1))
    config = step.parts.config
    is_float32 = config.model.dtype == "float32" or step.parts.model.dtype.itemsize >= 4
    detail = f"mean exp|Δ| - 1 is {mean:.1e}, the largest |Δ| {float(difference.max()):.1e}"
    if mean <= (MAX_DIFF_FLOAT32 if is_float32 and config.engine.name == "local" else MAX_DIFF_BFLOAT16):
        return Finding(name, "ok", detail)
    advice = "Importance ratios are wrong from the start. Write model.head=float32 or model.dtype=float32; with a "
    return Finding(name, "fail", detail, f"{advice}remote server, check its weights and sampling settings.")


def check_reference(step: FirstStep) -> Finding:
    """Before any update the policy equals the reference model."""
    if not step.parts.algorithm.needs.reference or not len(step.terms):
        return Finding("KL at step 0", "ok", "the algorithm uses no reference model")
    distance = float(np.mean(np.abs(step.terms.reference - step.terms.proximal)))
    if distance < 1e-3:
        return Finding("KL at step 0", "ok", f"{distance:.1e} nats per token")
    advice = "The KL penalty pulls towards another model: start from the reference model."
    return Finding("KL at step 0", "fail", f"the reference is {distance:.2g} nats per token away", advice)


def check_reward_variance(step: FirstStep) -> Finding:
    name = "reward variance"
    if step.parts.config.data.offline:
        return Finding(name, "ok", "the data are demonstrations: no rewards")
    rule = diagnose_step(step.metrics | {"step": 1})
    if rule is not None and rule.name not in BENIGN_STEP_RULES:
        return Finding(name, "warn", rule.summary, rule.advice, _evidence(step.episodes))
    share, reward = step.metrics.get("group/zero_variance", 0.0), step.metrics.get("reward/mean", 0.0)
    detail = f"{1 - share:.0%} of {len(step.groups)} groups have reward variance; mean reward {reward:.3g}"
    if share > 0.75:
        return Finding(name, "warn", detail, "Use tasks that are sometimes solved, or a larger rollout.group_size.")
    return Finding(name, "ok", detail)


def check_completions(step: FirstStep) -> Finding:
    share = step.metrics.get("call/cut_off", 0.0)
    advice = "Write a larger sampling.max_tokens; if no completion ends by itself, see `stop token`."
    detail = f"{share:.0%} are cut off at sampling.max_tokens"
    return Finding("completions", "warn", detail, advice) if share > 0.3 else Finding("completions", "ok", detail)


def check_format(step: FirstStep) -> Finding:
    """Environment and tool parser understand the model's messages."""
    valid, calls = step.metrics.get("episode/valid"), step.metrics.get("episode/tool/calls", 0.0)
    malformed = step.metrics.get("episode/tool/malformed", 0.0)
    if calls and malformed > 0.5 * calls:
        advice = "Write the agent.tool_format that the model was trained with."
        return Finding("format", "fail", f"{malformed / calls:.0%} of tool calls cannot be parsed", advice)
    details = [f"the environment can parse {valid:.0%} of the messages"] if valid is not None else []
    if valid is not None and valid < 0.3:
        advice = "State the format in the prompt, with an example; a few steps of algorithm=sft teach the format."
        return Finding("format", "warn", details[0], advice, _evidence(step.episodes))
    details += [f"{calls:.1f} tool calls per episode"] if calls else []
    return Finding("format", "ok", ", ".join(details) or "no part reports whether messages are valid")


def check_update(step: FirstStep) -> Finding:
    """One update changes the policy, but not too far."""
    metrics = step.metrics
    if not metrics.get("learner/steps"):
        causes = [name.rpartition("/")[2] for name, share in metrics.items() if "skipped/" in name and share]
        if causes == ["no_terms"]:
            return Finding("update", "warn", "none: every group has zero reward variance", "See reward variance.")
        advice = "Write a smaller learner.lr, and check that rewards are finite numbers."
        return Finding("update", "fail", f"skipped: {', '.join(causes) or 'no gradient'}", advice)
    norm = metrics.get("learner/grad_norm", 0.0)
    detail = f"gradient norm {norm:.3g}, log-probabilities change by {step.update_size:.1e} nats per token"
    is_sampled = bool(step.sampled.any())  # demonstrations may be unlikely, and become likelier at once
    if not np.isfinite(step.update_size) or (is_sampled and step.update_size > MAX_UPDATE):
        return Finding("update", "fail", detail, "The learning rate is too high: write a smaller learner.lr.")
    if step.update_size == 0 and metrics.get("learner/lr", 0.0) > 0:
        advice = "The weights did not change: write learner.master=float32, or a larger learner.lr."
        return Finding("update", "warn", detail, advice)
    return Finding("update", "ok", detail)


def check_weight_sync(step: FirstStep) -> Finding:
    if step.stale_message:
        advice = "See docs/engines.md: new weights must reach the engine."
        return Finding("weight sync", "fail", step.stale_message, advice)
    return Finding("weight sync", "ok", "the engine's reply to a probe changes with the weights")


def check_memory(step: FirstStep) -> Finding:
    plan = step.parts.plan
    if plan.fits:
        return Finding("memory forecast", "ok", plan.summary)
    smaller = "engine.kv_tokens, sampling.max_context or learner.micro_batch_tokens, or model.lora.rank=16."
    return Finding("memory forecast", "warn", plan.summary, plan.warning or f"Write a smaller {smaller}")


STEP_CHECKS: tuple[Callable[[FirstStep], Finding], ...] = (
    check_episodes, check_environment, check_context, check_mask, check_logprobs, check_reference,
    check_reward_variance, check_completions, check_format, check_update, check_weight_sync, check_memory,
)  # fmt: skip


def _evidence(episodes: list[Episode]) -> tuple[Evidence, ...]:
    return tuple(Evidence(1, episode.task.id, episode.id, episode.answer[:60]) for episode in episodes[:2])
