"""Evaluation of policies on the same held-out tasks, or on given prompts.

A policy is a run, a checkpoint, a model, a YAML file (its initial model), or `openai:NAME` at an address. A model, or
one at an address, has no settings; it is evaluated with those of the first policy that has some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arborl.config.config_base import validate
from arborl.config.engine_config import PlacementConfig
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.data import TaskSource
from arborl.data.reading.row_reader import RowReader
from arborl.errors import ConfigError, RunStopped
from arborl.registry import OBJECT_PREFIX
from arborl.training_run.build import RunParts, build
from arborl.training_run.run_folder import locate_model
from arborl.types import Episode, Task

if TYPE_CHECKING:
    from arborl.trainer.evaluation import Evaluator
    from arborl.trainer.policy_comparison import PolicyResult

REMOTE = "openai:"
PROMPTS, UNJUDGED = f"{OBJECT_PREFIX}prompts", f"{OBJECT_PREFIX}unjudged"
OPENAI = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    overrides: Sequence[str] = ()
    temperatures: Sequence[float] = ()
    """Sampling temperatures, 0 for greedy. Default: as configured."""
    attempts: int | None = None
    """Episodes per task. Default: as configured."""
    prompts: Sequence[Mapping[str, Any]] | None = None
    """Rows instead of held-out tasks, in the format of data rows."""
    base_url: str = OPENAI
    """Address of `openai:` models."""
    key: str | None = None
    """Environment variable with the API key. Default at OpenAI's address: OPENAI_API_KEY."""
    trust: bool = False
    """Import parts that an unsigned run folder names."""


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    name: str
    config: RunConfig


class HeldOutRows(TaskSource):
    def __init__(self, tasks: Sequence[Task]):
        self.tasks = list(tasks)

    def take(self, step: int, count: int) -> list[Task]:
        return []

    def evaluation(self, count: int) -> list[Task]:
        return self.tasks


def policies(names: Sequence[str], options: MeasureOptions) -> list[MeasuredPolicy]:
    """The named policies with their settings; no model is loaded."""
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"{twice[0]}: named twice. Name each policy once.")
    configs: dict[str, RunConfig | None] = dict.fromkeys(names)
    for name in names:  # a model has no settings of its own
        if not name.startswith(REMOTE) and locate_model(name, options.overrides, options.trust).run is not None:
            configs[name] = settings_of(name, options)
    common = next((config for config in configs.values() if config is not None), None) or load(None, options.overrides)
    return [
        MeasuredPolicy(name, _with_options(config or _model_settings(name, common, options), options))
        for name, config in configs.items()
    ]


def settings_of(name: str, options: MeasureOptions, only: Collection[str] = ()) -> RunConfig:
    place = locate_model(name, options.overrides, options.trust, only)
    config = place.config
    if not any(word.startswith("placement") for word in options.overrides):  # its cluster may be gone or busy
        config = config.model_copy(update={"placement": PlacementConfig()})
    return _of_model(config, str(place.model))


def _model_settings(name: str, common: RunConfig, options: MeasureOptions) -> RunConfig:
    if not name.startswith(REMOTE):
        return _of_model(common, str(locate_model(name, options.overrides, options.trust).model))
    url = options.base_url.rstrip("/")
    key = options.key or ("OPENAI_API_KEY" if url == OPENAI else None)
    where = {"urls": [url.removesuffix("/v1")], "model": name.removeprefix(REMOTE), "api_key_env": key}
    return validate(RunConfig, common.model_dump() | {"engine": {"name": "http", "args": {"chat": True} | where}})


def _of_model(config: RunConfig, model: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"name": model})})


def _with_options(config: RunConfig, options: MeasureOptions) -> RunConfig:
    tree = config.model_dump()
    if options.attempts is not None:
        tree["evaluation"]["group_size"] = options.attempts
    if options.prompts is None:
        if config.evaluation.tasks == 0:
            raise ConfigError("evaluation.tasks=0: nothing to evaluate. Write evaluation.tasks=200.")
        return validate(RunConfig, tree) if options.attempts is not None else config
    if not tasks_of(config, options.prompts):  # reports mistakes in rows first
        raise ConfigError("there are no prompts. Write at least one row.")
    if not config.data.has_rows or config.data.offline:  # its environment makes tasks; `question` takes rows
        tree["env"] = {"name": "question"}
    if config.data.offline:
        fresh = RunConfig()
        tree |= {"algorithm": fresh.algorithm.model_dump(), "engine": fresh.engine.model_dump()}
        tree["rollout"] |= {"group_size": max(config.rollout.group_size, 2)}
    rows = {"rows": PROMPTS, "evaluation_rows": PROMPTS, "question": config.data.question}
    tree |= {"data": {"agents": tree["data"]["agents"]} | rows, "demonstrations": {}}
    tree["trainer"] |= {"steps": 1, "epochs": None}
    if not (all("answer" in row for row in options.prompts) and any(one.name != "env" for one in config.rewards)):
        tree["rewards"] = [{"name": UNJUDGED}]
    return validate(RunConfig, tree)


async def play(
    policy: MeasuredPolicy, options: MeasureOptions, objects: Mapping[str, Any] | None = None
) -> list[PolicyResult]:
    functions = {} if options.prompts is None else {PROMPTS: lambda: list(options.prompts or ()), UNJUDGED: _unjudged}
    parts = build(policy.config, {**(objects or {}), **functions}, training=False)
    try:
        return await _play(policy, parts, options)
    finally:
        await parts.close()


async def _play(policy: MeasuredPolicy, parts: RunParts, options: MeasureOptions) -> list[PolicyResult]:
    from arborl.diagnosis.run_monitor import FailureMonitor, failure_message, nearly_all_failed
    from arborl.trainer.evaluation import Evaluator, count_episodes, evaluation_metrics, warn_of_failures
    from arborl.trainer.policy_comparison import PolicyResult

    evaluator, config = parts.evaluator, policy.config
    if options.prompts is not None:
        evaluator = _prompt_evaluator(parts, options.prompts)
    elif not isinstance(evaluator, Evaluator):  # an offline run: nothing is sampled
        return [PolicyResult(policy.name, "sampled", (await evaluator.measure()).metrics)]
    judged = all(reward.name != UNJUDGED for reward in config.rewards)
    found: list[PolicyResult] = []
    monitor = parts.rollout.observer = FailureMonitor(config.env.name, config.model.name)
    for way, temperature in _ways(config, options).items():
        groups = await evaluator.play(temperature)
        found.append(PolicyResult(policy.name, way, evaluation_metrics(groups), groups, judged))
        if len(found) == 1:  # if nearly all fail, one mode is enough
            warn_of_failures(groups)
            episodes = [episode for group in groups for episode in group.episodes]
            monitor.check("evaluation", 0, episodes)
            if episodes and all(episode.failure is not None for episode in episodes):  # however few
                first = f"Stopped: all {len(episodes)} episodes of the evaluation failed."
                raise RunStopped(failure_message(episodes, first, "the evaluation", monitor.names))
            if nearly_all_failed(*count_episodes(groups)):
                break
    return found


def _unjudged(episode: Episode) -> float:
    return 0.0


def _ways(config: RunConfig, options: MeasureOptions) -> dict[str, float]:
    if options.temperatures:
        return {"greedy" if one == 0 else f"t={one:g}": one for one in options.temperatures}
    sampled = {"sampled": config.evaluation.temperature}
    return sampled | ({"greedy": 0.0} if config.evaluation.greedy and options.prompts is None else {})


def _prompt_evaluator(parts: RunParts, prompts: Sequence[Mapping[str, Any]]) -> Evaluator:
    from arborl.trainer.evaluation import Evaluator

    config, tasks = parts.config, tasks_of(parts.config, prompts)
    return Evaluator(HeldOutRows(tasks), parts.rollout, parts.rewards, config.evaluation, config.seed)


def tasks_of(config: RunConfig, prompts: Sequence[Mapping[str, Any]]) -> list[Task]:
    reader = RowReader("prompts", config.data.question)
    tasks = (reader.task(row, f"prompt {n}", None, n) for n, row in enumerate(prompts, 1))
    return [replace(task, id=f"prompts/{n:06d}") for n, task in enumerate(tasks, 1)]
