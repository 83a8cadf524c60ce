"""ROLL's keys that stand for themselves, and those that have no counterpart."""

from __future__ import annotations

from typing import Any

from arborl.convert.common_rules import ENGINE, MICRO, REFERENCE, Rule, idle, known, no, positive, to, when
from arborl.convert.draft import Draft

PLACEMENT = "where a worker runs changes nothing but speed: one process, one device; placement=ray for more"
TEMPLATE = "a model brings its own chat template; model.chat_template names another"
NEVER = "nothing there reads it"
RESUME = "`arborl train --resume latest` goes on with a run of ours"
TURNS = "rollout and training take turns, as here"


def versions(ratio: Any) -> int:
    """Policy versions that a rollout may be behind."""
    return max(int(float(ratio)), 1)


def folder(draft: Draft, key: str, value: Any) -> None:
    """There a folder for all runs; here a run has one of its own."""
    name = str(draft.source.get("exp_name") or "run")
    draft.set(key, value, "output_dir", f"{str(value).rstrip('/')}/{name}", "a run has a folder of its own")


def tracker(draft: Draft, key: str, value: Any) -> None:
    draft.set(key, value, "track.tensorboard", value == "tensorboard")
    if value == "wandb":
        kwargs = draft.below("tracker_kwargs.")
        given = {name: kwargs[name] for name in ("project", "name", "entity", "dir", "mode") if kwargs.get(name)}
        ours = [{"name": "wandb", "args": {"project": str(draft.source.get("exp_name") or "roll")} | given}]
        draft.set(key, value, "track.trackers", ours)
        for name in given:
            draft.set(f"tracker_kwargs.{name}", given[name], "track.trackers", ours)
    elif value not in ("tensorboard", "stdout", None):
        why = "no such tracker here: metrics go to the console, metrics.jsonl and whatever track.trackers names"
        draft.drop(key, value, why)


def mock(draft: Draft, key: str, value: Any) -> None:
    """Episodes written once and trained on again."""
    at = "rollout_mock."
    if not draft.source.get(f"{at}enable"):
        draft.skip(key, value, "off")
        return
    mode = draft.source.get(f"{at}mode", "dump")
    where = f"{str(draft.source.get(f'{at}dump_dir', './rollout_mock_dumps')).rstrip('/')}/episodes.jsonl"
    why = "one file of episodes; those that ROLL dumped cannot be read"
    draft.set(key, value, "rollout.record" if mode == "dump" else "rollout.replay", where, why)


TABLE: dict[str, Rule] = {
    "exp_name": to("name"),
    "seed": to("seed"),
    "output_dir": folder,
    "logging_dir": idle("logs lie in the run's folder"),
    "render_save_dir": to("track.render_every", lambda folder: 10, "GIFs are in the run's folder, frames/"),
    "rollout_dump_dir": to("track.episodes", bool, "episodes are written to the run's folder"),
    "max_steps": to("trainer.steps"),
    "save_steps": positive("trainer.save_every"),
    "max_ckpt_to_keep": positive("trainer.keep", "all are kept there; here trainer.keep, 2 without a word"),
    "logging_steps": idle("every step is logged"),
    "eval_steps": positive("evaluation.every"),
    "resume_from_checkpoint": when(known("resume_from_checkpoint"), idle(RESUME), "off"),
    "reward_pretrain": idle("the critic's weights, which adv_estimator=gae alone reads"),
    "async_generation_ratio": when(known("async_generation_ratio"), to("rollout.max_lag", versions), TURNS),
    "track_with": tracker,
    "max_running_requests": to("engine.max_requests"),
    "whiten_rewards": no("rewards are not whitened here; whiten_advantages is what remains of it"),
    "batch_adjust_mode": idle("no episode is copied or left out to make a batch even"),
    "value_clip": idle("not read without adv_estimator=gae"),
    "critic_warmup": no("policy and critic are trained together from the start"),
    "use_pg_clip_range": idle("see pg_clip_low and pg_clip_high, or pg_clip"),
    "dual_clip_loss": idle("off"),
    "advantage_clip": idle("none"),
    "reward_clip": idle("none"),
    "val_batch_size": no("held-out tasks: evaluation.tasks"),
    "enable_reference": idle(REFERENCE),
    "exp_mode": idle(NEVER),
    "global_template": idle(TEMPLATE),
}  # fmt: skip
ROLES = {
    "actor_train": PLACEMENT, "actor_infer": ENGINE, "reference": REFERENCE, "critic": REFERENCE,
    "student_train": PLACEMENT, "student_infer": ENGINE, "student": PLACEMENT, "teacher": REFERENCE,
    "sft_train": PLACEMENT, "validation": REFERENCE, "reward": REFERENCE, "reward_model": REFERENCE,
}  # fmt: skip
"""Workers, and why what is left of their keys has no counterpart."""
MANAGER_PREFIXES: dict[str, Rule] = {
    "generating_args.": idle("actor_infer.generating_args goes before it, or as it is here"),
    "llm_proxy.": no("the policy plays; `arborl env play --random` is for others"),
    "format_penalty": idle(f"{NEVER}; env_config.format_penalty is"),
    "": idle("distribution of environments over workers"),
}
ROLE_PREFIXES = {
    "device_mapping": PLACEMENT, "strategy_args.": PLACEMENT, "infer_batch_size": PLACEMENT,
    "system_envs.": "set variables of the environment in your shell", "data_args.template": TEMPLATE,
    "use_dynamic_batching": MICRO, "max_tokens_per_microbatch": MICRO, "sequence_": MICRO,
    "use_sequence_packing": "tokens are always packed, as trees",
}  # fmt: skip
PREFIXES: dict[str, Rule] = {
    **{f"{role}.{key}": idle(why) for role in ROLES for key, why in ROLE_PREFIXES.items()},
    **{f"{role}.": idle(why) for role, why in ROLES.items()},
    **{f"{at}_env_manager.{key}": rule for at in ("train", "val") for key, rule in MANAGER_PREFIXES.items()},
    "tracker_kwargs.log_dir": idle("TensorBoard's files lie in the run's folder"),
    "tracker_kwargs.api_key": idle(
        "a key is read from the tracker's own variable (WANDB_API_KEY), and kept out of files"
    ),
    "tracker_kwargs.": no("no counterpart in track"),
    "rollout_mock.": mock,
    "checkpoint_config.": idle("checkpoints lie in the run's folder"),
    "system_envs.": idle("set variables of the environment in your shell"),
    "env_monitor.": no("rollout.episode_seconds and rollout.step_seconds bound an environment that hangs"),
    "reward_normalization.": idle("what a group is compared with is algorithm.args.baseline and algorithm.std"),
    "router_args.": idle(ENGINE),
    "train_env_manager.generating_args.num_return_sequences": idle("episodes of a task are rollout.group_size"),
    "train_env_manager.group_filter_cls": no("write a function: rollout.group_filter=package.module:function"),
    "force_disable_": idle("ratios are taken against the policy that the update began with"),
    "enable_old_": idle("ratios are taken against the policy that the update began with"),
    "is_offload_": idle(PLACEMENT),
    "num_": idle(PLACEMENT),
    "local_rank": idle(PLACEMENT),
    "rpc_timeout": idle(PLACEMENT),
    "partial_gpu_mode": idle(PLACEMENT),
    "model_update_": idle("the engine shares the learner's weights: there is nothing to send"),
    "model_download_type": idle("models are folders or Hugging Face ids"),
    "generate_opt_level": idle(ENGINE),
    "is_num_return_sequences_expand": idle(ENGINE),
    "is_use_additional_prompts": no("rollout.spare_groups replaces groups that a rollout.group_filter drops"),
    "max_additional_running_prompts": no("rollout.spare_groups replaces groups that a rollout.group_filter drops"),
    "profiler_": idle("no profile is written"),
    "report_length_and_rewards": idle("both are in every step's metrics"),
}
