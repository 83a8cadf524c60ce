"""Checks across the sections of a configuration. Each raises ValueError with the keys and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborl.config.algorithm_config import OFFLINE_LOSSES, AlgorithmConfig, is_custom
from arborl.config.data_config import OF_A_SOURCE, DataConfig
from arborl.config.engine_config import SERVER_ENGINES
from arborl.errors import did_you_mean

if TYPE_CHECKING:
    from arborl.config.run_config import RunConfig

READ_OFFLINE: dict[str, tuple[str, ...]] = {
    "env": ("name",), "agent": ("tool_format",), "tools": (), "rewards": (), "engine": ("name",),
    "rollout": ("tasks_per_step",), "sampling": ("max_context",),
}  # fmt: skip
"""Sections about sampling, and their keys that offline runs read."""


def check_run(run: RunConfig) -> None:
    """All checks, in order."""
    for check in (
        check_teacher, check_demonstrations, check_offline, check_algorithm, check_critic, check_batch,
        check_deterministic, check_lengths, check_sources, check_engine, check_placement, check_lag,
        check_keep_best,
    ):  # fmt: skip
        check(run)


def check_keep_best(run: RunConfig) -> None:
    metric, evaluation = run.trainer.keep_best, run.evaluation
    if metric is None or not metric.removeprefix("-").startswith("evaluation/"):
        return
    if not (evaluation.every and evaluation.tasks):
        raise ValueError(
            f"trainer.keep_best={metric} with evaluation.every={evaluation.every} and tasks={evaluation.tasks}: "
            "held-out tasks are not measured during training. Write evaluation.every=10."
        )


def check_teacher(run: RunConfig) -> None:
    chosen = {one.options.teacher for one in run.algorithm.all if one.loss == "distill"}
    if None in chosen:
        raise ValueError(
            "algorithm=distill: there is no teacher. Write algorithm.args.teacher=MODEL, or the address of a server."
        )
    if len(chosen) > 1:
        raise ValueError(f"algorithm.args.teacher: one for the whole run; given {', '.join(sorted(map(str, chosen)))}.")
    sampling = run.sampling
    remote = any(str(name).startswith(("http://", "https://")) for name in chosen)
    if remote and (sampling.temperature != 1 or sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise ValueError(
            "algorithm.args.teacher: a server returns log-probabilities at temperature 1 over all tokens. Leave "
            "sampling.temperature, top_k, top_p and min_p out."
        )


def check_demonstrations(run: RunConfig) -> None:
    section = run.demonstrations
    if not section.enabled:
        return
    if run.data.offline:
        raise ValueError("demonstrations with data.offline: both are given conversations. Write one of them.")
    if run.trainer.steps is not None and section.steps >= run.trainer.steps:
        raise ValueError(
            f"demonstrations.steps={section.steps} with trainer.steps={run.trainer.steps}: no step is left for "
            f"reinforcement learning. Write trainer.steps={2 * section.steps}, or algorithm=sft for all."
        )
    if section.weight and run.algorithm.loss == "trpo":
        raise ValueError("demonstrations.weight with loss=trpo, whose step is bounded for one loss. Write weight=0.")


def check_offline(run: RunConfig) -> None:
    data, algorithm = run.data, run.algorithm
    if not data.offline:
        if run.engine.name == "none":
            raise ValueError("engine=none samples nothing, and this run is not offline. Leave engine out.")
        return
    if algorithm.loss not in OFFLINE_LOSSES or algorithm.by_source:
        key = "algorithm.by_source" if algorithm.by_source else f"algorithm.loss={algorithm.loss}"
        raise ValueError(
            f"data.offline with {key}: offline runs have one of the losses {', '.join(sorted(OFFLINE_LOSSES))}. Write "
            "algorithm=sft, or data.offline=false."
        )
    sources = data.sources.values()
    no_rows = not data.has_rows and not any(source.has_rows for source in sources)
    if no_rows or any(not source.has_rows for source in sources if not data.by):
        raise ValueError("data.offline: a source has no rows. Write data.path=FILE.")
    if algorithm.loss == "kto" and run.rollout.tasks_per_step < 2:
        raise ValueError(
            "rollout.tasks_per_step=1 with algorithm=kto: its reference point is estimated from other rows of the "
            "batch. Write rollout.tasks_per_step=2 or more."
        )
    if run.engine.name != "none":
        raise ValueError(f"engine={run.engine.name}: an offline run samples nothing. Leave engine out.")
    if run.env.name != "question":
        raise ValueError(
            f"env={run.env.name}: an offline run has no environment. Leave env out, or write data.offline=false."
        )
    for name, read in READ_OFFLINE.items():
        now, default = getattr(run, name), type(run).model_fields[name].get_default(call_default_factory=True)
        fields = {} if isinstance(now, tuple) else type(now).model_fields
        written = [key for key in fields if key not in read and getattr(now, key) != getattr(default, key)]
        if written or (not fields and now != default):
            raise ValueError(
                f"{'.'.join([name, *written[:1]])}: not read in an offline run, which samples nothing. Leave it out, "
                "or write data.offline=false."
            )


def check_algorithm(run: RunConfig) -> None:
    if run.model.dtype == "float16" and run.learner.master == "none":
        raise ValueError(
            "learner.master=none with model.dtype=float16: small gradients and updates would be lost. Write "
            "learner.master=float32, or model.dtype=bfloat16."
        )
    for algorithm in run.algorithm.all:
        if algorithm.compares_episodes and run.rollout.group_size < 2:
            raise ValueError(_group_of_one(algorithm))
        by_episode = algorithm.loss in ("gspo", "gmpo") and algorithm.options.sequence == "episode"
        whole = by_episode or algorithm.loss in ("dpo", "ipo", "kto")
        if run.learner.max_samples_per_trajectory is not None and whole:
            other = ", or write algorithm.args.sequence=call" if by_episode else ""
            raise ValueError(
                f"learner.max_samples_per_trajectory with algorithm.loss={algorithm.loss}, which is of whole "
                f"episodes: leave it out{other}."
            )
    for name in run.algorithm.by_source if run.data.sources else ():
        if name not in run.data.sources:
            near = did_you_mean(name, run.data.sources)
            raise ValueError(f"algorithm.by_source.{name}: no such source.{near} See data.sources.")


def _group_of_one(algorithm: AlgorithmConfig) -> str:
    if algorithm.loss in ("dpo", "ipo"):
        what, instead = f"loss={algorithm.loss}: one episode makes no pair", "algorithm.loss=sft"
    elif algorithm.advantage in ("grpo", "step_reinforce"):
        what = "args.baseline=mean: the only episode equals the mean, so every advantage is 0"
        instead = "algorithm.args.baseline=none"
    else:
        what = f"advantage={algorithm.advantage}: the only episode has nothing to be compared with"
        instead = "algorithm.advantage=reinforce"
    return f"rollout.group_size=1 with algorithm.{what}. Write rollout.group_size=8, or {instead}."


def check_critic(run: RunConfig) -> None:
    name, critic, algorithms = run.algorithm.name, run.learner.critic, run.algorithm.all
    needed = any(one.uses_critic for one in algorithms)
    if not needed and any(is_custom(one.advantage) for one in algorithms):
        return  # a custom advantage declares it when it is imported
    if needed and critic == "none":
        raise ValueError(
            f"learner.critic=none: algorithm={name} needs values. Write learner.critic=shared or separate."
        )
    if not needed and critic in ("shared", "detached", "separate"):
        raise ValueError(f"learner.critic={critic}: algorithm={name} needs no values. Write learner.critic=auto.")
    if not needed and run.learner.critic_from is not None:
        raise ValueError(
            f"learner.critic_from={run.learner.critic_from}: algorithm={name} needs no values. Leave it out, or "
            "write algorithm=ppo."
        )


def check_batch(run: RunConfig) -> None:
    tasks = run.rollout.tasks_per_step
    if run.learner.minibatches > tasks:
        raise ValueError(
            f"learner.minibatches={run.learner.minibatches} with rollout.tasks_per_step={tasks}: a mini-batch holds "
            f"whole groups. Write learner.minibatches={tasks} or less."
        )


def check_deterministic(run: RunConfig) -> None:
    for name in ("redundancy", "group_seconds"):
        if run.deterministic and getattr(run.rollout, name):
            raise ValueError(
                f"deterministic=true with rollout.{name}={getattr(run.rollout, name)}: which episodes finish first "
                f"depends on time. Leave rollout.{name} out, or write deterministic=false."
            )


def check_lengths(run: RunConfig) -> None:
    context, kv_tokens = run.sampling.max_context, run.engine.kv_tokens
    sections = {"evaluation.sampling": run.evaluation.sampling.get("max_tokens")}
    if not run.data.offline:
        sections = {"sampling": run.sampling.max_tokens, **sections}
    for section, tokens in sections.items():
        if tokens is not None and tokens >= context:
            raise ValueError(
                f"{section}.max_tokens={tokens} with sampling.max_context={context}: no room for a prompt. Write a "
                "larger sampling.max_context."
            )
    if run.engine.name == "local" and 0 < kv_tokens < context:
        raise ValueError(
            f"engine.kv_tokens={kv_tokens} with sampling.max_context={context}: not even one sequence fits. Write "
            f"engine.kv_tokens={context} or more, or 0 for a share of the memory."
        )


def check_sources(run: RunConfig) -> None:
    data = run.data
    if others := data.written(OF_A_SOURCE):
        run_key = f"{others[0]}, or " if others[0] in type(run).model_fields else ""
        raise ValueError(f"data.{others[0]}: is of one source. Write {run_key}data.sources.NAME.{others[0]}.")
    if run.env.prompt.is_set and data.sources and all(source.env for source in data.sources.values()):
        raise ValueError(
            "env.prompt is of the run's environment, and every source names another. Write "
            f"data.sources.{next(iter(data.sources))}.env.prompt."
        )
    if not data.sources:
        _check_source(run, "", data)
    rows = {"path": data.path, "hub": data.hub, "rows": data.rows} if data.by else {}
    for name, source in data.sources.items():
        _check_source(run, f"data.sources.{name}.", source.model_copy(update=rows) if rows else source)


def _check_source(run: RunConfig, where: str, source: DataConfig) -> None:
    agent, env = source.agent or run.agent, source.env or run.env
    tools = run.tools if source.tools is None else source.tools
    rewards = run.rewards if source.rewards is None else source.rewards
    if tools and agent.name == "chat" and (source.tools or source.agent or not where):
        raise ValueError(f"{where}tools are given but agent=chat calls none. Write {where}agent=tool.")
    if agent.name == "endpoint" and (tools or agent.system is not None):
        key = f"{where}tools" if tools else f"{where if source.agent else ''}agent.system"
        raise ValueError(f"{key}: with agent=endpoint the program has its own tools and prompts. Leave it out.")
    if source.agent is not None and source.agent.tool_format not in ("auto", run.agent.tool_format):
        raise ValueError(f"{where}agent.tool_format: a model has one format of tool calls. Write agent.tool_format.")
    if env.name == "question":
        if not source.has_rows:
            raise ValueError(f"{where}env=question takes its tasks from a file. Write {where or 'data.'}path=FILE.")
        if env.prompt.action_pattern is not None:
            raise ValueError(
                f"{where}env.prompt.action_pattern with env=question, whose answer is the whole reply. Leave it out, "
                "or check the pattern with a reward: rewards=[format]."
            )
        needs_reward = not run.data.offline and run.algorithm.loss != "distill"
        if needs_reward and [reward.name for reward in rewards] == ["env"]:
            raise ValueError(
                f"{where}env=question gives no reward of its own. Write {where}rewards=[exact], which compares with "
                "the column `answer`, or your own."
            )
    context = run.sampling.max_context
    for key, value, most in (
        ("max_tokens", source.sampling.get("max_tokens"), context - 1),
        ("max_context", source.sampling.get("max_context"), context),
    ):
        if value is not None and value > most:
            raise ValueError(
                f"{where}sampling.{key}={value} with sampling.max_context={context}. Write a larger one for the run."
            )


def check_engine(run: RunConfig) -> None:
    name, sampling = run.engine.name, run.sampling
    if name in ("vllm", *SERVER_ENGINES):
        if run.deterministic:
            raise ValueError(
                f"deterministic=true with engine={name}: its rounding depends on batch composition. Write "
                "engine=local, or deterministic=false."
            )
        if sampling.min_p > 0 and sampling.top_p < 1:
            raise ValueError(
                f"sampling.min_p={sampling.min_p:g} with sampling.top_p={sampling.top_p:g} and engine={name}: vLLM "
                "applies them in the other order. Write one of them, or engine=local."
            )
        if run.model.quantize != "none":
            raise ValueError(
                f"model.quantize={run.model.quantize} with engine={name}: quantised weights are not sent. Write "
                "engine=local, or model.quantize=none."
            )
    if run.track.top_logprobs and (name != "local" or run.placement.engines):
        key = f"engine={name}" if name != "local" else "placement.engines"
        raise ValueError(
            f"track.top_logprobs={run.track.top_logprobs} with {key}, which does not return them. Write engine=local "
            "in this process, or track.top_logprobs=0."
        )


def check_placement(run: RunConfig) -> None:
    placement, engine = run.placement, run.engine
    counts = (placement.engines, placement.env_workers, placement.reward_workers, run.learner.ranks - 1)
    if placement.name == "ray" and not any(counts):
        raise ValueError(
            "placement=ray places nothing. Write placement.engines=2, or another of its counts, or learner.ranks=2."
        )
    if placement.engines:
        if engine.name != "local":
            raise ValueError(
                f"placement.engines={placement.engines} are replicas of engine=local, and engine={engine.name}. Leave "
                "it out; several vLLM servers are written engine=http engine.args.urls=[…]."
            )
        if engine.sleep_mode:
            raise ValueError(
                f"engine.sleep_mode is for an engine beside the learner, and placement.engines={placement.engines} "
                "have their own memory. Leave engine.sleep_mode out."
            )
        if run.model.quantize != "none":
            raise ValueError(
                f"model.quantize={run.model.quantize} with placement.engines={placement.engines}: quantised weights "
                "are not sent. Write placement.engines=0, or model.quantize=none."
            )
    if placement.device_mapping.engines and run.model.device.partition(":")[0] == "cpu":
        raise ValueError("placement.device_mapping names GPUs, and model.device=cpu. Leave one of them out.")
    if placement.env_workers and run.rollout.workers not in ("auto", "process"):
        raise ValueError(
            f"placement.env_workers={placement.env_workers} are processes, and rollout.workers={run.rollout.workers}. "
            "Leave one of them out."
        )
    if placement.env_workers and run.rollout.envs_per_process:
        raise ValueError(
            f"placement.env_workers={placement.env_workers} divides the environments, and so does "
            "rollout.envs_per_process. Leave one of them out."
        )


def check_lag(run: RunConfig) -> None:
    lag = run.rollout.max_lag
    if run.deterministic and lag:
        raise ValueError(
            f"deterministic=true with rollout.max_lag={lag}: the composition of batches depends on time. Write "
            "rollout.max_lag=0, or deterministic=false."
        )
    if run.data.offline and lag:
        raise ValueError(f"rollout.max_lag={lag} with data.offline, where nothing is sampled. Leave it out.")
    if lag and run.engine.name == "vllm" and run.engine.sleep_mode:
        raise ValueError(
            f"rollout.max_lag={lag} with engine.sleep_mode: vLLM samples while the learner updates. Write "
            "rollout.max_lag=0, or engine.sleep_mode=false."
        )
