"""Injects faults into the parts of a run (`arborl train --faults FILE`): environments, tools, rewards, engine and disk
that raise, hang, answer late, return nonsense, die or are full.

Each part is wrapped where it is built; the parts themselves know nothing of faults. Which calls are hit follows from
the seed, the rule, the episode and the number of the call, so the same run has the same faults. Every injected fault is
counted under `faults/<part>/<kind>`, in the metrics of its step and in `summary.json`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from arborl.config.config_base import to_plain, validate
from arborl.config.fault_config import FaultConfig, FaultsConfig
from arborl.config.load_config import load_yaml
from arborl.config.run_config import RunConfig
from arborl.engines.engine import PROBE_SESSION, Engine, TokenListener, Weights
from arborl.envs.env import Env, Observation, Step
from arborl.envs.wrapper import EnvWrapper
from arborl.errors import ConfigError, EngineError, EpisodeError, boundary, did_you_mean, disk_errors
from arborl.rewards import Rewards
from arborl.rewards.reward import FunctionReward, GroupReward, RewardsBySource
from arborl.rewards.threaded_calls import call
from arborl.rollout.env_processes import ProcessEnv, ProcessPool
from arborl.rollout.env_threads import ThreadEnv
from arborl.rollout.env_workers import Workers
from arborl.rollout.episode_store import EpisodeStore
from arborl.seeds import generator
from arborl.tools import AnyTool
from arborl.tools.core.tool_context import ToolContext
from arborl.types import Completion, Episode, Group, Message, Metrics, Sampling, Task, ToolResult

if TYPE_CHECKING:
    from arborl.trainer.hooks import WriteEpisodes
    from arborl.trainer.trainer import Trainer

log = logging.getLogger(__name__)

TOOL_SECONDS = 10.0
"""How long a tool without its own timeout hangs."""


class InjectedFault(RuntimeError):
    """The error that `kind: raise` raises."""


def with_faults(config: RunConfig, file: Path) -> RunConfig:
    """The configuration with the faults of a YAML file: a list of rules, or a section with `seed` and `rules`, which
    may stand under `faults`."""
    content = load_yaml(file)
    content = content["faults"] if isinstance(content, Mapping) and list(content) == ["faults"] else content
    section = {"rules": content} if isinstance(content, list) else content
    if not isinstance(section, Mapping):
        raise ConfigError(f"{file}: must be a list of rules. Write - {{part: environment, kind: raise, rate: 0.1}}.")
    try:
        faults = validate(FaultsConfig, section)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from error
    if not faults.rules:
        raise ConfigError(f"{file}: has no rules. Write - {{part: environment, kind: raise, rate: 0.1}}.")
    return validate(RunConfig, config.model_dump() | {"faults": to_plain(faults)})


class FaultInjector:
    """Decides which calls are hit, counts them, and wraps parts."""

    def __init__(self, config: RunConfig):
        faults = config.faults
        self.rules, self.seed = faults.rules, config.seed if faults.seed is None else faults.seed
        self.counts: dict[str, int] = {rule.label: 0 for rule in self.rules}
        """Injected faults of the run by name."""
        self.hit = {str(number): 0 for number in range(len(self.rules))}
        """Number of calls hit by each rule, by its number."""
        self.reported: Counter[str] = Counter()
        self.step = 1
        """The step whose episodes are sampled now."""
        self.lock = Lock()
        self._check_processes(config)

    def _check_processes(self, config: RunConfig) -> None:
        for number, rule in enumerate(self.rules):
            if rule.part == "environment" and rule.kind == "die" and config.rollout.workers in ("none", "thread"):
                raise ConfigError(
                    f"faults.rules.{number}: kind=die kills the process of an environment, and "
                    f"rollout.workers={config.rollout.workers}. Write rollout.workers=process."
                )

    def draw(
        self, part: str, names: Sequence[str], key: Sequence[str | int], step: int | None = None
    ) -> FaultConfig | None:
        """The fault of this call, which is counted; None if it has none. `names` are the names of the part, `key`
        identifies the call."""
        step = self.step if step is None else step
        for number, rule in enumerate(self.rules):
            if rule.part != part or (rule.name is not None and rule.name not in names):
                continue
            if rule.at.step and step not in rule.at.step:
                continue
            if rule.rate < 1 and generator(self.seed, "fault", number, *key).random() >= rule.rate:
                continue
            with self.lock:
                if rule.once and self.hit[str(number)]:
                    continue
                self.hit[str(number)] += 1
                self.counts[rule.label] += 1
            log.info("injected fault: %s of %s in %s", rule.kind, " ".join(names) or part, "/".join(map(str, key)))
            return rule
        return None

    # -------------------------------------------------------------------------------------------- counts

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """As a hook of the trainer: the faults since the last step."""
        with self.lock:
            metrics |= {name: float(count - self.reported[name]) for name, count in self.counts.items()}
            self.reported = Counter(self.counts)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; it stays current."""
        return {"counts": self.counts, "hit": self.hit}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.counts.update({name: int(count) for name, count in state.get("counts", {}).items() if name in self.counts})
        self.hit.update({number: int(count) for number, count in state.get("hit", {}).items() if number in self.hit})
        self.reported = Counter(self.counts)

    # -------------------------------------------------------------------------------------------- parts

    def engine(self, engine: Engine) -> Engine:
        return FaultyEngine(engine, self)

    def workers(self, kind: str, per_process: int = 0, processes: ProcessPool | None = None) -> Workers:
        return FaultyWorkers(self, kind, per_process, processes)

    def tools(self, tools: Mapping[str, Sequence[AnyTool]]) -> dict[str, list[AnyTool]]:
        self._check_names("tool", {tool.name for some in tools.values() for tool in some})
        return {source: [FaultyTool(tool, self) for tool in some] for source, some in tools.items()}

    def rewards(self, rewards: Rewards) -> Rewards:
        every = [rewards, *(rewards.sources.values() if isinstance(rewards, RewardsBySource) else ())]
        self._check_names("reward", {name for one in every for name, _, _ in one.called})
        for one in every:
            one.called = [(name, faulty_reward(name, reward, self), weight) for name, reward, weight in one.called]
        return rewards

    def episode_files(self, hook: WriteEpisodes) -> None:
        hook.store = FaultyEpisodeStore(hook.store.folder, self)

    def checkpoint_files(self, write: Callable[[Path], None]) -> Callable[[Path], None]:
        """The function that writes further files into a checkpoint."""

        def write_or_fail(folder: Path) -> None:
            found = re.search(r"step-(\d+)", str(folder.parent.name))
            step = int(found[1]) if found else self.step
            if self.draw("disk", ["checkpoint"], ["checkpoint", step], step) is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(folder)

        return write_or_fail

    def _check_names(self, part: str, known: set[str]) -> None:
        for number, rule in enumerate(self.rules):
            if rule.part != part:
                continue
            if not known:
                raise ConfigError(f"faults.rules.{number}: part={part}, and the run has no {part}s. Leave it out.")
            if rule.name is not None and rule.name not in known:
                near = did_you_mean(rule.name, known)
                raise ConfigError(
                    f"faults.rules.{number}.name: no {part} {rule.name!r}.{near} There are {', '.join(sorted(known))}."
                )


async def _hang(where: str, seconds: float, thread: ThreadEnv | None = None) -> None:
    """Wait for the deadline of a call, and fail as a call that exceeds it. The thread of an environment is blocked for
    twice as long."""
    async with boundary(where, seconds):
        if thread is not None:
            await thread.call(partial(time.sleep, 2 * seconds))
        await asyncio.get_running_loop().create_future()


# ------------------------------------------------------------------------------------------------ environments


class FaultyWorkers(Workers):
    def __init__(
        self, faults: FaultInjector, kind: str = "auto", per_process: int = 0, processes: ProcessPool | None = None
    ):
        super().__init__(kind, per_process, processes)
        self.faults = faults

    async def place(self, make: Callable[[], Env], name: str | None, seconds: float) -> tuple[Env, str]:
        env, name = await super().place(make, name, seconds)
        return FaultyEnv(env, name, seconds, self.faults), name


class FaultyEnv(EnvWrapper):
    """Around the environment where the rollout calls it, outside of its thread or process."""

    blocking = False

    def __init__(self, env: Env, name: str, seconds: float, faults: FaultInjector):
        self.env, self.name, self.seconds, self.faults = env, name, seconds, faults
        self.has_own_deadline = isinstance(env, ProcessEnv)
        self.key: list[str | int] = []
        self.count = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self.key, self.count = ["environment", task.id, seed], 0
        if await self._fault() == "lie":
            return None  # type: ignore[return-value]
        return await call_env(self.env.reset, task, seed)  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        self.count += 1
        lies = await self._fault() == "lie"
        step: Step = await call_env(self.env.step, action)
        return Step(step.observation, math.nan, step.terminated, step.truncated, step.info) if lies else step

    async def close(self) -> None:
        await call_env(self.env.close)

    async def _fault(self) -> str | None:
        rule = self.faults.draw("environment", [self.name], [*self.key, self.count])
        if rule is None:
            return None
        where = f"environment {self.name!r}"
        if rule.kind == "raise":
            raise InjectedFault(f"injected by faults, call {self.count}")
        if rule.kind == "hang":
            await _hang(where, self.seconds, self.env if isinstance(self.env, ThreadEnv) else None)
        if rule.kind == "late":
            await asyncio.sleep(rule.delay)
        if rule.kind == "die":
            self._kill_process()
        return rule.kind

    def _kill_process(self) -> None:
        """The environment is restored in another process, as after any loss; elsewhere the call fails."""
        if not isinstance(self.env, ProcessEnv) or self.env.process is None:
            raise InjectedFault("injected by faults: it has no process that could die; write rollout.workers=process")
        self.env.process.kill()


async def call_env(method: Callable[..., Any], *args: Any) -> Any:
    value = method(*args)
    return await value if asyncio.iscoroutine(value) or isinstance(value, asyncio.Future) else value


# ------------------------------------------------------------------------------------------------ tools


class FaultyTool:
    """A tool whose failed calls are results for the model, as those of any tool."""

    def __init__(self, tool: AnyTool, faults: FaultInjector):
        self.tool, self.faults = tool, faults
        self.name, self.spec, self.stateful, self.terminal = tool.name, tool.spec, tool.stateful, tool.terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)

    async def run(self, arguments: Mapping[str, Any], context: ToolContext | None = None) -> ToolResult:
        task, number = (context.task.id, context.calls) if context is not None else ("", 0)
        text = json.dumps(dict(arguments), sort_keys=True, default=str)
        rule = self.faults.draw("tool", [self.name], ["tool", self.name, task, number, text])
        if rule is not None and rule.kind == "late":
            await asyncio.sleep(rule.delay)
        elif rule is not None:
            return await self._fail(rule)
        return await self.tool.run(arguments, context)

    async def _fail(self, rule: FaultConfig) -> ToolResult:
        try:
            if rule.kind == "hang":
                await _hang(f"tool {self.name!r}", getattr(self.tool, "timeout", None) or TOOL_SECONDS)
            raise EpisodeError(f"tool {self.name!r}", InjectedFault("injected by faults"))
        except EpisodeError as error:
            content = f"{self.name}: {type(error.cause).__name__}: {error.cause}"
            return ToolResult(content, False, "timeout" if error.kind == "timeout" else "exception")


# ------------------------------------------------------------------------------------------------ rewards


class FaultyReward:
    def __init__(self, name: str, reward: Any, faults: FaultInjector):
        self.name, self.reward, self.faults = name, reward, faults
        self.required_fields = getattr(reward, "required_fields", ())

    async def __call__(self, episode: Episode) -> Any:
        rule = self.faults.draw("reward", [self.name], ["reward", self.name, episode.id, episode.seed])
        kind = rule.kind if rule is not None else None
        if kind == "raise":
            raise InjectedFault("injected by faults")
        if kind == "hang":
            await asyncio.get_running_loop().create_future()
        if kind == "nan":
            return math.nan
        if rule is not None and kind == "late":
            await asyncio.sleep(rule.delay)
        reward = self.reward
        return await (reward(episode) if isinstance(reward, FunctionReward) else call(reward, episode))


class FaultyGroupReward(FaultyReward):
    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> Sequence[float]:
        return self.reward.across(episodes, values)  # type: ignore[no-any-return]


def faulty_reward(name: str, reward: Any, faults: FaultInjector) -> Any:
    kind = FaultyGroupReward if isinstance(reward, GroupReward) else FaultyReward
    return kind(name, reward, faults)


# ------------------------------------------------------------------------------------------------ engine


class FaultyEngine(Engine):
    """An engine whose calls fail or are late. The number of the step follows the versions of the weights."""

    def __init__(self, engine: Engine, faults: FaultInjector):
        self.engine, self.faults = engine, faults
        self.follows_weights, self.verifies_weights = engine.follows_weights, engine.verifies_weights
        self.shares_weights, self.shares_threads = engine.shares_weights, engine.shares_threads
        self.can_pause, self.can_stream, self.chat = engine.can_pause, engine.can_stream, engine.chat

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def is_saturated(self) -> bool:
        return self.engine.is_saturated

    @property
    def capacity(self) -> int:
        return self.engine.capacity

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        if session != PROBE_SESSION:
            rule = self.faults.draw("engine", [], ["engine", session, sampling.seed, len(prompt)])
            if rule is not None:
                await self._fault(rule, session)
        more = {} if listener is None else {"listener": listener}
        return await self.engine.generate(prompt, sampling, session=session, **more)

    async def _fault(self, rule: FaultConfig, session: str) -> None:
        if rule.kind == "late":
            await asyncio.sleep(rule.delay)
        elif rule.kind == "die" and (kill := getattr(self.engine, "kill_replica", None)) is not None:
            kill(session)  # the request moves to another replica
        else:
            what = "the request was lost with its engine" if rule.kind == "die" else "the request failed"
            raise EngineError(f"{what} (injected by faults)")

    async def load(self, weights: Weights, version: int) -> None:
        await self.engine.load(weights, version)
        self.faults.step = version + 1

    async def close(self) -> None:
        await self.engine.close()

    def check_request(self, sampling: Sampling) -> None:
        self.engine.check_request(sampling)

    def metrics(self) -> Metrics:
        return self.engine.metrics()

    def warm_up(self, sampling: Sampling) -> None:
        self.engine.warm_up(sampling)

    async def pause(self) -> None:
        await self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    async def sleep(self) -> None:
        await self.engine.sleep()


# ------------------------------------------------------------------------------------------------ disk


class FaultyEpisodeStore(EpisodeStore):
    def __init__(self, folder: Path, faults: FaultInjector):
        super().__init__(folder)
        self.faults = faults

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        with disk_errors(self.path(step)):
            if self.faults.draw("disk", ["episodes"], ["episodes", step], step) is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(step, groups)
