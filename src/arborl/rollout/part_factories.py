"""Factories of agents and environments, and the parts and overrides of each data source."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arborl.agents.agent_interface import Agent, as_agent, is_async
from arborl.agents.context.managed_conversation import ContextPolicy
from arborl.config.data_config import DataConfig
from arborl.config.run_config import AgentPartConfig, ContextConfig, EnvConfig, RewardConfig, RunConfig, ToolConfig
from arborl.envs.env import Env
from arborl.envs.prompt_wrapper import PromptLimits
from arborl.errors import ConfigError
from arborl.registry import check_arguments
from arborl.rollout.recorder import EpisodeLimits
from arborl.tools.tool_loader import tool_names
from arborl.types import Sampling, Task

IMMUTABLE = (str, int, float, bool, type(None))
"""Types of arguments that several objects may share."""


class PartFactory:
    """Makes a new object if a name refers to a class or a function; else returns the object that it refers to."""

    def __init__(self, target: Any, name: str, args: Mapping[str, Any], where: str, more: Mapping[str, Any]):
        self.target, self.where, self.args = target, f"{where}.args", dict(args)
        self.is_class = inspect.isclass(target)
        self.is_factory = self.is_class or (inspect.isfunction(target) and not is_async(target))
        if self.is_factory:
            parameters = inspect.signature(target).parameters
            self.args |= {key: value for key, value in more.items() if key in parameters}
            check_arguments(target, self.args, self.where)
        elif args:
            raise ConfigError(f"{self.where}: {name!r} is an object and takes no arguments. Remove them.")

    def __call__(self) -> Any:
        return self.with_args(self.args)

    def with_args(self, args: Mapping[str, Any]) -> Any:
        if not self.is_factory:
            return self.target
        try:
            return self.target(**args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.where}: {error}") from error


def env_factory(make: PartFactory) -> Callable[[], Env]:
    """Makes environments that share no mutable argument, since many run at once."""
    if not make.is_class:
        return lambda: copy.deepcopy(make())
    if all(isinstance(value, IMMUTABLE) for value in make.args.values()):
        return make
    return lambda: make.with_args(copy.deepcopy(make.args))


def agent_factory(make: PartFactory, where: str) -> Callable[[], Agent]:
    """Makes agents. The interface is checked once per class."""
    if not make.is_factory:
        shared = as_agent(make(), where)
        return lambda: shared
    checked: set[type] = set()

    def new_agent() -> Agent:
        candidate = make()
        has_class_method = "run" not in getattr(candidate, "__dict__", ())
        if has_class_method and type(candidate) in checked:
            return candidate  # type: ignore[no-any-return]
        agent = as_agent(candidate, where)
        if has_class_method and agent is candidate:
            checked.add(type(candidate))
        return agent

    return new_agent


def source_overrides(
    sources: Mapping[str, DataConfig],
) -> tuple[Callable[[Task, Sampling], Sampling], Callable[[Task, EpisodeLimits], EpisodeLimits]]:
    """Functions that apply the sampling parameters and limits of a task's source to those of the run."""
    sampling_of = {
        name: {key: value for key, value in source.sampling.items() if key != "max_context"}
        for name, source in sources.items()
    }
    limits_of = {
        name: source.rollout | {key: value for key, value in source.sampling.items() if key == "max_context"}
        for name, source in sources.items()
    }

    def sampling(task: Task, run: Sampling) -> Sampling:
        overrides = sampling_of.get(task.source)
        if not overrides:
            return run
        stop = (*run.stop_texts, *overrides.get("stop", ()))
        return replace(run, **{name: value for name, value in overrides.items() if name != "stop"}, stop_texts=stop)

    def limits(task: Task, run: EpisodeLimits) -> EpisodeLimits:
        overrides = limits_of.get(task.source)
        return replace(run, **overrides) if overrides else run

    return sampling, limits


@dataclass(frozen=True, slots=True)
class SourceParts:
    where: str
    """Prefix of its configuration keys: empty for the run, `data.sources.math.` for a source."""
    agent: AgentPartConfig
    env: EnvConfig
    tools: tuple[ToolConfig, ...]
    rewards: tuple[RewardConfig, ...]
    tool_args: Mapping[str, dict[str, Any]]
    sizes: PromptLimits
    context: ContextPolicy | None


def parts_by_source(config: RunConfig) -> dict[str, SourceParts]:
    max_turns, max_tokens = config.rollout.max_turns, config.sampling.max_tokens
    run = config.agent, config.env, config.tools, config.rewards, config.agent.tool_args
    parts = {"": SourceParts("", *run, PromptLimits(max_turns, max_tokens), context_policy(config.context))}
    for name, source in config.data.sources.items():
        agent = source.agent or config.agent
        tools = config.tools if source.tools is None else source.tools
        tool_args = agent.tool_args
        if source.agent is None:  # the run's agent with other tools: arguments of tools that it lacks do not apply
            tool_args = {tool: args for tool, args in tool_args.items() if tool in tool_names(tools)}
        parts[name] = SourceParts(
            f"data.sources.{name}.",
            agent,
            source.env or config.env,
            tools,
            source.rewards or config.rewards,
            tool_args,
            PromptLimits(source.rollout.get("max_turns", max_turns), source.sampling.get("max_tokens", max_tokens)),
            context_policy(source.context or config.context),
        )
    return parts


def context_policy(config: ContextConfig) -> ContextPolicy | None:
    """The context policy of a configuration; None for `policy: none`."""
    return None if config.policy == "none" else ContextPolicy(config.policy, **config.args)
