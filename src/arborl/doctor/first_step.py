"""One small step, played and learned from: do engine, learner, rewards and environment agree about it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arborl.algorithms.algorithm import Needs
from arborl.doctor.finding import Evidence, Finding, State
from arborl.envs.checker import check_env
from arborl.rollout.tree import plant
from arborl.seeds import derive
from arborl.trainer.diagnosis import FINE_STEP, diagnose
from arborl.trainer.look import look
from arborl.trainer.probe import StaleEngine, SyncProbe
from arborl.trainer.summary import describe_batch, summarize
from arborl.training_run.build import RunParts
from arborl.types import NOT_SAMPLED, Episode, Forest, Group, Metrics, Terms

TASKS, MEMBERS = 4, 8
"""Groups that are played, and episodes of each, at most."""
EXACT, COARSE = 1e-3, 0.05
"""Of mean exp|Δ| - 1 between engine and learner: what float32 keeps, and what bfloat16 does."""
LEAP = 0.5
"""Nats a token that one update moves log-probabilities by at most, on average, where a run is to go on learning."""
SECONDS = 10.0
"""What one call of the environment may take while it is held to its contract."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What was played, what the models say of it, and what one update did."""

    parts: RunParts
    groups: list[Group]
    forest: Forest
    terms: Terms
    """Of all episodes that did not fail, with what the learner and the reference say."""
    metrics: Metrics
    """As the first line of a run would have them."""
    moved: float
    """Mean |Δ| of log-probabilities after the update; NaN where there was none."""
    stale: str = ""
    """What the probe said of the engine after it."""

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def sampled(self) -> np.ndarray:
        """Which terms an engine has sampled."""
        return np.asarray(self.terms.version != NOT_SAMPLED)


async def take(parts: RunParts) -> FirstStep:
    """Play and learn, as the trainer does; the weights change in memory alone."""
    config, learner, algorithm = parts.config, parts.learner, parts.algorithm
    seed = derive(config.seed, "step", 0)
    tasks = parts.source.take(0, min(TASKS, config.rollout.tasks_per_step))
    await parts.engine.load(learner.weights(), version=0)
    probe = SyncProbe(parts.engine)
    await probe.ask()
    if config.data.offline:
        groups = parts.rollout.shown(tasks)
    else:
        groups = await parts.rollout.collect(tasks, seed, min(MEMBERS, config.rollout.group_size))
        await parts.rewards.score(groups)
    alive = [Group(group.task, group.valid_episodes) for group in groups if group.valid_episodes]
    forest = plant(alive)
    asked = Needs(proximal=True, reference=algorithm.needs.reference)
    terms = learner.look(forest.trees, forest.terms, asked)
    kept, learned, wanted = look(algorithm, learner, groups)
    credited = algorithm.credit(kept, wanted)
    metrics = summarize(groups) | describe_batch(learned, credited, 0) | algorithm.metrics()
    metrics |= learner.update(learned.trees, credited, algorithm, [])
    moved, stale = float("nan"), ""
    if metrics.get("learner/steps") and len(terms):
        after = learner.look(forest.trees, forest.terms, Needs(proximal=True))
        moved = float(np.mean(np.abs(after.proximal - terms.proximal)))
        await parts.engine.load(learner.weights(), version=1)
        try:
            await probe.check(metrics)
        except StaleEngine as error:
            stale = str(error)
    return FirstStep(parts, groups, forest, terms, metrics, moved, stale)


# ------------------------------------------------------------------------------------------------ the questions


def episodes_played(step: FirstStep) -> Finding:
    failed = [episode for episode in step.episodes if episode.failure is not None]
    if not failed:
        return Finding("episodes", "ok", f"{len(step.episodes)} played, none failed")
    state: State = "fail" if len(failed) > len(step.episodes) / 2 else "warn"
    detail = f"{len(failed)} of {len(step.episodes)} failed: {failed[0].failure}"
    advice = "Mend the part that it names; `arborl rollout` plays one episode and shows it."
    return Finding("episodes", state, detail[:400], advice, _shown(failed))


def environment(step: FirstStep) -> Finding:
    if step.parts.config.data.offline:
        return Finding("environment", "ok", "none: rows are given")
    tasks = step.parts.source.take(0, 1)
    problems = check_env(lambda: step.parts.cast.env(tasks[0]), tasks[0], steps=8, seconds=SECONDS)
    if not problems:
        return Finding("environment", "ok", "keeps its contract")
    advice = "`arborl env check NAME` says all of them; docs/environments.md has the contract."
    return Finding("environment", "warn", problems[0], advice)


def prompts_fit(step: FirstStep) -> Finding:
    """How much of the context the first prompts take."""
    room = step.parts.config.sampling.max_context
    longest = max((len(call.prompt) for episode in step.episodes for call in episode.calls), default=0)
    cut = [episode for episode in step.episodes if episode.stop == "context_full"]
    told = f"the longest prompt has {longest} of {room} tokens"
    if cut:
        told += f", and {len(cut)} of {len(step.episodes)} episodes end because it is full"
    if 2 * len(cut) > len(step.episodes):
        return Finding("context", "fail", told, "Write a larger sampling.max_context, or context.policy.", _shown(cut))
    return Finding("context", "warn" if cut else "ok", told, "Write a larger sampling.max_context." if cut else "")


def mask_coverage(step: FirstStep) -> Finding:
    """Every sampled token is one loss term, and nothing else is."""
    alive = [episode for episode in step.episodes if episode.failure is None]
    said = sum(len(call.completion.tokens) for episode in alive for call in episode.calls if call.trained)
    shared = said - len(step.terms)
    whole = sum(len(tree) for tree in step.forest.trees)
    if shared:
        return Finding("mask", "fail", f"{said} tokens were sampled and {len(step.terms)} are loss terms", REPORT)
    if not said:
        return Finding("mask", "fail", "no token was sampled, so none can be learned from", NOTHING)
    return Finding("mask", "ok", f"{said} sampled tokens, each one loss term; {whole} tokens are run")


REPORT = "An agent's doing, or a fault of this library: `arborl rollout --ids` shows the tokens; please report it."
NOTHING = "Check sampling.stop and sampling.max_tokens, and that the agent calls the model."


def log_probabilities(step: FirstStep) -> Finding:
    """Engine and learner say the same of the same weights."""
    name, own = "engine and learner", step.sampled
    if not own.any():
        return Finding(name, "ok", "nothing was sampled")
    gap = np.abs(step.terms.proximal[own] - step.terms.logprob[own])
    if not np.isfinite(gap).all():
        advice = (
            "The weights are damaged, or float16 overflows: write model.dtype=bfloat16, or take another checkpoint."
        )
        return Finding(name, "fail", "log-probabilities are not finite", advice)
    mean, widest = float(np.mean(np.exp(np.minimum(gap, 20.0)) - 1)), float(gap.max())
    exact = step.parts.config.model.dtype == "float32" or step.parts.model.dtype.itemsize >= 4
    told = f"mean exp|Δ| - 1 is {mean:.1e}, the widest |Δ| {widest:.1e}"
    if mean <= (EXACT if exact and step.parts.config.engine.name == "local" else COARSE):
        return Finding(name, "ok", told)
    advice = "Ratios are then wrong from the start. Write model.head=float32 or model.dtype=float32; with a server of "
    return Finding(name, "fail", told, f"{advice}others, check that it has these weights and samples as asked.")


def kl_at_start(step: FirstStep) -> Finding:
    """Before any update the policy is its own reference."""
    if not step.parts.algorithm.needs.reference or not len(step.terms):
        return Finding("KL at step 0", "ok", "no reference is asked for")
    far = float(np.mean(np.abs(step.terms.reference - step.terms.proximal)))
    if far < 1e-3:
        return Finding("KL at step 0", "ok", f"{far:.1e} nats a token")
    advice = "The penalty would pull towards another model: begin from the model that is the reference."
    return Finding("KL at step 0", "fail", f"the reference is {far:.2g} nats a token away", advice)


def rewards_vary(step: FirstStep) -> Finding:
    """By the same table that is asked of every step of a run."""
    name = "reward variance"
    if step.parts.config.data.offline:
        return Finding(name, "ok", "nothing is rewarded: rows are given")
    found = diagnose(step.metrics | {"step": 1})
    if found is not None and found.name not in FINE_STEP:
        return Finding(name, "warn", found.short, found.advice, _shown(step.episodes))
    flat, earned = step.metrics.get("group/zero_variance", 0.0), step.metrics.get("reward/mean", 0.0)
    told = f"{1 - flat:.0%} of {len(step.groups)} groups have something to compare; mean reward {earned:.3g}"
    advice = "Take tasks that are sometimes solved, or a larger rollout.group_size." if flat > 0.75 else ""
    return Finding(name, "warn" if flat > 0.75 else "ok", told, advice)


def replies_end(step: FirstStep) -> Finding:
    cut = step.metrics.get("call/cut_off", 0.0)
    advice = "Write a larger sampling.max_tokens; if no reply ends by itself, see `stop token`." if cut > 0.3 else ""
    return Finding("replies", "warn" if cut > 0.3 else "ok", f"{cut:.0%} are cut off at sampling.max_tokens", advice)


def replies_valid(step: FirstStep) -> Finding:
    """Whether what the model says is understood by who reads it."""
    valid, calls = step.metrics.get("episode/valid"), step.metrics.get("episode/tool/calls", 0.0)
    broken = step.metrics.get("episode/tool/malformed", 0.0)
    if calls and broken > 0.5 * calls:
        advice = "Write agent.tool_format as the model was taught."
        return Finding("form", "fail", f"{broken / calls:.0%} of tool calls cannot be read", advice)
    if valid is not None and valid < 0.3:
        advice = "Say in the prompt what to write, with an example; a few steps of algorithm=sft teach the form."
        return Finding(
            "form", "warn", f"the environment understands {valid:.0%} of the replies", advice, _shown(step.episodes)
        )
    told = [f"the environment understands {valid:.0%} of the replies"] if valid is not None else []
    told += [f"{calls:.1f} tool calls an episode"] if calls else []
    return Finding("form", "ok", ", ".join(told) or "nothing says what form replies have")


def update(step: FirstStep) -> Finding:
    """One update moves the policy, and not out of itself."""
    metrics = step.metrics
    if not metrics.get("learner/steps"):
        why = [name.rpartition("/")[2] for name, share in metrics.items() if "skipped/" in name and share]
        if why == ["no_terms"]:
            return Finding("update", "warn", "none: no group has anything to compare", "See reward variance.")
        advice = "Write a smaller learner.lr, and check that rewards are finite numbers."
        return Finding("update", "fail", f"skipped: {', '.join(why) or 'no gradient'}", advice)
    told = (
        f"gradient {metrics.get('learner/grad_norm', 0.0):.3g}, log-probabilities move by {step.moved:.1e} nats a token"
    )
    own = bool(step.sampled.any())  # what is given may be as unlikely as it likes, and becomes likelier at once
    if not np.isfinite(step.moved) or (own and step.moved > LEAP):
        return Finding("update", "fail", told, "The learning rate is too high: write a smaller learner.lr.")
    if step.moved == 0 and metrics.get("learner/lr", 0.0) > 0:
        return Finding("update", "warn", told, "Nothing moved: write learner.master=float32, or a larger learner.lr.")
    return Finding("update", "ok", told)


def engine_follows(step: FirstStep) -> Finding:
    if step.stale:
        return Finding("engine follows", "fail", step.stale, "See docs/engines.md: new weights must reach the engine.")
    return Finding("engine follows", "ok", "its answer to a probe changes with the weights, or it proves them itself")


def memory(step: FirstStep) -> Finding:
    plan = step.parts.plan
    if plan.fits:
        return Finding("memory forecast", "ok", plan.told)
    return Finding("memory forecast", "warn", plan.told, plan.warning or SMALLER)


SMALLER = "Write a smaller engine.kv_tokens, sampling.max_context or learner.micro_batch_tokens, or model.lora.rank=16."

QUESTIONS: tuple[Callable[[FirstStep], Finding], ...] = (
    episodes_played,
    environment,
    prompts_fit,
    mask_coverage,
    log_probabilities,
    kl_at_start,
    rewards_vary,
    replies_end,
    replies_valid,
    update,
    engine_follows,
    memory,
)


def _shown(episodes: list[Episode]) -> tuple[Evidence, ...]:
    return tuple(Evidence(1, episode.task.id, episode.id, episode.answer[:60]) for episode in episodes[:2])
