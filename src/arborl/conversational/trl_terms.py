"""What crosses the line between Arbor and TRL: settings, conversations as rows of tokens, weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.config.algorithm_config import KLConfig
from arborl.config.run_config import RunConfig
from arborl.conversational.config import TrainingConfig
from arborl.errors import ConfigError, EpisodeError
from arborl.models.find import described, resolve
from arborl.training_run.build import RunParts
from arborl.types import Episode

if TYPE_CHECKING:  # what needs torch
    from trl import GRPOTrainer

log = logging.getLogger("arborl.conversational")

ME = "TRLGRPOTrainerWrapper"
LOSSES = {"episode": "grpo", "token": "dapo", "fixed": "dr_grpo"}
"""What TRL calls our ways of weighing tokens."""
PLAYED = (
    "rollout.episode_seconds", "rollout.step_seconds", "rollout.max_turns", "rollout.concurrency", "rollout.workers",
    "sampling.", "evaluation.", "env.", "agent.", "data.", "engine.", "model.chat_args", "learner.recompute",
)  # fmt: skip
"""Keys of a run that hold here too: those of playing and measuring, which Arbor does."""


# ------------------------------------------------------------------------------------------------ settings


def refuse(config: TrainingConfig, run: RunConfig) -> None:
    """Say what TRL cannot do, before anything is read or written."""
    algorithm, why = run.algorithm, ""
    if algorithm.advantage != "grpo" or algorithm.loss not in ("ppo", "gspo"):
        why = f"algorithm={algorithm.name}: TRL's trainer has none such. Write grpo, dapo, dr_grpo, bnpo or gspo."
    elif config.resume_from_checkpoint is not None:
        why = "resume_from_checkpoint: a run of TRL's is not continued here. Leave it out, or use arborl.train."
    elif config.wandb_project is not None:
        why = "wandb_project: TRL reads it from the environment. Set WANDB_PROJECT instead."
    elif run.model.dtype == "float64":
        why = "torch_dtype=float64: TRL's losses are in float32. Write float32."
    elif not described(resolve(run.model.name)):
        why = f"model_name={run.model.name}: holds adapters alone. Give the folder of a whole model."
    elif lost := sorted(key for key in config.overrides if not key.startswith(PLAYED)):
        why = f"overrides, {lost[0]}: is about Arbor's learner, and here TRL learns. Leave it out."
    if why:
        raise ConfigError(f"{ME}, {why}")
    if run.sampling.top_p < 1 or run.sampling.top_k or run.sampling.min_p:
        log.warning("top_p, top_k, min_p: TRL's loss reads the probabilities of all tokens, not of those in the draw")


def played(run: RunConfig) -> RunConfig:
    """What of a run Arbor does itself: no adapters, no reference, no float32 copies for a learner that rests."""
    model = run.model.model_copy(update={"lora": type(run.model.lora)()})
    algorithm = run.algorithm.model_copy(update={"kl": KLConfig()})
    learner = run.learner.model_copy(update={"master": "none"} if run.model.dtype == "bfloat16" else {})
    return run.model_copy(update={"model": model, "algorithm": algorithm, "learner": learner})


def settings(run: RunConfig, config: TrainingConfig, parts: RunParts, home: Path) -> dict[str, Any]:
    """Fields of `GRPOConfig`. A batch is counted in conversations there and in groups here. Weights are in float32 and
    the arithmetic in what the model is in, which is what Arbor's float32 copies come to."""
    from arborl.learner.schedule import warmup

    algorithm, learner, drawn, device = run.algorithm, run.learner, run.sampling, parts.model.device
    if device.type == "cuda" and device.index:
        raise ConfigError(f"{ME}, device_map={device}: TRL takes the first. Set CUDA_VISIBLE_DEVICES instead.")
    usual = 10 if run.model.lora.rank and learner.lr is None else 1
    fixed = algorithm.aggregation == "fixed"
    return {
        "output_dir": str(home / "trl"), "run_name": home.name, "seed": run.seed, "max_steps": parts.steps,
        "num_generations": config.num_generations, "shuffle_dataset": False,
        "per_device_train_batch_size": config.per_device_train_batch_size * config.num_generations,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "learning_rate": parts.learner.lr * usual, "weight_decay": learner.weight_decay,
        "adam_beta1": learner.betas[0], "adam_beta2": learner.betas[1], "max_grad_norm": learner.max_grad_norm,
        "warmup_steps": warmup(learner, parts.steps),
        "lr_scheduler_type": "constant_with_warmup" if learner.decay == "none" else learner.decay,
        "loss_type": LOSSES[algorithm.aggregation], "scale_rewards": algorithm.std,
        "importance_sampling_level": "sequence" if algorithm.loss == "gspo" else "token",
        "epsilon": algorithm.clip_low, "epsilon_high": algorithm.clip_high,
        "beta": algorithm.kl.coef, "entropy_coef": algorithm.entropy_coef,
        "temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k, "min_p": drawn.min_p or None,
        "max_completion_length": algorithm.fixed_length if fixed else drawn.max_context,
        "bf16": run.model.dtype == "bfloat16", "fp16": run.model.dtype == "float16", "use_cpu": device.type == "cpu",
        "gradient_checkpointing": learner.recompute,
        "save_strategy": "steps", "save_steps": config.save_steps, "save_total_limit": config.save_total_limit,
        "logging_steps": config.logging_steps, "report_to": list(config.followers) or "none", "disable_tqdm": True,
    }  # fmt: skip


def adapters(run: RunConfig) -> Any:
    """LoRA as TRL is told of it; None for none."""
    asked = run.model.lora
    if not asked.rank:
        return None
    if find_spec("peft") is None:
        raise ConfigError(f"{ME}, use_lora=True: needs the package peft. Install it: pip install arborl[peft].")
    import peft

    target = "all-linear" if asked.target == ("all-linear",) else list(asked.target)
    alpha: Any = asked.alpha
    return peft.LoraConfig(
        r=asked.rank, lora_alpha=alpha, lora_dropout=asked.dropout, target_modules=target, task_type="CAUSAL_LM"
    )


# ------------------------------------------------------------------------------------------------ conversations


def fail_branched(episode: Episode) -> bool:
    """Mark an episode as failed that is no single row of tokens, because the model was shown a history that is not the
    last one continued; whether it was so. An agent that edits its history always does that; any other once in a while,
    when the model writes a control token, which the next prompt shows as text."""
    if episode.failure is not None or len(set(episode.branches)) < 2:
        return False
    why = "the model was shown a history that is not the last one continued, and TRL trains one row of tokens a "
    how = "conversation. Train this agent with arborl.train, or let its history only grow"
    episode.fail(EpisodeError(ME, ValueError(why + how)))
    return True


def row_of(episode: Episode) -> tuple[list[int], list[int], list[float]]:
    """All that was read and sampled, in its order; 1 where a token was sampled, to be trained; and log-probabilities.
    Empty of an episode that failed, or in which the model was never asked."""
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    for call in episode.calls if episode.failure is None else ():
        read, said = call.prompt[len(ids) :], call.completion.tokens
        ids += [*read, *said]
        mask += [0] * len(read) + [int(call.trained)] * len(said)
        logprobs += [0.0] * len(read) + list(call.completion.logprobs)
    return ids, mask, logprobs


def batch_of(episodes: Sequence[Episode], pad: int) -> dict[str, list[Any]]:
    """What TRL's `rollout_func` returns.

    Prompts are cut where the shortest ends; what is left of the longer ones is masked, like all that is only read. TRL
    would pad them on the left, where a model with learned positions reads other places than it sampled from. A failed
    episode has no reward: TRL leaves it out of the group's mean and gives it no advantage.
    """
    rows = [row_of(episode) for episode in episodes]
    cut = min((len(e.calls[0].prompt) for e, (ids, *_) in zip(episodes, rows, strict=True) if ids), default=1)
    nothing = [pad] * (cut + 1), [0] * (cut + 1), [0.0] * (cut + 1)
    whole = [row if row[0] else nothing for row in rows]
    return {
        "prompt_ids": [ids[:cut] for ids, _, _ in whole],
        "completion_ids": [ids[cut:] for ids, _, _ in whole],
        "env_mask": [mask[cut:] for _, mask, _ in whole],
        "logprobs": [logprobs[cut:] for _, _, logprobs in whole],
        "earned": [None if episode.failure is not None else episode.reward for episode in episodes],
    }


def earned(earned: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: what `batch_of` said."""
    return earned


# ------------------------------------------------------------------------------------------------ weights


def weights_of(trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's weights by their names in a plain model; adapters are added to what they correct."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        return dict(model.state_dict())
    base = model.get_base_model()
    found = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora_" not in name}
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight"):
            found[f"{name}.weight"] = found[f"{name}.weight"] + module.get_delta_weight("default").detach()
    return found
