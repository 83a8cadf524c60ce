"""Runs that learn from given rows: when a run is one, and which settings then count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arborl.config.algorithm import AlgorithmConfig
from arborl.config.base import spelt_out
from arborl.config.data import DataConfig, SourceConfig
from arborl.config.parts import EnvConfig
from arborl.config.presets import GIVEN_LOSSES, PRESETS

if TYPE_CHECKING:
    from arborl.config.run import RunConfig

READ: dict[str, tuple[str, ...]] = {
    "env": ("name",), "agent": ("tool_format",), "tools": (), "rewards": (), "engine": ("name",),
    "rollout": ("tasks_per_step",), "sampling": ("max_context",),
}  # fmt: skip
"""Sections about sampling and playing, and what of them counts all the same."""


def with_given(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's settings with a word on whether its rows are given, and without an engine where they are."""
    data = spelt_out(DataConfig, settings.get("data"))
    written = data if isinstance(data, Mapping) else getattr(data, "model_fields_set", ())
    if "offline" not in written:
        asks = loss_of(settings.get("algorithm")) in GIVEN_LOSSES
        if not asks or not brings_rows(data) or settings.get("rewards") or _names_env(settings.get("env")):
            return settings
        told = {"offline": True}
        data = {**data, **told} if isinstance(data, Mapping) else data.model_copy(update=told)
        settings = {**settings, "data": data}
    given = data["offline"] if isinstance(data, Mapping) else data.offline
    return {**settings, "engine": {"name": "none"}} if given and "engine" not in settings else settings


def _names_env(given: Any) -> bool:
    env = spelt_out(EnvConfig, given)
    return env is not None and not (isinstance(env, Mapping) and not {"name", "_target_"} & env.keys())


def loss_of(given: Any) -> str:
    """The loss of an algorithm's settings, before they are checked."""
    algorithm = spelt_out(AlgorithmConfig, given)
    if isinstance(algorithm, AlgorithmConfig):
        return algorithm.loss
    chosen = algorithm if isinstance(algorithm, Mapping) else {}
    return str(chosen.get("loss") or PRESETS.get(str(chosen.get("name", "grpo")), {}).get("loss", "ppo"))


def brings_rows(data: Any) -> bool:
    """Whether `data`, as given, has rows: its own, or those of a source."""
    if isinstance(data, DataConfig):
        return data.has_rows or any(source.has_rows for source in data.sources.values())
    if not isinstance(data, Mapping):
        return False
    sources = data.get("sources")
    own = any(data.get(key) is not None for key in ("path", "hub", "rows"))
    inner = [spelt_out(SourceConfig, one) for one in sources.values()] if isinstance(sources, Mapping) else []
    return own or any(brings_rows(one) for one in inner)


def check_given(run: RunConfig) -> None:
    """Raise where settings contradict that rows are given, or that they are not."""
    _check_teachers(run)
    _check_demonstrations(run)
    if not run.data.offline:
        if run.engine.name == "none":
            raise ValueError("engine=none samples nothing, and this run plays. Leave engine out.")
        return
    algorithm = run.algorithm
    if algorithm.loss not in GIVEN_LOSSES or algorithm.by_source:
        said = "algorithm.by_source" if algorithm.by_source else f"algorithm.loss={algorithm.loss}"
        raise ValueError(
            f"data.offline with {said}: given rows are learned from by one of {', '.join(sorted(GIVEN_LOSSES))}. Write "
            "algorithm=sft, or data.offline=false."
        )
    if not brings_rows(run.data) or any(not source.has_rows for source in run.data.sources.values() if not run.data.by):
        raise ValueError("data.offline: rows are learned from, and a source has none. Write data.path=FILE.")
    if algorithm.loss == "kto" and run.rollout.tasks_per_step < 2:
        raise ValueError(
            "rollout.tasks_per_step=1 with algorithm=kto: its reference point is read off answers to other rows of the "
            "batch. Write rollout.tasks_per_step=2 or more."
        )
    if run.engine.name != "none":
        raise ValueError(f"engine={run.engine.name}: with given rows nothing is sampled. Leave engine out.")
    if run.env.name != "question":
        raise ValueError(
            f"env={run.env.name}: with given rows nothing is played. Leave env out, or write data.offline=false."
        )
    _check_read(run)


def _check_read(run: RunConfig) -> None:
    """That nothing is said about sampling and playing, which nobody would read."""
    for name, read in READ.items():
        now, default = getattr(run, name), type(run).model_fields[name].get_default(call_default_factory=True)
        fields = {} if isinstance(now, tuple) else type(now).model_fields
        written = [key for key in fields if key not in read and getattr(now, key) != getattr(default, key)]
        if written or (not fields and now != default):
            raise ValueError(
                f"{'.'.join([name, *written[:1]])}: with given rows nothing is sampled or played, so it is not read. "
                "Leave it out, or write data.offline=false."
            )


def _check_demonstrations(run: RunConfig) -> None:
    asked = run.demonstrations
    if not asked.enabled:
        return
    if run.data.offline:
        raise ValueError("demonstrations beside given rows: both are transcripts. Write one of them.")
    if run.trainer.steps is not None and asked.steps >= run.trainer.steps:
        raise ValueError(
            f"demonstrations.steps={asked.steps} with trainer.steps={run.trainer.steps}: they are the first of them, "
            f"and no step is left for the rest. Write trainer.steps={2 * asked.steps}, or algorithm=sft for all."
        )
    if asked.weight and run.algorithm.loss == "trpo":
        raise ValueError("demonstrations.weight with loss=trpo, whose step is bounded for one loss. Write weight=0.")


def _check_teachers(run: RunConfig) -> None:
    chosen = {one.teacher for one in (run.algorithm, *run.algorithm.by_source.values()) if one.loss == "distill"}
    if None in chosen:
        raise ValueError(
            "algorithm=distill: there is no one to learn from. Write algorithm.teacher=MODEL, or a server's address."
        )
    if len(chosen) > 1:
        raise ValueError(f"algorithm.teacher: one for the whole run; given {', '.join(sorted(map(str, chosen)))}.")
    remote = any(str(name).startswith(("http://", "https://")) for name in chosen)
    sampling = run.sampling
    if remote and (sampling.temperature != 1 or sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise ValueError(
            "algorithm.teacher: a server says how likely tokens are at temperature 1, of all tokens. Leave "
            "sampling.temperature, top_k, top_p and min_p out."
        )
