"""The only file that knows every room: a `RunConfig` becomes the objects of a run.

Everything a configuration can get wrong is found here, before anything is written; and what can be found without the
model, before torch is even imported, so that a mistake is answered in a second or two.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.chat import Renderer
from arborl.checkpoint import check_model
from arborl.config.run import LearnerConfig, RunConfig
from arborl.data import TaskSource
from arborl.data.demonstrations import with_demonstrations
from arborl.engines import Engine
from arborl.errors import ConfigError
from arborl.models.find import check_supported, described, resolve
from arborl.rewards import Rewards
from arborl.rollout.given import GivenEpisodes
from arborl.rollout.recorder import Limits
from arborl.rollout.runner import Cast, Rollout
from arborl.sandbox import Found
from arborl.tools.opened import OpenTools
from arborl.track.from_config import Makers, followers
from arborl.types import Message, Sampling
from arborl.workshop import Workshop

if TYPE_CHECKING:  # what needs torch
    from transformers import PreTrainedModel

    from arborl.algorithms import Algorithm
    from arborl.algorithms.algorithm import Needs
    from arborl.cluster.connection import Cluster
    from arborl.learner.blueprint import Blueprint
    from arborl.learner.forecast import Plan
    from arborl.learner.group import LearnerGroup
    from arborl.learner.learner import Learner
    from arborl.models.scalar import Origin
    from arborl.trainer.evaluate import Measures

SAMPLE = (
    Message("user", "What is 12 + 30? Explain each step, then give the answer."),
    Message("assistant", "First I add the tens: 10 + 30 = 40. Then I add the ones: 40 + 2 = 42. The answer is 42."),
    Message("user", "Good. Write one sentence about a frozen lake in winter."),
)
"""Text that execution paths are checked on."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


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
    learner: Learner | LearnerGroup
    evaluator: Measures
    steps: int
    """Of the whole run."""
    sandbox: Found | None
    """What isolates the code that the model writes, where the run has some."""
    tools: OpenTools
    """What the tools came from."""
    plan: Plan
    """Of the device's memory."""
    followers: Makers = field(default_factory=dict)
    """Trackers beyond the run's own files, by name."""
    cluster: Cluster | None = None
    """Where some of the parts are."""

    async def close(self) -> None:
        """End what the parts have started: the engine, processes of environments, servers of tools, a cluster."""
        try:
            await self.engine.close()
            self.rollout.close()
        finally:
            try:
                self.learner.close()
                await self.tools.close()
            finally:
                self.leave()

    def leave(self) -> None:
        """Let go of the cluster, and end it where it is the run's own; a second time does nothing."""
        if self.cluster is not None:
            self.cluster.close()

    def copy_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer and template beside saved weights, so that the folder is a whole model."""
        copy_tokenizer(self.model_folder, self.renderer, folder)


def copy_tokenizer(source: Path, renderer: Renderer, folder: Path) -> None:
    """The tokenizer's files as they are, and the chat template as it is used."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    renderer.template.save(folder)


def build(config: RunConfig, objects: Mapping[str, Any] | None = None, training: bool = True) -> Parts:
    """The objects of this configuration.

    Args:
        config: the run.
        objects: parts that Python code handed in, by name.
        training: whether weights will change; servers of others are left as they are where they do not.
    """
    workshop = Workshop(config, objects or {}, connect=True)
    try:
        return _build(workshop, training)
    except BaseException:
        workshop.stop()
        raise


def _build(workshop: Workshop, training: bool) -> Parts:
    config = workshop.config
    cast, rewards = workshop.cast(), workshop.rewards()
    behind = followers(config.track, workshop.objects)
    workshop.check_names()
    found = workshop.sandbox()
    folder, named = check_model(resolve(config.model.name)), config.learner.critic_from
    began = check_model(resolve(named, "learner.critic_from")) if named is not None else None
    check_supported(described(folder), config.model.name, config.sampling.max_context)  # before the weights are read
    renderer = renderer_of(config, folder)
    given = GivenEpisodes.of(config, renderer)
    source, steps = workshop.source(renderer, given)
    trained = with_demonstrations(source, config, given.rows("sft"), workshop.objects) if training else source

    import torch

    from arborl.cluster.ranks import ranks_on
    from arborl.learner.launch import check_ranks, make_learner
    from arborl.learner.memory import planned
    from arborl.learner.teacher import teacher_of
    from arborl.models.probe import check_runs
    from arborl.models.scalar import load_origin
    from arborl.trainer.evaluate import Evaluator
    from arborl.trainer.given_evaluation import GivenEvaluator

    if config.threads:
        torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
    algorithm = workshop.algorithm()  # what is wrong with one's own need not wait for the weights
    config = workshop.config = with_dtype(config)
    if training:
        check_ranks(config.learner, config.model.device, algorithm, elsewhere=config.placement.name == "ray")
    model = _policy(config, folder)
    _use_sample_text(renderer, model)
    check_runs(model, config.model.name, config.sampling.max_context)
    _check_tokens(config, renderer, model)
    origin = load_origin(began, model, folder) if began is not None else None
    teacher = teacher_of(config, folder)
    plan = planned(model, config, algorithm.needs)  # now that all models of others have their memory
    sampling, asked = sampling_of(config, renderer), config.rollout
    workshop.connect(model, rewards, training)
    engine = workshop.engine(model, renderer, cast, sampling, plan.kv_tokens, plan.forecast.lent, training)
    limits = Limits(asked.max_turns, config.sampling.max_context, asked.episode_seconds, asked.step_seconds)
    rollout = workshop.rollout(engine, cast, sampling, limits, rewards, given)
    settings = plan.settings(config.learner)
    if not training:
        settings = settings.model_copy(update={"strategy": "single", "ranks": 1})
    drawn_up = _blueprint(config, settings, sampling, algorithm.needs, steps, folder, began)
    learner = make_learner(drawn_up, model, origin, teacher, ranks_on(workshop.cluster, model))
    evaluator: Measures = (
        GivenEvaluator(source, rollout, algorithm, config, learner)
        if config.data.offline
        else Evaluator(source, rollout, rewards, config.evaluation, config.seed, config.rollout.val_envs)
    )
    return Parts(
        config, folder, model, renderer, engine, trained, cast, rollout, rewards, algorithm, learner, evaluator, steps,
        found, workshop.open_tools, plan, behind, workshop.cluster,
    )  # fmt: skip


def _blueprint(
    config: RunConfig, settings: LearnerConfig, sampling: Sampling, needs: Needs, steps: int, folder: Path,
    began: Path | None,
) -> Blueprint:  # fmt: skip
    """What every rank makes its learner of."""
    from arborl.learner.blueprint import Blueprint
    from arborl.learner.schedule import NONE, FirstSteps
    from arborl.learner.teacher import teacher_of

    shown = config.demonstrations
    return Blueprint(
        settings, sampling, needs, steps, config.seed,
        model=partial(_policy_on, config, folder),
        origin=partial(_origin, began, folder),
        teacher=partial(teacher_of, config, folder),
        deterministic=config.deterministic,
        threads=config.threads,
        first=NONE if shown.imitation_lr is None else FirstSteps(shown.steps, shown.imitation_lr),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """What it takes to use a trained model, and no more: nothing that learns."""

    config: RunConfig
    model: PreTrainedModel
    renderer: Renderer
    engine: Engine
    cast: Cast
    sampling: Sampling
    """As the run is evaluated."""
    limits: Limits
    tools: OpenTools

    def read(self, folder: Path) -> Mapping[str, Any]:
        """The weights of another checkpoint of the same run, under the names that the engine has for them."""
        return _policy(self.config, check_model(folder)).state_dict()


def build_served(config: RunConfig, objects: Mapping[str, Any] | None = None) -> Served:
    """The model of this configuration with its engine, and its agents."""
    workshop = Workshop(config, objects or {}, connect=True)
    try:
        cast = workshop.cast()
        workshop.sandbox()
        folder = check_model(resolve(config.model.name))
        check_supported(described(folder), config.model.name, config.sampling.max_context)
        renderer = renderer_of(config, folder)
        import torch

        from arborl.models.probe import check_runs

        if config.threads:
            torch.set_num_threads(config.threads)
        config = workshop.config = with_dtype(config)
        model = _policy(config, folder)
        _use_sample_text(renderer, model)
        check_runs(model, config.model.name, config.sampling.max_context)
        _check_tokens(config, renderer, model)
        sampling = sampling_of(config, renderer)
        engine = workshop.engine(model, renderer, cast, sampling, config.engine.kv_tokens, training=False)
    except BaseException:
        workshop.open_tools.stop()
        raise
    asked, measured = config.rollout, config.evaluation
    limits = Limits(asked.max_turns, config.sampling.max_context, asked.episode_seconds, asked.step_seconds)
    own = {name: getattr(measured, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")}
    own = {name: value for name, value in own.items() if value is not None}
    sampling = replace(sampling, **own)
    return Served(config, model, renderer, engine, cast, sampling, limits, workshop.open_tools)


def sampling_of(config: RunConfig, renderer: Renderer) -> Sampling:
    """How tokens are drawn in training."""
    drawn = config.sampling
    return Sampling(
        drawn.max_tokens,
        drawn.temperature,
        stop=renderer.stop,
        stop_texts=drawn.stop,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        min_p=drawn.min_p,
    )


def renderer_of(config: RunConfig, folder: Path) -> Renderer:
    model = config.model
    return Renderer.from_folder(folder, config.agent.tool_format, model.chat_args, model.chat_template)


def count_steps(config: RunConfig, objects: Mapping[str, Any] | None = None) -> int:
    """The steps of a run, without building it; where they are said in passes over its rows, these are read."""
    if config.trainer.steps is not None:
        return config.trainer.steps
    renderer = renderer_of(config, resolve(config.model.name))
    return Workshop(config, objects or {}).source(renderer, GivenEpisodes.of(config, renderer))[1]


def check(config: RunConfig) -> None:
    """That agents, environments, tools and rewards are there and take their arguments; without a model, in a second or
    two. A tool that is made of a class (an index of a corpus, say) is not made: its arguments are looked at."""
    workshop = Workshop(config, {})
    workshop.cast()
    workshop.rewards()
    workshop.check_names()


def with_dtype(config: RunConfig) -> RunConfig:
    """With the precision that `model.dtype=auto` stands for here, so that a run that is resumed elsewhere keeps it."""
    from arborl.models.load import dtype_of

    asked = config.model
    if asked.dtype != "auto":
        return config
    dtype = "float32" if config.algorithm.loss == "trpo" else dtype_of(asked.dtype, asked.device)
    return config.model_copy(update={"model": asked.model_copy(update={"dtype": dtype})})


def _use_sample_text(renderer: Renderer, model: PreTrainedModel) -> None:
    """Check the model's execution paths on a conversation in its own chat template."""
    from arborl.models.path_check import use_sample_text

    tokens = renderer.encode(renderer.render(SAMPLE))
    known = model.get_input_embeddings().weight.shape[0]
    use_sample_text(model, [token for token in tokens if token < known])


def _policy(config: RunConfig, folder: Path) -> PreTrainedModel:
    from arborl.models.heads import float32_head
    from arborl.models.load import load_model
    from arborl.models.lora import add_lora, has_lora, load_4bit

    asked = config.model
    model = (load_4bit if asked.quantize == "4bit" else load_model)(folder, asked.dtype, asked.device)
    if asked.head == "float32":
        float32_head(model)
    if asked.lora.rank or has_lora(model):  # a folder of adapters: they go on being trained
        add_lora(model, asked.lora)
    return model


def _policy_on(config: RunConfig, folder: Path, device: str) -> PreTrainedModel:
    """The policy as a further rank of the learner has it."""
    model = config.model.model_copy(update={"device": device})
    return _policy(config.model_copy(update={"model": model}), folder)


def _origin(began: Path | None, folder: Path, model: PreTrainedModel) -> Origin | None:
    from arborl.models.scalar import load_origin

    return load_origin(began, model, folder) if began is not None else None


def _check_tokens(config: RunConfig, renderer: Renderer, model: PreTrainedModel) -> None:
    """That what the tokenizer writes, the model knows, and that it can end its turn."""
    known = model.get_input_embeddings().weight.shape[0]
    largest = max(*renderer.encode(renderer.render([Message("user", "Hello.")])), min(renderer.stop))
    if largest >= known:
        raise ConfigError(
            f"model.name={config.model.name}: its tokenizer gives the token {largest}, and the model knows {known}. "
            "Give a folder whose tokenizer.json is the model's own."
        )
