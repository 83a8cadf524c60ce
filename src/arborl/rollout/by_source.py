"""What the tasks of some sources have otherwise than the run's: who plays and judges them, how, and within what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arborl.agents.context.policy import Policy
from arborl.config.data_config import SourceConfig
from arborl.config.run_config import AgentConfig, ContextConfig, EnvConfig, RewardConfig, RunConfig, ToolConfig
from arborl.envs.prompted import Sizes
from arborl.rollout.recorder import Limits
from arborl.tools.opened import names
from arborl.types import Sampling, Task


def differences(
    sources: Mapping[str, SourceConfig],
) -> tuple[Callable[[Task, Sampling], Sampling], Callable[[Task, Limits], Limits]]:
    """What sources sample, and allow, otherwise than the run."""
    sampled = {name: source.sampling.model_dump(exclude_none=True) for name, source in sources.items()}
    allowed = {name: source.limits.model_dump(exclude_none=True) for name, source in sources.items()}

    def sampling(task: Task, run: Sampling) -> Sampling:
        asked = sampled.get(task.source)
        if not asked:
            return run
        stop = (*run.stop_texts, *asked.get("stop", ()))
        return replace(run, **{name: value for name, value in asked.items() if name != "stop"}, stop_texts=stop)

    def limits(task: Task, run: Limits) -> Limits:
        asked = allowed.get(task.source)
        return replace(run, **asked) if asked else run

    return sampling, limits


@dataclass(frozen=True, slots=True)
class Seat:
    """What plays the tasks of one source, and what judges them."""

    where: str
    """In front of its keys in a configuration: empty for the run, `data.sources.math.` for a source."""
    agent: AgentConfig
    env: EnvConfig
    tools: tuple[ToolConfig, ...]
    rewards: tuple[RewardConfig, ...]
    tool_args: Mapping[str, dict[str, Any]]
    sizes: Sizes
    """What its prompts may tell of limits."""
    context: Policy | None
    """What is done about a conversation that outgrows its window."""


def seats_of(config: RunConfig) -> dict[str, Seat]:
    """The run's own under the empty name, and that of each source."""
    turns, reply = config.rollout.max_turns, config.sampling.max_tokens
    sizes = Sizes(turns, reply)
    own = Seat(
        "",
        config.agent,
        config.env,
        config.tools,
        config.rewards,
        config.agent.tool_args,
        sizes,
        as_policy(config.context),
    )
    seats = {"": own}
    for name, source in config.data.sources.items():
        agent = source.agent or config.agent
        tools = config.tools if source.tools is None else source.tools
        given = agent.tool_args
        if source.agent is None:  # the run's agent at other tools: what is said of those it has not is not for here
            given = {tool: args for tool, args in given.items() if tool in names(tools)}
        where = f"data.sources.{name}."
        env, rewards = source.env or config.env, source.rewards or config.rewards
        sizes = Sizes(source.limits.max_turns or turns, source.sampling.max_tokens or reply)
        context = as_policy(source.context or config.context)
        seats[name] = Seat(where, agent, env, tools, rewards, given, sizes, context)
    return seats


def as_policy(config: ContextConfig) -> Policy | None:
    """The policy of a configuration; None where nothing is done."""
    asked = config.model_dump()
    return None if config.policy == "none" else Policy(asked.pop("policy"), **asked)
