"""Build the objects of a run from its configuration: `build` for training and evaluation, `build_served` for serving,
`build_learner` for an update alone.

Mistakes in a configuration are found here before anything is written; those that need no model, before torch is
imported.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.chat import Renderer
from arborl.checkpoint import check_model
from arborl.config.run_config import LearnerConfig, RunConfig
from arborl.config.training_config import MAX_LEARNING_RATE
from arborl.data import TaskSource
from arborl.data.source_factory import with_demonstrations
from arborl.engines import Engine
from arborl.errors import ConfigError
from arborl.models.model_files import check_supported, read_model_config, resolve
from arborl.rewards import Rewards
from arborl.rollout.offline_episodes import OfflineEpisodes
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.sandbox import ActiveLevel
from arborl.tools.tool_loader import ToolLoader
from arborl.track.configured_trackers import Makers, make_trackers
from arborl.training_run.fault_injection import FaultInjector
from arborl.training_run.part_factory import RunPartFactory
from arborl.types import Message, Sampling

if TYPE_CHECKING:  # needs torch
    from transformers import PreTrainedModel

    from arborl.algorithms import Algorithm
    from arborl.algorithms.recipe import AlgorithmNeeds
    from arborl.cluster.placement.ray_cluster import RayCluster
    from arborl.learner.core.learner import Learner
    from arborl.learner.core.memory_forecast import MemoryPlan
    from arborl.learner.distributed.learner_group import LearnerGroup
    from arborl.learner.distributed.rank_worker import LearnerSpec
    from arborl.models.output_heads import CriticInit
    from arborl.trainer.evaluation import HeldOutEvaluator

log = logging.getLogger(__name__)

SAMPLE = (
    Message("user", "What is 12 + 30? Explain each step, then give the answer."),
    Message("assistant", "First I add the tens: 10 + 30 = 40. Then I add the ones: 40 + 2 = 42. The answer is 42."),
    Message("user", "Good. Write one sentence about a frozen lake in winter."),
)
"""Conversation on which execution paths are checked."""
SAMPLING_SETTINGS = ("max_tokens", "temperature", "top_k", "top_p", "min_p")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    config: RunConfig
    model_folder: Path
    model: PreTrainedModel
    renderer: Renderer
    engine: Engine
    source: TaskSource
    episode_factories: EpisodeFactories
    rollout: Rollout
    rewards: Rewards
    algorithm: Algorithm
    learner: Learner | LearnerGroup
    evaluator: HeldOutEvaluator
    steps: int
    sandbox: ActiveLevel | None
    """Isolation of the code that the model writes; None if the run executes none."""
    tools: ToolLoader
    plan: MemoryPlan
    tracker_makers: Makers = field(default_factory=dict)
    cluster: RayCluster | None = None
    faults: FaultInjector | None = None

    async def close(self) -> None:
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
        """Leave the cluster, and stop it if the run started it. A second call does nothing."""
        if self.cluster is not None:
            self.cluster.close()

    def save_tokenizer(self, folder: Path) -> None:
        save_tokenizer(self.model_folder, self.renderer, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingParts:
    config: RunConfig
    model: PreTrainedModel
    renderer: Renderer
    engine: Engine
    episode_factories: EpisodeFactories
    sampling: Sampling
    """As in the evaluation of the run."""
    limits: EpisodeLimits
    tools: ToolLoader

    def read(self, folder: Path) -> Mapping[str, Any]:
        """The weights of another checkpoint of the run, by the engine's names of them."""
        return load_policy(self.config, check_model(folder)).state_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    config: RunConfig
    renderer: Renderer
    sampling: Sampling
    algorithm: Algorithm
    learner: Learner


def save_tokenizer(source: Path, renderer: Renderer, folder: Path) -> None:
    """Copy the tokenizer files, and write the chat template in use."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    renderer.template.save(folder)


def build(config: RunConfig, objects: Mapping[str, Any] | None = None, training: bool = True) -> RunParts:
    faults = FaultInjector(config) if training and config.faults.rules else None
    factory = RunPartFactory(config, objects or {}, connect=True, faults=faults)
    try:
        return _build(factory, training)
    except BaseException:
        factory.stop()
        raise


def _build(factory: RunPartFactory, training: bool) -> RunParts:
    config = factory.config
    episode_factories, rewards = factory.episode_factories(), factory.rewards()
    trackers = make_trackers(config.track, factory.objects)
    factory.check_names()
    sandbox = factory.sandbox()
    check_device(config)
    warn_high_learning_rate(config, training)
    folder, renderer = _find_model(config)
    critic_folder = _critic_folder(config)
    given = OfflineEpisodes.of(config, renderer)
    source, steps = factory.source(renderer, given)
    factory.check_tasks(source, rewards, renderer)
    trained = with_demonstrations(source, config, given.rows("sft"), factory.objects) if training else source

    from arborl.cluster.placement.ray_ranks import rank_launcher
    from arborl.learner.core.memory_plan import plan_memory
    from arborl.learner.core.teacher import teacher_of
    from arborl.learner.distributed.launch import check_ranks, make_learner
    from arborl.trainer.evaluation import Evaluator
    from arborl.trainer.offline_evaluation import OfflineEvaluator

    _set_up_torch(config)
    algorithm = factory.algorithm()  # a mistake in a custom function is reported before the weights are loaded
    config = factory.config = resolve_dtype(config)
    if training:
        check_ranks(config.learner, config.model.device, algorithm, elsewhere=config.placement.name == "ray")
    model = _load_checked_policy(config, folder, renderer)
    origin = _load_critic_origin(critic_folder, folder, model)
    teacher = teacher_of(config, folder)
    plan = plan_memory(model, config, algorithm.needs)  # after all other models have their memory
    sampling = training_sampling(config, renderer)
    factory.connect(model, rewards, training)
    engine = factory.engine(
        model,
        renderer,
        episode_factories,
        sampling,
        kv_tokens=plan.kv_tokens,
        sleep_mode=plan.forecast.kv_freed,
        training=training,
    )
    engine = engine if factory.faults is None else factory.faults.engine(engine)
    rollout = factory.rollout(engine, episode_factories, sampling, episode_limits(config), rewards, given)
    settings = plan.settings(config.learner)
    if not training:
        settings = settings.model_copy(update={"strategy": "single", "ranks": 1})
    spec = _learner_spec(config, settings, sampling, algorithm.needs, steps, folder, critic_folder)
    learner = make_learner(spec, model, origin, teacher, rank_launcher(factory.cluster, model))
    evaluator: HeldOutEvaluator = (
        OfflineEvaluator(source, rollout, algorithm, config, learner)
        if config.data.offline
        else Evaluator(source, rollout, rewards, config.evaluation, config.seed, config.data.evaluation_counts)
    )
    return RunParts(
        config=config, model_folder=folder, model=model, renderer=renderer, engine=engine, source=trained,
        episode_factories=episode_factories, rollout=rollout, rewards=rewards, algorithm=algorithm, learner=learner,
        evaluator=evaluator, steps=steps, sandbox=sandbox, tools=factory.open_tools, plan=plan,
        tracker_makers=trackers, cluster=factory.cluster, faults=factory.faults,
    )  # fmt: skip


def build_learner(config: RunConfig, objects: Mapping[str, Any], steps: int) -> LearnerParts:
    """What an update needs, in one process: no environment, engine, tool or reward is made. The weights are those
    before the first of `steps` steps."""
    from arborl.learner.core.memory_plan import plan_memory
    from arborl.learner.core.teacher import teacher_of

    factory = RunPartFactory(config, objects)
    check_device(config)
    folder, renderer = _find_model(config)
    critic_folder = _critic_folder(config)
    _set_up_torch(config)
    algorithm = factory.algorithm()
    config = factory.config = resolve_dtype(config)
    model = _load_checked_policy(config, folder, renderer)
    origin, teacher = _load_critic_origin(critic_folder, folder, model), teacher_of(config, folder)
    settings = plan_memory(model, config, algorithm.needs).settings(config.learner)
    settings = settings.model_copy(update={"strategy": "single", "ranks": 1})
    sampling = training_sampling(config, renderer)
    spec = _learner_spec(config, settings, sampling, algorithm.needs, steps, folder, critic_folder)
    learner = spec.build(model, origin, teacher)
    learner.check_paths()
    return LearnerParts(config=config, renderer=renderer, sampling=sampling, algorithm=algorithm, learner=learner)


def build_served(config: RunConfig, objects: Mapping[str, Any] | None = None) -> ServingParts:
    factory = RunPartFactory(config, objects or {}, connect=True)
    try:
        episode_factories = factory.episode_factories()
        factory.sandbox()
        check_device(config)
        folder, renderer = _find_model(config)
        _set_up_torch(config, seeded=False)
        config = factory.config = resolve_dtype(config)
        model = _load_checked_policy(config, folder, renderer)
        sampling = training_sampling(config, renderer)
        kv_tokens = config.engine.kv_tokens
        engine = factory.engine(model, renderer, episode_factories, sampling, kv_tokens=kv_tokens, training=False)
    except BaseException:
        factory.open_tools.stop()
        raise
    overrides = config.evaluation.sampling | {"temperature": config.evaluation.temperature}
    return ServingParts(
        config=config, model=model, renderer=renderer, engine=engine, episode_factories=episode_factories,
        sampling=replace(sampling, **overrides), limits=episode_limits(config), tools=factory.open_tools,
    )  # fmt: skip


def check(config: RunConfig) -> None:
    """Check that agents, environments, tools and rewards exist and accept their arguments, without a model. A tool that
    is a class (such as an index of a corpus) is not constructed; its arguments are checked."""
    factory = RunPartFactory(config, {})
    factory.episode_factories()
    factory.rewards()
    factory.check_names()


def count_steps(config: RunConfig, objects: Mapping[str, Any] | None = None) -> int:
    """Number of steps of a run, without building it. With `trainer.epochs` the rows are read."""
    if config.trainer.steps is not None:
        return config.trainer.steps
    renderer = make_renderer(config, resolve(config.model.name))
    return RunPartFactory(config, objects or {}).source(renderer, OfflineEpisodes.of(config, renderer))[1]


def training_sampling(config: RunConfig, renderer: Renderer) -> Sampling:
    section = config.sampling
    same = {name: getattr(section, name) for name in SAMPLING_SETTINGS}
    return Sampling(stop=renderer.stop, stop_texts=section.stop, **same)


def episode_limits(config: RunConfig) -> EpisodeLimits:
    rollout, max_context = config.rollout, config.sampling.max_context
    return EpisodeLimits(rollout.max_turns, max_context, rollout.episode_seconds, rollout.step_seconds)


def make_renderer(config: RunConfig, folder: Path) -> Renderer:
    """The chat template and tokenizer of a model folder, with the settings of the run."""
    model = config.model
    return Renderer.from_folder(folder, config.agent.tool_format, model.chat_args, model.chat_template)


def check_device(config: RunConfig) -> None:
    """ConfigError if the device is not there, before rows and weights are read."""
    if config.model.device not in ("auto", "cpu"):
        from arborl.models.model_loading import device_of

        device_of(config.model.device)


def warn_high_learning_rate(config: RunConfig, training: bool = True) -> None:
    rate = config.learner.lr
    if training and rate is not None and rate > MAX_LEARNING_RATE:
        log.warning(
            "learner.lr=%g: AdamW changes each weight by about this much, so the first step destroys the model. "
            "Write 1e-6 to 1e-3, or leave it out for a default by the size of the model.",
            rate,
        )


def resolve_dtype(config: RunConfig) -> RunConfig:
    """With the precision that `model.dtype=auto` means here, so that a resumed run keeps it on another machine."""
    from arborl.models.model_loading import dtype_of

    model = config.model
    if model.dtype != "auto":
        return config
    dtype = "float32" if config.algorithm.loss == "trpo" else dtype_of(model.dtype, model.device)
    return config.model_copy(update={"model": model.model_copy(update={"dtype": dtype})})


def load_policy(config: RunConfig, folder: Path, device: str | None = None) -> PreTrainedModel:
    """The policy with its adapters and output layer, on `device` or that of the configuration."""
    from arborl.models.lora import add_lora, has_lora, load_4bit
    from arborl.models.model_loading import load_model
    from arborl.models.output_heads import float32_head

    settings = config.model
    load = load_4bit if settings.quantize == "4bit" else load_model
    model = load(folder, settings.dtype, settings.device if device is None else device)
    if settings.head == "float32":
        float32_head(model)
    if settings.lora.rank or has_lora(model):  # adapters of a saved folder are trained further
        add_lora(model, settings.lora)
    return model


def _find_model(config: RunConfig) -> tuple[Path, Renderer]:
    """Folder and renderer of the policy; checked before the weights are loaded."""
    folder = check_model(resolve(config.model.name))
    check_supported(read_model_config(folder), config.model.name, config.sampling.max_context)
    return folder, make_renderer(config, folder)


def _set_up_torch(config: RunConfig, seeded: bool = True) -> None:
    import torch

    if config.threads:
        torch.set_num_threads(config.threads)
    if seeded:
        torch.use_deterministic_algorithms(config.deterministic)
        torch.manual_seed(config.seed)


def _load_checked_policy(config: RunConfig, folder: Path, renderer: Renderer) -> PreTrainedModel:
    """Load the policy; check that it runs at `max_context` and knows all tokens of its tokenizer."""
    from arborl.models.path_check import check_tree_support, use_sample_text

    model = load_policy(config, folder)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    use_sample_text(model, [token for token in renderer.encode(renderer.render(SAMPLE)) if token < vocabulary])
    check_tree_support(model, config.model.name, config.sampling.max_context)
    largest = max(*renderer.encode(renderer.render([Message("user", "Hello.")])), min(renderer.stop))
    if largest >= vocabulary:
        raise ConfigError(
            f"model.name={config.model.name}: its tokenizer has the token {largest}, and the model knows {vocabulary}. "
            "Write a folder whose tokenizer.json is the model's own."
        )
    return model


def _critic_folder(config: RunConfig) -> Path | None:
    name = config.learner.critic_from
    return check_model(resolve(name, "learner.critic_from")) if name is not None else None


def _load_critic_origin(critic_folder: Path | None, folder: Path, model: PreTrainedModel) -> CriticInit | None:
    from arborl.models.output_heads import load_critic_init

    return load_critic_init(critic_folder, model, folder) if critic_folder is not None else None


def _learner_spec(
    config: RunConfig, settings: LearnerConfig, sampling: Sampling, needs: AlgorithmNeeds, steps: int, folder: Path,
    critic_folder: Path | None,
) -> LearnerSpec:  # fmt: skip
    """What every rank builds its learner from."""
    from arborl.learner.core.optimizer import NO_INITIAL_UPDATES, InitialUpdates
    from arborl.learner.core.teacher import teacher_of
    from arborl.learner.distributed.rank_worker import LearnerSpec

    imitation = config.demonstrations
    return LearnerSpec(
        settings, sampling, needs, steps, config.seed,
        model=partial(load_policy, config, folder),
        origin=partial(_load_critic_origin, critic_folder, folder),
        teacher=partial(teacher_of, config, folder),
        deterministic=config.deterministic,
        threads=config.threads,
        first=(
            NO_INITIAL_UPDATES
            if imitation.imitation_lr is None
            else InitialUpdates(imitation.steps, imitation.imitation_lr)
        ),
    )  # fmt: skip
