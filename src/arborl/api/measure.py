"""Measure: policies on the same held-out tasks, or on prompts of one's own.

A policy is a run, a checkpoint, a model, what a YAML file begins with, or `openai:NAME` behind an address. One that
brings no settings of its own (a model, or one behind an address) is measured as the first that does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arborl.api.located import located
from arborl.build import Parts, build
from arborl.config.base import validate
from arborl.config.load import load
from arborl.config.placement import PlacementConfig
from arborl.config.run import RunConfig
from arborl.data import TaskSource
from arborl.data.reading.rows import Reader
from arborl.errors import ConfigError, RunStopped
from arborl.registry import HANDED_IN
from arborl.types import Episode, Task

if TYPE_CHECKING:
    from arborl.trainer.evaluate import Evaluator
    from arborl.trainer.standings import Played

REMOTE = "openai:"
PROMPTS, UNJUDGED = f"{HANDED_IN}prompts", f"{HANDED_IN}unjudged"
OPENAI = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True)
class Asked:
    """How to measure."""

    overrides: Sequence[str] = ()
    """Settings on top of a run's, as on the command line."""
    temperatures: Sequence[float] = ()
    """Ways of playing, 0 for the likeliest tokens; without any, as the configuration says."""
    attempts: int | None = None
    """Episodes of a task; without it, as the configuration says."""
    prompts: Sequence[Mapping[str, Any]] | None = None
    """Rows to answer in place of held-out tasks, each as a row of data is."""
    base_url: str = OPENAI
    """Where `openai:` models are."""
    key: str | None = None
    """The environment variable that holds the key for them; at OpenAI's own address it is OPENAI_API_KEY."""
    trust: bool = False
    """Import what a run's folder names though this user did not write it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Who is measured, and with what settings."""

    name: str
    config: RunConfig


class Rows(TaskSource):
    """Tasks that are all held out."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks = list(tasks)

    def take(self, step: int, count: int) -> list[Task]:
        return []

    def evaluation(self, count: int) -> list[Task]:
        return self.tasks


def policies(names: Sequence[str], asked: Asked) -> list[Policy]:
    """Everyone who is named, with settings; nothing is read or loaded yet but these."""
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"{twice[0]}: named twice. Name each policy once.")
    own = {name: _own_settings(name, asked) for name in names}
    common = next((config for config in own.values() if config is not None), None) or load(None, asked.overrides)
    found = (Policy(name, config or _others_settings(name, common, asked)) for name, config in own.items())
    return [Policy(policy.name, _as_asked(policy.config, asked)) for policy in found]


def settings_of(name: str, asked: Asked, only: Collection[str] = ()) -> RunConfig:
    """Of one policy, with the model that it stands for; `only` as of `load_run`."""
    place = located(name, asked.overrides, asked.trust, only)
    return _of_model(_here(place.config, asked), str(place.model))


def _own_settings(name: str, asked: Asked) -> RunConfig | None:
    """Of a run, a checkpoint or a YAML file, with the model that it stands for; None of what has none."""
    if name.startswith(REMOTE):
        return None
    place = located(name, asked.overrides, asked.trust)
    return _of_model(_here(place.config, asked), str(place.model)) if place.run is not None else None


def _others_settings(name: str, common: RunConfig, asked: Asked) -> RunConfig:
    """Of a model by its name, or behind an address."""
    if not name.startswith(REMOTE):
        return _of_model(common, str(located(name, asked.overrides, asked.trust).model))
    url = asked.base_url.rstrip("/")
    key = asked.key or ("OPENAI_API_KEY" if url == OPENAI else None)
    where = {"urls": [url.removesuffix("/v1")], "model": name.removeprefix(REMOTE), "api_key_env": key}
    return validate(RunConfig, common.model_dump() | {"engine": {"name": "http", "chat": True} | where})


def _here(config: RunConfig, asked: Asked) -> RunConfig:
    """In this process, wherever the run was, unless this command places it: the cluster may be gone or busy, and what
    is played does not depend on it."""
    if any(word.startswith("placement") for word in asked.overrides):
        return config
    return config.model_copy(update={"placement": PlacementConfig()})


def _of_model(config: RunConfig, model: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"name": model})})


def _as_asked(config: RunConfig, asked: Asked) -> RunConfig:
    """With as many attempts as were asked for, and ready for prompts where there are some."""
    tree = config.model_dump()
    if asked.attempts is not None:
        tree["rollout"]["val_envs"]["group_size"] = asked.attempts
    if asked.prompts is None:
        if config.evaluation.tasks == 0:
            raise ConfigError("evaluation.tasks=0: nothing to evaluate. Write evaluation.tasks=200.")
        return validate(RunConfig, tree) if asked.attempts is not None else config
    if not tasks_of(config, asked.prompts):  # what is wrong with a row is said by its number, before all else
        raise ConfigError("no prompts to answer: there is not one row. Give at least one.")
    if not config.data.has_rows or config.data.offline:  # its environment makes tasks of its own: questions do not
        tree["env"] = {"name": "question"}
    if config.data.offline:
        fresh = RunConfig()
        tree |= {"algorithm": fresh.algorithm.model_dump(), "engine": fresh.engine.model_dump()}
        tree["rollout"] |= {"group_size": max(config.rollout.group_size, 2)}
    rows = {"rows": PROMPTS, "evaluation_rows": PROMPTS, "question": config.data.question}
    tree |= {"data": {"agents": tree["data"]["agents"]} | rows, "demonstrations": {}}
    tree["rollout"]["val_envs"] |= {"tags": (), "num_groups_partition": ()}
    tree["rollout"]["envs"] |= {"tags": (), "num_groups_partition": ()}
    tree["trainer"] |= {"steps": 1, "epochs": None}
    if not (all("answer" in row for row in asked.prompts) and any(one.name != "env" for one in config.rewards)):
        tree["rewards"] = [{"name": UNJUDGED}]
    return validate(RunConfig, tree)


async def play(policy: Policy, asked: Asked, objects: Mapping[str, Any] | None = None) -> list[Played]:
    """Everything one policy was asked to play, one way after the other.

    Args:
        policy: who.
        asked: what, and how.
        objects: parts handed in by Python code, by the name the configuration uses for them.
    """
    given = {} if asked.prompts is None else {PROMPTS: lambda: list(asked.prompts or ()), UNJUDGED: _unjudged}
    parts = build(policy.config, {**(objects or {}), **given}, training=False)
    try:
        return await _play(policy, parts, asked)
    finally:
        await parts.close()


async def _play(policy: Policy, parts: Parts, asked: Asked) -> list[Played]:
    from arborl.trainer.evaluate import Evaluator, counted, headline, warn_of_failures
    from arborl.trainer.failing import FailureWatch, explain, hopeless
    from arborl.trainer.standings import Played

    evaluator, config = parts.evaluator, policy.config
    if asked.prompts is not None:
        evaluator = _answering(parts, asked.prompts)
    elif not isinstance(evaluator, Evaluator):  # rows that say themselves what was said: nothing is played
        return [Played(policy.name, "sampled", (await evaluator.measure()).metrics)]
    judged = all(reward.name != UNJUDGED for reward in config.rewards)
    found: list[Played] = []
    for way, temperature in _ways(config, asked).items():
        groups = await evaluator.play(temperature)
        found.append(Played(policy.name, way, headline(groups), groups, judged))
        if len(found) == 1:  # where nearly all fail, once is enough
            warn_of_failures(groups)
            episodes = [episode for group in groups for episode in group.episodes]
            FailureWatch().look("evaluation", 0, episodes)
            if episodes and all(episode.failure is not None for episode in episodes):  # however few: nothing is known
                raise RunStopped(explain(episodes, len(episodes), "the evaluation", 1))
            if hopeless(*counted(groups)):
                break
    return found


def _unjudged(episode: Episode) -> float:
    """Of prompts without answers: nobody says how good a reply is."""
    return 0.0


def _ways(config: RunConfig, asked: Asked) -> dict[str, float]:
    """Ways of playing by name, and their temperatures."""
    if asked.temperatures:
        return {"greedy" if one == 0 else f"t={one:g}": one for one in asked.temperatures}
    sampled = {"sampled": config.evaluation.temperature}
    return sampled | ({"greedy": 0.0} if config.evaluation.greedy and asked.prompts is None else {})


def _answering(parts: Parts, prompts: Sequence[Mapping[str, Any]]) -> Evaluator:
    from arborl.trainer.evaluate import Evaluator

    config, tasks = parts.config, tasks_of(parts.config, prompts)
    tags = config.rollout.val_envs
    return Evaluator(Rows(tasks), parts.rollout, parts.rewards, config.evaluation, config.seed, tags)


def tasks_of(config: RunConfig, prompts: Sequence[Mapping[str, Any]]) -> list[Task]:
    """Prompts as tasks, in their order; each has an id of its own, whatever the rows say of theirs."""
    reader = Reader("prompts", config.data.question)
    tasks = (reader.task(row, f"prompt {n}", None, n) for n, row in enumerate(prompts, 1))
    return [replace(task, id=f"prompts/{n:06d}") for n, task in enumerate(tasks, 1)]
