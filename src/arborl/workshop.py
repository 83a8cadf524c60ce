"""Where parts are found by name and made, each checked once at the start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from arborl import sandbox
from arborl.agents import AGENTS, Agent, called_here
from arborl.agents.agent import refuse_plain_function
from arborl.agents.context.policy import check_takes
from arborl.chat import Renderer
from arborl.cluster.connection import check_there
from arborl.config.run import Part, RunConfig
from arborl.data import Mixture, TaskSource, open_source
from arborl.data.mixing.streams import RowPool
from arborl.engines import ENGINES, Engine
from arborl.envs import ENVS, Env
from arborl.envs.prompted import NO_PROMPT, opened, prompted
from arborl.errors import ConfigError, EngineError
from arborl.registry import Registry, call_checked, short, unique
from arborl.rewards import REWARDS, Rewards
from arborl.rewards.by_source import RewardsBySource
from arborl.rewards.reward import opened as parts_of
from arborl.rollout.by_source import Seat, differences, seats_of
from arborl.rollout.given import GivenEpisodes
from arborl.rollout.groups import FILTERS, Manner
from arborl.rollout.part_maker import PartMaker, agent_maker, env_maker
from arborl.rollout.recorder import Limits
from arborl.rollout.replay import Recording, Replay
from arborl.rollout.runner import Cast, Rollout
from arborl.rollout.slots import FIRST
from arborl.rollout.workers import Workers
from arborl.sandbox import Found
from arborl.tools import TOOLS, AnyTool
from arborl.tools.opened import OpenTools, warn_of_variables, with_args
from arborl.tools.tool_warnings import warn_of_gaps
from arborl.types import Message, Sampling, Task

if TYPE_CHECKING:  # what needs torch
    from transformers import PreTrainedModel

    from arborl.algorithms import Algorithm
    from arborl.cluster.connection import Cluster


class Workshop:
    """Finds parts by name and makes them, each checked once at the start. Servers that tools come from are started and
    asked where it says `connect`; else their entries are only looked at, and give no tools."""

    def __init__(self, config: RunConfig, objects: Mapping[str, Any], connect: bool = False):
        self.config, self.objects = config, objects
        self.open_tools = OpenTools(lambda name: self.find(TOOLS, name), connect)
        self.made: list[Any] = []
        """Agents, tools and rewards."""
        self.cluster: Cluster | None = None

    def find(self, registry: Registry, name: str) -> Any:
        return self.objects[name] if name in self.objects else registry[name]

    def maker(self, registry: Registry, part: Part, where: str, **more: Any) -> PartMaker:
        """Makes objects of a part; that its arguments are what it takes is checked here, once."""
        return PartMaker(self.find(registry, part.name), part.name, part.args, where, more)

    def check_names(self) -> None:
        """That there is what only comes up once there is a model. Engines of the library are not imported yet."""
        if self.config.engine.name not in ENGINES.table:
            self.find(ENGINES, self.config.engine.name)
        if self.config.engine.name == "vllm":
            check_installed(self.config.engine.python)
        if self.config.placement.name == "ray":
            check_there(self.config.placement)
        if self.config.rollout.group_filter is not None:
            self.find(FILTERS, self.config.rollout.group_filter)

    def connect(self, model: PreTrainedModel, rewards: Rewards, training: bool = True) -> None:
        """Join the cluster of the run or start one, and have the rewards computed there that are to be."""
        if self.config.placement.name == "ray":
            from arborl.cluster.from_config import connected

            further = self.config.learner.ranks - 1 if training else 0
            self.cluster = connected(self.config.placement, model, rewards, further)

    def stop(self) -> None:
        """End what was started, where the run is not to be."""
        try:
            self.open_tools.stop()
        finally:
            if self.cluster is not None:
                self.cluster.close()

    def seats(self) -> dict[str, Seat]:
        """The run's own under the empty name, and that of each source."""
        return seats_of(self.config)

    def cast(self) -> Cast:
        """Who plays, by a task's source; a task may itself name another agent or environment.

        An agent that a source's configuration names comes before one that its rows name.
        """
        config, seats = self.config, self.seats()
        tools, sources = self.tools(seats), config.data.sources

        def seat_of(task: Task) -> str:
            return task.source if task.source in seats else ""

        def part_of(name: str, asked: str | None) -> Part:
            chosen = name in sources and sources[name].agent is not None
            if not asked or chosen or called_here(asked, config.data.agents) == seats[name].agent.name:
                return seats[name].agent
            return config.data.agents.get(asked) or Part(name=called_here(asked))

        @cache
        def envs_of(name: str, asked: str | None, agent: str | None) -> Callable[[], Env]:
            seat = seats[name]
            own = asked in (None, seat.env.name)
            part = seat.env if own else Part(name=str(asked))
            make = env_maker(self.maker(ENVS, part, f"{seat.where}env"))
            system = getattr(part_of(name, agent), "system", None)
            system = config.agent.system if system is None else system
            prompt = seat.env.prompt if own else NO_PROMPT
            return lambda: prompted(make(), prompt, system, seat.sizes)

        @cache
        def agents_of(name: str, asked: str | None) -> Callable[[], Agent]:
            part, where = part_of(name, asked), f"{seats[name].where}agent"
            said = f"{where}={part.name}"
            found, policy = self.find(AGENTS, part.name), seats[name].context
            refuse_plain_function(found, {*part.args, "tools"}, said)
            check_takes(found, said, policy)
            more: dict[str, Any] = {"tools": tools[name]} | ({"context": policy} if policy is not None else {})
            return agent_maker(self.maker(AGENTS, part, where, **more), said)

        def env(task: Task) -> Env:
            return envs_of(seat_of(task), task.env, task.agent)()

        def agent(task: Task) -> Agent:
            return agents_of(seat_of(task), task.agent)()

        made = Cast(agent, env, *differences(sources)) if sources else Cast(agent, env)
        for name, seat in seats.items():
            _check_has(made.env(Task("check", source=name)), ("reset", "step"), f"{seat.where}env={seat.env.name}")
            self.made.append(made.agent(Task("check", source=name)))
        for named in config.data.agents:
            self.made.append(made.agent(Task("check", agent=named)))
        self.made += [tool for several in tools.values() for tool in several]
        return made

    def tools(self, seats: Mapping[str, Seat]) -> dict[str, list[AnyTool]]:
        """The tools of each seat, made with their arguments or got from their servers."""
        everywhere = [entry for seat in seats.values() for entry in seat.tools]
        warn_of_variables(everywhere)
        made = {}
        for name, seat in seats.items():
            entries = with_args(seat.tools, seat.tool_args, seat.where, seat.tools if seat.where else everywhere)
            made[name] = [tool for entry in entries for tool in self.open_tools.open(*entry)]
        warn_of_gaps({tool.name: tool for some in made.values() for tool in some}.values())
        return made

    def rewards(self) -> Rewards:
        """The run's rewards, and those of sources that have their own."""
        seats = self.seats()
        run = self._rewards(seats.pop(""))
        own = {name: source for name, source in self.config.data.sources.items() if source.rewards is not None}
        return RewardsBySource(run, {name: self._rewards(seats[name]) for name in own}) if own else run

    def _rewards(self, seat: Seat) -> Rewards:
        """Rewards with their weights. A function is a reward as it stands; a class is called with its `args`."""
        chosen: list[tuple[str, Any, float]] = []
        for i, part in enumerate(seat.rewards):
            found = self.find(REWARDS, part.name)
            if isinstance(found, type):
                found = call_checked(found, part.args, f"{seat.where}rewards.{i}.args")
            elif part.args:
                raise ConfigError(
                    f"{seat.where}rewards.{i}.args: the reward {part.name!r} is a function and takes no arguments here."
                )
            own = str(getattr(found, "name", short(part.name)))
            name = unique(own, [other for other, _, _ in chosen])  # or one would take the place of another's number
            self.made += [each for one in parts_of(found) for each in (one, *parts_of(getattr(one, "base", None)))]
            chosen.append((name, found, part.weight * float(getattr(found, "weight", 1.0))))
        return Rewards(chosen, self.config.rollout.step_seconds)

    def sandbox(self) -> Found | None:
        """What isolates code where a part of the run executes some; ConfigError where nothing does, unallowed."""
        sandbox.allow_unsafe(self.config.sandbox.allow_unsafe)
        if not any(getattr(part, "sandboxed", False) for part in self.made):
            return None
        try:
            return sandbox.level_in_force()
        except sandbox.SandboxError as error:
            raise ConfigError(f"this run executes code, and {error}.") from error

    def source(self, renderer: Renderer, given: GivenEpisodes | None = None) -> tuple[TaskSource, int]:
        """Where tasks come from, and the steps of the run; that the agents they name exist, and that their rows will
        last, is checked here."""
        config = self.config

        def length(messages: Sequence[Message]) -> int:
            return len(renderer.encode(renderer.render(opened(messages, config.agent.system or ""))))

        rows = given.rows(config.algorithm.loss) if given is not None and config.data.offline else None
        source = open_source(config.data, config.env.name, config.seed, length, self.objects, rows)
        count = config.rollout.tasks_per_step + config.rollout.spare_groups
        shown = config.demonstrations.steps
        steps = config.trainer.steps or source.steps(config.trainer.epochs or 1, count) + shown
        if isinstance(source, Mixture):
            source.check(steps - shown, count)
            for name, pool in source.pools.items():
                own = name in config.data.sources and config.data.sources[name].agent is not None
                for agent in () if own or not isinstance(pool, RowPool) else sorted(pool.agents()):
                    self._check_agent(agent, name)
        return source, steps

    def _check_agent(self, agent: str, source: str) -> None:
        if agent in self.config.data.agents or called_here(agent) == self.config.agent.name:
            return
        try:
            found = self.find(AGENTS, called_here(agent))
        except ConfigError as error:
            raise ConfigError(f"rows of {source}, agent_name: {error} Or write data.agents.{agent}=NAME.") from error
        seats = self.seats()
        check_takes(found, f"agent_name={agent} of rows of {source}", seats.get(source, seats[""]).context)

    def algorithm(self) -> Algorithm:
        """The algorithm; it weighs sources where they say so."""
        from arborl.algorithms import finder, make_algorithm
        from arborl.algorithms.demonstrated import Demonstrated
        from arborl.algorithms.source_weights import SourceWeights

        made = make_algorithm(self.config.algorithm, finder(self.objects), True, self.config.data.offline)
        weights = {name: source.weight for name, source in self.config.data.sources.items()}
        made = SourceWeights(made, weights) if len(set(weights.values())) > 1 else made
        shown = self.config.demonstrations
        return Demonstrated(made, shown.weight) if shown.enabled else made

    def rollout(
        self, engine: Engine, cast: Cast, sampling: Sampling, limits: Limits, rewards: Rewards, given: GivenEpisodes
    ) -> Rollout:
        """What plays: where environments run, how groups are made, and what is recorded or replayed."""
        asked = self.config.rollout
        workers = Workers(asked.workers, asked.envs.max_env_num_per_worker)
        if self.cluster is not None and self.config.placement.env_workers:
            from arborl.cluster.environments import environment_processes

            workers = Workers("process", processes=environment_processes(self.cluster))
        keep = self.find(FILTERS, asked.group_filter) if asked.group_filter is not None else None
        training = Manner(asked.redundancy, asked.group_seconds, keep, rewards.judge, rewards.score)
        tape = Replay(asked.replay) if asked.replay else Recording(asked.record) if asked.record else None
        concurrency = None if asked.concurrency == "auto" else asked.concurrency
        if concurrency is None and self.config.deterministic:
            concurrency = FIRST  # what follows the engine depends on time, and so would the metrics
        rivals = self.config.track.top_logprobs
        return Rollout(
            engine, given.renderer, cast, sampling, limits, concurrency, workers, training, tape, given, rivals
        )

    def engine(
        self,
        model: PreTrainedModel,
        renderer: Renderer,
        cast: Cast,
        sampling: Sampling,
        kv_tokens: int = 0,
        lends: bool = False,
        training: bool = True,
    ) -> Engine:
        """`kv_tokens` and `lends` as `LocalEngine` has them."""
        config = self.config
        found = self.find(ENGINES, config.engine.name)
        if self.cluster is not None and config.placement.engines:
            from arborl.cluster.from_config import engines_of

            made: Engine = engines_of(self.cluster, config, model, renderer, sampling)
        elif config.engine.name == "local":
            made = self._local(found, model, renderer, kv_tokens, lends)
        elif config.engine.name == "scripted":
            texts = config.engine.replies or cast.env(Task("check")).actions() or ("Yes.",)
            made = found(replies(renderer, texts), decode=renderer.tokenizer.decode)
        elif config.engine.name == "vllm":
            made = self._vllm(found, model, renderer, sampling)
        elif config.engine.name == "http":
            made = self._http(found, model, renderer, sampling, training)
        else:
            made = found(model)
        return made

    def _local(
        self, engine: Callable[..., Engine], model: PreTrainedModel, renderer: Renderer, kv_tokens: int, lends: bool
    ) -> Engine:
        config, asked = self.config, self.config.engine
        try:
            return engine(
                model,
                config.sampling.max_context,
                asked.requests(model.device.type),
                kv_tokens,
                asked.page_size,
                config.deterministic,
                renderer.tokenizer.decode,
                asked.update,
                lends,
            )
        except (EngineError, ValueError) as error:
            raise ConfigError(f"model.name={config.model.name} with engine=local: {error}.") from error
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error):
                raise
            raise ConfigError(
                f"engine.kv_tokens={asked.kv_tokens}: there is no memory for so many keys and values. Write a smaller "
                "engine.kv_tokens, or 0 for a share of the memory."
            ) from error

    def _vllm(
        self, engine: Callable[..., Engine], model: PreTrainedModel, renderer: Renderer, sampling: Sampling
    ) -> Engine:
        config, asked = self.config, self.config.engine
        try:
            return engine(
                model,
                config.sampling.max_context,
                asked.requests(),
                asked.kv_tokens,
                asked.dtype,
                asked.python,
                asked.args,
                sampling,
                asked.sleep_mode,
                renderer.tokenizer.decode,
            )
        except EngineError as error:
            raise ConfigError(f"model.name={config.model.name} with engine=vllm: {error}. {VLLM_HINT}") from error

    def _http(
        self,
        engine: Callable[..., Engine],
        model: PreTrainedModel,
        renderer: Renderer,
        sampling: Sampling,
        training: bool,
    ) -> Engine:
        config, asked = self.config, self.config.engine
        try:
            return engine(
                model,
                asked.urls,
                config.sampling.max_context,
                asked.requests(),
                asked.dtype,
                asked.model,
                asked.weights_dir,
                asked.seconds,
                asked.api_key_env,
                sampling,
                renderer,
                training,
                asked.chat,
            )
        except EngineError as error:
            raise ConfigError(f"engine=http: {error}") from error


VLLM_HINT = (
    "Check that vLLM knows the architecture (config.json, architectures), and engine.args; or write engine=local."
)


def check_installed(python: str | None) -> None:
    """That the interpreter is there and has vLLM, before anything is read."""
    asked = [
        python or sys.executable,
        "-c",
        "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)",
    ]
    try:
        missing = subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine.python={python}: is no Python that can be started ({error}). Give the path of an interpreter."
        ) from error
    if missing:
        whose = f"the environment of engine.python={python}" if python else "this environment"
        raise ConfigError(
            f"engine=vllm: {whose} has no vLLM. Install it there (pip install vllm), or give the interpreter of an "
            "environment that has it: engine.python=PATH. See docs/engines.md."
        )


def _check_has(part: Any, methods: Sequence[str], where: str) -> None:
    for name in methods:
        if not callable(getattr(part, name, None)):
            raise ConfigError(f"{where}: gives a {type(part).__name__}, which has no method {name!r}.")


def replies(renderer: Renderer, texts: Sequence[str]) -> list[list[int]]:
    """Texts as what a model would have sampled: their ids and a stop token."""
    return [[*renderer.encode(renderer.said(text)), renderer.stop[0]] for text in texts]
