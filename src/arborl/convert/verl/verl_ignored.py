"""verl's keys that change no result, by prefix, with the reason."""

from __future__ import annotations

from arborl.convert.common_rules import ENGINE, MICRO, REFERENCE
from arborl.convert.verl.verl_defaults import A, M, R

PLACEMENT = "the model is trained in one process; nothing is sharded or off-loaded"
CLUSTER = "one machine is used; there is nothing to say about nodes and GPUs"
SPEED = "changes speed or memory, and no result"
ROWS = "how rows are loaded changes no result"
CRITIC = "a critic is trained as the policy is; see learner.critic"
SCORES = "rewards are functions, named in rewards"


def _all(why: str, at: str, names: str) -> dict[str, str]:
    return {f"{at}{name}": why for name in names.split()}


IGNORED: dict[str, str] = (
    _all(
        ROWS,
        "data.",
        "tokenizer use_shm return_raw_chat return_raw_input_ids return_full_prompt dataloader_num_workers "
        "image_patch_size validation_shuffle filter_overlong_prompts_workers trust_remote_code "
        "return_multi_modal_inputs datagen. tool_config_path",
    )
    | {"data.mixed_dataset.": "batches are always composed exactly, and their composition is always logged"}
    | {"algorithm.pf_ppo.": "see algorithm.use_pf_ppo", "algorithm._target_": "Hydra's"}
    | _all(
        ENGINE,
        R,
        "name mode dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine "
        "tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode "
        "scheduling_policy load_format log_prob_ disable_log_stats multi_stage_wake_up engine_kwargs. "
        "calculate_log_probs agent.num_workers agent.custom_async_server. checkpoint_engine. trace. skip_rollout "
        "skip_dump_dir skip_tokenizer_init enable_rollout_routing_replay profiler. prometheus. quantization mtp "
        "layered_summon update_weights_bucket_megabytes use_fire_sampling micro_batch_size",
    )
    | _all(
        "what the model was shown is kept as it was sampled; there is nothing to check",
        f"{R}multi_turn.",
        "tokenization_sanity_check_mode use_inference_chat_template completion_callback",
    )
    | {f"{R}multi_turn.tool_config.": "a tool's own settings: agent.tool_args"}
    | _all(
        SPEED,
        M,
        "hf_config_path use_shm trust_remote_code enable_activation_offload use_liger use_fused_kernels "
        "fused_kernel_options. tiled_mlp. mtp. moe_config. lora.",
    )
    | {f"{A}optim.": "of an optimiser's inner workings", f"{A}policy_loss.": "read by a loss that is not chosen"}
    | {f"{A}fsdp_config.": PLACEMENT, f"{A}megatron.": PLACEMENT, f"{A}ppo_micro_batch_size": MICRO}
    | _all(
        SPEED,
        A,
        "strategy use_torch_compile ulysses_sequence_parallel_size checkpoint. profiler. "
        "entropy_from_logits_with_chunking entropy_checkpointing router_replay. use_remove_padding use_fused_kernels "
        "freeze_vision_tower calculate_entropy data_loader_seed rollout_n calculate_sum_pi_squared "
        "sum_pi_squared_checkpointing use_prefix_grouper load_weight",
    )
    | {"actor_rollout_ref.ref.": REFERENCE}
    | _all(PLACEMENT, "actor_rollout_ref.", "hybrid_engine nccl_timeout")
    | _all(
        CRITIC,
        "critic.",
        "model. megatron. optim. checkpoint. profiler. strategy enable ppo_micro_batch_size ppo_max_token_len_per_gpu "
        "forward_ use_dynamic_bsz ulysses_sequence_parallel_size shuffle data_loader_seed rollout_n load_weight",
    )
    | {"reward_model.": SCORES, "reward_manager.": SCORES}
    | {"global_profiler.": "a step's times are metrics", "hydra.": "where verl's own configuration lies"}
    | _all(CLUSTER, "trainer.", "nnodes n_gpus_per_node use_legacy_worker_impl ray_wait_register_center_timeout")
    | _all(
        "checkpoints are in the run's folder",
        "trainer.",
        "esi_redundant_time default_hdfs_dir del_local_ckpt_after_load remove_previous_ckpt",
    )
    | _all(CLUSTER, "", "ray_kwargs. ray_init. transfer_queue. rollout.nnodes rollout.n_gpus_per_node")
)
