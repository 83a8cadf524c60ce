"""Settings of the rollout: batch size, limits, workers, sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from arborl.config.config_base import Config, StopStrings


class SamplingConfig(Config):
    """Sampling in training. The learner computes log-probabilities under the same distribution."""

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this probability relative to the most likely token."""
    stop: StopStrings = ()
    """Stop strings, beside the end-of-turn token of the model."""
    max_tokens: int = Field(64, ge=1)
    """Maximum tokens of a completion."""
    max_context: int = Field(1024, ge=8)
    """Maximum tokens of prompt and completion. An episode ends if its next prompt does not fit."""


def _check_concurrency(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"must be a whole number >= 1, or auto; given {value}")
    return value


Concurrency = Annotated[int | Literal["auto"], BeforeValidator(_check_concurrency)]


class RolloutConfig(Config):
    """Collection of episodes."""

    tasks_per_step: int = Field(16, ge=1)
    """Tasks, and so groups, per step."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    redundancy: int = Field(0, ge=0)
    """Additional episodes per group: the first `group_size` to finish are used, the others are cancelled."""
    group_seconds: float | None = Field(None, gt=0)
    """Timeout of a group after its first episode began: finished episodes are used, the others are cancelled."""
    group_filter: str | None = None
    """Filter of scored groups: `varied` (rewards differ), `solvable` (at least one success), or your own function
    `package.module:function`. A group for which it returns False is dropped and replaced."""
    spare_groups: int = Field(0, ge=0)
    """With `group_filter`: additional tasks per step that replace dropped groups. Unused ones are skipped; if they do
    not suffice, the batch is smaller."""
    max_lag: int = Field(0, ge=0)
    """Maximum staleness of a token in policy versions. 0: rollout and update alternate. From 1 on, that many batches
    are collected ahead, concurrently with updates; groups that become too old are restarted (`rollout/dropped_stale`).
    See docs/async.md."""
    concurrency: Concurrency = "auto"
    """Concurrent episodes. `auto` starts with the capacity of the engine (128 if unknown, or if environments run in
    threads or processes) and adapts to the length of its queue; at most 128 with `workers=process`, and 128 with
    `deterministic`."""
    workers: Literal["auto", "thread", "process", "none"] = "auto"
    """Where environments run. `auto`: in the event loop if they declare `blocking = False`, in processes if they
    declare `isolated = True`, else in threads. `thread`, `process`: all of them; `none`: all in the event loop."""
    envs_per_process: int = Field(0, ge=0)
    """With `workers=process`: environments per process. 0: one process per core."""
    max_turns: int = Field(32, ge=1)
    """Maximum turns of an episode."""
    episode_seconds: float = Field(120.0, gt=0)
    """Timeout of an episode."""
    step_seconds: float = Field(30.0, gt=0)
    """Timeout of an environment step or reward, without the wait for a sandbox. An environment that exceeds it is
    abandoned in its thread or killed with its process, and replaced."""
    record: Path | None = None
    """File to which every training episode is written, for `replay`."""
    replay: Path | None = None
    """File of recorded episodes to train on instead of sampling; written by the same run with `record`."""

    @model_validator(mode="after")
    def _fits_together(self) -> RolloutConfig:
        if self.spare_groups and self.group_filter is None:
            raise ValueError("spare_groups replace groups that a group_filter drops. Write group_filter=varied too.")
        if self.envs_per_process and self.workers != "process":
            raise ValueError(f"envs_per_process with workers={self.workers}. Write workers=process.")
        mode = "record" if self.record is not None else "replay" if self.replay is not None else None
        if self.max_lag and mode:
            raise ValueError(
                f"max_lag={self.max_lag} with {mode}: a recording holds whole batches, and groups of several are "
                f"trained together. Write max_lag=0, or leave {mode} out."
            )
        if self.record is not None and self.replay is not None:
            raise ValueError("record and replay are both given: a replay samples nothing to record. Leave one out.")
        return self
