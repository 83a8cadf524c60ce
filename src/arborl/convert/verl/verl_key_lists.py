"""verl's keys that need no counterpart, and those that have one only at their usual value, by their exact names.

A key that is neither here nor in `verl_keys.ROWS` is reported as lost. The names are those of `ppo_trainer.yaml` and
`ppo_megatron_trainer.yaml` (January 2026) and of older examples. Only sections about profiles, logs and transport are
claimed as a whole: `WILDCARDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from arborl.convert.common_rules import MICRO, Rule, choice, idle, known, no, refuse, together, unless, when
from arborl.convert.draft import Draft
from arborl.convert.verl import verl_rules as rules
from arborl.convert.verl.verl_losses import GAE, KL_LOSS
from arborl.convert.verl.verl_rules import A, M, R, T

REF = "actor_rollout_ref.ref."
SPEED = "changes speed or memory, and no result"
CLASS = "Hydra's class of the section"
SCHEDULER = "scheduling and memory of vLLM or SGLang, which change no result"
CHECKPOINTS = "a checkpoint holds weights, optimiser and state of the run: docs/resume.md"
ROLES = {
    REF: "the reference is on the learner's ranks, sharded as the policy: learner.strategy",
    "critic.": "the critic is on the learner's ranks, sharded as the policy: learner.strategy",
    "reward_model.": "the reward model is in the training process, or on placement.reward_workers",
}
"""Where other models than the policy are."""
PRECISION = "has the policy's precision: model.dtype"


def has_reference(draft: Draft) -> bool:
    return bool(KL_LOSS(draft) or draft.known("algorithm.use_kl_in_reward"))


HAS_REWARD_MODEL = known("reward_model.enable")
READ_IF: dict[str, tuple[Callable[[Draft], Any], str]] = {
    REF: (has_reference, "no reference is kept without a KL penalty"),
    "critic.": (GAE, "there is a critic with algorithm.adv_estimator=gae only"),
    "reward_model.": (HAS_REWARD_MODEL, "there is no reward model"),
}
"""When verl reads the keys of a section."""


def named(rule: Rule, at: str, names: str | Iterable[str]) -> dict[str, Rule]:
    """One rule for several names of a section."""
    words = names.split() if isinstance(names, str) else names
    return {f"{at}{name}": rule for name in words}


def read_if(at: str, rules_of: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules of a section that verl reads under a condition only."""
    condition, why = READ_IF[at]
    return {key: when(condition, rule, why) for key, rule in rules_of.items()}


# ------------------------------------------------------------------------------------------------ training back ends

FSDP = (
    "wrap_policy.min_num_params reshard_after_forward forward_prefetch use_orig_params use_torch_compile forward_only "
    "entropy_from_logits_with_chunking entropy_checkpointing"
)
FUSIONS = (
    "attention_backend apply_rope_fusion bias_activation_fusion bias_dropout_fusion deallocate_pipeline_outputs "
    "gradient_accumulation_fusion masked_softmax_fusion moe_enable_deepep moe_grouped_gemm moe_permute_fusion "
    "moe_shared_expert_overlap moe_token_dispatcher_type persist_layer_norm use_flash_attn recompute_granularity "
    "recompute_modules recompute_method recompute_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"
)
MEGATRON = "sequence_parallel use_distributed_optimizer use_mbridge vanilla_mbridge use_remove_padding forward_only"
MEGATRON_PARALLEL = tuple(
    f"{kind}_parallel_size"
    for kind in (
        "tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor",
    )
)  # fmt: skip
EMPTY: tuple[Any, ...] = (None, {}, [])


def back_ends(at: str, fsdp: str, megatron: str) -> dict[str, Rule]:
    """Keys of FSDP's and Megatron's section of one model, without those that `verl_rules.devices` reads."""
    override = f"{megatron}override_transformer_config"
    return {
        **named(idle(SPEED), fsdp, FSDP),
        **named(idle(SPEED), megatron, MEGATRON),
        **named(idle("Megatron's kernels and pipeline stages change no result"), f"{override}.", FUSIONS),
        **named(unless((0, None), "routers have no auxiliary loss"), f"{override}.moe_", "aux_loss_coeff z_loss_coeff"),
        f"{override}.moe_router_dtype": no("routers compute in the precision of the model"),
        override: unless(EMPTY, "Megatron's settings are not read"),
        **named(unless(EMPTY, "Megatron's settings are not read"), megatron, "override_ddp_config"),
        **named(unless(EMPTY, "Megatron's settings are not read"), megatron, "override_mcore_model_config"),
        **named(
            unless((None, False, ""), "weights are those of model.name; Megatron's checkpoints are not read"),
            megatron,
            "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix",
        ),
        f"{fsdp}strategy": idle("see the strategy of the policy"),
        **named(unless(42, "one seed decides the run: seed"), "", (f"{fsdp}seed", f"{megatron}seed")),
        f"{fsdp}full_determinism": unless(False, "deterministic=true is for rollout and update of the whole run"),
        **named(idle(CLASS), "", (f"{fsdp}_target_", f"{megatron}_target_")),
        **named(_gradients("fp32"), f"{fsdp}mixed_precision.", "reduce_dtype buffer_dtype"),
    } | _of_other_model(at, fsdp, megatron)


def _gradients(usual: str) -> Rule:
    return unless((usual, "float32"), "gradients of ranks are added in float32")


def _of_other_model(at: str, fsdp: str, megatron: str) -> dict[str, Rule]:
    if at not in ROLES:
        return {}
    parallel = ["fsdp_size", "ulysses_sequence_parallel_size"]
    return {
        **named(idle(ROLES[at]), fsdp, parallel),
        **named(idle(ROLES[at]), megatron, MEGATRON_PARALLEL),
        **named(_as_policy("fsdp_config.dtype"), "", (f"{fsdp}dtype", f"{megatron}dtype")),
        f"{fsdp}model_dtype": _as_policy("fsdp_config.model_dtype"),
        f"{fsdp}mixed_precision.param_dtype": _as_policy("fsdp_config.dtype"),
        **named(unless(False, f"{ROLES[at]}; it stays on the device"), fsdp, rules.OFFLOADS),
        **named(unless(False, f"{ROLES[at]}; it stays on the device"), megatron, rules.OFFLOADS),
    }


def _as_policy(name: str) -> Rule:
    """A precision that is the policy's here."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        policy = rules.DTYPES.get(str(draft.known(f"{A}{name}")))
        if value is None or rules.DTYPES.get(str(value)) == policy:
            draft.skip(key, value, "the policy's, as here")
        else:
            draft.lose(key, value, PRECISION)

    return rule


# ------------------------------------------------------------------------------------------------ sections

ACTOR: dict[str, Rule] = {
    **back_ends(A, f"{A}fsdp_config.", f"{A}megatron."),
    f"{A}fsdp_config.mixed_precision.param_dtype": choice(
        "model.dtype", rules.DTYPES, "Write bfloat16, float16 or float32."
    ),
    f"{A}megatron.dtype": choice("model.dtype", rules.DTYPES, "Write bfloat16, float16 or float32."),
    **named(idle(MICRO), A, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu"),
    **named(
        idle(SPEED), A,
        "use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing use_fused_kernels "
        "sum_pi_squared_checkpointing",
    ),
    **named(idle(CLASS), A, "_target_ optim._target_ policy_loss._target_ checkpoint._target_ router_replay._target_"),
    **named(idle(CHECKPOINTS), f"{A}checkpoint.", "save_contents load_contents async_save"),
    **named(
        when(
            known(f"{A}policy_loss.loss_mode", "clip_cov", "kl_cov"),
            together,
            "read with loss_mode=clip_cov or kl_cov only",
        ),
        f"{A}policy_loss.",
        "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef",
    ),
    f"{A}rollout_n": idle("rollout.n says how many"),
    f"{A}calculate_entropy": idle("the entropy is a metric of every step"),
    f"{A}calculate_sum_pi_squared": idle("computed where an advantage needs it"),
    f"{A}use_prefix_grouper": idle("episodes of a task share their prompt always, as a tree"),
    f"{A}use_remove_padding": idle("there is no padding: tokens are packed as trees"),
    f"{A}data_loader_seed": idle("read with shuffle only"),
    f"{A}freeze_vision_tower": unless(False, "models of text have no vision tower"),
    f"{A}load_weight": unless(True, "weights are always those of model.name"),
    f"{A}router_replay.mode": unless(("disabled", None), "routers' choices are computed anew in the update"),
    **named(unless(None, "routers' choices are not recorded"), f"{A}router_replay.", "record_file replay_file"),
    f"{A}optim.lr_warmup_init": unless(0, "a warm-up begins at 0"),
    f"{A}optim.lr_decay_steps": unless(None, "a decay ends with the run"),
    f"{A}optim.weight_decay_incr_style": unless("constant", "the weight decay stays"),
    **named(idle("read with lr_decay_style=WSD only"), f"{A}optim.", "lr_wsd_decay_style lr_wsd_decay_steps"),
    f"{A}optim.use_checkpoint_opt_param_scheduler": idle("a resumed run continues its schedule"),
    f"{A}optim.override_optimizer_config": unless(EMPTY, "the optimiser is torch's AdamW"),
    f"{A}optim.override_optimizer_config.optimizer_offload_fraction": unless(1, "offload is of the whole state"),
    **named(
        idle(SPEED), f"{A}optim.override_optimizer_config.",
        "overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer",
    ),
}  # fmt: skip
REFERENCE: dict[str, Rule] = read_if(
    REF,
    {
        **back_ends(REF, f"{REF}fsdp_config.", f"{REF}megatron."),
        **named(
            idle(MICRO), REF,
            "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
            "log_prob_max_token_len_per_gpu",
        ),
        **named(idle(SPEED), REF, "use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing"),
        **named(idle(ROLES[REF]), REF, "strategy ulysses_sequence_parallel_size"),
        **named(idle(CLASS), REF, "_target_ router_replay._target_"),
        f"{REF}rollout_n": idle("rollout.n says how many"),
        f"{REF}load_weight": unless(True, "weights are always those of model.name"),
        **named(unless(("disabled", None), "routers' choices are computed anew"), f"{REF}router_replay.", "mode"),
        **named(unless(None, "routers' choices are not recorded"), f"{REF}router_replay.", "record_file replay_file"),
    },
)  # fmt: skip
ROLLOUT: dict[str, Rule] = {
    **named(
        idle(SCHEDULER), R,
        "mode enforce_eager cudagraph_capture_sizes free_cache_engine max_num_batched_tokens max_num_seqs "
        "enable_chunked_prefill enable_prefix_caching scheduling_policy load_format disable_log_stats "
        "multi_stage_wake_up skip_tokenizer_init layered_summon update_weights_bucket_megabytes enable_sleep_mode "
        "sglang_rollout_mode agent.num_workers engine_kwargs.vllm engine_kwargs.sglang engine_kwargs.trtllm "
        "engine_kwargs.vllm.disable_mm_preprocessor_cache engine_kwargs.sglang.attention_backend "
        "engine_kwargs.vllm.compilation_config.cudagraph_mode engine_kwargs.trtllm.batch_wait_timeout_iters "
        "engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes "
        "engine_kwargs.trtllm.batch_wait_max_tokens_ratio layer_name_map.qkv_layer_name "
        "layer_name_map.gate_proj_layer_name",
    ),
    **named(
        idle(MICRO), R,
        "micro_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu",
    ),
    **named(
        idle("of a server that is not started here"), f"{R}server.",
        "timeout max_attempts retry_delay max_connections max_start_wait_time",
    ),
    **named(
        idle(CLASS), R,
        "_target_ val_kwargs._target_ multi_turn._target_ agent._target_ agent.custom_async_server._target_",
    ),
    f"{R}dtype": _as_policy("fsdp_config.dtype"),
    f"{R}logprobs_mode": unless("processed_logprobs", "log-probabilities are of the distribution that is sampled"),
    f"{R}calculate_log_probs": idle("log-probabilities of the engine are always recorded"),
    f"{R}enable_rollout_routing_replay": unless(False, "routers' choices are computed anew in the update"),
    f"{R}quantization": unless(None, "weights are not quantised for sampling"),
    f"{R}quantization_config_file": unless(None, "weights are not quantised for sampling"),
    f"{R}use_fire_sampling": unless(False, "the first token is sampled as the others"),
    f"{R}mtp": unless(EMPTY, "one token is sampled at a time"),
    f"{R}skip_rollout": unless(False, "see rollout.record and rollout.replay"),
    f"{R}skip_dump_dir": idle("read with skip_rollout only"),
    **named(unless(None, "the engine is one of engine.name"), f"{R}agent.custom_async_server.", "path name"),
    **named(
        idle("what the model was shown is kept as it was sampled; there is nothing to check"), T,
        "tokenization_sanity_check_mode use_inference_chat_template",
    ),
    f"{T}completion_callback": unless(None, "an agent decides when to call tools: docs/agents.md"),
}  # fmt: skip
MODEL: dict[str, Rule] = {
    **named(
        idle(SPEED), M,
        "use_shm enable_activation_offload enable_activation_offloading use_liger use_fused_kernels "
        "fused_kernel_options.impl_backend tiled_mlp.enabled tiled_mlp.num_shards lora.a2a_experimental",
    ),
    **named(idle(CLASS), M, "_target_ mtp._target_"),
    f"{M}hf_config_path": unless(None, "a model is as its own configuration says"),
    f"{M}trust_remote_code": unless(False, "code of a model's repository is not run; models of transformers are read"),
    f"{M}override_config": unless(EMPTY, "a model is as its own configuration says"),
    f"{M}override_config.model_config": unless(EMPTY, "a model is as its own configuration says"),
    f"{M}override_config.moe_config.freeze_moe_router": unless(False, "routers are trained with the rest"),
    **named(
        unless(False, "heads for several tokens are neither trained nor sampled with"), f"{M}mtp.",
        "enable enable_train enable_rollout detach_encoder",
    ),
    **named(
        idle("of multi-token prediction: see model.mtp.enable"), f"{M}mtp.",
        "mtp_loss_scaling_factor speculative_algorithm speculative_num_steps speculative_eagle_topk "
        "speculative_num_draft_tokens method num_speculative_tokens",
    ),
    f"{M}lora.type": unless("lora", "adapters are LoRA's"),
    f"{M}lora.merge": idle("the engine samples with the adapters, which is the same"),
    f"{M}lora.exclude_modules": unless(EMPTY, "no layer is left out: name those that are adapted in model.lora.target"),
    f"{M}lora.dropout_position": idle("read with a dropout only, which is before the adapter here"),
    f"{M}lora.lora_A_init_method": unless(("xavier", "kaiming"), "adapters begin as in PEFT"),
    f"{M}lora.lora_B_init_method": unless("zero", "adapters begin as in PEFT"),
    f"{M}lora.dtype": unless(None, "adapters have the precision of the master weights"),
    **named(
        idle("of images"), f"{M}lora.", "freeze_vision_model freeze_vision_projection freeze_language_model"
    ),
}  # fmt: skip
DATA: dict[str, Rule] = {
    **named(
        idle("how rows are loaded changes no result"), "data.",
        "use_shm return_raw_chat return_raw_input_ids return_full_prompt dataloader_num_workers "
        "filter_overlong_prompts_workers trust_remote_code tool_config_path",
    ),
    **named(idle("of images"), "data.", "image_patch_size return_multi_modal_inputs"),
    "data.tokenizer": unless(None, "the model's own tokenizer is used"),
    "data.validation_shuffle": idle("all held-out rows are played"),
    **named(unless(None, "rows are not generated during the run"), "data.datagen.", "path name"),
    "data.apply_chat_template_kwargs": unless(EMPTY, "arguments of the chat template are a table"),
    **named(
        idle("batches are always composed exactly, and their composition is always logged"), "data.mixed_dataset.",
        "sampler_type precompute_batches monitor_performance log_batch_stats log_frequency",
    ),
}  # fmt: skip
CRITIC: dict[str, Rule] = read_if(
    "critic.",
    {
        **back_ends("critic.", "critic.model.fsdp_config.", "critic.megatron."),
        **named(
            idle(MICRO), "critic.",
            "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
            "forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu",
        ),
        **named(idle(ROLES["critic."]), "critic.", "strategy ulysses_sequence_parallel_size nccl_timeout"),
        **named(idle(CLASS), "critic.", "_target_ optim._target_ model._target_ checkpoint._target_"),
        **named(idle(CHECKPOINTS), "critic.checkpoint.", "save_contents load_contents async_save"),
        "critic.enable": idle("algorithm.adv_estimator=gae has a critic"),
        "critic.rollout_n": idle("rollout.n says how many"),
        "critic.load_weight": unless(True, "weights are always those of the model"),
        "critic.data_loader_seed": idle("read with shuffle only"),
        "critic.model.tokenizer_path": idle("the critic reads the policy's tokens"),
        "critic.model.external_lib": unless(None, "nothing else is imported"),
        "critic.model.trust_remote_code": unless(False, "code of a model's repository is not run"),
        "critic.model.enable_gradient_checkpointing": idle("learner.recompute is of policy and critic"),
        **named(
            idle(SPEED), "critic.model.",
            "use_shm use_remove_padding enable_activation_offload tiled_mlp.enabled tiled_mlp.num_shards "
            "lora.a2a_experimental",
        ),
        **named(unless(EMPTY, "a model is as its own configuration says"), "critic.model.", "override_config"),
        "critic.model.override_config.model_config": unless(EMPTY, "a model is as its own configuration says"),
        "critic.model.override_config.moe_config.freeze_moe_router": unless(False, "routers are trained"),
        **named(
            unless((0, None), "a critic is trained whole, or with the policy's adapters"), "critic.model.",
            "lora_rank lora.rank",
        ),
        **named(
            idle("read with adapters of the critic only"), "critic.model.",
            "lora_alpha target_modules lora.type lora.alpha lora.dropout lora.target_modules lora.exclude_modules "
            "lora.dropout_position lora.lora_A_init_method lora.lora_B_init_method lora.dtype lora.adapter_path "
            "lora.freeze_vision_model lora.freeze_vision_projection lora.freeze_language_model",
        ),
        "critic.optim.total_training_steps": idle("known from the length of the run"),
        "critic.optim.lr_decay_steps": unless(None, "a decay ends with the run"),
        "critic.optim.lr_warmup_init": unless(0, "a warm-up begins at 0"),
        "critic.optim.min_lr": unless((0, None), "the critic's rate decays to the share of the policy's"),
        "critic.optim.weight_decay_incr_style": unless("constant", "the weight decay stays"),
        **named(idle("read with lr_decay_style=WSD only"), "critic.optim.", "lr_wsd_decay_style lr_wsd_decay_steps"),
        "critic.optim.use_checkpoint_opt_param_scheduler": idle("a resumed run continues its schedule"),
        "critic.optim.override_optimizer_config": unless(EMPTY, "the optimiser is torch's AdamW"),
        **named(
            idle("learner.offload is of policy and critic"), "critic.optim.override_optimizer_config.",
            "optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer "
            "optimizer_offload_fraction",
        ),
    },
)  # fmt: skip
ENGINE_OF_JUDGE = (
    "name dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine data_parallel_size "
    "expert_parallel_size tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs load_format "
    "engine_kwargs limit_images enable_chunked_prefill enable_prefix_caching disable_log_stats skip_tokenizer_init "
    "prompt_length response_length _target_"
)
REWARD_MODEL: dict[str, Rule] = {
    **read_if(
        "reward_model.",
        {
            **back_ends("reward_model.", "reward_model.model.fsdp_config.", "reward_model.megatron."),
            **named(
                idle(ROLES["reward_model."]), "reward_model.",
                "enable_resource_pool n_gpus_per_node nnodes strategy ulysses_sequence_parallel_size nccl_timeout "
                "num_workers",
            ),
            "reward_model.param_offload": unless(False, "the reward model stays on its device"),
            **named(
                idle("the reward model scores as many conversations at once as `batch` of the reward says"),
                "reward_model.",
                "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu",
            ),
            **named(idle(SPEED), "reward_model.model.", "use_shm use_remove_padding use_fused_kernels"),
            "reward_model.model.input_tokenizer": idle("the conversation is rendered for the reward model"),
            "reward_model.model.trust_remote_code": unless(False, "code of a model's repository is not run"),
            "reward_model.model.external_lib": unless(None, "nothing else is imported"),
            "reward_model.model.override_config": unless(EMPTY, "a model is as its own configuration says"),
            "reward_model.max_length": together,
            **named(
                idle("a classifier is not sampled from: its engine's settings are not read"), "reward_model.rollout.",
                ENGINE_OF_JUDGE,
            ),
            "reward_model.load_weight": unless(True, "weights are always those of the model"),
        },
    ),
    "reward_model.model.path": together,
    "reward_model.launch_reward_fn_async": idle("rewards are computed as soon as an episode ends"),
    "reward_model.use_reward_loop": idle("rewards are computed as soon as an episode ends"),
    "reward_model.reward_loop_source": unless("register", "rewards are functions, named in rewards"),
    **named(
        refuse("a class of rewards of your own. Name a function: rewards=[package.module:function].", off="null: none"),
        "", ("reward_model.reward_loop_module_path", "reward_manager.module.path"),
    ),
    "reward_model.reward_loop_class_name": idle("read with reward_loop_module_path only"),
    "reward_manager.module.name": idle("read with module.path only"),
    "reward_manager.source": unless("register", "rewards are functions, named in rewards"),
    **named(idle(CLASS), "reward_manager.", "_target_ module._target_"),
    **named(
        idle("tests of code run in Arbor's own sandbox"), "reward_model.sandbox_fusion.",
        "url max_concurrent memory_limit_mb",
    ),
}  # fmt: skip
TRAINER: dict[str, Rule] = {
    "trainer.default_hdfs_dir": unless(None, "nothing is copied to HDFS: output_dir"),
    **named(
        idle("checkpoints are in the run's folder, the last ones: trainer.keep"), "trainer.",
        "esi_redundant_time del_local_ckpt_after_load remove_previous_ckpt_in_save",
    ),
    **named(
        idle("of Ray's start"), "",
        "trainer.ray_wait_register_center_timeout ray_kwargs.ray_init.num_cpus ray_init.num_cpus "
        "ray_kwargs.timeline_json_file ray_init.timeline_json_file",
    ),
    **named(idle(SPEED), "", "trainer.use_legacy_worker_impl trainer.balance_batch transfer_queue.enable"),
    **named(
        idle("limits are kept by the tool client, for all runs of this user"), "global_rate_limiter.",
        "lock_file auto_cleanup cleanup_on_exit",
    ),
    "actor_rollout_ref.hybrid_engine": unless(True, "see rollout.max_lag and placement"),
    "actor_rollout_ref.nccl_timeout": idle("of communication between ranks"),
    "algorithm._target_": idle(CLASS),
    "algorithm.kl_ctrl._target_": idle(CLASS),
    **named(idle("see algorithm.use_pf_ppo"), "algorithm.pf_ppo.", "reweight_method weight_pow"),
}  # fmt: skip
EXACT: dict[str, Rule] = {
    **ACTOR, **REFERENCE, **ROLLOUT, **MODEL, **DATA, **CRITIC, **REWARD_MODEL, **TRAINER,
}  # fmt: skip
"""Rules by key."""
PROFILES = "profiles of verl's workers; here every step's times are metrics, and track.timeline has more"
WILDCARDS: dict[str, Rule] = {
    **named(
        idle(PROFILES), "",
        f"global_profiler. actor_rollout_ref.profiler. trainer.npu_profile. trainer.profile_steps {A}profiler. "
        f"{REF}profiler. {R}profiler. critic.profiler. reward_model.profiler.",
    ),
    "hydra.": idle("place of verl's own configuration"),
    "logging.": idle("levels of verl's own loggers"),
    **named(
        idle("the engine gets weights from the learner; there is nothing to say about transport"), "",
        f"{R}checkpoint_engine. actor_rollout_ref.checkpoint_engine.",
    ),
    f"{R}prometheus.": idle("metrics of verl's own server"),
    f"{R}trace.": idle("traces of verl; every episode is written to the run's folder"),
}  # fmt: skip
"""Sections that are wholly about profiles, logs or transport, whatever their keys."""
