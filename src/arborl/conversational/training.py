"""Train an agent: its model, an environment and a reward become a run, and the trainer does the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from arborl import checkpoint
from arborl.config.load_config import from_kwargs
from arborl.config.run_config import RunConfig
from arborl.conversational.agent import AgentConfig, MultiTurnAgent
from arborl.conversational.callbacks import Callback, Callbacks, CheckpointCallback
from arborl.conversational.config import TrainingConfig
from arborl.conversational.environment import Environment, split
from arborl.conversational.value import ValueFunction
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
    """Train an agent; returns it with its new weights. The one that is given stays as it is.

    Losses are over what the model sampled, token by token; everything else in a conversation is only read. The run has
    a folder with all its episodes, curves and a report: the agent's `run_folder`.

    Args:
        agent: whom to train. One that overrides `generate_response` is trained through it.
        environment: an `Environment`; or one of Arbor's own, as an object or by name.
        reward_fn: what a conversation is worth: a `RewardFunction`, `@reward_function`, or any of Arbor's rewards, also
            by name. Without one, what the environment says.
        num_episodes: scenarios to play, each by a group; in place of the configuration's.
        profile: `conservative`, `balanced`, `aggressive` or `experimental`; for what `config` does not say.
        config: all other settings.
        algorithm: `grpo`, `gspo`, `ppo`, `dpo`, `a2c`, `trpo`, …; in place of the configuration's.
        eval_rewards: measured and reported beside, and never trained on.
        callbacks: see `arborl.conversational.callbacks`.
        value_function: how values are estimated; needs an algorithm that has a critic, such as `ppo`.
        save_path: folder of the run, in place of `config.output_dir`.
        resume_from_checkpoint: `latest`, a step or a path, in place of the configuration's.

    Example:
        trained = await train(agent=agent, environment=environment, reward_fn=HelpfulnessReward(), num_episodes=100)
    """
    told = {
        "num_episodes": num_episodes, "algorithm": algorithm, "output_dir": save_path,
        "resume_from_checkpoint": resume_from_checkpoint,
    }  # fmt: skip
    chosen = settled(config, profile, told)
    check_given(agent, environment)
    for one in callbacks:
        if isinstance(one, CheckpointCallback) and one.save_steps is not None:
            chosen = changed(chosen, {"save_steps": one.save_steps})
    rewards = [reward_fn] if reward_fn is not None else []
    run, objects = run_config(agent, environment, rewards, chosen, eval_rewards, value_function)
    hook = Callbacks(callbacks, chosen.logging_steps)
    await agent.close()
    await hook.tell("train_start", steps=chosen.steps)
    done = await train_async(run, resume=chosen.resume_from_checkpoint, objects=objects, hooks=[hook])
    await hook.end(done.folder, chosen.steps, done.summary)
    model = checkpoint.find(done.folder / "checkpoints", "latest") / "model"
    system = agent.config.system_prompt or getattr(environment, "system", None) or None
    return agent.trained(str(model), system, done.folder, done.summary)


def settled(config: TrainingConfig | None, profile: str | None, told: Mapping[str, Any]) -> TrainingConfig:
    """The settings of a run: those told, then the configuration's, then the profile's."""
    if config is not None and not isinstance(config, TrainingConfig):
        raise ConfigError(f"train, config={config!r}: must be a TrainingConfig. Write TrainingConfig(…).")
    given = {name: value for name, value in told.items() if value is not None}
    found = changed(config or TrainingConfig(), given)
    settled: TrainingConfig = found.with_profile(profile) if profile is not None else found
    return settled


def changed(config: TrainingConfig, fields: Mapping[str, Any]) -> TrainingConfig:
    """The settings, with these in place of theirs."""
    return type(config)(**{name: getattr(config, name) for name in config.said} | dict(fields))


def check_given(agent: Any, environment: Any) -> None:
    if not isinstance(agent, MultiTurnAgent):
        raise ConfigError(
            f"train, agent={agent!r}: must be a MultiTurnAgent. Any async program that calls a model can be trained "
            "with arborl.run(agent=…)."
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
    """The run's configuration, and the objects it names."""
    settings = config.as_settings(agent.config)
    settings |= {"name": "conversation", "agent": agent} | _tasks(environment, config, settings)
    settings["rewards"] = [*(rewards or ["env"]), *({"name": one, "weight": 0.0} for one in eval_rewards)]
    if value_function is not None:
        value_function.apply(settings, agent.config)
    dotted = {key: value for key, value in config.overrides.items() if "." in key}
    if wrong := sorted(set(config.overrides) - set(dotted)):
        raise ConfigError(f"TrainingConfig, overrides: {wrong[0]!r} is no key of a run. Write 'section.key'.")
    named, objects = name_objects(settings)
    return from_kwargs(**_with(named, dotted)), objects


def _with(settings: dict[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, with dotted keys put where they belong."""
    for key, value in dotted.items():
        *above, last = key.split(".")
        place = settings
        for part in above:
            inner = place.get(part)
            place[part] = dict(inner) if isinstance(inner, Mapping) else {} if inner is None else {"name": inner}
            place = place[part]
        place[last] = value
    return settings


def _tasks(environment: Environment | Any, config: TrainingConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """The environment, and where its tasks come from."""
    evaluation = settings["evaluation"]
    if not isinstance(environment, Environment):
        evaluation["tasks"] = 64 if config.eval_share else 0
        return {"env": environment}
    turns = int(getattr(environment, "max_turns", 0) or 0)
    settings["rollout"] |= {"max_turns": turns} if turns else {}
    rows, apart = environment.rows(), environment.held_out
    if not rows:
        evaluation["tasks"] = 32 if config.eval_share else 0
        return {"env": environment.as_env()}
    if apart is None:
        rows, apart = split(rows, config.eval_share)
        if not apart and config.eval_share:
            log.warning("there is one scenario only: what is measured is measured on what was trained on")
    evaluation["tasks"] = len(apart) or (len(rows) if config.eval_share else 0)
    data = {"rows": rows, "evaluation_rows": apart or rows, "shuffle": environment.randomize_scenarios}
    return {"env": environment.as_env(), "data": data}


async def trial(
    agent: MultiTurnAgent,
    environment: Environment | Any,
    reward_fn: Any,
    config: TrainingConfig,
    params: Mapping[str, Any],
    *,
    folder: Path,
    report: Callable[[int, float], bool],
) -> float:
    """One trial of a search: train from the agent's weights with these parameters in place of the configuration's;
    returns the mean reward on held-out scenarios.

    Args:
        agent, environment, reward_fn, config: as of `train`.
        params: fields of `TrainingConfig`, or `top_p`, `top_k` and `max_new_tokens` of the agent's.
        folder: of the run.
        report: told the step and the reward of each evaluation on the way; says whether to stop there.
    """
    spoken = {name: value for name, value in params.items() if name in ("top_p", "top_k", "max_new_tokens")}
    fields = {name: value for name, value in params.items() if name not in spoken}
    for name in fields:
        if name not in TrainingConfig.model_fields:
            near = did_you_mean(name, TrainingConfig.model_fields)
            raise ConfigError(f"search space, {name}: no such field of TrainingConfig.{near}")
    if spoken:
        told = {name: getattr(agent.config, name) for name in agent.config.said}
        agent = agent.with_config(AgentConfig(**told | spoken))
    watch = Pruned(report)
    if fields.get("learning_rate") is not None:
        fields |= {"learning_rate_scale": 1.0}  # a profile's, which is about the usual rate
    chosen = changed(config, fields | {"output_dir": folder})
    done = await train(agent, environment, reward_fn, config=chosen, callbacks=[watch])
    after = done.summary.get("after", {})
    if "reward" not in after:
        raise ConfigError("quick_hpo: nothing was measured. Write eval_share above 0, or give eval_scenarios.")
    return float(after["reward"])


class Pruned:
    """Reports evaluations, and ends the run where it is told to."""

    def __init__(self, report: Callable[[int, float], bool]):
        self.report, self.should_abort, self.abort_reason = report, False, ""

    def on_evaluation_end(self, data: Mapping[str, Any]) -> None:
        if "reward" in data["metrics"] and self.report(data["step"], data["metrics"]["reward"]):
            self.should_abort, self.abort_reason = True, "other settings have come further by now"
