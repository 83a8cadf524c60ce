"""What becomes of each of verl's keys, and what only all of them together say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborl.agents import VERL_AGENT_NAMES
from arborl.convert.common_rules import MICRO
from arborl.convert.draft import Draft, Rule, every, idle, no, to
from arborl.convert.verl import verl_losses as losses
from arborl.convert.verl import verl_parts as parts
from arborl.convert.verl import verl_rules as rules
from arborl.convert.verl.verl_defaults import DEFAULTS as THEIRS
from arborl.convert.verl.verl_defaults import A, M, R, usual_here
from arborl.convert.verl.verl_ignored import CLUSTER, IGNORED, SPEED
from arborl.convert.verl.verl_rules import num, text, unless

T = f"{R}multi_turn."
FORMATS = {"hermes": "hermes", "qwen": "hermes", "llama3_json": "llama3", "qwen3_coder": "qwen_xml"}
LOGS = "every episode is written to the run's folder"


def together(draft: Draft, key: str, value: Any) -> None:
    """Looked at when all keys are known (`parts`, `losses`); nothing to do for this one alone."""


def picture(draft: Draft, key: str, value: Any) -> None:
    draft.refuse(
        key, value, "rows with pictures: models that see are not trained here. Give rows of text, and a model of text."
    )


def own_rows(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.skip(key, value, "null: the usual rows")
    else:
        draft.refuse(
            key,
            value,
            "rows of a class of yours. Write them to a file, or name a function: data.rows=package.module:function.",
        )


def module(draft: Draft, key: str, value: Any) -> None:
    name = str(value)
    if "sft" in name:
        draft.refuse(
            key,
            value,
            "supervised training has other keys. Write: arborl train algorithm=sft data.path=FILE model=MODEL",
        )
    elif "generation" in name or "main_eval" in name:
        draft.refuse(key, value, "this trains nothing. Write: arborl evaluate RUN")
    elif name.startswith(("verl.", "agentfly.")) or name.rpartition(".")[2] in ("main_ppo", "main_dapo"):
        draft.skip(key, value, "arborl train")
    else:
        draft.refuse(
            key, value, "a trainer of its own, whose steps are not verl's. Convert a script of verl.trainer.main_ppo."
        )


def configuration(draft: Draft, key: str, value: Any) -> None:
    usual = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "_generated_ppo_trainer")
    if str(value).removesuffix(".yaml") in usual:
        draft.skip(key, value, "verl's own defaults, which are written out")
    else:
        draft.refuse(
            key,
            value,
            "no such file near the script, and what it says would be lost. Give it first: "
            "arborl convert verl FILE.yaml SCRIPT",
        )


def interaction(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.skip(key, value, "null: only tools answer")
    else:
        draft.refuse(
            key,
            value,
            "an interaction is an environment here. Write it as one (docs/environments.md), take this key out, and "
            "name it: env=package.module:Class.",
        )


def ratio(draft: Draft, key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    draft.settings.setdefault("data.by", "data_source")
    num(f"data.sources.{name}.ratio")(draft, key, value)


def mapping(draft: Draft, key: str, value: Any) -> None:
    """Which agent plays a source; `single_turn_agent` has no tools."""
    path = f"data.sources.{key.rpartition('.')[2]}.agent"
    rules.choice(path, VERL_AGENT_NAMES, "Name yours: data.sources.NAME.agent=package.module:Class.")(draft, key, value)


TABLE: dict[str, Rule] = {
    "--module": module,
    "--config-name": configuration,
    "--config-path": idle("where the configuration lies"),
    "tools": together,
    "data.train_files": rules.files("data.path"),
    "data.val_files": rules.files("data.evaluation_path"),
    "data.train_batch_size": num("rollout.tasks_per_step"),
    "data.gen_batch_size": losses.group_filter,
    "data.val_batch_size": idle("held-out tasks are played all at once, as many as evaluation.tasks"),
    "data.val_max_samples": rules.validation_rows,
    "data.train_max_samples": unless(-1, "all rows are used. Write a shorter file."),
    "data.max_prompt_length": num("data.max_prompt_tokens"),
    "data.max_response_length": rules.answer_length,
    "data.filter_overlong_prompts": rules.overlong_prompts,
    "data.truncation": rules.overlong_prompts,
    "data.prompt_key": rules.prompt_key,
    "data.reward_fn_key": unless("data_source", "rewards go by the column data_source"),
    "data.document_key": unless("document_content", "documents are read from the column document_content"),
    "data.seed": num("seed"),
    "data.shuffle": rules.choice("data.shuffle", {"True": True, "False": False}, "Write true or false."),
    "data.image_key": picture,
    "data.video_key": picture,
    "data.custom_cls.path": own_rows,
    "data.custom_cls.name": together,
    "data.sampler.class_path": unless(
        None, "rows come in a new order every pass; data.schedule and data.band order sources"
    ),
    "data.sampler.class_name": unless(None, "see data.sampler.class_path"),
    "data.mixed_dataset.enabled": idle("sources are mixed as soon as there are some"),
    "data.mixed_dataset.tolerance": idle("shares are exact; `arborl data mix` shows them"),
    "algorithm.adv_estimator": losses.estimator,
    "algorithm.gamma": losses.gamma,
    "algorithm.lam": losses.of_gae(num("algorithm.args.gae_lambda")),
    "algorithm.norm_adv_by_std_in_grpo": losses.by_std,
    "algorithm.use_kl_in_reward": idle("see algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.kl_coef": losses.kl_reward,
    "algorithm.kl_penalty": losses.kl_reward,
    "algorithm.kl_ctrl.type": losses.kl_control,
    "algorithm.kl_ctrl.target_kl": losses.kl_control,
    "algorithm.kl_ctrl.horizon": losses.kl_control,
    "algorithm.use_pf_ppo": unless(False, "episodes are not drawn again by their rewards"),
    "algorithm.rollout_correction.rollout_is": losses.correction,
    "algorithm.rollout_correction.rollout_is_threshold": losses.correction,
    "algorithm.rollout_correction.rollout_is_batch_normalize": unless(False, "weights are not brought to mean 1"),
    "algorithm.rollout_correction.rollout_rs": losses.rejection,
    "algorithm.rollout_correction.rollout_rs_threshold": losses.rejection,
    "algorithm.rollout_correction.bypass_mode": idle(
        "ratios are taken against the policy that sampled: algorithm.anchor"
    ),
    "algorithm.rollout_correction.loss_type": idle("read with bypass_mode only: the loss is then PPO's, or REINFORCE"),
    "algorithm.rollout_is": losses.correction,
    "algorithm.rollout_is_threshold": losses.correction,
    "algorithm.rollout_is_threshold_lower": losses.correction,
    "algorithm.rollout_is_level": losses.correction,
    "algorithm.rollout_is_mode": losses.correction,
    "algorithm.rollout_is_veto_threshold": unless(None, "no token vetoes its sequence"),
    "algorithm.filter_groups.enable": losses.group_filter,
    "algorithm.filter_groups.metric": idle("groups are compared by their rewards"),
    "algorithm.filter_groups.max_num_gen_batches": idle("see rollout.spare_groups"),
    f"{M}path": text("model.name"),
    f"{M}lora_adapter_path": rules.adapters,
    f"{M}tokenizer_path": unless(None, "a model's own tokenizer is used"),
    f"{M}custom_chat_template": rules.if_set(text("model.chat_template")),
    f"{M}external_lib": unless(None, "nothing else is imported"),
    f"{M}enable_gradient_checkpointing": to("learner.recompute", bool),
    f"{M}use_remove_padding": idle("there is no padding: tokens are packed as trees"),
    f"{M}lora_rank": num("model.lora.rank"),
    f"{M}lora_alpha": rules.with_adapters("model.lora.alpha"),
    f"{M}lora.rank": num("model.lora.rank"),
    f"{M}lora.alpha": num("model.lora.alpha"),
    f"{M}target_modules": rules.adapted_layers,
    f"{M}exclude_modules": unless(None, "no layer is left out: name those that are adapted in model.lora.target"),
    f"{A}optim.lr": num("learner.lr"),
    f"{A}optim.weight_decay": num("learner.weight_decay", why="all weights there; here matrices, not norms and biases"),
    f"{A}optim.betas": rules.betas,
    f"{A}optim.lr_warmup_steps": rules.warmup,
    f"{A}optim.lr_warmup_steps_ratio": rules.warmup_share,
    f"{A}optim.lr_scheduler_type": rules.schedule,
    f"{A}optim.warmup_style": rules.schedule,
    f"{A}optim.lr_decay_style": rules.schedule,
    f"{A}optim.min_lr_ratio": rules.lowest_rate,
    f"{A}optim.num_cycles": unless(0.5, "a cosine comes down once"),
    f"{A}optim.total_training_steps": idle("known from the length of the run"),
    f"{A}optim.optimizer": unless(("AdamW", "adam", "adamw", "Adam"), "the optimiser is AdamW"),
    f"{A}optim.optimizer_impl": unless("torch.optim", "the optimiser is torch's AdamW"),
    f"{A}optim.clip_grad": rules.clip_grad,
    f"{A}grad_clip": num("learner.max_grad_norm"),
    f"{A}ppo_mini_batch_size": rules.minibatch,
    f"{A}ppo_epochs": num("learner.epochs"),
    f"{A}ppo_max_token_len_per_gpu": rules.micro_tokens,
    f"{A}shuffle": unless(False, "minibatches are in the order of the batch"),
    f"{A}clip_ratio": losses.clip,
    f"{A}clip_ratio_low": losses.clip_side("low"),
    f"{A}clip_ratio_high": losses.clip_side("high"),
    f"{A}clip_ratio_c": losses.second_clip,
    f"{A}tau_pos": losses.gate("algorithm.args.tau_positive"),
    f"{A}tau_neg": losses.gate("algorithm.args.tau_negative"),
    f"{A}use_kl_loss": losses.kl_loss,
    f"{A}kl_loss_coef": losses.kl_part("algorithm.kl.coef"),
    f"{A}kl_loss_type": losses.kl_part("algorithm.kl.estimator", losses.KL),
    f"{A}entropy_coeff": num("algorithm.entropy_coef"),
    f"{A}loss_agg_mode": losses.aggregation,
    f"{A}loss_scale_factor": together,
    f"{A}policy_loss.loss_mode": losses.loss_mode,
    f"{A}use_dynamic_bsz": idle(MICRO),
    f"{A}fsdp_config.dtype": rules.precision,
    f"{A}fsdp_config.model_dtype": rules.weights_kept,
    f"{R}n": num("rollout.group_size"),
    f"{R}temperature": num("sampling.temperature"),
    f"{R}top_p": num("sampling.top_p"),
    f"{R}top_k": num("sampling.top_k", lambda k: max(int(k), 0)),
    f"{R}do_sample": unless(True, "training episodes are sampled"),
    f"{R}ignore_eos": unless(False, "the model's end of turn ends a call"),
    f"{R}over_sample_rate": unless((0, None), "no episode is cancelled for being late; see rollout.redundancy"),
    f"{R}prompt_length": rules.window,
    f"{R}response_length": rules.answer_length,
    f"{R}max_model_len": rules.window,
    f"{R}val_kwargs.temperature": rules.evaluation,
    f"{R}val_kwargs.do_sample": rules.evaluation,
    f"{R}val_kwargs.top_p": num("evaluation.sampling.top_p"),
    f"{R}val_kwargs.top_k": num("evaluation.sampling.top_k", lambda k: max(int(k), 0)),
    f"{R}val_kwargs.n": num("evaluation.group_size"),
    f"{R}agent.default_agent_loop": together,
    f"{R}agent.agent_loop_config_path": parts.loop_file,
    f"{T}enable": together,
    f"{T}tool_config_path": together,
    f"{T}interaction_config_path": interaction,
    f"{T}max_assistant_turns": together,
    f"{T}min_assistant_turns": together,
    f"{T}max_user_turns": no("the environment decides how often it answers"),
    f"{T}max_parallel_calls": together,
    f"{T}max_tool_response_length": no("a tool says itself how much of its answer is shown: @tool(max_chars=…)"),
    f"{T}tool_response_truncate_side": no("what is too long loses its end, and says so"),
    f"{T}num_repeat_rollouts": unless(None, "an episode is played once"),
    f"{T}single_turn_max_tokens": parts.one_call,
    f"{T}max_samples_per_trajectory": parts.samples,
    f"{T}downsample_mode": parts.samples,
    f"{T}exceed_length_penalty": together,
    f"{T}below_min_turns_reward": together,
    f"{T}model_type": idle("what a template does to earlier turns is seen, and a new branch begins"),
    f"{T}dump_trajectories_enabled": to("agent.args.dump_trajectories_enabled"),
    f"{T}dump_trajectories_dir": rules.dump_folder,
    f"{T}dump_trajectories_freq": num("agent.args.dump_trajectories_freq"),
    f"{T}tool_config.code_start_tag": together,
    f"{T}tool_config.code_end_tag": together,
    f"{T}tool_config.answer_start_tag": together,
    f"{T}tool_config.answer_end_tag": together,
    f"{T}tool_config.server_url": no("code runs in Arbor's own sandbox"),
    f"{T}format": rules.choice("agent.tool_format", FORMATS, "Name yours: agent.tool_format."),
    "critic.optim.lr": losses.of_critic(num("learner.critic_lr")),
    "critic.cliprange_value": losses.of_critic(num("algorithm.args.value_clip")),
    "critic.model.path": losses.of_critic(losses.critic_model),
    "critic.ppo_epochs": losses.of_critic(losses.as_the_actor(f"{A}ppo_epochs")),
    "critic.ppo_mini_batch_size": losses.of_critic(losses.as_the_actor(f"{A}ppo_mini_batch_size")),
    "critic.grad_clip": losses.of_critic(losses.as_the_actor(f"{A}grad_clip")),
    "critic.optim.weight_decay": losses.of_critic(losses.as_the_actor(f"{A}optim.weight_decay")),
    "critic.optim.lr_warmup_steps": losses.of_critic(losses.as_the_actor(f"{A}optim.lr_warmup_steps")),
    "critic.optim.lr_warmup_steps_ratio": losses.of_critic(losses.as_the_actor(f"{A}optim.lr_warmup_steps_ratio")),
    "critic.loss_agg_mode": losses.of_critic(losses.as_the_actor(f"{A}loss_agg_mode")),
    "reward_model.enable": parts.reward_model,
    "reward_model.reward_manager": together,
    "reward_manager.name": parts.manager,
    "reward_model.reward_kwargs.max_resp_len": together,
    "custom_reward_function.path": together,
    "custom_reward_function.name": together,
    "trainer.total_training_steps": rules.length_of_the_run,
    "trainer.total_epochs": rules.length_of_the_run,
    "trainer.experiment_name": rules.named,
    "trainer.project_name": idle("runs lie in runs/, under their names; trackers get the project"),
    "trainer.default_local_dir": rules.folder,
    "trainer.save_freq": every("trainer.save_every"),
    "trainer.test_freq": every("evaluation.every"),
    "trainer.val_before_train": to("evaluation.before", bool),
    "trainer.val_only": rules.only_validation,
    "trainer.critic_warmup": unless((0, -1), "policy and critic are trained together from the start"),
    "trainer.logger": rules.loggers,
    "trainer.resume_mode": idle("`arborl train --resume latest` goes on with a run"),
    "trainer.resume_from_path": idle("`arborl train --resume FOLDER` goes on with a run"),
    "trainer.max_actor_ckpt_to_keep": rules.keep,
    "trainer.max_critic_ckpt_to_keep": idle("a checkpoint holds policy and critic"),
    "trainer.rollout_data_dir": idle(LOGS),
    "trainer.validation_data_dir": idle(LOGS),
    "trainer.log_val_generations": idle(LOGS),
    "trainer.balance_batch": idle(SPEED),
    "trainer.device": idle("model.device is found"),
    "trainer.ref_update_freq": unless((0, -1, None), "the reference is the policy at the start, always"),
}
PREFIXES: dict[str, Rule] = {key: idle(why) for key, why in IGNORED.items()} | {
    "data.apply_chat_template_kwargs.": rules.chat_args,
    "data.mixed_dataset.dataset_ratios.": ratio,
    "data.mixed_dataset.agent_mapping.": mapping,
    "agent_loops.": parts.loop_class,
    "reward_model.reward_kwargs.overlong_buffer_cfg.": losses.overlong_buffer,
    "reward_model.overlong_buffer.": losses.overlong_buffer,
    "custom_reward_function.reward_kwargs.": together,
    f"{M}override_config.": no("a model is as its own configuration says"),
}
VARIABLES: dict[str, Rule] = {
    "MODEL_PATH": text("model.name"),
    "TRAIN_FILES": rules.files("data.path"),
    "VAL_FILES": rules.files("data.evaluation_path"),
    "LEARNING_RATE": num("learner.lr"),
    "TRAIN_BATCH_SIZE": num("rollout.tasks_per_step"),
    "RATE_LIMIT_PER_MINUTE": no("a limit is written with its tool: tools=[{server: URL, limit: {per_minute: N}}]"),
    "TOOL_MAX_WORKERS": no("written with its tool: tools=[{server: URL, concurrency: N}]"),
    "TOOL_REQUEST_INTERVAL": no("written with its tool: limit.per_minute, as 60 divided by the interval"),
    "MASTER_IP": idle(CLUSTER),
    "WORKER_NODES": idle(CLUSTER),
    "CONDA_ENV": idle(CLUSTER),
    "WANDB_DIR": idle("metrics are in the run's folder; see track.trackers"),
}
"""Of mixed-training scripts whose overrides are made of them elsewhere. What an override says wins."""


def variables_too(draft: Draft, variables: Mapping[str, Any]) -> None:
    """Variables with a known meaning, unless an override sets the same."""
    for name, value in variables.items():
        rule = variable_ratio if name.endswith("_RATIO") else VARIABLES.get(name)
        if rule is None or value in (None, "", []):
            continue
        trial = Draft(source=draft.source)
        rule(trial, name, value)
        if trial.problems or not trial.settings.keys() <= draft.settings.keys():
            rule(draft, name, value)
        elif trial.dropped:
            draft.lines += trial.dropped


def variable_ratio(draft: Draft, key: str, value: Any) -> None:
    """`TACO_RATIO=0.4`."""
    if not isinstance(value, int | float):
        return
    draft.settings.setdefault("data.by", "data_source")
    draft.set(key, value, f"data.sources.{key.removesuffix('_RATIO').lower()}.ratio", value)


def complete(draft: Draft, has_parts: bool = False) -> None:
    """What a script does not say, and what only all of it together says.

    Args:
        has_parts: whether agent, tools and rewards are already set (by AgentFly's keys).
    """
    assumed = Draft(source=draft.source, settings=dict(draft.settings))
    for key, value in THEIRS.items():
        if key not in draft.source:
            TABLE[key](assumed, key, value)
    usual = usual_here(draft.settings | assumed.settings)
    for line in assumed.lines:
        if line.path and (line.path not in usual or usual[line.path] != line.ours):
            draft.default(line.key, line.value, line.path, line.ours, line.why)
    draft.default("a deadline of an episode", None, "rollout.episode_seconds", 86_400, "there is none: a day")
    if not has_parts:
        parts.complete(draft)
    _sources(draft)
    for key in draft.source.keys() - draft.accounted():
        draft.skip(key, draft.source[key], "read together with other keys; nothing to do as things are")


def _sources(draft: Draft) -> None:
    """Sources by a column: sources without an agent answer in one turn, as verl's `single_turn_agent` does."""
    if not draft.settings.get("data.by"):
        return
    held_out = draft.settings.get("data.evaluation_path")
    if held_out is not None:
        draft.undo("data.evaluation_path", "sources by a column have their own held-out rows")
    named = {key.split(".")[2] for key in draft.settings if key.startswith("data.sources.")}
    mapped = any(key.startswith("data.mixed_dataset.agent_mapping.") for key in draft.source)
    for name in sorted(named) if mapped else ():
        at = f"data.sources.{name}.agent"
        if not any(key == at or key.startswith(f"{at}.") for key in draft.settings):
            draft.settings[at] = "chat"
