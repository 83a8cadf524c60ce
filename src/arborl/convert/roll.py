"""ROLL's keys, of its agentic pipeline."""

from __future__ import annotations

from typing import Any

from arborl.convert.draft import Draft, Rule, no, to

ESTIMATORS = {
    "grpo": "grpo", "gae": "ppo", "reinforce": "grpo", "gigpo": "gigpo", "step_reinforce": "step_reinforce",
    "agentic_reinforce": "turn_discounted",
}  # fmt: skip
ENVS = {"frozen_lake": "frozen_lake", "sokoban": "sokoban", "webshop": "shop"}
ARGUMENTS = {
    "frozen_lake": {
        "size": "size", "p": "frozen", "is_slippery": "slippery", "max_steps": "max_steps",
        "format_penalty": "format_penalty",
    },
    "sokoban": {"max_steps": "max_steps", "num_boxes": "boxes", "format_penalty": "format_penalty"},
    "shop": {"max_steps": "max_steps", "format_penalty": "format_penalty"},
}  # fmt: skip
TYPES = {"bf16": "bfloat16", "fp32": "float32"}
CLUSTER = "the model is trained in one process on one device"


def clip(draft: Draft, key: str, value: Any) -> None:
    for side in ("low", "high"):
        draft.set(key, value, f"algorithm.clip_{side}", value)


def batch(draft: Draft, key: str, value: Any) -> None:
    group = draft.given.get("train_env_manager.group_size")
    if isinstance(group, int) and isinstance(value, int) and value % group == 0:
        draft.set(key, value, "rollout.tasks_per_step", value // group)
    else:
        draft.drop(key, value, "episodes of a step, which do not divide by train_env_manager.group_size")


def groups(draft: Draft, key: str, value: Any) -> None:
    if "rollout_batch_size" in draft.given:
        draft.drop(key, value, "how many environments play at once follows from the batch and rollout.concurrency")
    else:
        draft.set(key, value, "rollout.tasks_per_step", value)


def penalty(draft: Draft, key: str, value: Any) -> None:
    if not value:
        draft.drop(key, value, "no KL penalty, as here without algorithm.kl.coef")
        return
    draft.set(key, value, "algorithm.kl.coef", value)
    draft.set(key, value, "algorithm.kl.where", "reward")


def kl_loss(draft: Draft, key: str, value: Any) -> None:
    if value and draft.given.get("use_kl_loss", True) and not draft.given.get("init_kl_coef"):
        draft.set(key, value, "algorithm.kl.coef", value)
    else:
        draft.drop(key, value, "off, or there is a penalty in the reward already")


def estimator(draft: Draft, key: str, value: Any) -> None:
    """Nothing is divided by a deviation there, unless `reward_normalization` says so."""
    to("algorithm.name", ESTIMATORS)(draft, key, value)
    if ESTIMATORS.get(value) == "grpo":
        draft.settings.setdefault("algorithm.std", "none")


def tags(draft: Draft, key: str, value: Any) -> None:
    """Environments by tag: one is the run's, several are sources in the shares of their groups."""
    names = value if isinstance(value, list) else [value]
    shares = draft.given.get("train_env_manager.num_groups_partition", [1] * len(names))
    for name, share in zip(names, shares, strict=False):
        where = "env" if len(names) == 1 else f"data.sources.{name}.env"
        kind = str(draft.given.get(f"custom_envs.{name}.env_type", name))
        if kind not in ENVS:
            draft.drop(key, name, f"no environment like {kind!r} here; name your own as env=package.module:Class")
            continue
        draft.set(key, name, f"{where}.name", ENVS[kind])
        if len(names) > 1:
            draft.set(key, name, f"data.sources.{name}.ratio", share)
        _arguments(draft, name, where, ENVS[kind])


def _arguments(draft: Draft, name: str, where: str, kind: str) -> None:
    for key in [key for key in draft.given if key.startswith(f"custom_envs.{name}.")]:
        last, value = key.rpartition(".")[2], draft.given[key]
        limits = f"data.sources.{name}.sampling" if where != "env" else "sampling"
        if last == "max_tokens_per_step":
            draft.set(key, value, f"{limits}.max_tokens", value)
        elif (kind, last) == ("sokoban", "dim_room") and isinstance(value, list) and len(set(value)) == 1:
            draft.set(key, value, f"{where}.args.size", value[0])
        elif last in ARGUMENTS[kind]:
            draft.set(key, value, f"{where}.args.{ARGUMENTS[kind][last]}", value)
        elif last != "env_type":
            draft.drop(key, value, f"env={kind} takes no such argument")


def custom(draft: Draft, key: str, value: Any) -> None:
    """Read with its tag, or not at all."""
    tag, chosen = key.split(".")[1], draft.given.get("train_env_manager.tags", [])
    if tag not in (chosen if isinstance(chosen, list) else [chosen]):
        draft.drop(key, value, "not among train_env_manager.tags")


def every(path: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, int) and value > 0:
            draft.set(key, value, path, value)
        else:
            draft.drop(key, value, "off")

    return rule


STD = {"group": "group", "batch": "batch", None: "none", "None": "none"}
TRAIN, INFER = "actor_train.", "actor_infer."
TABLE: dict[str, Rule] = {
    "exp_name": to("name"),
    "seed": to("seed"),
    "output_dir": to("output_dir"),
    "logging_dir": no("logs lie in the run's folder"),
    "render_save_dir": no("episodes are rendered into the run's folder; track.gifs says how many"),
    "max_steps": to("trainer.steps"),
    "save_steps": every("trainer.save_every"),
    "logging_steps": no("every step is logged"),
    "eval_steps": every("evaluation.every"),
    "resume_from_checkpoint": no("`arborl train --resume latest` goes on with a run"),
    "pretrain": to("model.name"),
    "reward_pretrain": no("the critic shares the policy's trunk; see learner.critic"),
    "rollout_batch_size": batch,
    "val_batch_size": to("evaluation.tasks"),
    "sequence_length": to("sampling.max_context"),
    "adv_estimator": estimator,
    "ppo_epochs": to("learner.epochs"),
    "gamma": to("algorithm.gamma"),
    "step_reward_gamma": to("algorithm.gamma"),
    "lambd": to("algorithm.gae_lambda"),
    "pg_clip": clip,
    "dual_clip_loss": no("algorithm.dual_clip takes the bound itself"),
    "init_kl_coef": penalty,
    "target_kl": to("algorithm.kl.target"),
    "kl_loss_coef": kl_loss,
    "use_kl_loss": no("see kl_loss_coef"),
    "whiten_advantages": to("algorithm.whiten"),
    "entropy_loss_coef": to("algorithm.entropy_coef"),
    "step_reward_weight": to("algorithm.step_weight"),
    "reward_normalization.norm_std_type": to("algorithm.std", STD),
    "reward_normalization.method": to("algorithm.std", {"mean_std": "group", "asym_clip": "group", "mean": "none"}),
    "advantage_clip": no("advantages are not clipped"),
    "max_grad_norm": to("learner.max_grad_norm"),
    "async_generation_ratio": no("rollout and training take turns"),
    "track_with": to("track.tensorboard", lambda name: name == "tensorboard"),
    f"{TRAIN}model_args.dtype": to("model.dtype", TYPES),
    f"{TRAIN}model_args.disable_gradient_checkpointing": to("learner.recompute", lambda off: not off),
    f"{TRAIN}training_args.learning_rate": to("learner.lr"),
    f"{TRAIN}training_args.weight_decay": to("learner.weight_decay"),
    f"{TRAIN}training_args.warmup_steps": to("learner.warmup_steps"),
    f"{TRAIN}training_args.lr_scheduler_type": to("learner.decay", {"linear": "linear", "constant": "none"}),
    f"{TRAIN}training_args.per_device_train_batch_size": no("micro-batches are in tokens: learner.micro_batch_tokens"),
    f"{TRAIN}training_args.gradient_accumulation_steps": no("a step's batch is one optimiser step; see minibatches"),
    f"{INFER}generating_args.max_new_tokens": to("sampling.max_tokens"),
    f"{INFER}generating_args.temperature": to("sampling.temperature"),
    f"{INFER}generating_args.top_p": to("sampling.top_p"),
    f"{INFER}generating_args.top_k": to("sampling.top_k", lambda k: max(int(k), 0)),
    f"{INFER}generating_args.num_return_sequences": no("episodes of a task are rollout.group_size"),
    "train_env_manager.group_size": to("rollout.group_size"),
    "train_env_manager.num_env_groups": groups,
    "train_env_manager.tags": tags,
    "train_env_manager.num_groups_partition": no("see tags: shares of several environments are data.sources ratios"),
}
PREFIXES: dict[str, Rule] = {
    "custom_envs.": custom,
    "train_env_manager.": no("how environments are spread over workers is not said here"),
    "val_env_manager.": no("held-out tasks of the same environments are played: evaluation.tasks"),
    "actor_train.": no(CLUSTER),
    "actor_infer.": no("sampling is done by Arbor's own engine, which shares the learner's weights"),
    "reference.": no("the reference policy is a frozen copy, made where algorithm.kl.coef asks for one"),
    "critic.": no("the critic shares the policy's trunk; see learner.critic"),
    "reward_normalization.": no("episodes are compared within their group; see algorithm.baseline and algorithm.std"),
    "checkpoint_config.": no("checkpoints lie in the run's folder"),
    "tracker_kwargs.": no("metrics go to the console, metrics.jsonl and TensorBoard"),
    "system_envs.": no("set the environment's variables in your shell"),
    "num_": no(CLUSTER),
    "hydra.": no("only a defaults list is for Hydra"),
}
