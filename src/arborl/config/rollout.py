"""How episodes are played: how many, by whom, where, and for how long.

`envs` and `val_envs` say the same in the words of an environment manager (groups, tags, a partition): several
environments in every batch. Tags become sources of `data.sources`, so there is one way of mixing and not two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from arborl.config.base import Config, spelt_out
from arborl.config.prompt import ActionPattern, ObservationTemplate, Text


class TagConfig(Config):
    """What a tag stands for."""

    env_type: str
    """The environment, by its short name or as `package.module:attribute`."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    max_steps: int | None = Field(None, ge=1)
    """Turns of an episode; without it, `rollout.max_turns`."""
    max_tokens_per_step: int | None = Field(None, ge=1)
    """Sampled tokens a model call; without it, `sampling.max_tokens`."""
    agent_system_template: Text | None = None
    """The system message, as it is: `env.prompt.system` without places."""
    agent_template: ObservationTemplate | None = None
    """Around every observation: `env.prompt.observation`."""
    action_pattern: ActionPattern | None = None
    """Finds the action in a reply: `env.prompt.action_pattern`. Also read from `env_config`, where the environment is
    one of the library's; and so is `env_instruction`, which is `env.prompt.instruction`."""

    def env(self) -> dict[str, Any]:
        """The environment as a source has it."""
        args = dict(self.env_config)
        theirs = {} if ":" in self.env_type else {key: args.pop(key) for key in THEIRS if key in args}
        system = self.agent_system_template
        return {
            "name": self.env_type,
            "args": args,
            "prompt": {
                "system": None if system is None else system.replace("{", "{{").replace("}", "}}"),
                "instruction": theirs.get("env_instruction"),
                "observation": self.agent_template,
                "action_pattern": self.action_pattern or theirs.get("action_pattern"),
            },
        }


THEIRS = ("action_pattern", "env_instruction")
"""Arguments of ROLL's environments that are no arguments of ours."""


class TagsConfig(Config):
    """Tags, and how many groups each has."""

    tags: tuple[str, ...] = ()
    """Names of `custom_envs`, or of environments. None: the run's own environment has all groups."""
    num_groups_partition: tuple[int, ...] = ()
    """Groups of each tag, in the order of `tags`; without it, the same for all."""

    @model_validator(mode="after")
    def _is_a_partition(self) -> TagsConfig:
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
        """Groups by tag; an error shows the arithmetic where they do not add up."""
        if not self.tags:
            return {}
        asked = f"{groups} groups x {episodes} episodes = {groups * episodes}"
        if not self.num_groups_partition:
            share, over = divmod(groups, len(self.tags))
            if over or not share:
                raise ValueError(
                    f"{len(self.tags)} tags cannot have the same part of {asked}: {groups} / {len(self.tags)} = "
                    f"{groups / len(self.tags):.4g}. Write num_groups_partition=[…] with a sum of {groups}."
                )
            return dict.fromkeys(self.tags, share)
        have = sum(self.num_groups_partition)
        if have != groups:
            added = " + ".join(map(str, self.num_groups_partition))
            raise ValueError(
                f"num_groups_partition adds up to {added} = {have} groups ({have} x {episodes} = {have * episodes} "
                f"episodes), but {asked} are asked for. Write num_env_groups={have}, or a partition with a sum of "
                f"{groups}."
            )
        return dict(zip(self.tags, self.num_groups_partition, strict=True))


class EnvsConfig(TagsConfig):
    """Training's environments: so many groups of so many episodes, divided among tags."""

    num_env_groups: int | None = Field(None, ge=1)
    """Another name for `rollout.tasks_per_step`: all members of a group play one task, from one seed."""
    group_size: int | None = Field(None, ge=1)
    """Another name for `rollout.group_size`."""
    custom_envs: dict[str, TagConfig] = Field(default_factory=dict)
    """What tags stand for: each with `env_type`, `env_config`, `max_steps`, `max_tokens_per_step`,
    `agent_system_template`, `agent_template` and `action_pattern`. More may be defined than `tags` names."""
    max_env_num_per_worker: int = Field(0, ge=0)
    """With `workers=process`: environments in one process. 0 divides them among a process a core."""


class ValEnvsConfig(TagsConfig):
    """Validation's environments, by tag; tags that are not trained on may be among them."""

    group_size: int = Field(1, ge=1)
    """Episodes of one held-out task."""

    @property
    def counts(self) -> dict[str, int]:
        """Held-out tasks by tag; empty where nothing is said of them."""
        return dict(zip(self.tags, self.num_groups_partition, strict=bool(self.num_groups_partition)))


def _is_concurrency(given: Any) -> Any:
    if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ValueError(f"must be a whole number >= 1, or auto; given {given}")
    return given


Concurrency = Annotated[int | Literal["auto"], BeforeValidator(_is_concurrency)]


class RolloutConfig(Config):
    """How episodes are played."""

    tasks_per_step: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1)
    """Episodes of one task."""
    redundancy: int = Field(0, ge=0)
    """Episodes a group plays beyond `group_size`: the first `group_size` to finish count, the others are cancelled."""
    group_seconds: float | None = Field(None, gt=0)
    """A group goes on with whoever has finished so long after its first episode began; the others are cancelled."""
    group_filter: str | None = None
    """Which groups are worth training on: `varied` (rewards differ), `solvable` (somebody succeeded), or your own
    function of a scored group, `package.module:function`; a group it answers False to is dropped and replaced."""
    spare_groups: int = Field(0, ge=0)
    """With `group_filter`: tasks taken beyond `tasks_per_step`, to replace groups that are dropped. When none is needed
    they are passed over; when they run out, the batch is smaller."""
    max_lag: int = Field(0, ge=0)
    """Versions that a token may be older than the weights that train on it. 0: each step plays, then learns. From 1 on
    so many batches are played ahead: learning does not wait for the slowest episode, nor playing for learning. What
    would grow too old is begun again (`rollout/dropped_stale`). See docs/async.md."""
    concurrency: Concurrency = "auto"
    """Episodes in flight. `auto` follows the engine: it begins with as many as the engine can serve (128 where that is
    not known, or where environments run in threads or processes), more while there is room, fewer while requests wait
    for some. With `workers=process` it stays at 128 or less; with `deterministic` it is 128."""
    workers: Literal["auto", "thread", "process", "none"] = "auto"
    """Where environments run. `auto`: those that say `blocking = False`, as ours do, in the event loop, the others in
    threads. `thread`, `process`: all of them; `none`: all in the event loop."""
    max_turns: int = Field(32, ge=1)
    episode_seconds: float = Field(120.0, gt=0)
    """Deadline of one episode."""
    step_seconds: float = Field(30.0, gt=0)
    """Deadline of one environment step or reward; waiting for a sandbox is no part of it. An environment that hangs is
    left behind in its thread, or killed with its process, and replaced."""
    record: Path | None = None
    """File to write every training episode to, for `replay`."""
    replay: Path | None = None
    """Train on the episodes of this file instead of playing; made by the same run with `record`."""
    envs: EnvsConfig = EnvsConfig()
    val_envs: ValEnvsConfig = ValEnvsConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_number_by_two_names(cls, given: Any) -> Any:
        envs = given.get("envs") if isinstance(given, Mapping) else None
        asked = envs if isinstance(envs, Mapping) else envs.model_dump() if isinstance(envs, EnvsConfig) else {}
        filled = dict(given) if asked else given
        for theirs, ours in (("num_env_groups", "tasks_per_step"), ("group_size", "group_size")):
            if asked.get(theirs) is None:
                continue
            if filled.get(ours, asked[theirs]) != asked[theirs]:
                raise ValueError(
                    f"envs.{theirs}={asked[theirs]} and {ours}={filled[ours]} are two names for one number. Write one."
                )
            filled[ours] = asked[theirs]
        return filled

    @model_validator(mode="after")
    def _fits_together(self) -> RolloutConfig:
        self.envs.divide(self.tasks_per_step, self.group_size)
        if self.envs.custom_envs and not self.envs.tags:
            known = ", ".join(self.envs.custom_envs)
            raise ValueError(f"envs.custom_envs says what tags stand for; none is named. Write envs.tags=[{known}].")
        if self.val_envs.tags and not self.envs.tags:
            raise ValueError("val_envs.tags are given without envs.tags. Write envs.tags=[…] too.")
        if self.spare_groups and self.group_filter is None:
            raise ValueError("spare_groups replace groups that a group_filter drops. Write group_filter=varied too.")
        if self.envs.max_env_num_per_worker and self.workers != "process":
            raise ValueError(
                f"envs.max_env_num_per_worker is about processes, and workers={self.workers}. Write workers=process."
            )
        taped = "record" if self.record is not None else "replay" if self.replay is not None else None
        if self.max_lag and taped:
            raise ValueError(
                f"max_lag={self.max_lag} with {taped}: a tape holds whole batches, and groups of several are trained "
                f"together. Write max_lag=0, or leave {taped} out."
            )
        if self.record is not None and self.replay is not None:
            raise ValueError("record and replay are both given: a replay plays nothing to record. Leave one out.")
        return self


def tags_as_sources(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's settings with the tags of `rollout.envs` and `rollout.val_envs` written as `data.sources`.

    Anything that is wrong with the tags is left for the checks of their own section.
    """
    try:
        rollout = RolloutConfig.model_validate(given.get("rollout") or {})
    except ValidationError:
        return given
    groups = rollout.envs.divide(rollout.tasks_per_step, rollout.group_size)
    tags = [*groups, *(tag for tag in rollout.val_envs.tags if tag not in groups)]
    if not tags:
        return given
    made = {tag: _source(rollout.envs.custom_envs.get(tag), tag, groups.get(tag, 0), groups) for tag in tags}
    data = _plain(given.get("data"))
    if set(data.get("sources") or ()) == set(made):  # a resolved configuration, read again
        return given
    if any(data.get(key) for key in ("sources", "path", "hub", "rows")):
        raise ValueError("rollout.envs.tags and data both say where tasks come from. Write one of them.")
    return _counted({**given, "data": {**data, "sources": made}}, sum(rollout.val_envs.counts.values()))


def _counted(given: dict[str, Any], tasks: int) -> dict[str, Any]:
    """`evaluation.tasks` is what the partition of `val_envs` adds up to."""
    evaluation = given.get("evaluation") or {}
    if not tasks or not isinstance(evaluation, Mapping):
        return given
    if evaluation.get("tasks", tasks) != tasks:
        raise ValueError(
            f"rollout.val_envs.num_groups_partition adds up to {tasks} tasks, but evaluation.tasks="
            f"{evaluation['tasks']}. Leave evaluation.tasks out."
        )
    return {**given, "evaluation": {**evaluation, "tasks": tasks}}


def _source(tag: TagConfig | None, name: str, groups: int, among: Mapping[str, int]) -> dict[str, Any]:
    tag = tag or TagConfig(env_type=name)
    return {
        "env": tag.env(),
        "ratio": groups / sum(among.values()),
        "limits": {"max_turns": tag.max_steps},
        "sampling": {"max_tokens": tag.max_tokens_per_step},
    }


def _plain(data: Any) -> dict[str, Any]:
    from arborl.config.data import DataConfig

    data = spelt_out(DataConfig, data)
    return dict(data) if isinstance(data, Mapping) else data.model_dump() if isinstance(data, Config) else {}
