"""That every trial costs the same: as many episodes as the settings as they are would play.

A larger group in every step is a longer run, and a longer run is a better one; compared with a shorter one it proves
nothing. So where a parameter changes how many episodes a step has, another number follows.
"""

from __future__ import annotations

from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError

FREE = "or write --budget free, and trials cost what they cost"


def episodes(config: RunConfig) -> int | None:
    """Of a whole run; none where its length is said in passes over rows."""
    return None if config.trainer.steps is None else config.trainer.steps * a_step(config)


def a_step(config: RunConfig) -> int:
    """Episodes a step; of given rows, rows."""
    rollout = config.rollout
    return rollout.tasks_per_step * (1 if config.data.offline else rollout.group_size)


def evened(base: RunConfig, trial: RunConfig) -> list[str]:
    """Settings with which the trial has as many episodes as the base: other tasks a step where it has other groups, so
    that it also has as many updates; else other steps."""
    if any(getattr(base.trainer, length) != getattr(trial.trainer, length) for length in ("steps", "epochs")):
        raise ConfigError(
            "trainer.steps and trainer.epochs say how much a trial costs; searched for, more is better and nothing is "
            f"learned about it. Leave them out, {FREE}."
        )
    if a_step(base) == a_step(trial):
        return []
    whole = episodes(base)
    if whole is None:
        raise ConfigError(
            f"trainer.epochs={base.trainer.epochs}: with {a_step(trial)} episodes a step instead of {a_step(base)}, "
            f"trials would play more or fewer. Write trainer.steps, {FREE}."
        )
    size = 1 if base.data.offline else trial.rollout.group_size
    if base.rollout.tasks_per_step == trial.rollout.tasks_per_step:
        key, number, by = "rollout.tasks_per_step", a_step(base), size
    else:
        key, number, by = "trainer.steps", whole, a_step(trial)
    if number % by:
        what = "a step" if key == "rollout.tasks_per_step" else "a run"
        raise ConfigError(
            f"rollout.group_size={trial.rollout.group_size}, tasks_per_step={trial.rollout.tasks_per_step}: the "
            f"{number} episodes of {what} cannot be divided by {by}, so trials would differ in what they cost. Give "
            f"choices that divide {number}, {FREE}."
        )
    return [f"{key}={number // by}"]
