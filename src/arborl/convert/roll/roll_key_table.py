"""Outcomes of ROLL's single keys, by exact name. A key that is not listed is unknown and reported as lost.

Names are those of ROLL's configuration classes (roll/configs, roll/pipeline/*/*_config.py, and the arguments of
mcore_adapter for Megatron), and names in its examples that no class has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from arborl.convert.common_rules import Rule, idle, known, no, positive, refuse, to, unless, when
from arborl.convert.draft import Draft
from arborl.convert.reading.training_scripts import START
from arborl.convert.roll.roll_learner import PARALLEL, TYPES

TEMPLATE = "a model brings its own chat template; model.chat_template names another"
NEVER = "nothing there reads it"
TURNS = "rollout and training take turns, as here"
OFF = "off"
RESUME = "not a setting: arborl train FILE --resume latest, which continues a run of Arbor"
KERNELS = "kernels and communication: speed and memory only"
CHECKPOINTS = "a checkpoint here is a Hugging Face folder, with the optimizer's state beside it"
MICRO = "the size of a micro-batch changes memory and speed only: learner.micro_batch_tokens"
PACKED = "tokens are always packed, as trees"
OVERWRITTEN = "ROLL overwrites it"


def every(names: Iterable[str], rule: Rule) -> dict[str, Rule]:
    """The same rule for several names."""
    return dict.fromkeys(names, rule)


def inside(section: str, table: Mapping[str, Rule]) -> dict[str, Rule]:
    """The table for keys of a section."""
    return {f"{section}.{name}": rule for name, rule in table.items()}


def versions(ratio: Any) -> int:
    """Policy versions that a rollout may be behind."""
    return max(int(float(ratio)), 1)


def folder(draft: Draft, key: str, value: Any) -> None:
    """There a folder for all runs; here a run has one of its own."""
    name = str(draft.source.get("exp_name") or "run")
    draft.set(key, value, "output_dir", f"{str(value).rstrip('/')}/{name}", "a run has a folder of its own")


def logs(draft: Draft, key: str, value: Any) -> None:
    """Log files are in the run's folder."""
    output = draft.source.get("output_dir", "./output")
    name = str(draft.source.get("exp_name") or "run")
    ours = f"{str(output).rstrip('/')}/{name}"
    draft.set(key, value, "output_dir", ours, "run.log and TensorBoard's files are in the run's folder")


def checkpoints(draft: Draft, key: str, value: Any) -> None:
    """Where checkpoints go; ROLL copies them there."""
    kind = draft.source.get("checkpoint_config.type", "file_system")
    if not value:
        draft.skip(key, value, "null: not given")
    elif kind == "file_system":
        draft.set(
            key, value, "trainer.checkpoint_dir", str(value), "in a folder with the name of the run, not of a time"
        )
    else:
        draft.lose(key, value, f"checkpoint_config.type={kind} is not a folder of this machine")


def resume(draft: Draft, key: str, value: Any) -> None:
    """A Hugging Face folder is the initial model; checkpoints of ROLL cannot be read."""
    place = Path(str(value)).expanduser()
    if value in (None, False, "", "False", "false"):
        draft.skip(key, value, OFF)
    elif value is True or str(value).lower() == "true":
        draft.lose(key, value, RESUME)
    elif (place / "MANIFEST").is_file() or (place / "checkpoints").is_dir():
        draft.lose(key, value, f"not a setting: arborl train FILE --resume {value}")
    elif (place / "config.json").is_file():
        why = "the weights alone: optimizer and steps begin anew"
        draft.set(key, value, "model.name", str(value), why)
    else:
        why = (
            "a checkpoint of ROLL cannot be read. Save it as a Hugging Face folder there (training_args.save_hf_model: "
        )
        draft.lose(key, value, f"{why}true) and write model.name=FOLDER")


def start(draft: Draft, key: str, value: Any) -> None:
    """The script that starts the pipeline."""
    if "_rollout_" in str(value):
        why = (
            "there episodes are sampled and nothing is trained: arborl evaluate FILE, or rollout.record=EPISODES.jsonl"
        )
        draft.lose(key, value, why)
    else:
        draft.skip(key, value, "arborl train FILE starts every algorithm")


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
        draft.lose(key, value, why)


def mock(draft: Draft, key: str, value: Any) -> None:
    """Episodes written once and trained on again."""
    at = "rollout_mock."
    if not draft.source.get(f"{at}enable"):
        draft.skip(key, value, OFF)
        return
    mode = draft.source.get(f"{at}mode", "dump")
    where = f"{str(draft.source.get(f'{at}dump_dir', './rollout_mock_dumps')).rstrip('/')}/episodes.jsonl"
    why = "one file of episodes; those that ROLL dumped cannot be read"
    draft.set(key, value, "rollout.record" if mode == "dump" else "rollout.replay", where, why)


def variable(draft: Draft, key: str, value: Any) -> None:
    """An environment variable of ROLL's processes."""
    name = key.rpartition(".")[2]
    if name == "DETERMINISTIC_MODE":
        on = str(value) == "1"
        draft.set(
            key, value, "deterministic", on, "kernels there; here episodes depend on the seed alone" if on else ""
        )
    elif name in VARIABLES:
        draft.skip(key, value, VARIABLES[name])
    elif name in ("USE_MODELSCOPE", "MODEL_DOWNLOAD_TYPE"):
        draft.lose(key, value, "models are folders or Hugging Face ids, and not of ModelScope")
    else:
        draft.lose(key, value, f"not a setting. Set it in the shell: {name}={value} arborl train FILE")


VARIABLES = {
    "RAY_PROFILING": "a timeline is always written: track.timeline",
    "VLLM_USE_V1": "of vLLM alone",
    "VLLM_USE_FLASHINFER_SAMPLER": "of vLLM alone",
    **dict.fromkeys(
        ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        "of Transformer Engine, which is not used here",
    ),
}
"""Environment variables that change nothing here."""
PIPELINE: dict[str, Rule] = {
    START: start,
    "exp_name": to("name"),
    "seed": to("seed"),
    "output_dir": folder,
    "logging_dir": logs,
    "render_save_dir": to("track.render_every", lambda folder: 10, "GIFs are in the run's folder, frames/"),
    "rollout_dump_dir": to("track.episodes", bool, "episodes are written to the run's folder"),
    "max_steps": to("trainer.steps"),
    "save_steps": positive("trainer.save_every"),
    "max_ckpt_to_keep": positive("trainer.keep", "all are kept there; here trainer.keep, 2 by default"),
    "logging_steps": unless(1, "every step is logged"),
    "eval_steps": positive("evaluation.every"),
    "resume_from_checkpoint": resume,
    "reward_pretrain": idle("the critic's weights, which adv_estimator=gae alone reads"),
    "async_generation_ratio": when(known("async_generation_ratio"), to("rollout.max_lag", versions), TURNS),
    "track_with": tracker,
    "whiten_rewards": unless(False, "rewards are not whitened here; whiten_advantages is what remains of it"),
    "batch_adjust_mode": idle("no episode is copied or left out to make a batch even"),
    "value_clip": idle("not read without adv_estimator=gae"),
    "critic_warmup": unless(0, "policy and critic are trained together from the start"),
    "use_pg_clip_range": idle("see pg_clip_low and pg_clip_high, or pg_clip"),
    "dual_clip_loss": idle(OFF),
    **every(("advantage_clip", "reward_clip"), idle("none")),
    "val_batch_size": no("held-out tasks: evaluation.tasks"),
    "enable_reference": idle("the reference policy is made when algorithm.kl.coef > 0"),
    "enable_old_logprobs_recompute": idle("they are always computed: algorithm.anchor=proximal"),
    "force_disable_old_logprobs_recompute": unless(False, "they are always computed: algorithm.anchor=proximal"),
    "global_template": idle(TEMPLATE),
    "max_running_requests": to("engine.max_requests"),
    "router_args.max_running_requests": to("engine.max_requests"),
    "router_args.router_name": idle("which engine serves a request changes speed only"),
    "generate_opt_level": idle("every request is scheduled by itself"),
    "is_num_return_sequences_expand": idle("every episode is a request by itself"),
    **every(
        ("is_use_additional_prompts", "max_additional_running_prompts"),
        when(known("is_use_additional_prompts"), no("rollout.spare_groups replaces groups that a filter drops"), OFF),
    ),
    "user_defined_rollout_loop_cls": refuse("a class of yours. Write an agent (docs/agents.md), and take the key out."),
    "partial_gpu_mode": idle("engines and the learner have GPUs of their own"),
    "skip_mock_system_prompt": idle("a turn is rendered as within the whole conversation"),
    "parse_tool_call_parameter_to_dict": unless(False, "agent=tool parses tool calls"),
    **every(("profiler_timeline", "profiler_memory"), unless(False, "arborl train FILE --profile")),
    **every(("profiler_output_dir", "length_profiler_dir"), idle("profile.json is in the run's folder")),
    "report_length_and_rewards": idle("both are in every step's metrics"),
    "is_offload_states": unless(False, "models stay on their GPUs: learner.offload"),
    "is_offload_optimizer_states_in_train_step": unless(False, "learner.offload=optimizer does it between steps"),
    "model_update_buffer_size_mb": idle("how weights are sent changes speed only"),
    "model_download_type": unless((None, "HUGGINGFACE_HUB"), "models are folders or Hugging Face ids"),
    **every(("rpc_timeout", "local_rank"), idle("of ROLL's remote calls and launchers, which are not here")),
    "otlp_output_dir": idle("arborl[otel] sends spans to a collector; see docs/tracking.md"),
    "save_logging_board_dir": unless(None, "metrics are in the run's folder"),
    "pure_opd_pipeline_type": idle("rows and environments of the file decide"),
    "is_pure_opd": idle("see teacher.model_args.model_name_or_path"),
    "use_opd": unless(False, "a teacher beside rewards is not here"),
    **every(
        (
            "l2", "use_reward_scaling", "add_len_reward", "use_reward_norm", "dirty_data_mask", "open_feedback_turn",
            "use_token_reward", "use_policy_loss_type", "mask_type", "minibatch_data_iter_num", "val_greedy",
            "val_n_sample", "reward_shift", "reward_scale", "reward_norm", "exp_mode", "base_dir", "world_size",
            "reward_normalization.global_scale_factor", "reward_normalization.global_shift_value",
            "dataset_filter.source", "dataset_filter.min_difficulty", "dataset_filter.max_difficulty",
            "dataset_filter.num_samples",
        ),
        idle(NEVER),
    ),
    "tracker_kwargs.log_dir": idle("TensorBoard's files are in the run's folder"),
    "tracker_kwargs.api_key": idle("read from the tracker's own variable (WANDB_API_KEY), and kept out of files"),
    **every(("rollout_mock.enable", "rollout_mock.mode", "rollout_mock.dump_dir"), mock),
    "checkpoint_config.type": unless("file_system", "checkpoints are written to a folder: trainer.checkpoint_dir"),
    "checkpoint_config.output_dir": checkpoints,
    "checkpoint_config.async_upload": idle("a checkpoint is written while the next step runs"),
    "checkpoint_config.keep_local_file": unless(False, "there is one copy: trainer.checkpoint_dir"),
    "env_monitor.enable": unless(True, "rollout.episode_seconds and rollout.step_seconds bound an environment"),
    "env_monitor.monitor_interval": idle("every episode has its own deadline"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ roles


MEGATRON = (
    "variable_seq_lengths", "bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion",
    "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_overlap", "calculate_per_token_loss",
    "transformer_impl", "cuda_graph_impl", "cuda_graph_scope", "overlap_grad_reduce", "delay_grad_reduce",
    "overlap_param_gather", "check_for_nan_in_loss_and_grad", "ddp_average_in_collective", "ddp_bucket_size",
    "sequence_packing", "compile_warmup", "additional_configs.moe_permute_fusion",
)  # fmt: skip
FSDP = (
    "reshard_after_forward", "apply_tiled_mlp", "tiled_num_shards", "model_type", "moe_use_grouped_mm",
    "apply_expert_patch", "reduce_scatter_during_grad_accumulation", "wrap_policy.transformer_layer_cls_to_wrap",
    "wrap_policy.moe_experts", "wrap_policy.wrap_embeddings", "wrap_policy.wrap_lm_output",
)  # fmt: skip
RECOMPUTE = (
    "recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers", "moe_layer_recompute",
)  # fmt: skip
SAVED = (
    "save_hf_model", "save_merged_model", "ckpt_format", "distrib_optim_fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient", "async_save_ckpt", "save_only_model",
)  # fmt: skip
VLLM = (
    "block_size", "load_format", "max_num_batched_tokens", "max_num_seqs", "enforce_eager", "enable_prefix_caching",
    "disable_custom_all_reduce", "disable_log_stats", "distributed_executor_backend", "sleep_level",
    "optimization_level", "cuda_graph_sizes", "cudagraph_capture_sizes", "swap_space", "enable_chunked_prefill",
    "data_parallel_size", "VLLM_USE_V1", "trust_remote_code",
)  # fmt: skip
SGLANG = (
    "enable_memory_saver", "disable_cuda_graph", "disable_radix_cache", "log_level", "log_level_http",
    "chunked_prefill_size", "attention_backend", "schedule_policy", "grpc_mode", "max_running_requests",
)  # fmt: skip
IMAGES = ("disable_mm_preprocessor_cache", "limit_mm_per_prompt.image", "limit_mm_per_prompt.video")
ENGINE = "Arbor's engine: speed and memory only"


def equal_type(draft: Draft, key: str, value: Any) -> None:
    """All copies of the model have one type."""
    ours = draft.settings.get("model.dtype")
    why = f"all copies of the model have the policy's type, model.dtype={ours}"
    (draft.skip if TYPES.get(str(value), value) in (ours, None) else draft.lose)(key, value, why)


def engine_length(draft: Draft, key: str, value: Any) -> None:
    most = draft.settings.get("sampling.max_context", 0)
    if value is None or (isinstance(value, int) and value >= most):
        draft.skip(key, value, f"not less than sampling.max_context={most}, which bounds an episode")
    else:
        draft.lose(key, value, f"sampling.max_context={most} bounds an episode")


def reference_model(draft: Draft, key: str, value: Any) -> None:
    if value in (None, draft.settings.get("model.name")):
        draft.skip(key, value, "the policy's weights")
    else:
        draft.lose(key, value, "the reference policy has the weights that the policy begins with")


def worker_class(draft: Draft, key: str, value: Any) -> None:
    if value is None or str(value).startswith("roll."):
        draft.skip(key, value, "a worker of ROLL, whose part is known")
    else:
        draft.lose(key, value, "a class of yours. Losses and advantages of your own: docs/algorithms.md")


def head(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.set(key, value, "model.head", "float32")
    else:
        draft.skip(key, value, OFF)


def micro_batch(draft: Draft, key: str, value: Any) -> None:
    at = key.removesuffix("max_tokens_per_microbatch_in_train")
    if draft.source.get(f"{at}use_dynamic_batching_in_train") and isinstance(value, int) and value > 0:
        draft.set(key, value, "learner.micro_batch_tokens", value, "tokens of a tree, in which a prefix counts once")
    else:
        draft.skip(key, value, "not read without use_dynamic_batching_in_train")


WORKER: dict[str, Rule] = {
    "name": idle("a name in ROLL's logs"),
    "worker_cls": worker_class,
    **every(("world_size", "max_concurrency", "num_gpus_per_worker"), idle("computed there from device_mapping")),
    "model_update_frequency": unless(1, "weights are published after every step"),
    "infer_batch_size": idle(MICRO),
    "backend_timeout": idle("of ROLL's process groups, which are not here"),
    "offload_nccl": idle("always off there"),
    **every(
        (
            "use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_train",
            "max_tokens_per_microbatch_in_infer", "sequence_length_round_in_train", "sequence_length_round_in_infer",
        ),
        idle(MICRO),
    ),
    **every(
        (
            "use_sequence_packing", "use_remove_padding", "sequence_packing_args.algorithm",
            "sequence_packing_args.max_packed_sequence_length_forward",
            "sequence_packing_args.max_packed_sequence_length_train",
            "sequence_packing_args.min_num_micro_batches_forward", "sequence_packing_args.min_num_micro_batches_train",
        ),
        idle(PACKED),
    ),
    "router_replay.mode": unless("disable", "routes of experts are not replayed"),
    "apply_loss_scale": unless(True, "the loss is that of the whole batch"),
    "mtp_training_mode": unless("disabled", "heads that predict several tokens are not trained"),
    "logits_in_fp32": idle("model.head, for all copies"),
    **every(("topr_positive_weight", "topr_negative_weight"), unless(1.0, "algorithm.loss=topr weighs both alike")),
}  # fmt: skip
"""Keys of every worker (WorkerConfig)."""
MODEL: dict[str, Rule] = {
    **every(("attn_implementation", "flash_attn"), idle("all implementations of attention give the same result")),
    "model_type": unless((None, "causal_lm", "trl"), "a causal language model, or its value head"),
    "dtype": equal_type,
    **every(("gradient_checkpointing_use_reentrant", "device_map"), idle(KERNELS)),
    **every(("disable_gradient_checkpointing", "ulysses_size"), idle(KERNELS)),
    "adapter_name_or_path": idle(NEVER),
    "num_labels": unless(1, "a critic has one value"),
    "moe_aux_loss_coef": unless((None, 0, 0.0), "no loss that balances experts"),
    "freeze_module_prefix": unless(None, "all weights, or adapters (model.lora), are trained"),
    "additional_target": unless(None, "beside adapters nothing is trained"),
    "autocast_adapter_dtype": unless(True, "adapters are trained in float32"),
    **every(("lora_rank", "lora_alpha", "lora_dropout", "lora_target"), idle("the adapters of the policy: model.lora")),
}
TRAINING: dict[str, Rule] = {
    **every(("output_dir", "max_steps", "seed"), idle(OVERWRITTEN)),
    "num_train_epochs": idle("max_steps decides"),
    **every(("data_seed", "tf32"), idle(NEVER)),
    **every(("fp16", "bf16"), idle("model_args.dtype decides")),
    "dataloader_num_workers": idle("rows are read in the process"),
    "save_hf_model": idle(CHECKPOINTS),
}
TRAINED = (
    "learning_rate", "lr_scheduler_type", "weight_decay", "adam_beta1", "adam_beta2", "warmup_ratio", "warmup_steps",
    "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
"""Keys of `training_args` that decide an update."""
DATA: dict[str, Rule] = {
    "template": idle(TEMPLATE),
    "preprocessing_num_workers": idle("rows are read in the process"),
    "dataset_type": unless((None, "json"), "rows are files: JSON, JSON lines, parquet, CSV; or data.hub"),
    "id": idle("rows are numbered"),
    **every(("tag", "prompt", "messages", "file_name"), idle("columns and files are those of training")),
    **every(("eval_file_name", "dataset_dir", "interleave_probs", "response"), idle(NEVER)),
    **every(("image_folder", "video_folder", "audio_folder", "custom_data_kwargs_func"), idle("null: not given")),
    **every(
        (
            "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_total_pixels",
            "video_fps", "video_max_frames", "video_resize_chunk_frames",
        ),
        idle("of images and videos, which rows of text do not have"),
    ),
}  # fmt: skip
GENERATING: dict[str, Rule] = {
    "num_return_sequences": idle("episodes of a task: rollout.group_size"),
    "max_length": idle("max_new_tokens goes before it"),
    "logprobs": idle("log-probabilities of all sampled tokens are kept"),
    "include_stop_str_in_output": unless((None, True), "a reply ends with its stop text"),
    "do_sample": idle("see temperature"),
}
GENERATED = (
    "temperature", "top_p", "top_k", "max_new_tokens", "num_beams", "repetition_penalty", "length_penalty",
    "stop_strings",
)  # fmt: skip


def _sharding(rule: Rule) -> dict[str, Rule]:
    """Names of strategies and their arguments, for a worker that has no strategy of its own here."""
    names = (
        *(key.removeprefix("strategy_args.strategy_config.") for key in PARALLEL), *MEGATRON, *FSDP, *RECOMPUTE, *SAVED,
        *VLLM, *SGLANG, *IMAGES, "param_dtype", "reduce_dtype", "offload_policy", "gpu_memory_utilization", "bf16",
        "mem_fraction_static", "tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "fp16",
        "use_batched_model_update", "max_grad_norm",
    )  # fmt: skip
    return every(("strategy_name", "strategy_config", *(f"strategy_config.{name}" for name in names)), rule)


TRAINER_STRATEGY: dict[str, Rule] = {
    **every((*MEGATRON, *FSDP), idle(KERNELS)),
    **every(RECOMPUTE, idle("learner.recompute says whether layers are computed again")),
    **every(SAVED, idle(CHECKPOINTS)),
    **every(("bf16", "fp16"), idle("model_args.dtype decides")),
    "max_grad_norm": idle("max_grad_norm at the top goes before it"),
    "use_batched_model_update": idle(NEVER),
    "param_dtype": equal_type,
    "reduce_dtype": idle("gradients are summed in float32"),
    "moe_aux_loss_coeff": unless((None, 0, 0.0), "no loss that balances experts"),
    **every(
        ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
        unless((None, False), "no token is dropped by an expert"),
    ),
    "moe_router_dtype": unless(None, "routers have the type of the model"),
    "moe_enable_routing_replay": unless(False, "routes of experts are not replayed"),
    "mtp_num_layers": unless((None, 0), "heads that predict several tokens are not trained"),
    "optimizer": unless("adam", "AdamW"),
    "optimizer_offload_fraction": unless((0.0, 1.0), "learner.offload is for all of it"),
}
SAMPLER_STRATEGY: dict[str, Rule] = {
    **every((*VLLM, *SGLANG), idle(ENGINE)),
    **every(IMAGES, idle("of images, which models here do not see")),
    "max_model_len": engine_length,
}
NOT_TRAINED, GENERATES_NOTHING = "it is not trained", "it generates nothing"


def role(what: str, training: Rule, generating: Rule, model: Rule) -> dict[str, Rule]:
    """Keys of a worker that neither trains nor samples the policy; `what` says where it is."""
    strategy = idle(what)
    return {
        **WORKER,
        "device_mapping": strategy,
        **inside("model_args", MODEL | {"model_name_or_path": model}),
        **inside("training_args", TRAINING | every(TRAINED, training)),
        **inside("data_args", DATA),
        **inside("generating_args", GENERATING | every(GENERATED, generating)),
        **inside("strategy_args", _sharding(strategy)),
    }


TRAINER = {
    **WORKER,
    "max_tokens_per_microbatch_in_train": micro_batch,
    "logits_in_fp32": head,
    **inside("model_args", MODEL),
    **inside("training_args", TRAINING),
    **inside(
        "data_args", DATA | every(("tag", "prompt", "messages", "file_name"), no("this pipeline reads no rows by it"))
    ),
    **inside("generating_args", GENERATING | every(GENERATED, idle(GENERATES_NOTHING))),
    **inside("strategy_args.strategy_config", TRAINER_STRATEGY),
}
SAMPLER = {
    **WORKER,
    **inside("model_args", MODEL | {"model_name_or_path": reference_model}),
    **inside("training_args", TRAINING | every(TRAINED, idle(NOT_TRAINED))),
    **inside("data_args", DATA),
    **inside("generating_args", GENERATING),
    **inside("strategy_args.strategy_config", SAMPLER_STRATEGY),
}
REFERENCE = role(
    "the reference policy is on the learner's GPUs", idle(NOT_TRAINED), idle(GENERATES_NOTHING), reference_model
)
TEACHER = {
    **role("the teacher is on the learner's GPUs", idle(NOT_TRAINED), idle(GENERATES_NOTHING), no("one teacher alone")),
    "opd_kl_coef": unless((None, 1.0), "the teacher's part is not scaled"),
    "tag_included": unless((None, []), "the teacher is for all rows"),
}
NO_CRITIC = "no critic without adv_estimator=gae"
CRITIC = {
    key: when(known("adv_estimator", "gae", None), rule, NO_CRITIC)
    for key, rule in role(
        "the critic is on the learner's GPUs", no("the critic has the policy's schedule and batches"),
        idle(GENERATES_NOTHING), no("reward_pretrain names the critic's weights"),
    ).items()
}  # fmt: skip
JUDGE = role(
    "the judge is a server of yours: args.base_url of the reward", idle(NOT_TRAINED),
    no("a judge is called at temperature 0"), idle("see the reward judge"),
)  # fmt: skip
FILTER = no("groups are dropped by rollout.group_filter, without thresholds")
REWARD: dict[str, Rule] = {
    **JUDGE,
    "world_size": idle("rewards run beside the episodes: placement.reward_workers"),
    "model_args.model_name_or_path": idle("for its tokenizer there; texts are compared here"),
    "code_url": unless(None, "tests run in Arbor's sandbox"),
    "use_local": unless(True, "tests run in Arbor's sandbox, on this machine"),
    "judge_prompt": no("the judge has Arbor's prompt"),
    "judge_api_key": idle("read from the variable OPENAI_API_KEY, and kept out of files"),
    **every(("judge_model_type", "judge_model_name", "judge_api_url"), idle("of judges: see worker_cls")),
    "format_pattern": idle("the format is measured there, and adds nothing to the reward"),
    "reward_type": idle("of multiple choice: see worker_cls"),
    "response_length_penalty_coef": unless((None, 0), "no such penalty by itself: algorithm.overlong"),
    "tag_included": no("all rows of the files are taken: leave out those of other tags"),
    "reward_manager_config": unless((None, []), "a service of yours. Write a reward (docs/tools.md)"),
    **every(("query_filter_config.type", "response_filter_config.type"), idle("no filter")),
    **every(("query_filter_config.filter_args", "response_filter_config.filter_args"), unless((None, {}), "see type")),
}
"""Keys of a domain's reward (RewardConfig)."""
VALIDATION = role("held-out tasks are played by the policy", idle(NOT_TRAINED), idle("as in training"), reference_model)
MANAGER = {
    **role("environments have no model", idle(NOT_TRAINED), idle("actor_infer.generating_args goes before it"),
           idle("the policy plays")),
    "format_penalty": idle(f"{NEVER}; env_config.format_penalty is"),
    "max_traj_per_env": idle("episodes of a step follow from rollout_batch_size"),
    "max_env_num_per_worker": idle("environments share nothing here, wherever they run: rollout.workers"),
    "llm_proxy.proxy_type": unless("policy", "the policy plays; `arborl env play --random` is for others"),
    "group_filter_cls": unless(
        "roll.pipeline.agentic.agentic_pipeline.GroupFilter",
        "write a function: rollout.group_filter=package.module:function",
    ),
    "group_size_redundancy": unless(0, "held-out tasks have no spare episodes"),
    **every(("tags", "num_groups_partition", "num_env_groups", "group_size"), no("held-out tasks: evaluation.tasks")),
}  # fmt: skip
ROLES = {
    **dict.fromkeys(("actor_train", "student_train", "student", "sft_train"), TRAINER),
    **dict.fromkeys(("actor_infer", "student_infer"), SAMPLER),
    "reference": REFERENCE, "critic": CRITIC, "teacher": TEACHER, "validation": VALIDATION,
    **dict.fromkeys(("reward", "reward_model"), JUDGE | {"llm_proxy.proxy_type": idle("see the reward judge")}),
    **dict.fromkeys(("train_env_manager", "val_env_manager"), MANAGER),
}  # fmt: skip
TABLE: dict[str, Rule] = PIPELINE | {
    key: rule for name, rules in ROLES.items() for key, rule in inside(name, rules).items()
}
PREFIXES: dict[str, Rule] = {
    **{f"{name}.system_envs.": variable for name in ROLES},
    "system_envs.": variable,
    **{f"{name}.model_args.model_config_kwargs.": no("the model's own configuration counts") for name in ROLES},
    "tracker_kwargs.": no("no counterpart in track"),
    "tag_to_template.": no("one chat template for all rows: model.chat_template"),
}
