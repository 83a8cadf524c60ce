"""Settings of the rollout: batch size, limits, workers, and environments by tag.

`envs` and `val_envs` use the names of ROLL's environment manager (groups, tags, partition). Tags become entries of
`data.sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from arborl.config.config_base import Config, expand_shorthand
from arborl.config.data_config import DataConfig
from arborl.config.part_config import ActionPattern, ObservationTemplate, PromptText


class TagConfig(Config):
    """The environment of a tag."""

    env_type: str
    """Environment: a short name or `package.module:attribute`."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum turns of an episode. Default: `rollout.max_turns`."""
    max_tokens_per_step: int | None = Field(None, ge=1)
    """Maximum tokens of a completion. Default: `sampling.max_tokens`."""
    agent_system_template: PromptText | None = None
    """System message without fields: `env.prompt.system`."""
    agent_template: ObservationTemplate | None = None
    """Template of every observation: `env.prompt.observation`."""
    action_pattern: ActionPattern | None = None
    """Regular expression of the action: `env.prompt.action_pattern`. For environments of the library, this key and
    `env_instruction` (`env.prompt.instruction`) are also read from `env_config`."""

    def env(self) -> dict[str, Any]:
        """The section `env` of a source."""
        args = dict(self.env_config)
        prompts = {} if ":" in self.env_type else {key: args.pop(key) for key in PROMPT_ARGS if key in args}
        system = self.agent_system_template
        return {
            "name": self.env_type,
            "args": args,
            "prompt": {
                "system": None if system is None else system.replace("{", "{{").replace("}", "}}"),
                "instruction": prompts.get("env_instruction"),
                "observation": self.agent_template,
                "action_pattern": self.action_pattern or prompts.get("action_pattern"),
            },
        }


PROMPT_ARGS = ("action_pattern", "env_instruction")
"""Arguments of ROLL's environments that are prompt settings here."""


class TagsConfig(Config):
    """Tags and their numbers of groups."""

    tags: tuple[str, ...] = ()
    """Names of `custom_envs` or environments. Empty: all groups use the environment of the run."""
    num_groups_partition: tuple[int, ...] = ()
    """Groups per tag, in the order of `tags`. Default: equal numbers."""

    @model_validator(mode="after")
    def _check_partition(self) -> TagsConfig:
        tags, parts = self.tags, self.num_groups_partition
        if len(set(tags)) < len(tags):
            raise ValueError(f"tags: {', '.join(tags)} names one twice. Write it once, with more groups.")
        if parts and not tags:
            raise ValueError("num_groups_partition divides groups among tags. Write tags=[…] too.")
        if parts and len(parts) != len(tags):
            raise ValueError(f"num_groups_partition has {len(parts)} numbers for {len(tags)} tags. Give one for each.")
        if any(part < 1 for part in parts):
            raise ValueError(f"num_groups_partition={list(parts)}: a tag has at least 1 group. Leave its tag out.")
        return self

    def divide(self, groups: int, episodes: int) -> dict[str, int]:
        """Groups by tag. Raises ValueError if they do not add up."""
        if not self.tags:
            return {}
        wanted = f"{groups} groups x {episodes} episodes = {groups * episodes}"
        if not self.num_groups_partition:
            share, over = divmod(groups, len(self.tags))
            if over or not share:
                raise ValueError(
                    f"{len(self.tags)} tags cannot have the same part of {wanted}: {groups} / {len(self.tags)} = "
                    f"{groups / len(self.tags):.4g}. Write num_groups_partition=[…] with a sum of {groups}."
                )
            return dict.fromkeys(self.tags, share)
        have = sum(self.num_groups_partition)
        if have != groups:
            added = " + ".join(map(str, self.num_groups_partition))
            raise ValueError(
                f"num_groups_partition adds up to {added} = {have} groups ({have} x {episodes} = {have * episodes} "
                f"episodes), but {wanted} are configured. Write num_env_groups={have}, or a partition with a sum of "
                f"{groups}."
            )
        return dict(zip(self.tags, self.num_groups_partition, strict=True))


class EnvsConfig(TagsConfig):
    """Environments of training: groups, episodes per group, and tags."""

    num_env_groups: int | None = Field(None, ge=1)
    """ROLL's name of `rollout.tasks_per_step`; all episodes of a group have the same task and seed."""
    group_size: int | None = Field(None, ge=1)
    """ROLL's name of `rollout.group_size`."""
    custom_envs: dict[str, TagConfig] = Field(default_factory=dict)
    """Environments by tag, with `env_type`, `env_config`, `max_steps`, `max_tokens_per_step`, `agent_system_template`,
    `agent_template` and `action_pattern`."""
    max_env_num_per_worker: int = Field(0, ge=0)
    """With `workers=process`: environments per process. 0: one process per core."""


class ValEnvsConfig(TagsConfig):
    """Environments of evaluation, by tag; also tags that are not trained on."""

    group_size: int = Field(1, ge=1)
    """Episodes per held-out task."""

    @property
    def counts(self) -> dict[str, int]:
        """Held-out tasks by tag; empty without a partition."""
        return dict(zip(self.tags, self.num_groups_partition, strict=bool(self.num_groups_partition)))


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
    """Where environments run. `auto`: in the event loop if they declare `blocking = False`, else in threads. `thread`,
    `process`: all of them; `none`: all in the event loop."""
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
    envs: EnvsConfig = EnvsConfig()
    val_envs: ValEnvsConfig = ValEnvsConfig()

    @model_validator(mode="before")
    @classmethod
    def _from_envs(cls, data: Any) -> Any:
        """Set `tasks_per_step` and `group_size` from ROLL's names of them."""
        envs = data.get("envs") if isinstance(data, Mapping) else None
        values = envs if isinstance(envs, Mapping) else envs.model_dump() if isinstance(envs, EnvsConfig) else {}
        filled = dict(data) if values else data
        for theirs, ours in (("num_env_groups", "tasks_per_step"), ("group_size", "group_size")):
            if values.get(theirs) is None:
                continue
            if filled.get(ours, values[theirs]) != values[theirs]:
                raise ValueError(
                    f"envs.{theirs}={values[theirs]} and {ours}={filled[ours]} are the same setting. Write one."
                )
            filled[ours] = values[theirs]
        return filled

    @model_validator(mode="after")
    def _fits_together(self) -> RolloutConfig:
        self.envs.divide(self.tasks_per_step, self.group_size)
        if self.envs.custom_envs and not self.envs.tags:
            known = ", ".join(self.envs.custom_envs)
            raise ValueError(f"envs.custom_envs defines tags, and envs.tags is empty. Write envs.tags=[{known}].")
        if self.val_envs.tags and not self.envs.tags:
            raise ValueError("val_envs.tags are given without envs.tags. Write envs.tags=[…] too.")
        if self.spare_groups and self.group_filter is None:
            raise ValueError("spare_groups replace groups that a group_filter drops. Write group_filter=varied too.")
        if self.envs.max_env_num_per_worker and self.workers != "process":
            raise ValueError(
                f"envs.max_env_num_per_worker is about processes, and workers={self.workers}. Write workers=process."
            )
        mode = "record" if self.record is not None else "replay" if self.replay is not None else None
        if self.max_lag and mode:
            raise ValueError(
                f"max_lag={self.max_lag} with {mode}: a recording holds whole batches, and groups of several are "
                f"trained together. Write max_lag=0, or leave {mode} out."
            )
        if self.record is not None and self.replay is not None:
            raise ValueError("record and replay are both given: a replay samples nothing to record. Leave one out.")
        return self


def tags_as_sources(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a run with the tags of `rollout.envs` and `rollout.val_envs` as `data.sources`."""
    try:
        rollout = RolloutConfig.model_validate(settings.get("rollout") or {})
    except ValidationError:
        return settings  # reported by the validation of the section
    groups = rollout.envs.divide(rollout.tasks_per_step, rollout.group_size)
    tags = [*groups, *(tag for tag in rollout.val_envs.tags if tag not in groups)]
    if not tags:
        return settings
    made = {tag: _source(rollout.envs.custom_envs.get(tag), tag, groups.get(tag, 0), groups) for tag in tags}
    data = _data_section(settings.get("data"))
    if set(data.get("sources") or ()) == set(made):  # a resolved configuration, read again
        return settings
    if any(data.get(key) for key in ("sources", "path", "hub", "rows")):
        raise ValueError("rollout.envs.tags and data both define the tasks. Write one of them.")
    settings = {**settings, "data": {**data, "sources": made}}
    return _with_evaluation_tasks(settings, sum(rollout.val_envs.counts.values()))


def _with_evaluation_tasks(settings: dict[str, Any], tasks: int) -> dict[str, Any]:
    """With `evaluation.tasks` as the sum of the partition of `val_envs`."""
    evaluation = settings.get("evaluation") or {}
    if not tasks or not isinstance(evaluation, Mapping):
        return settings
    if evaluation.get("tasks", tasks) != tasks:
        raise ValueError(
            f"rollout.val_envs.num_groups_partition adds up to {tasks} tasks, but evaluation.tasks="
            f"{evaluation['tasks']}. Leave evaluation.tasks out."
        )
    return {**settings, "evaluation": {**evaluation, "tasks": tasks}}


def _source(tag: TagConfig | None, name: str, groups: int, all_groups: Mapping[str, int]) -> dict[str, Any]:
    tag = tag or TagConfig(env_type=name)
    return {
        "env": tag.env(),
        "ratio": groups / sum(all_groups.values()),
        "limits": {"max_turns": tag.max_steps},
        "sampling": {"max_tokens": tag.max_tokens_per_step},
    }


def _data_section(data: Any) -> dict[str, Any]:
    data = expand_shorthand(DataConfig, data)
    return dict(data) if isinstance(data, Mapping) else data.model_dump() if isinstance(data, Config) else {}
