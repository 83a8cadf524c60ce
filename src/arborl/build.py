"""The only file that knows every room: a `RunConfig` becomes the objects of a run.

Everything a configuration can get wrong is found here, before anything is written.
"""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from arborl.agents import AGENTS, Agent, FunctionAgent
from arborl.algorithms.algorithm import ALGORITHMS, Algorithm
from arborl.chat import Renderer
from arborl.config.run import Part, RunConfig
from arborl.data import EnvTasks, FileTasks, TaskSource
from arborl.engines import ENGINES, Engine
from arborl.envs import ENVS, Env
from arborl.errors import ConfigError
from arborl.learner.learner import Learner
from arborl.models.load import load_model, resolve
from arborl.registry import Registry, call_checked
from arborl.rewards import REWARDS, Rewards
from arborl.rollout.recorder import Limits
from arborl.rollout.runner import Cast, Rollout
from arborl.tools import TOOLS, Tool
from arborl.trainer.evaluate import Evaluator
from arborl.types import Sampling, Task

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a run."""

    config: RunConfig
    model_folder: Path
    model: PreTrainedModel
    renderer: Renderer
    engine: Engine
    source: TaskSource
    cast: Cast
    rollout: Rollout
    rewards: Rewards
    algorithm: Algorithm
    learner: Learner
    evaluator: Evaluator

    def copy_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer and template beside saved weights, so that the folder is a whole model."""
        for name in TOKENIZER_FILES:
            if (self.model_folder / name).exists():
                shutil.copyfile(self.model_folder / name, folder / name)


def build(config: RunConfig, objects: Mapping[str, Any] | None = None) -> Parts:
    """The objects of this configuration; `objects` are parts that Python code handed in, by name."""
    workshop = Workshop(config, objects or {})
    cast, rewards, source = workshop.cast(), workshop.rewards(), workshop.source()
    folder = resolve(config.model.name)
    renderer = Renderer.from_folder(folder)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
    model = load_model(folder, config.model.dtype, config.model.device)
    _check_context(config, model)
    engine = workshop.engine(model, renderer, cast)
    drawn = config.sampling
    sampling = Sampling(
        drawn.max_tokens,
        drawn.temperature,
        stop=renderer.stop,
        stop_texts=drawn.stop,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        min_p=drawn.min_p,
    )
    limits = Limits(
        config.rollout.max_turns,
        config.sampling.max_context,
        config.rollout.episode_seconds,
        config.rollout.step_seconds,
    )
    rollout = Rollout(engine, renderer, cast, sampling, limits, config.rollout.concurrency)
    algorithm = ALGORITHMS[config.algorithm.name](config.algorithm)
    learner = Learner(
        model,
        config.learner,
        sampling,
        reference=algorithm.needs_reference,
        total_steps=config.trainer.steps,
    )
    evaluator = Evaluator(source, rollout, rewards, config.evaluation, config.seed)
    return Parts(config, folder, model, renderer, engine, source, cast, rollout, rewards, algorithm, learner, evaluator)


def _check_context(config: RunConfig, model: PreTrainedModel) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and config.sampling.max_context > longest:
        raise ConfigError(
            f"sampling.max_context={config.sampling.max_context}: {config.model.name} reads {longest} tokens at most. "
            f"Write sampling.max_context={longest} or less."
        )


class Workshop:
    """Finds parts by name and makes them, each checked once at the start."""

    def __init__(self, config: RunConfig, objects: Mapping[str, Any]):
        self.config, self.objects = config, objects

    def find(self, registry: Registry, name: str) -> Any:
        return self.objects[name] if name in self.objects else registry[name]

    def make(self, registry: Registry, part: Part, where: str, **more: Any) -> Any:
        """A fresh object where the name leads to a class or a function that makes one, else the object it leads to."""
        found = self.find(registry, part.name)
        makes = inspect.isclass(found) or (inspect.isfunction(found) and not inspect.iscoroutinefunction(found))
        if not makes:
            if part.args:
                raise ConfigError(f"{where}.args: {part.name!r} is an object already and takes no arguments.")
            return found
        takes = inspect.signature(found).parameters
        return call_checked(found, part.args | {k: v for k, v in more.items() if k in takes}, f"{where}.args")

    def cast(self) -> Cast:
        """Who plays. A task may name another agent or environment than the run's; that one takes no arguments."""
        config = self.config
        tools = [self._tool(name) for name in config.tools]

        def env(task: Task) -> Env:
            name = task.env or config.env.name
            part = config.env if name == config.env.name else Part(name=name)
            found: Env = self.make(ENVS, part, "env")
            return copy.deepcopy(found)  # an object that was handed in must not play two episodes at once

        def agent(task: Task) -> Agent:
            name = task.agent or config.agent.name
            part = config.agent if name == config.agent.name else Part(name=name)
            found = self.make(AGENTS, part, "agent", tools=tools)
            return FunctionAgent(found) if inspect.iscoroutinefunction(found) else found

        made = Cast(agent, env)
        made.env(Task("check"))
        made.agent(Task("check"))
        return made

    def _tool(self, name: str) -> Tool:
        found = self.find(TOOLS, name)
        return found if isinstance(found, Tool) else Tool(found)

    def rewards(self) -> Rewards:
        """The rewards with their weights. A function is a reward as it stands; a class is called with its `args`."""
        chosen = []
        for i, part in enumerate(self.config.rewards):
            found = self.find(REWARDS, part.name)
            if isinstance(found, type):
                found = call_checked(found, part.args, f"rewards.{i}.args")
            elif part.args:
                raise ConfigError(
                    f"rewards.{i}.args: the reward {part.name!r} is a function and takes no arguments here."
                )
            name = str(getattr(found, "name", part.name))
            chosen.append((name, found, part.weight * float(getattr(found, "weight", 1.0))))
        return Rewards(chosen, self.config.rollout.step_seconds)

    def source(self) -> TaskSource:
        data, seed = self.config.data, self.config.seed
        if data.path is None:
            return EnvTasks(self.config.env.name, seed)
        return FileTasks(data.path, data.question, seed, data.evaluation_share)

    def engine(self, model: PreTrainedModel, renderer: Renderer, cast: Cast) -> Engine:
        config = self.config
        found = ENGINES[config.engine.name]
        if config.engine.name == "local":
            made: Engine = found(
                model,
                config.sampling.max_context,
                config.engine.slots,
                config.deterministic,
                renderer.tokenizer.decode,
            )
        elif config.engine.name == "scripted":
            texts = config.engine.replies or cast.env(Task("check")).actions() or ("Yes.",)
            made = found(replies(renderer, texts), decode=renderer.tokenizer.decode)
        else:
            made = found(model)
        return made


def replies(renderer: Renderer, texts: Sequence[str]) -> list[list[int]]:
    """Texts as what a model would have sampled: their ids and a stop token."""
    return [[*renderer.tokenizer.encode(text), renderer.stop[0]] for text in texts]
