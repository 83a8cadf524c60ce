"""Find parts by name and construct them: agents, environments, tools, rewards, data, algorithm, engine, rollout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from arborl import sandbox
from arborl.agents import AGENTS, Agent, resolve_agent_name
from arborl.agents.agent_interface import refuse_plain_function
from arborl.agents.context.managed_conversation import check_accepts_context
from arborl.chat import Renderer
from arborl.cluster.placement.ray_cluster import check_ray_available
from arborl.config.engine_config import SERVER_ENGINES
from arborl.config.run_config import PartConfig, RunConfig
from arborl.data import Mixture, TaskSource, open_source
from arborl.data.mixing.task_pools import RowPool
from arborl.data.source_factory import TaskCheck
from arborl.engines import ENGINES, Engine
from arborl.envs import ENVS, Env
from arborl.envs.prompt_wrapper import NO_PROMPT, prepend_system_prompt, wrap_with_prompt
from arborl.errors import ConfigError, EngineError
from arborl.registry import Registry, call_checked, short_name, unique_name
from arborl.rewards import REWARDS, Rewards
from arborl.rewards.reward import RewardsBySource
from arborl.rewards.reward import reward_parts as parts_of
from arborl.rollout.env_workers import Workers
from arborl.rollout.episode_store import RolloutRecorder, RolloutReplay
from arborl.rollout.groups import FILTERS, GroupOptions
from arborl.rollout.offline_episodes import OfflineEpisodes
from arborl.rollout.part_factories import (
    PartFactory,
    SourceParts,
    agent_factory,
    env_factory,
    parts_by_source,
    source_overrides,
)
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import DEFAULT_CONCURRENCY, EpisodeFactories, Rollout
from arborl.sandbox import ActiveLevel
from arborl.tools import TOOLS, AnyTool
from arborl.tools.core.toolbox import warn_incomplete_specs
from arborl.tools.tool_loader import ToolLoader, merge_tool_args, warn_foreign_variables
from arborl.training_run.fault_injection import FaultInjector
from arborl.types import Message, Sampling, Task

if TYPE_CHECKING:  # needs torch
    from transformers import PreTrainedModel

    from arborl.algorithms import Algorithm
    from arborl.cluster.placement.ray_cluster import RayCluster


class RunPartFactory:
    """Constructs the parts of a run; each is checked once at the start."""

    def __init__(
        self,
        config: RunConfig,
        objects: Mapping[str, Any],
        connect: bool = False,
        faults: FaultInjector | None = None,
    ):
        self.config, self.objects, self.faults = config, objects, faults
        self.open_tools = ToolLoader(lambda name: self.find(TOOLS, name), connect)
        self.made: list[Any] = []
        self.cluster: RayCluster | None = None

    def find(self, registry: Registry, name: str) -> Any:
        return self.objects[name] if name in self.objects else registry[name]

    def maker(self, registry: Registry, part: PartConfig, where: str, **more: Any) -> PartFactory:
        """A constructor of a part; its arguments are checked here, once."""
        return PartFactory(self.find(registry, part.name), part.name, part.args, where, more)

    def check_names(self) -> None:
        """Check names that are used only after the model is loaded. Engines of the library are not imported."""
        config = self.config
        if config.engine.name not in ENGINES.table:
            self.find(ENGINES, config.engine.name)
        if config.engine.name == "vllm":
            check_vllm_installed(config.engine.options.python)
        if config.placement.name == "ray":
            check_ray_available(config.placement)
        if config.rollout.group_filter is not None:
            self.find(FILTERS, config.rollout.group_filter)

    def connect(self, model: PreTrainedModel, rewards: Rewards, training: bool = True) -> None:
        if self.config.placement.name == "ray":
            from arborl.cluster.placement.placed_parts import connect_cluster

            remote_ranks = self.config.learner.ranks - 1 if training else 0
            self.cluster = connect_cluster(self.config, model, rewards, remote_ranks)

    def stop(self) -> None:
        """Stop tool servers and the cluster after a failed build."""
        try:
            self.open_tools.stop()
        finally:
            if self.cluster is not None:
                self.cluster.close()

    def episode_factories(self) -> EpisodeFactories:
        """Constructors of agents and environments for a task. The parts are those of the task's source. A task may name
        another agent or environment; an agent in the configuration of the source takes precedence over one in its
        rows."""
        config, by_source = self.config, parts_by_source(self.config)
        tools, sources = self.tools(), config.data.sources

        def source_of(task: Task) -> str:
            return task.source if task.source in by_source else ""

        def agent_part(source: str, name: str | None) -> PartConfig:
            fixed = source in sources and sources[source].agent is not None
            if not name or fixed or resolve_agent_name(name, config.data.agents) == by_source[source].agent.name:
                return by_source[source].agent
            return config.data.agents.get(name) or PartConfig(name=resolve_agent_name(name))

        @cache
        def env_constructor(source: str, name: str | None, agent: str | None) -> Callable[[], Env]:
            source_parts = by_source[source]
            is_default = name in (None, source_parts.env.name)
            part = source_parts.env if is_default else PartConfig(name=str(name))
            make = env_factory(self.maker(ENVS, part, f"{source_parts.where}env"))
            system = getattr(agent_part(source, agent), "system", None)
            system = config.agent.system if system is None else system
            prompt = source_parts.env.prompt if is_default else NO_PROMPT
            where, checked = f"{source_parts.where}env={part.name}", set[type]()

            def new_env() -> Env:
                env = make()
                if type(env) not in checked:
                    _check_env(env, where)
                    checked.add(type(env))
                return wrap_with_prompt(env, prompt, system, source_parts.sizes)

            return new_env

        @cache
        def agent_constructor(source: str, name: str | None) -> Callable[[], Agent]:
            part, key, context = agent_part(source, name), f"{by_source[source].where}agent", by_source[source].context
            where, found = f"{key}={part.name}", self.find(AGENTS, part.name)
            refuse_plain_function(found, {*part.args, "tools"}, where)
            check_accepts_context(found, where, context)
            more: dict[str, Any] = {"tools": tools[source]} | ({"context": context} if context is not None else {})
            return agent_factory(self.maker(AGENTS, part, key, **more), where)

        def make_env(task: Task) -> Env:
            return env_constructor(source_of(task), task.env, task.agent)()

        def make_agent(task: Task) -> Agent:
            return agent_constructor(source_of(task), task.agent)()

        episode_factories = EpisodeFactories(make_agent, make_env, *source_overrides(sources))
        for name in by_source:
            episode_factories.env(Task("check", source=name))
            self.made.append(episode_factories.agent(Task("check", source=name)))
        self.made += [episode_factories.agent(Task("check", agent=name)) for name in config.data.agents]
        self.made += [tool for some in tools.values() for tool in some]
        return episode_factories

    def tools(self) -> dict[str, list[AnyTool]]:
        by_source = parts_by_source(self.config)
        everywhere = [entry for source_parts in by_source.values() for entry in source_parts.tools]
        warn_foreign_variables(everywhere)
        made = {}
        for name, source_parts in by_source.items():
            entries = merge_tool_args(
                source_parts.tools,
                source_parts.tool_args,
                source_parts.where,
                source_parts.tools if source_parts.where else everywhere,
            )
            made[name] = [tool for entry in entries for tool in self.open_tools.load(*entry)]
        warn_incomplete_specs({tool.name: tool for some in made.values() for tool in some}.values())
        return made if self.faults is None else self.faults.tools(made)

    def rewards(self) -> Rewards:
        by_source = parts_by_source(self.config)
        run = self._rewards(by_source.pop(""))
        names = [name for name, source in self.config.data.sources.items() if source.rewards is not None]
        made = RewardsBySource(run, {name: self._rewards(by_source[name]) for name in names}) if names else run
        return made if self.faults is None else self.faults.rewards(made)

    def _rewards(self, source_parts: SourceParts) -> Rewards:
        """Rewards with their weights. A function is a reward; a class is called with its `args`."""
        chosen: list[tuple[str, Any, float]] = []
        for number, part in enumerate(source_parts.rewards):
            found, where = self.find(REWARDS, part.name), f"{source_parts.where}rewards.{number}.args"
            if isinstance(found, type):
                found = call_checked(found, part.args, where)
            elif part.args:
                raise ConfigError(f"{where}: the reward {part.name!r} is a function and takes no arguments here.")
            name = str(getattr(found, "name", short_name(part.name)))
            name = unique_name(name, [other for other, _, _ in chosen])
            self.made += [each for one in parts_of(found) for each in (one, *parts_of(getattr(one, "base", None)))]
            chosen.append((name, found, part.weight * float(getattr(found, "weight", 1.0))))
        return Rewards(chosen, self.config.rollout.step_seconds)

    def sandbox(self) -> ActiveLevel | None:
        """The sandbox if a part executes code. Raises ConfigError if there is none and it is not allowed."""
        sandbox.allow_unsafe(self.config.sandbox.allow_unsafe)
        if not any(getattr(part, "sandboxed", False) for part in self.made):
            return None
        try:
            return sandbox.active_level()
        except sandbox.SandboxError as error:
            raise ConfigError(f"this run executes code, and {error}.") from error

    def source(self, renderer: Renderer, given: OfflineEpisodes | None = None) -> tuple[TaskSource, int]:
        """The tasks and the number of steps; checks that the rows suffice and that agents named in rows exist."""
        config, length = self.config, partial(self._prompt_tokens, renderer)
        rows = given.rows(config.algorithm.loss) if given is not None and config.data.offline else None
        source = open_source(config.data, config.env.name, config.seed, length, self.objects, rows)
        count = config.rollout.tasks_per_step + config.rollout.spare_groups
        imitation = config.demonstrations.steps
        steps = config.trainer.steps or source.steps(config.trainer.epochs or 1, count) + imitation
        if isinstance(source, Mixture):
            source.check(steps - imitation, count)
            for name, pool in source.pools.items():
                fixed = name in config.data.sources and config.data.sources[name].agent is not None
                for agent in () if fixed or not isinstance(pool, RowPool) else sorted(pool.agents()):
                    self._check_agent(agent, name)
        return source, steps

    def _prompt_tokens(self, renderer: Renderer, messages: Sequence[Message]) -> int:
        system = self.config.agent.system or ""
        return len(renderer.encode(renderer.render(prepend_system_prompt(messages, system))))

    def check_tasks(self, source: TaskSource, rewards: Rewards, renderer: Renderer) -> None:
        """Check columns and lengths of the tasks before a model is loaded (`data.source_factory.TaskCheck`)."""
        TaskCheck(self.config, rewards.required_fields, partial(self._prompt_tokens, renderer)).check(source)

    def _check_agent(self, agent: str, source: str) -> None:
        if agent in self.config.data.agents or resolve_agent_name(agent) == self.config.agent.name:
            return
        try:
            found = self.find(AGENTS, resolve_agent_name(agent))
        except ConfigError as error:
            raise ConfigError(f"rows of {source}, agent_name: {error} Or write data.agents.{agent}=NAME.") from error
        by_source = parts_by_source(self.config)
        check_accepts_context(
            found, f"agent_name={agent} of rows of {source}", by_source.get(source, by_source[""]).context
        )

    def algorithm(self) -> Algorithm:
        from arborl.algorithms import make_algorithm, object_finder
        from arborl.algorithms.combined_algorithms import DemonstrationAlgorithm, SourceWeightedAlgorithm

        config = self.config
        made = make_algorithm(config.algorithm, object_finder(self.objects), True, config.data.offline)
        weights = {name: source.weight for name, source in config.data.sources.items()}
        made = SourceWeightedAlgorithm(made, weights) if len(set(weights.values())) > 1 else made
        return DemonstrationAlgorithm(made, config.demonstrations.weight) if config.demonstrations.enabled else made

    def rollout(
        self,
        engine: Engine,
        episode_factories: EpisodeFactories,
        sampling: Sampling,
        limits: EpisodeLimits,
        rewards: Rewards,
        given: OfflineEpisodes,
    ) -> Rollout:
        settings = self.config.rollout
        make_workers = Workers if self.faults is None else self.faults.workers
        workers = make_workers(settings.workers, settings.envs_per_process)
        if self.cluster is not None and self.config.placement.env_workers:
            from arborl.cluster.placement.ray_environments import environment_processes

            workers = make_workers("process", processes=environment_processes(self.cluster))
        keep = self.find(FILTERS, settings.group_filter) if settings.group_filter is not None else None
        training = GroupOptions(settings.redundancy, settings.group_seconds, keep, rewards.judge, rewards.score)
        tape = (
            RolloutReplay(settings.replay)
            if settings.replay
            else RolloutRecorder(settings.record)
            if settings.record
            else None
        )
        concurrency = None if settings.concurrency == "auto" else settings.concurrency
        if concurrency is None and self.config.deterministic:
            concurrency = DEFAULT_CONCURRENCY  # adaptive concurrency, and so the metrics, would depend on time
        return Rollout(
            engine, given.renderer, episode_factories, sampling, limits, concurrency, workers, training, tape, given,
            self.config.track.top_logprobs,
        )  # fmt: skip

    def engine(
        self,
        model: PreTrainedModel,
        renderer: Renderer,
        episode_factories: EpisodeFactories,
        sampling: Sampling,
        *,
        kv_tokens: int = 0,
        sleep_mode: bool = False,
        training: bool = True,
    ) -> Engine:
        """The engine. `kv_tokens` and `sleep_mode` are those of `LocalEngine`, from the memory plan."""
        config, settings, options = self.config, self.config.engine, self.config.engine.options
        found, decode = self.find(ENGINES, settings.name), renderer.tokenizer.decode
        if self.cluster is not None and config.placement.engines:
            from arborl.cluster.placement.placed_parts import build_ray_engine

            return build_ray_engine(self.cluster, config, model, renderer, sampling)
        if settings.name == "scripted":
            texts = options.replies or episode_factories.env(Task("check")).actions() or ("Yes.",)
            made: Engine = found(replies(renderer, texts), decode=decode)
            return made
        if settings.name not in ("local", "vllm", *SERVER_ENGINES):
            made = found(model, **settings.args)
            return made
        common: dict[str, Any] = {
            "model": model,
            "max_context": config.sampling.max_context,
            "max_requests": settings.requests(model.device.type if settings.name == "local" else "cpu"),
        }
        arguments: dict[str, dict[str, Any]] = {
            "local": {
                "kv_tokens": kv_tokens, "block_size": options.block_size, "deterministic": config.deterministic,
                "decode": decode, "update": options.update, "sleep_mode": sleep_mode, "tokenizer": renderer.tokenizer,
            },
            "vllm": {
                "kv_tokens": settings.kv_tokens, "dtype": options.dtype, "python": options.python,
                "args": settings.own_args, "sampling": sampling, "sleep_mode": settings.sleep_mode, "decode": decode,
            },
            "http": {
                "urls": options.urls, "dtype": options.dtype, "named": options.model,
                "weights_dir": options.weights_dir, "seconds": options.seconds, "key": options.api_key_env,
                "sampling": sampling, "renderer": renderer, "training": training, "chats": options.chat,
                "kind": settings.name,
            },
        }  # fmt: skip
        with _engine_errors(config):
            made = found(**common, **arguments["http" if settings.name in SERVER_ENGINES else settings.name])
        return made


@contextmanager
def _engine_errors(config: RunConfig) -> Iterator[None]:
    """Convert errors of an engine's constructor to ConfigError."""
    name, kv_tokens = config.engine.name, config.engine.kv_tokens
    where = f"engine={name}" if name in SERVER_ENGINES else f"model.name={config.model.name} with engine={name}"
    end = {"local": ".", "vllm": f". {VLLM_HINT}"}.get(name, "")
    try:
        yield
    except EngineError as error:
        raise ConfigError(f"{where}: {error}{end}") from error
    except (ValueError, MemoryError, RuntimeError) as error:
        if name == "local" and isinstance(error, ValueError):
            raise ConfigError(f"{where}: {error}.") from error
        if name != "local" or "memory" not in str(error):
            raise
        raise ConfigError(
            f"engine.kv_tokens={kv_tokens}: not enough memory for the KV cache. Write a smaller engine.kv_tokens, or 0 "
            "for a share of the memory."
        ) from error


VLLM_HINT = (
    "Check that vLLM supports the architecture (config.json, architectures), and engine.args; or write engine=local."
)


def check_vllm_installed(python: str | None) -> None:
    """Raise ConfigError unless the interpreter can be started and has vLLM."""
    code = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
    try:
        done = subprocess.run([python or sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine.args.python={python}: cannot be started as a Python interpreter ({error}). Write the path of one."
        ) from error
    if done.returncode != 0:
        where = f"the environment of engine.args.python={python}" if python else "this environment"
        raise ConfigError(
            f"engine=vllm: {where} has no vLLM. Install it there (pip install vllm), or write the interpreter of an "
            "environment that has it: engine.args.python=PATH. See docs/engines.md."
        )


def _check_env(env: Any, where: str) -> None:
    """Raise ConfigError unless it has its own `reset` and `step`, and the other methods of `Env`."""
    kind = type(env)
    for name, arguments in (("reset", "task, seed"), ("step", "action"), ("close", ""), ("metrics", "")):
        method = getattr(env, name, None)
        if callable(method) and (name not in ("reset", "step") or getattr(kind, name, None) is not getattr(Env, name)):
            continue
        if name in ("reset", "step"):
            how = f"Write `async def {name}(self, {arguments})`"
        else:
            how = f"Write `class {kind.__name__}(arborl.Env)` to inherit it"
        raise ConfigError(f"{where}: {kind.__name__} has no {name}(). {how}; docs/environments.md has an example.")


def replies(renderer: Renderer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts as completions, each with a stop token."""
    return [[*renderer.encode(renderer.escape_reply(text)), renderer.stop[0]] for text in texts]
