"""`train`: build a run from an agent, an environment and a reward, and train it; trainers as objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from arborl import checkpoint
from arborl.config.load_config import from_kwargs
from arborl.config.run_config import RunConfig
from arborl.conversational.callbacks import Callback, CallbackHook, CheckpointCallback
from arborl.conversational.config import GSPOConfig, TrainingConfig, ValueFunction, check_counts
from arborl.conversational.environment import Environment, split_rows
from arborl.conversational.multi_turn_agent import MultiTurnAgent
from arborl.errors import ConfigError, did_you_mean
from arborl.training_run.entry_points import train_async
from arborl.training_run.object_names import name_objects

log = logging.getLogger("arborl.conversational")

A = TypeVar("A", bound=MultiTurnAgent)


async def train(
    agent: A,
    environment: Environment | Any,
    reward_fn: Any = None,
    num_episodes: int | None = None,
    profile: str | None = None,
    *,
    config: TrainingConfig | None = None,
    algorithm: str | None = None,
    eval_rewards: Sequence[Any] = (),
    callbacks: Sequence[Callback] = (),
    value_function: ValueFunction | None = None,
    save_path: str | Path | None = None,
    resume_from_checkpoint: str | None = None,
) -> A:
    """Train an agent; returns a copy with the new weights.

    The loss is over the tokens that the model sampled. The run folder (`run_folder` of the returned agent) contains all
    episodes, curves and a report.

    Args:
        agent: the agent. An override of `generate_response` is used in training too.
        environment: an `Environment`; or one of Arbor's environments, as an object or by name.
        reward_fn: a `RewardFunction`, a `@reward_function`, or any of Arbor's rewards, also by name. Default: the
            environment's reward.
        num_episodes: scenarios to play, each by a group; in place of the configuration's.
        profile: `conservative`, `balanced`, `aggressive` or `experimental`, for fields that `config` does not set.
        config: all other settings.
        algorithm: `grpo`, `gspo`, `ppo`, `dpo`, `a2c`, `trpo`, …; in place of the configuration's.
        eval_rewards: rewards that are reported and not trained on.
        callbacks: see `arborl.conversational.callbacks`.
        value_function: settings of the critic; needs an algorithm with a critic, such as `ppo`.
        save_path: run folder, in place of `config.output_dir`.
        resume_from_checkpoint: `latest`, a step or a path, in place of the configuration's.

    Example:
        trained = await train(agent=agent, environment=environment, reward_fn=HelpfulnessReward(), num_episodes=100)
    """
    arguments = {
        "num_episodes": num_episodes, "algorithm": algorithm, "output_dir": save_path,
        "resume_from_checkpoint": resume_from_checkpoint,
    }  # fmt: skip
    config = resolve_config(config, profile, arguments)
    check_arguments(agent, environment)
    for callback in callbacks:
        if isinstance(callback, CheckpointCallback) and callback.save_steps is not None:
            config = config.replace(save_steps=callback.save_steps)
    rewards = [reward_fn] if reward_fn is not None else []
    run, objects = run_config(agent, environment, rewards, config, eval_rewards, value_function)
    hook = CallbackHook(callbacks, config.logging_steps)
    await agent.close()
    await hook.emit("train_start", steps=config.steps)
    result = await train_async(run, resume=config.resume_from_checkpoint, objects=objects, hooks=[hook])
    await hook.end(result.folder, config.steps, result.summary)
    return trained_agent(agent, environment, result.folder, result.summary)


def trained_agent(agent: A, environment: Any, folder: Path, summary: Mapping[str, Any]) -> A:
    """The agent with the weights of the run's last checkpoint."""
    model = checkpoint.find(folder / "checkpoints", "latest") / "model"
    system = agent.config.system_prompt or getattr(environment, "system", None) or None
    return agent.with_weights(str(model), system, folder, summary)


def resolve_config(
    config: TrainingConfig | None, profile: str | None = None, arguments: Mapping[str, Any] | None = None
) -> TrainingConfig:
    """The settings of a run: arguments override the configuration, which overrides the profile."""
    if config is not None and not isinstance(config, TrainingConfig):
        raise ConfigError(f"train, config={config!r}: must be a TrainingConfig. Write TrainingConfig(…).")
    fields = {name: value for name, value in (arguments or {}).items() if value is not None}
    config = (config or TrainingConfig()).replace(**fields)
    resolved: TrainingConfig = config.with_profile(profile) if profile is not None else config
    return resolved


def check_arguments(agent: Any, environment: Any) -> None:
    if not isinstance(agent, MultiTurnAgent):
        raise ConfigError(
            f"train, agent={agent!r}: must be a MultiTurnAgent. Train any other async program with arborl.run(agent=…)."
        )
    if isinstance(environment, type):
        name = environment.__name__
        raise ConfigError(f"train, environment: {name} is a class. Write {name}(…).")


def run_config(
    agent: MultiTurnAgent,
    environment: Environment | Any,
    rewards: Sequence[Any],
    config: TrainingConfig,
    eval_rewards: Sequence[Any] = (),
    value_function: ValueFunction | None = None,
) -> tuple[RunConfig, dict[str, Any]]:
    """The run's configuration, and the objects that it names."""
    settings = config.run_settings(agent.config)
    settings |= {"name": "conversation", "agent": agent} | _task_settings(environment, config, settings)
    settings["rewards"] = [*(rewards or ["env"]), *({"name": reward, "weight": 0.0} for reward in eval_rewards)]
    if value_function is not None:
        value_function.apply(settings, agent.config)
    if wrong := sorted(key for key in config.overrides if "." not in key):
        raise ConfigError(f"TrainingConfig, overrides: {wrong[0]!r} is not a key of a run. Write 'section.key'.")
    named, objects = name_objects(settings)
    return from_kwargs(**_apply_overrides(named, config.overrides)), objects


def _apply_overrides(settings: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Set dotted keys in nested settings."""
    for key, value in overrides.items():
        *sections, last = key.split(".")
        place = settings
        for section in sections:
            inner = place.get(section)
            place[section] = dict(inner) if isinstance(inner, Mapping) else {} if inner is None else {"name": inner}
            place = place[section]
        place[last] = value
    return settings


def _task_settings(environment: Environment | Any, config: TrainingConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the environment and its tasks."""
    evaluation = settings["evaluation"]
    if not isinstance(environment, Environment):
        evaluation["tasks"] = 64 if config.eval_share else 0
        return {"env": environment}
    max_turns = int(getattr(environment, "max_turns", 0) or 0)
    settings["rollout"] |= {"max_turns": max_turns} if max_turns else {}
    rows, held_out = environment.rows(), environment.held_out
    if not rows:
        evaluation["tasks"] = 32 if config.eval_share else 0
        return {"env": environment.as_env()}
    if held_out is None:
        rows, held_out = split_rows(rows, config.eval_share)
        if not held_out and config.eval_share:
            log.warning("there is only one scenario: evaluation uses the scenario that is trained on")
    evaluation["tasks"] = len(held_out) or (len(rows) if config.eval_share else 0)
    data = {"rows": rows, "evaluation_rows": held_out or rows, "shuffle": environment.randomize_scenarios}
    return {"env": environment.as_env(), "data": data}


# ------------------------------------------------------------------------------------------------ trainers as objects


class MultiTurnGRPOTrainer:
    """A run as an object; `train` runs it.

    Args:
        agent, environment: as of `arborl.train`.
        reward_function: the reward.
        config: settings.
        value_function: if set, advantages are GAE with a critic instead of group-relative.

    Example:
        trainer = MultiTurnGRPOTrainer(agent, environment, reward_function=HelpfulnessReward(), config=TrainingConfig())
        trained = await trainer.train(callbacks=[EarlyStoppingCallback(patience=10)])
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment | Any,
        reward_function: Any = None,
        config: TrainingConfig | None = None,
        value_function: ValueFunction | None = None,
        eval_rewards: Sequence[Any] = (),
    ):
        self.agent, self.environment, self.reward_function = agent, environment, reward_function
        self.config, self.value_function = config or TrainingConfig(), value_function
        self.eval_rewards = eval_rewards

    async def train(self, callbacks: Sequence[Callback] = ()) -> Any:
        """Train; returns the trained agent."""
        more: dict[str, Any] = {
            "value_function": self.value_function,
            "eval_rewards": self.eval_rewards,
            "callbacks": callbacks,
        }
        return await train(self.agent, self.environment, self.reward_function, config=self.config, **more)


class DistributedTrainer(MultiTurnGRPOTrainer):
    """Training on several GPUs of one machine: a learner with as many ranks (`learner.ranks`). On a machine without
    GPUs the ranks are processes on the CPU.

    Args:
        agent, environment, config: as of `MultiTurnGRPOTrainer`.
        reward_fn: the reward.
        num_gpus: number of GPUs.
        strategy: `ddp`: a copy of the model on each GPU, gradients are summed.

    Raises:
        ConfigError: from `train`, if this machine has GPUs, but fewer.
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment | Any,
        reward_fn: Any = None,
        config: TrainingConfig | None = None,
        num_gpus: int = 1,
        strategy: Literal["ddp"] = "ddp",
    ):
        if strategy != "ddp":
            raise ConfigError(f"DistributedTrainer, strategy={strategy!r}: must be one of ddp.")
        check_counts("DistributedTrainer", num_gpus=num_gpus)
        super().__init__(agent, environment, reward_fn, _with_ranks(config or TrainingConfig(), num_gpus, strategy))
        self.num_gpus, self.strategy = num_gpus, strategy

    async def train(self, callbacks: Sequence[Callback] = ()) -> Any:
        """Train; returns the trained agent."""
        check_arguments(self.agent, self.environment)
        count = gpu_count(self.agent.config.device_map)
        if self.num_gpus > count > 0:
            raise ConfigError(
                f"DistributedTrainer, num_gpus={self.num_gpus}: this machine has {count} GPU{'s' * (count > 1)}. Write "
                f"num_gpus={count}."
            )
        if self.num_gpus > 1 and not count:
            log.warning("DistributedTrainer, num_gpus=%d: no GPU; ranks are processes on the CPU", self.num_gpus)
        return await super().train(callbacks)


def gpu_count(device: str) -> int:
    """GPUs of this machine; 0 if the model is on the CPU."""
    import torch

    from arborl.models.model_loading import device_of

    return torch.cuda.device_count() if device_of(device).type == "cuda" else 0


def _with_ranks(config: TrainingConfig, count: int, strategy: str) -> TrainingConfig:
    """The configuration with a learner of this many ranks."""
    if count == 1:
        return config
    keys = {"learner.strategy": strategy, "learner.ranks": count}
    for key, value in keys.items():
        if config.overrides.get(key, value) != value:
            raise ConfigError(
                f"DistributedTrainer, num_gpus={count}: overrides has {key}={config.overrides[key]!r}. Leave it out."
            )
    return config.replace(overrides={**config.overrides, **keys})


async def train_with_gspo(
    config: GSPOConfig,
    agent: MultiTurnAgent,
    environment: Environment | Any,
    reward_model: Any = None,
    callbacks: Sequence[Callback] = (),
    eval_rewards: Sequence[Any] = (),
) -> Any:
    """Train with GSPO; `reward_model` is the `reward_fn` of `train`."""
    if not isinstance(config, GSPOConfig):
        raise ConfigError(f"train_with_gspo, config={config!r}: must be a GSPOConfig. Write GSPOConfig(…).")
    return await train(agent, environment, reward_model, config=config, callbacks=callbacks, eval_rewards=eval_rewards)


# ------------------------------------------------------------------------------------------------ search


async def run_trial(
    agent: MultiTurnAgent,
    environment: Environment | Any,
    reward_fn: Any,
    config: TrainingConfig,
    params: Mapping[str, Any],
    *,
    folder: Path,
    report: Callable[[int, float], bool],
) -> float:
    """One trial of a search: train with these parameters; returns the mean reward on held-out scenarios."""
    agent_fields = {name: value for name, value in params.items() if name in ("top_p", "top_k", "max_new_tokens")}
    fields = {name: value for name, value in params.items() if name not in agent_fields}
    for name in fields:
        if name not in TrainingConfig.model_fields:
            near = did_you_mean(name, TrainingConfig.model_fields)
            raise ConfigError(f"search space, {name}: no such field of TrainingConfig.{near}")
    if agent_fields:
        agent = agent.with_config(agent.config.replace(**agent_fields))
    if fields.get("learning_rate") is not None:
        fields |= {"learning_rate_scale": 1.0}  # the scale of a profile applies to the default rate only
    config = config.replace(**fields, output_dir=folder)
    trained = await train(agent, environment, reward_fn, config=config, callbacks=[PruningCallback(report)])
    after = trained.summary.get("after", {})
    if "reward" not in after:
        raise ConfigError("quick_hpo: there was no evaluation. Write eval_share above 0, or eval_scenarios.")
    return float(after["reward"])


class PruningCallback:
    """Reports evaluations of a trial and stops it on request."""

    def __init__(self, report: Callable[[int, float], bool]):
        self.report, self.should_abort, self.abort_reason = report, False, ""

    def on_evaluation_end(self, data: Mapping[str, Any]) -> None:
        if "reward" in data["metrics"] and self.report(data["step"], data["metrics"]["reward"]):
            self.should_abort, self.abort_reason = True, "pruned: worse than the median of other trials"
