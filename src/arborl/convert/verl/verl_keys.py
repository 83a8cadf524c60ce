"""What becomes of each of verl's keys, with its defaults; what only all keys together say.

The defaults are those of `ppo_trainer.yaml` (January 2026; 0.6 has the same) that change the result. A default goes
through the rule of its key, as if the script had set it, and is written out where Arbor would do something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arborl.agents import VERL_AGENT_NAMES
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import RunConfig
from arborl.convert.common_rules import (
    ENGINE,
    MICRO,
    REFERENCE,
    Rule,
    choice,
    folder,
    idle,
    known,
    no,
    num,
    positive,
    refuse,
    text,
    to,
    together,
    unless,
    when,
)
from arborl.convert.draft import Draft
from arborl.convert.verl import verl_losses as losses
from arborl.convert.verl import verl_parts as parts
from arborl.convert.verl import verl_rules as rules
from arborl.convert.verl.verl_losses import GAE, KL_LOSS, SAPO, as_the_actor, of_critic
from arborl.convert.verl.verl_rules import A, M, R, T

CORRECTION = "algorithm.rollout_correction."
FORMATS = {"hermes": "hermes", "qwen": "hermes", "llama3_json": "llama3", "qwen3_coder": "qwen_xml"}
LOGS = idle("every episode is written to the run's folder")
PICTURE = refuse("rows with pictures: models that see are not trained here. Give rows of text, and a model of text.")
FILTER = when(known("algorithm.filter_groups.enable"), losses.group_filter, "no groups are filtered")
KL_REWARD = when(known("algorithm.use_kl_in_reward"), losses.kl_reward, "not read without use_kl_in_reward")
WITH_KL_LOSS = idle("a KL penalty in the loss; see kl_loss_coef and kl_loss_type")
WITHOUT_KL_LOSS = "no KL penalty in the loss, as here without algorithm.kl.coef"
KL_TYPE = choice("algorithm.kl.estimator", losses.KL, "Write low_var_kl, kl, abs or mse.")
GRPO, DYNAMIC = known("algorithm.adv_estimator", "grpo", "grpo_vectorized"), known(f"{A}use_dynamic_bsz")
DECAYED = "all weights there; here matrices, not norms and biases"
HAS_LORA, WITHOUT_LORA = known(f"{M}lora_rank"), "read with a lora_rank above 0 only"
MASTER = {name: "float32" if dtype == "float32" else "none" for name, dtype in rules.DTYPES.items()}
PLACEMENT = "the model is trained in one process; nothing is sharded or off-loaded"
CLUSTER = "one machine is used; there is nothing to say about nodes and GPUs"
SPEED = "changes speed or memory, and no result"
SCORES = "rewards are functions, named in rewards"


def is_vanilla(draft: Draft) -> bool:
    return losses.loss(draft) == "ppo"


def has_no_grad_clip(draft: Draft) -> bool:
    return f"{A}grad_clip" not in draft.source


def source_agent(draft: Draft, key: str, value: Any) -> None:
    """The agent of a source; `single_turn_agent` has no tools."""
    path = f"data.sources.{key.rpartition('.')[2]}.agent"
    choice(path, VERL_AGENT_NAMES, "Name yours: data.sources.NAME.agent=package.module:Class.")(draft, key, value)


def length_of_the_run(draft: Draft, key: str, value: Any) -> None:
    """`total_epochs`, where `total_training_steps` is not given."""
    if isinstance(draft.source.get("trainer.total_training_steps"), int):
        draft.skip(key, value, "total_training_steps says how long to train")
    else:
        num("trainer.epochs")(draft, key, value)


ROWS: dict[str, Rule | tuple[Rule, Any]] = {
    "--module": rules.module,
    "--config-name": rules.configuration,
    "--config-path": idle("where the configuration lies"),
    "data.train_files": (text("data.path"), "~/data/rlhf/gsm8k/train.parquet"),
    "data.val_files": (text("data.evaluation_path"), "~/data/rlhf/gsm8k/test.parquet"),
    "data.train_batch_size": (num("rollout.tasks_per_step"), 1024),
    "data.gen_batch_size": FILTER,
    "data.val_batch_size": idle("held-out tasks are played all at once, as many as evaluation.tasks"),
    "data.val_max_samples": (rules.validation_rows, -1),
    "data.train_max_samples": unless(-1, "all rows are used. Write a shorter file."),
    "data.max_prompt_length": (num("data.max_prompt_tokens"), 512),
    "data.max_response_length": (rules.answer_length, 512),
    "data.filter_overlong_prompts": (rules.overlong_prompts, False),
    "data.truncation": (rules.overlong_prompts, "error"),
    "data.prompt_key": rules.prompt_key,
    "data.reward_fn_key": unless("data_source", "rewards go by the column data_source"),
    "data.document_key": unless("document_content", "documents are read from the column document_content"),
    "data.seed": num("seed"),
    "data.shuffle": (choice("data.shuffle", {"True": True, "False": False}, "Write true or false."), True),
    "data.image_key": PICTURE,
    "data.video_key": PICTURE,
    "data.custom_cls.path": refuse(
        "rows of a class of yours. Write them to a file, or name a function: data.rows=package.module:function.",
        off="null: the usual rows",
    ),
    "data.sampler.class_path": unless(
        None, "rows come in a new order every pass; data.schedule and data.band order sources"
    ),
    "data.sampler.class_name": unless(None, "see data.sampler.class_path"),
    "data.mixed_dataset.enabled": idle("sources are mixed as soon as there are some"),
    "data.mixed_dataset.tolerance": idle("shares are exact; `arborl data mix` shows them"),
    "algorithm.adv_estimator": (losses.estimator, "gae"),
    "algorithm.norm_adv_by_std_in_grpo": (when(GRPO, losses.by_std, "read with adv_estimator=grpo only"), True),
    "algorithm.gamma": (losses.gamma, 1.0),
    "algorithm.lam": (when(GAE, num("algorithm.args.gae_lambda"), "read with adv_estimator=gae only"), 1.0),
    "algorithm.use_kl_in_reward": (idle("see algorithm.kl_ctrl.kl_coef"), False),
    "algorithm.kl_penalty": (KL_REWARD, "kl"),
    "algorithm.kl_ctrl.type": (losses.kl_control, "fixed"),
    "algorithm.kl_ctrl.kl_coef": (KL_REWARD, 0.001),
    "algorithm.kl_ctrl.target_kl": losses.kl_control,
    "algorithm.kl_ctrl.horizon": losses.kl_control,
    "algorithm.use_pf_ppo": unless(False, "episodes are not drawn again by their rewards"),
    f"{CORRECTION}rollout_is": losses.correction,
    f"{CORRECTION}rollout_is_threshold": (losses.correction, 2.0),
    f"{CORRECTION}rollout_is_batch_normalize": unless(False, "weights are not brought to mean 1"),
    f"{CORRECTION}rollout_rs": losses.rejection,
    f"{CORRECTION}rollout_rs_threshold": losses.rejection,
    f"{CORRECTION}bypass_mode": idle("ratios are taken against the policy that sampled: algorithm.anchor"),
    f"{CORRECTION}loss_type": idle("read with bypass_mode only: the loss is then PPO's, or REINFORCE"),
    "algorithm.rollout_is": losses.correction,
    "algorithm.rollout_is_threshold": losses.correction,
    "algorithm.rollout_is_threshold_lower": losses.correction,
    "algorithm.rollout_is_level": losses.correction,
    "algorithm.rollout_is_mode": losses.correction,
    "algorithm.rollout_is_veto_threshold": unless(None, "no token vetoes its sequence"),
    "algorithm.filter_groups.enable": FILTER,
    "algorithm.filter_groups.metric": idle("groups are compared by their rewards"),
    "algorithm.filter_groups.max_num_gen_batches": idle("see rollout.spare_groups"),
    f"{A}policy_loss.loss_mode": (losses.loss_mode, "vanilla"),
    f"{A}loss_agg_mode": (losses.aggregation, "token-mean"),
    f"{A}clip_ratio": (losses.clip, 0.2),
    f"{A}clip_ratio_low": (losses.clip_side("low"), 0.2),
    f"{A}clip_ratio_high": (losses.clip_side("high"), 0.2),
    f"{A}clip_ratio_c": (when(is_vanilla, num("algorithm.args.dual_clip"), "read with loss_mode=vanilla only"), 3.0),
    f"{A}tau_pos": (when(SAPO, num("algorithm.args.tau_positive"), "read with loss_mode=sapo only"), 1.0),
    f"{A}tau_neg": (when(SAPO, num("algorithm.args.tau_negative"), "read with loss_mode=sapo only"), 1.05),
    f"{A}entropy_coeff": (num("algorithm.entropy_coef"), 0),
    f"{A}use_kl_loss": (when(KL_LOSS, WITH_KL_LOSS, WITHOUT_KL_LOSS), False),
    f"{A}kl_loss_coef": (when(KL_LOSS, num("algorithm.kl.coef"), "not read without use_kl_loss"), 0.001),
    f"{A}kl_loss_type": (when(KL_LOSS, KL_TYPE, "not read without use_kl_loss"), "low_var_kl"),
    f"{A}ppo_epochs": (num("learner.epochs"), 1),
    f"{A}ppo_mini_batch_size": (rules.minibatch, 256),
    f"{A}ppo_max_token_len_per_gpu": when(
        DYNAMIC, num("learner.micro_batch_tokens"), "read with use_dynamic_bsz only; it changes memory, and no result"
    ),
    f"{A}use_dynamic_bsz": idle(MICRO),
    f"{A}shuffle": unless(False, "minibatches are in the order of the batch"),
    f"{A}grad_clip": (num("learner.max_grad_norm"), 1.0),
    f"{A}optim.clip_grad": when(has_no_grad_clip, num("learner.max_grad_norm"), "actor.grad_clip is read in its place"),
    f"{A}optim.lr": (num("learner.lr"), 1e-6),
    f"{A}optim.lr_warmup_steps": (rules.warmup, -1),
    f"{A}optim.lr_warmup_steps_ratio": (rules.warmup_share, 0.0),
    f"{A}optim.lr_scheduler_type": (rules.schedule, "constant"),
    f"{A}optim.warmup_style": rules.schedule,
    f"{A}optim.lr_decay_style": rules.schedule,
    f"{A}optim.min_lr_ratio": (rules.lowest_rate, 0.0),
    f"{A}optim.weight_decay": (num("learner.weight_decay", why=DECAYED), 0.01),
    f"{A}optim.betas": (rules.betas, [0.9, 0.999]),
    f"{A}optim.num_cycles": unless(0.5, "a cosine comes down once"),
    f"{A}optim.total_training_steps": idle("known from the length of the run"),
    f"{A}optim.optimizer": unless(("AdamW", "adam", "adamw", "Adam"), "the optimiser is AdamW"),
    f"{A}optim.optimizer_impl": unless("torch.optim", "the optimiser is torch's AdamW"),
    f"{A}fsdp_config.dtype": (choice("model.dtype", rules.DTYPES, "Write bfloat16, float16 or float32."), "bfloat16"),
    f"{A}fsdp_config.model_dtype": (choice("learner.master", MASTER, "Write fp32 or bf16."), "fp32"),
    f"{M}path": (text("model.name"), "~/models/deepseek-llm-7b-chat"),
    f"{M}lora_adapter_path": text("model.name", "a folder of adapters knows its base, and they go on being trained"),
    f"{M}tokenizer_path": unless(None, "a model's own tokenizer is used"),
    f"{M}custom_chat_template": text("model.chat_template"),
    f"{M}external_lib": unless(None, "nothing else is imported"),
    f"{M}enable_gradient_checkpointing": to("learner.recompute", bool),
    f"{M}use_remove_padding": idle("there is no padding: tokens are packed as trees"),
    f"{M}lora_rank": (num("model.lora.rank"), 0),
    f"{M}lora_alpha": (when(HAS_LORA, num("model.lora.alpha"), WITHOUT_LORA), 16),
    f"{M}lora.rank": num("model.lora.rank"),
    f"{M}lora.alpha": num("model.lora.alpha"),
    f"{M}target_modules": when(HAS_LORA, rules.adapted_layers, WITHOUT_LORA),
    f"{M}exclude_modules": unless(None, "no layer is left out: name those that are adapted in model.lora.target"),
    f"{R}n": (num("rollout.group_size"), 1),
    f"{R}temperature": (num("sampling.temperature"), 1.0),
    f"{R}top_p": (num("sampling.top_p"), 1),
    f"{R}top_k": (num("sampling.top_k", lambda k: max(int(k), 0)), -1),
    f"{R}do_sample": unless(True, "training episodes are sampled"),
    f"{R}ignore_eos": unless(False, "the model's end of turn ends a call"),
    f"{R}over_sample_rate": unless((0, None), "no episode is cancelled for being late; see rollout.redundancy"),
    f"{R}prompt_length": rules.window,
    f"{R}response_length": rules.answer_length,
    f"{R}max_model_len": rules.window,
    f"{R}val_kwargs.do_sample": (rules.evaluation, False),
    f"{R}val_kwargs.temperature": (rules.evaluation, 0),
    f"{R}val_kwargs.top_p": (num("evaluation.sampling.top_p"), 1.0),
    f"{R}val_kwargs.top_k": (num("evaluation.sampling.top_k", lambda k: max(int(k), 0)), -1),
    f"{R}val_kwargs.n": (num("evaluation.group_size"), 1),
    f"{R}agent.agent_loop_config_path": parts.loop_file,
    f"{T}interaction_config_path": refuse(
        "an interaction is an environment here. Write it as one (docs/environments.md), take this key out, and "
        "name it: env=package.module:Class.",
        off="null: only tools answer",
    ),
    f"{T}max_user_turns": no("the environment decides how often it answers"),
    f"{T}max_tool_response_length": no("a tool says itself how much of its answer is shown: @tool(max_chars=…)"),
    f"{T}tool_response_truncate_side": no("what is too long loses its end, and says so"),
    f"{T}num_repeat_rollouts": unless(None, "an episode is played once"),
    f"{T}single_turn_max_tokens": num("sampling.max_tokens"),
    f"{T}max_samples_per_trajectory": parts.samples,
    f"{T}downsample_mode": parts.samples,
    f"{T}model_type": idle("what a template does to earlier turns is seen, and a new branch begins"),
    f"{T}dump_trajectories_enabled": to("agent.args.dump_trajectories_enabled"),
    f"{T}dump_trajectories_dir": folder("agent.args.dump_trajectories_dir", "they go to the folder `trajectories`"),
    f"{T}dump_trajectories_freq": num("agent.args.dump_trajectories_freq"),
    f"{T}tool_config.server_url": no("code runs in Arbor's own sandbox"),
    f"{T}format": choice("agent.tool_format", FORMATS, "Name yours: agent.tool_format."),
    "critic.optim.lr": (of_critic(num("learner.critic_lr")), 1e-5),
    "critic.cliprange_value": (of_critic(num("algorithm.args.value_clip")), 0.5),
    "critic.model.path": of_critic(losses.critic_model),
    "reward_model.enable": parts.reward_model,
    "reward_model.reward_manager": (together, "naive"),
    "reward_manager.name": parts.manager,
    "trainer.total_training_steps": num("trainer.steps"),
    "trainer.total_epochs": (length_of_the_run, 30),
    "trainer.experiment_name": rules.run_name,
    "trainer.project_name": idle("runs lie in runs/, under their names; trackers get the project"),
    "trainer.default_local_dir": folder("output_dir", "a run lies in runs/NAME-001"),
    "trainer.save_freq": positive("trainer.save_every"),
    "trainer.test_freq": (positive("evaluation.every"), -1),
    "trainer.val_before_train": (to("evaluation.before", bool), True),
    "trainer.val_only": refuse("this trains nothing. Write: arborl evaluate RUN", off="it trains"),
    "trainer.critic_warmup": unless((0, -1), "policy and critic are trained together from the start"),
    "trainer.logger": rules.loggers,
    "trainer.resume_mode": idle("`arborl train --resume latest` goes on with a run"),
    "trainer.resume_from_path": idle("`arborl train --resume FOLDER` goes on with a run"),
    "trainer.max_actor_ckpt_to_keep": positive(
        "trainer.keep", "all checkpoints there, the last two here: trainer.keep"
    ),
    "trainer.max_critic_ckpt_to_keep": idle("a checkpoint holds policy and critic"),
    "trainer.rollout_data_dir": LOGS,
    "trainer.validation_data_dir": LOGS,
    "trainer.log_val_generations": LOGS,
    "trainer.balance_batch": idle(SPEED),
    "trainer.device": idle("model.device is found"),
    "trainer.ref_update_freq": unless((0, -1, None), "the reference is the policy at the start, always"),
}
"""Rules by key; with verl's default where that changes the result."""
READ_TOGETHER = (
    "tools data.custom_cls.name custom_reward_function.path custom_reward_function.name "
    f"reward_model.reward_kwargs.max_resp_len {A}loss_scale_factor {R}agent.default_agent_loop {T}enable "
    f"{T}tool_config_path {T}max_assistant_turns {T}min_assistant_turns {T}max_parallel_calls "
    f"{T}exceed_length_penalty {T}below_min_turns_reward {T}tool_config.code_start_tag {T}tool_config.code_end_tag "
    f"{T}tool_config.answer_start_tag {T}tool_config.answer_end_tag"
)
"""Keys that `verl_parts` and `verl_losses` read with others."""
SHARED_WITH_CRITIC = (
    "ppo_epochs ppo_mini_batch_size grad_clip optim.weight_decay optim.lr_warmup_steps optim.lr_warmup_steps_ratio "
    "loss_agg_mode"
)
TABLE: dict[str, Rule] = (
    {key: row[0] if isinstance(row, tuple) else row for key, row in ROWS.items()}
    | dict.fromkeys(READ_TOGETHER.split(), together)
    | {f"critic.{name}": as_the_actor(name) for name in SHARED_WITH_CRITIC.split()}
)
DEFAULTS: dict[str, Any] = {key: row[1] for key, row in ROWS.items() if isinstance(row, tuple)}


def _all(why: str, at: str, names: str) -> dict[str, Rule]:
    return {f"{at}{name}": idle(why) for name in names.split()}


PREFIXES: dict[str, Rule] = {
    **_all(
        "how rows are loaded changes no result",
        "data.",
        "tokenizer use_shm return_raw_chat return_raw_input_ids return_full_prompt dataloader_num_workers "
        "image_patch_size validation_shuffle filter_overlong_prompts_workers trust_remote_code "
        "return_multi_modal_inputs datagen. tool_config_path",
    ),
    "data.mixed_dataset.": idle("batches are always composed exactly, and their composition is always logged"),
    "algorithm.pf_ppo.": idle("see algorithm.use_pf_ppo"),
    "algorithm._target_": idle("Hydra's"),
    **_all(
        ENGINE,
        R,
        "name mode dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine "
        "tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode "
        "scheduling_policy load_format log_prob_ disable_log_stats multi_stage_wake_up engine_kwargs. "
        "calculate_log_probs agent.num_workers agent.custom_async_server. checkpoint_engine. trace. skip_rollout "
        "skip_dump_dir skip_tokenizer_init enable_rollout_routing_replay profiler. prometheus. quantization mtp "
        "layered_summon update_weights_bucket_megabytes use_fire_sampling micro_batch_size",
    ),
    **_all(
        "what the model was shown is kept as it was sampled; there is nothing to check",
        T,
        "tokenization_sanity_check_mode use_inference_chat_template completion_callback",
    ),
    f"{T}tool_config.": idle("a tool's own settings: agent.tool_args"),
    **_all(
        SPEED,
        M,
        "hf_config_path use_shm trust_remote_code enable_activation_offload use_liger use_fused_kernels "
        "fused_kernel_options. tiled_mlp. mtp. moe_config. lora.",
    ),
    f"{A}optim.": idle("of an optimiser's inner workings"),
    f"{A}policy_loss.": idle("read by a loss that is not chosen"),
    f"{A}ppo_micro_batch_size": idle(MICRO),
    **_all(PLACEMENT, "actor_rollout_ref.", "actor.fsdp_config. actor.megatron. hybrid_engine nccl_timeout"),
    **_all(
        SPEED,
        A,
        "strategy use_torch_compile ulysses_sequence_parallel_size checkpoint. profiler. "
        "entropy_from_logits_with_chunking entropy_checkpointing router_replay. use_remove_padding use_fused_kernels "
        "freeze_vision_tower calculate_entropy data_loader_seed rollout_n calculate_sum_pi_squared "
        "sum_pi_squared_checkpointing use_prefix_grouper load_weight",
    ),
    "actor_rollout_ref.ref.": idle(REFERENCE),
    **_all(
        "a critic is trained as the policy is; see learner.critic",
        "critic.",
        "model. megatron. optim. checkpoint. profiler. strategy enable ppo_micro_batch_size ppo_max_token_len_per_gpu "
        "forward_ use_dynamic_bsz ulysses_sequence_parallel_size shuffle data_loader_seed rollout_n load_weight",
    ),
    "reward_model.": idle(SCORES),
    "reward_manager.": idle(SCORES),
    "global_profiler.": idle("a step's times are metrics"),
    "hydra.": idle("where verl's own configuration lies"),
    **_all(CLUSTER, "trainer.", "nnodes n_gpus_per_node use_legacy_worker_impl ray_wait_register_center_timeout"),
    **_all(
        "checkpoints are in the run's folder",
        "trainer.",
        "esi_redundant_time default_hdfs_dir del_local_ckpt_after_load remove_previous_ckpt",
    ),
    **_all(CLUSTER, "", "ray_kwargs. ray_init. transfer_queue. rollout.nnodes rollout.n_gpus_per_node"),
    "data.apply_chat_template_kwargs.": rules.chat_args,
    "data.mixed_dataset.dataset_ratios.": rules.ratio,
    "data.mixed_dataset.agent_mapping.": source_agent,
    "agent_loops.": parts.loop_class,
    "reward_model.reward_kwargs.overlong_buffer_cfg.": losses.overlong_buffer,
    "reward_model.overlong_buffer.": losses.overlong_buffer,
    "custom_reward_function.reward_kwargs.": together,
    f"{M}override_config.": no("a model is as its own configuration says"),
}
VARIABLES: dict[str, Rule] = {
    "MODEL_PATH": text("model.name"),
    "TRAIN_FILES": text("data.path"),
    "VAL_FILES": text("data.evaluation_path"),
    "LEARNING_RATE": num("learner.lr"),
    "TRAIN_BATCH_SIZE": num("rollout.tasks_per_step"),
    "RATE_LIMIT_PER_MINUTE": no("a limit is written with its tool: tools=[{server: URL, limit: {per_minute: N}}]"),
    "TOOL_MAX_WORKERS": no("written with its tool: tools=[{server: URL, concurrency: N}]"),
    "TOOL_REQUEST_INTERVAL": no("written with its tool: limit.per_minute, as 60 divided by the interval"),
    **_all(CLUSTER, "", "MASTER_IP WORKER_NODES CONDA_ENV"),
    "WANDB_DIR": idle("metrics are in the run's folder; see track.trackers"),
}
"""Of mixed-training scripts whose overrides are made of them elsewhere. What an override says wins."""


def variables_too(draft: Draft, variables: Mapping[str, Any]) -> None:
    """Variables with a known meaning, unless an override sets the same."""
    for name, value in variables.items():
        is_ratio = name.endswith("_RATIO") and isinstance(value, int | float)
        rule = rules.ratio if is_ratio else VARIABLES.get(name)
        if rule is None or value in (None, "", []):
            continue
        trial = Draft(source=draft.source)
        rule(trial, name, value)
        if trial.problems or not trial.settings.keys() <= draft.settings.keys():
            rule(draft, name, value)
        elif trial.dropped:
            draft.lines += trial.dropped


def complete(draft: Draft, has_parts: bool = False) -> None:
    """What a script does not say, and what only all of it together says."""
    assumed = Draft(source=draft.source, settings=dict(draft.settings), defaults=DEFAULTS)
    for key, value in DEFAULTS.items():
        if key not in draft.source:
            TABLE[key](assumed, key, value)
    usual = _usual_here(draft.settings | assumed.settings)
    for line in assumed.lines:
        if line.path and (line.path not in usual or usual[line.path] != line.ours):
            draft.default(line.key, line.value, line.path, line.ours, line.why)
    draft.default("a deadline of an episode", None, "rollout.episode_seconds", 86_400, "there is none: a day")
    if not has_parts:
        parts.complete(draft)
    _sources(draft)
    draft.skip_rest(draft.source, "read together with other keys; nothing to do as things are")


def _usual_here(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arbor's defaults with the advantage and the loss of these settings, by dotted key."""
    preset = AlgorithmConfig(name=settings.get("algorithm.name", "grpo"))
    chosen = AlgorithmConfig(name=preset.name, loss=settings.get("algorithm.loss", preset.loss))
    own = dict(_dotted(chosen.model_dump(mode="json"), "algorithm."))
    usual = dict(_dotted(RunConfig().model_dump(mode="json"))) | own
    return usual | {"algorithm.name": "grpo", "algorithm.loss": preset.loss}


def _dotted(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _sources(draft: Draft) -> None:
    """Sources by a column: sources without an agent answer in one turn, as verl's `single_turn_agent` does."""
    if not draft.settings.get("data.by"):
        return
    if draft.settings.get("data.evaluation_path") is not None:
        draft.undo("data.evaluation_path", "sources by a column have their own held-out rows")
    if draft.below("data.mixed_dataset.agent_mapping."):
        for name in sorted({key.split(".")[2] for key in draft.settings if key.startswith("data.sources.")}):
            at = f"data.sources.{name}.agent"
            if not any(key == at or key.startswith(f"{at}.") for key in draft.settings):
                draft.settings[at] = "chat"
