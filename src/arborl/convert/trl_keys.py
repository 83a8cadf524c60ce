"""What becomes of each of TRL's keys, with its defaults: those of TRL 1.16, transformers 5.19 and peft 0.21.

A default goes through the rule of its key, as if the script had set it, and is written where Arbor's differs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arborl.convert import trl_rules as rules
from arborl.convert.common_rules import (
    ENGINE,
    MICRO,
    REFERENCE,
    Rule,
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
    write_defaults,
)  # fmt: skip
from arborl.convert.conversion_report import KeyReport
from arborl.convert.draft import Draft, one_or_all
from arborl.convert.reading.python_scripts import (
    CallItem,
    ImportedName,
    RunTimeValue,
    ScriptDefinition,
    UnevaluatedCall,
)
from arborl.convert.trl_rules import GRPO, MODEL_LORA, SFT, written
from arborl.convert.trl_scripts import FunctionModule, NotCopied, TrainingScript

SPEED = "changes speed or memory, and no result"
LOGS = "every step and every episode is written to the run's folder"
HUB = "nothing is uploaded. `arborl export RUN --out FOLDER` writes a model that can be"
PLACEMENT = "about processes and GPUs: learner.strategy, learner.ranks, placement (docs/scale-out.md)"
OTHER_LOSS = "read by another loss_type only"
ALL_TOKENS = "of a row with messages all tokens are trained there, here those of the assistant"
BY_RULES = "answers are compared by rules, not by math_verify"
LIBRARY_REWARDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "accuracy_reward": ("equal", {"field": "solution"}, BY_RULES),
    "reasoning_accuracy_reward": ("equal", {"field": "solution"}, BY_RULES),
    "think_format_reward": ("format", {"pattern": "<think>(?!.*<think>).*</think>.*", "tools": False}, ""),
}
"""Functions of `trl.rewards` with a counterpart."""
TEXT_PROMPTS = "a prompt that is text is a user message of the chat template here; there it is continued as it is"
ARGS: dict[str, Rule | tuple[Rule, Any]] = {
    "learning_rate": num("learner.lr"),
    "adam_beta1": (rules.betas, 0.9),
    "adam_beta2": (rules.betas, 0.999),
    "adam_epsilon": unless(1e-8, "AdamW's epsilon is 1e-8"),
    "weight_decay": (num("learner.weight_decay"), 0.0),
    "max_grad_norm": (num("learner.max_grad_norm", lambda norm: norm or 1e9), 1.0),
    "lr_scheduler_type": (rules.schedule, "linear"),
    "warmup_steps": (rules.warmup, 0),
    "warmup_ratio": rules.warmup,
    "optim": rules.optimizer,
    "per_device_train_batch_size": (rules.batch_size, 8),
    "gradient_accumulation_steps": (rules.batch_size, 1),
    "max_steps": (rules.steps, -1),
    "num_train_epochs": (rules.epochs, 3.0),
    "save_steps": (rules.interval, 500),
    "save_strategy": (rules.interval, "steps"),
    "save_total_limit": positive("trainer.keep", "all checkpoints there, the last two here: trainer.keep"),
    "eval_strategy": (rules.evaluation, "no"),
    "evaluation_strategy": rules.evaluation,
    "eval_steps": when(rules.evaluates, rules.evaluation, "nothing is evaluated"),
    "eval_on_start": when(rules.evaluates, rules.evaluation, "nothing is evaluated"),
    "seed": (num("seed"), 42),
    "bf16": (rules.precision, True),
    "fp16": rules.precision,
    "model_init_kwargs.dtype": rules.precision,
    "model_init_kwargs.torch_dtype": rules.precision,
    "full_determinism": to("deterministic", bool),
    "gradient_checkpointing": to("learner.recompute", bool),
    "use_cpu": to("model.device", {True: "cpu", False: "auto"}),
    "loss_type": rules.loss_type,
    "beta": rules.penalty,
    "label_smoothing_factor": unless(0, "no smoothing of labels here"),
    "neftune_noise_alpha": unless(None, "no noise is added to embeddings"),
    "load_best_model_at_end": unless(False, "the last policy is kept; every checkpoint can be evaluated"),
    "optim_target_modules": unless(None, "all layers have one optimizer"),
    "router_aux_loss_coef": unless((None, 0, 0.001), "no loss for the balance of experts"),
    "chat_template_path": text("model.chat_template"),
    **dict.fromkeys(
        ("model_init_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs", "generation_kwargs"),
        unless((None, {}), "not a dictionary that can be read"),
    ),
    # GRPO
    "num_generations": (rules.whole_number("rollout.group_size"), 8),
    "num_generations_eval": idle("see eval_strategy"),
    "generation_batch_size": rules.batch_size,
    "steps_per_generation": rules.batch_size,
    "num_iterations": (rules.whole_number("learner.epochs"), 1),
    "max_completion_length": (rules.completion_length, 512),
    "max_prompt_length": rules.prompt_length,
    "temperature": (num("sampling.temperature"), 1.0),
    "top_p": rules.truncated(num("sampling.top_p")),
    "top_k": rules.truncated(num("sampling.top_k", lambda k: max(int(k), 0))),
    "min_p": rules.truncated(num("sampling.min_p")),
    "repetition_penalty": unless(1.0, "no penalty for repeated tokens"),
    "epsilon": (rules.clip, 0.2),
    "epsilon_high": rules.clip,
    "delta": rules.two_sided,
    "sapo_temperature_pos": when(known("args.loss_type", "sapo"), num("algorithm.args.tau_positive"), OTHER_LOSS),
    "sapo_temperature_neg": when(known("args.loss_type", "sapo"), num("algorithm.args.tau_negative"), OTHER_LOSS),
    "importance_sampling_level": rules.grpo_loss,
    "scale_rewards": (rules.scaled, "group"),
    "multi_objective_aggregation": rules.objectives,
    "entropy_coef": num("algorithm.entropy_coef"),
    "mask_truncated_completions": to(
        "algorithm.overlong.filter", bool, "they are left out of the group's mean too, there of the loss only"
    ),
    "shuffle_dataset": when(GRPO, to("data.shuffle", bool), "rows come in a new order every pass, as there"),
    "cast_lm_head_to_fp32": to("model.head", {True: "float32", False: "model"}),
    "max_tool_calling_iterations": positive("agent.args.max_tool_rounds", "no limit of rounds"),
    "reward_weights": together,
    "vllm_max_model_length": num("sampling.max_context"),
    "vllm_importance_sampling_correction": rules.correction,
    "vllm_importance_sampling_mode": rules.correction,
    "vllm_importance_sampling_clip_max": rules.correction,
    "vllm_importance_sampling_clip_min": rules.correction,
    "vllm_importance_sampling_cap": rules.correction,
    "vllm_structured_outputs_regex": unless(None, "replies are not constrained; rewards=[format] checks them"),
    "use_bias_correction_kl": no("the KL penalty is not multiplied by the ratio"),
    "sync_ref_model": unless(False, REFERENCE),
    "top_entropy_quantile": unless(1.0, "all tokens are trained"),
    "off_policy_mask_threshold": unless(None, "no sequence is masked; algorithm.importance_weights=mis masks tokens"),
    "use_adaptive_entropy": unless(False, "the coefficient of the entropy stays"),
    # SFT, DPO, KTO
    "max_length": rules.row_length,
    "max_seq_length": rules.row_length,
    "truncation_mode": unless("keep_start", "the end of a long row is cut off"),
    "packing": unless(
        False, "a step has rows, there packed sequences of max_length: write a larger rollout.tasks_per_step"
    ),
    "dataset_text_field": no("rows are conversations: columns messages, or prompt and completion (docs/offline.md)"),
    "completion_only_loss": unless((None, True), "only the assistant's messages are trained"),
    "assistant_only_loss": unless(True, "only the assistant's messages are trained"),
    "eos_token": unless(None, "a reply ends with the token of the chat template"),
    "label_smoothing": unless(0, "no smoothing of labels here"),
    "ld_alpha": unless(None, "all tokens of a completion count the same"),
    "f_divergence_type": unless("reverse_kl", "the divergence is the reverse KL"),
    "use_weighting": unless(False, "pairs are weighted by their column weight"),
    "loss_weights": unless(None, "there is one loss"),
    "desirable_weight": unless(1.0, "rows are weighted by their column weight"),
    "undesirable_weight": unless(1.0, "rows are weighted by their column weight"),
}
"""Rules of training arguments; with the default of transformers or TRL where that changes the result."""
BY_TRAINER: dict[str, dict[str, Any]] = {
    "GRPOTrainer": {"learning_rate": 1e-6, "beta": 0.0, "loss_type": "dapo", "importance_sampling_level": "token",
                    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
                    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0},
    "SFTTrainer": {"learning_rate": 2e-5, "loss_type": "nll", "max_length": 1024},
    "DPOTrainer": {"learning_rate": 1e-6, "beta": 0.1, "loss_type": ["sigmoid"], "max_length": 1024},
    "KTOTrainer": {"learning_rate": 1e-6, "beta": 0.1, "loss_type": "kto", "max_length": 1024},
}  # fmt: skip
OF_GRPO = ("num_generations", "num_iterations", "max_completion_length", "temperature", "epsilon", "scale_rewards")
UNREAD: dict[str, str] = {
    SPEED: "torch_compile torch_compile_backend torch_compile_mode tf32 use_liger_kernel use_liger_loss use_cache "
    "liger_kernel_config torch_empty_cache_steps auto_find_batch_size gradient_checkpointing_kwargs dataset_num_proc "
    "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order pad_to_multiple_of padding_free "
    "pad_token activation_offloading precompute_ref_log_probs precompute_ref_batch_size eval_accumulation_steps "
    "skip_memory_metrics optim_args bf16_full_eval fp16_full_eval cache_implementation eval_packing packing_strategy "
    "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged "
    "dataset_kwargs dataset_batch_size use_logits_to_keep generate_during_eval save_safetensors fp16_opt_level "
    "half_precision_backend ds3_gather_for_generation group_by_length trust_remote_code",
    MICRO: "average_tokens_across_devices",
    LOGS: "logging_strategy logging_steps logging_first_step logging_dir log_on_each_node logging_nan_inf_filter "
    "include_num_input_tokens_seen log_level log_level_replica disable_tqdm project trackio_space_id "
    "trackio_bucket_id trackio_static_space_id log_completions log_multimodal num_completions_to_print "
    "log_unique_prompts wandb_log_unique_prompts include_tokens_per_second",
    HUB: "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
    "log_completions_hub_repo",
    PLACEMENT: "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
    "ddp_timeout fsdp fsdp_config deepspeed parallelism_config accelerator_config local_rank no_cuda",
    ENGINE: "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode "
    "vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
    "vllm_group_port vllm_device vllm_dtype vllm_guided_decoding_regex vllm_enable_prefix_caching",
    REFERENCE: "ref_model_mixup_alpha ref_model_sync_steps ref_adapter_name model_adapter_name force_use_ref_model "
    "reference_free",
    "held-out rows are evaluated as they are trained; see eval_strategy": "per_device_eval_batch_size eval_delay "
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics "
    "do_train do_eval do_predict metric_for_best_model greater_is_better",
    "a checkpoint here holds all, and `arborl train --resume` goes on with it": "save_only_model save_on_each_node "
    "enable_jit_checkpoint restore_callback_states_from_checkpoint resume_from_checkpoint ignore_data_skip "
    "overwrite_output_dir",
    "all columns are fields of a task": "remove_unused_columns label_names length_column_name",
    "rows come in a new order every pass, from the seed": "data_seed train_sampling_strategy",
    "dropout of the model itself is off": "disable_dropout",
    OTHER_LOSS: "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg f_alpha_divergence_coef discopop_tau "
    "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    "a debugger of transformers": "debug",
}
"""Training arguments without a counterpart, by reason."""
MODEL_UNREAD = {
    SPEED: "attn_implementation use_cache device_map low_cpu_mem_usage max_memory offload_folder "
    "gpu_memory_utilization fast_inference max_lora_rank use_gradient_checkpointing use_kernels",
    "no code of a model's repository is run": "trust_remote_code",
    "4-bit weights are nf4, with double quantization, computed in model.dtype": "bnb_4bit_compute_dtype "
    "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage use_bnb_nested_quant",
}


def _unread(prefix: str, table: Mapping[str, str]) -> dict[str, Rule]:
    return {f"{prefix}{name}": idle(why) for why, names in table.items() for name in names.split()}


def _of_model(prefix: str) -> dict[str, Rule]:
    """Arguments of `from_pretrained`, in its call or in `model_init_kwargs`."""
    bits = {f"{prefix}{at}load_in_4bit": rules.four_bits for at in ("", "quantization_config.")}
    no_bits = {
        f"{prefix}{at}load_in_8bit": unless(False, "weights are not in 8 bits") for at in ("", "quantization_config.")
    }
    return bits | no_bits | _unread(prefix, MODEL_UNREAD) | _unread(f"{prefix}quantization_config.", MODEL_UNREAD) | {
        f"{prefix}dtype": rules.precision,
        f"{prefix}torch_dtype": rules.precision,
        f"{prefix}revision": unless((None, "main"), "the newest revision is loaded; write a folder as the model"),
        f"{prefix}max_seq_length": num("sampling.max_context"),
        f"{prefix}class": rules.model_class,
    }  # fmt: skip


LORA_RULES: dict[str, Rule] = {
    "r": num("model.lora.rank"),
    "lora_alpha": rules.lora_alpha,
    "lora_dropout": num("model.lora.dropout"),
    "target_modules": rules.layers,
    "class": rules.adapters,
    "bias": unless("none", "biases are not trained"),
    "use_rslora": idle("see lora_alpha"),
    "init_lora_weights": unless(True, "adapters begin at zero, as LoRA's do"),
    "use_dora": unless(False, "adapters are LoRA's"),
    "modules_to_save": unless(None, "only adapters are trained"),
    "inference_mode": unless(False, "adapters are trained"),
    **_unread("", {"of a causal language model": "task_type", SPEED: "use_gradient_checkpointing random_state "
                   "max_seq_length runtime_config base_model_name_or_path megatron_core fan_in_fan_out"}),
}  # fmt: skip
MODEL_CONFIG: dict[str, Rule] = {
    "model_name_or_path": idle("see model"),
    "model_revision": unless((None, "main"), "the newest revision is loaded; write a folder as the model"),
    "dtype": idle("see args.model_init_kwargs and from_pretrained"),
    "torch_dtype": idle("see args.model_init_kwargs and from_pretrained"),
    "use_peft": idle("adapters: model.lora"),
    **{f"lora_{name}": when(MODEL_LORA, LORA_RULES[rule], "read with use_peft only") for name, rule in (
        ("r", "r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout"), ("target_modules", "target_modules"),
        ("modules_to_save", "modules_to_save"), ("task_type", "task_type"))},
    "lora_target_parameters": unless(None, "adapters are of layers: model.lora.target"),
    "use_rslora": idle("see lora_alpha"),
    "use_dora": unless(False, "adapters are LoRA's"),
    "load_in_4bit": rules.four_bits,
    "load_in_8bit": unless(False, "weights are not in 8 bits"),
    **_unread("", MODEL_UNREAD),
}  # fmt: skip
CODE = "is code of the script. Leave it out"
PARAMETERS: dict[str, Rule] = {
    "trainer": rules.algorithm,
    "model": written(rules.model_name),
    "args": written(refuse("is not a call of a configuration that can be read. Write GRPOConfig(…) for it.")),
    **dict.fromkeys(("train_dataset", "eval_dataset", "reward_funcs", "tools"), together),
    "peft_config": rules.adapters,
    "quantization_config": rules.adapters,
    "ref_model": no(REFERENCE),
    "processing_class": idle("a model's own tokenizer and chat template are used"),
    "tokenizer": idle("a model's own tokenizer and chat template are used"),
    "reward_processing_classes": idle("a reward model's own tokenizer is used"),
    "callbacks": no(f"{CODE}, or write hooks (docs/trainer.md)"),
    "optimizers": refuse(f"{CODE}: the optimizer is AdamW, with learner.lr and learner.decay."),
    "optimizer_cls_and_kwargs": refuse(f"{CODE}: the optimizer is AdamW."),
    "compute_loss_func": refuse(f"{CODE}, and name a loss: algorithm.loss=package.module:function."),
    "data_collator": no("rows are rendered by the chat template, without padding"),
    "compute_metrics": no("held-out rows have their own metrics (docs/offline.md)"),
    "preprocess_logits_for_metrics": no("held-out rows have their own metrics (docs/offline.md)"),
    "formatting_func": refuse("rows are conversations here: write columns messages, or prompt and completion."),
    "environment_factory": refuse(
        f"{CODE}, and write an environment: env=package.module:Class (docs/environments.md)."
    ),
    "rollout_func": refuse(f"{CODE}, and write an agent: agent=package.module:Class (docs/agents.md)."),
    "command": idle("its arguments are read"),
}
TABLE: dict[str, Rule] = (
    _unread("args.", UNREAD)
    | {f"args.{key}": written(row[0] if isinstance(row, tuple) else row) for key, row in ARGS.items()}
    | {"args.output_dir": rules.output, "args.run_name": rules.run_name, "args.report_to": rules.trackers}
    | {"args.class": idle("transformers' TrainingArguments")}
    | _of_model("args.model_init_kwargs.") | _of_model("from_pretrained.") | _of_model("quantization_config.")
    | {f"peft_config.{key}": written(rule) for key, rule in LORA_RULES.items()}
    | {f"model_config.{key}": written(rule) for key, rule in MODEL_CONFIG.items()}
    | PARAMETERS
    | {"quantization_config.class": rules.adapters}
)  # fmt: skip
PREFIXES: dict[str, Rule] = {
    **dict.fromkeys(
        ("**", "args.**", "peft_config.**", "from_pretrained.**", "quantization_config.**"), written(together)
    ),
    "args.lr_scheduler_kwargs.": written(rules.lowest_rate),
    "args.chat_template_kwargs.": written(rules.chat_argument),
    "args.generation_kwargs.": no(
        "no such argument of sampling; see sampling.temperature, top_p, top_k, min_p and stop"
    ),
    **{f"args.{name}.": idle(why) for why, names in UNREAD.items() for name in names.split()},
    "peft_config.": no("adapters here have rank, alpha, dropout and target"),
    "script_args.": idle("a value of the script, which is read where the script uses it"),
    "dataset_args.": no("data.sources mixes rows of several sources (docs/data.md)"),
    "accelerate.": idle(PLACEMENT),
    "train.": no("`arborl train --resume latest` goes on with a run"),
}


def begin(draft: Draft) -> None:
    """Sort keys of older trainers to the training arguments, and choose the defaults of this trainer."""
    for key in [key for key in draft.source if key not in TABLE and f"args.{key}" in TABLE]:
        draft.source[f"args.{key}"] = draft.source.pop(key)
    trainer = str(draft.source.get("trainer"))
    rows = {key: row[1] for key, row in ARGS.items() if isinstance(row, tuple)}
    rows = {key: value for key, value in rows.items() if trainer == "GRPOTrainer" or key not in OF_GRPO}
    rows |= BY_TRAINER.get(trainer, {})
    if "args.class" in draft.source:  # transformers' TrainingArguments
        rows |= {"learning_rate": 5e-5, "bf16": False}
    defaults = {f"args.{key}": value for key, value in rows.items()}
    if draft.source.get("peft_config.class") == "get_peft_model":  # unsloth
        defaults |= {"peft_config.r": 16, "peft_config.lora_alpha": 16}
    elif "peft_config.class" in draft.source:
        defaults |= {"peft_config.r": 8, "peft_config.lora_alpha": 8, "peft_config.target_modules": None}
    if draft.source.get("from_pretrained.class") == "FastLanguageModel":  # unsloth
        defaults["from_pretrained.load_in_4bit"] = True
    if draft.source.get("model_config.use_peft") is True:
        defaults |= {f"model_config.lora_{key}": value for key, value in
                     (("r", 16), ("alpha", 32), ("dropout", 0.05), ("target_modules", None))}  # fmt: skip
    draft.defaults = defaults


def complete(draft: Draft) -> None:
    """What a script does not say."""
    write_defaults(draft, TABLE)
    if GRPO(draft):
        draft.default("groups of equal rewards", None, "algorithm.skip_zero_variance", False, "they stay in the mean")
        draft.default("ratios", None, "algorithm.anchor", "proximal", "against the learner's own log-probabilities")
        draft.default("a deadline of an episode", None, "rollout.episode_seconds", 86_400, "there is none: a day")
        draft.default("a deadline of a reward", None, "rollout.step_seconds", 3_600, "there is none: an hour")
    if SFT(draft):
        draft.default("the mean of the loss", None, "algorithm.aggregation", "token", "")
        if "args.assistant_only_loss" not in draft.source:
            line = KeyReport("lost", "args.assistant_only_loss", False, why=ALL_TOKENS, explicit=False)
            draft.lines.append(line)
    draft.lines.append(KeyReport("lost", "prompts as text", None, why=TEXT_PROMPTS, explicit=False))


# ------------------------------------------------------------------------------------------------ rows, rewards, tools


def parts(draft: Draft, variables: Mapping[str, Any]) -> None:
    """Rows, rewards and tools. Functions of the script are copied into a module beside the configuration."""
    script: TrainingScript = variables["script"]
    copies = FunctionModule(script)
    _rows(draft, script, copies)
    _held_out(draft, script, copies)
    if GRPO(draft):
        _rewards(draft, script, copies)
        _tools(draft, script, copies)
    template = getattr(script.parameters.get("processing_class"), "keywords", {}).get("chat_template")
    if isinstance(template, str) and not isinstance(template, RunTimeValue):
        draft.set("processing_class.chat_template", template, "model.chat_template", template)
    if made := copies.text():
        draft.files[f"{script.module}.py"] = made
    if "signal.alarm(" in made:
        why = f"fails in the threads in which functions run here: take it out of {script.module}.py"
        draft.lose("signal.alarm", "called by the script", why)


LOADING = {"path", "name", "data_files", "split", "streaming", "num_proc", "cache_dir", "token", "trust_remote_code"}
"""Arguments of `load_dataset` that change no row, or are converted."""


@dataclass(slots=True)
class RowsOrigin:
    """Where a dataset comes from."""

    call: UnevaluatedCall
    split: str = ""
    changes: list[UnevaluatedCall] = field(default_factory=list)
    """Methods that change rows, the last first."""

    @property
    def settings(self) -> dict[str, Any] | None:
        """Our settings for the origin alone; None if it is no file and no dataset of the hub."""
        given = dict(zip(("path", "name", "data_dir", "data_files", "split"), self.call.args, strict=False))
        given |= self.call.keywords
        split, path = str(given.get("split") or self.split), given.get("path")
        if any(isinstance(one, RunTimeValue) for one in (*given.values(), split)):
            return None
        files = given.get("data_files")
        if self.call.name in ("from_json", "from_csv", "from_parquet"):
            files = self.call.args[0] if self.call.args else given.get("path_or_paths")
        elif self.call.name == "load_from_disk":
            return {"data.hub": f"{path or given.get('dataset_path')}{f'::{split}' if split else ''}"}
        elif self.call.name != "load_dataset" or not given.keys() <= LOADING or set(split) & set("[+("):
            return None
        elif files is None and isinstance(path, str) and path not in ("json", "csv", "parquet", "text", "arrow"):
            return {"data.hub": ":".join([path, str(given.get("name") or ""), split]).rstrip(":")}
        elif path not in ("json", "csv", "parquet"):
            return None
        files = files.get(split or "train") if isinstance(files, Mapping) else files
        listed = [str(one) for one in files] if isinstance(files, list | tuple) else [str(files)]
        is_path = files and not any("*" in one or "://" in one or isinstance(one, RunTimeValue) for one in listed)
        return {"data.path": one_or_all(listed)} if is_path else None


def rows_origin(value: Any) -> RowsOrigin | None:
    """The call behind `load_dataset(…)["train"].map(…)`; None if it cannot be seen."""
    split, changes = "", list[UnevaluatedCall]()
    while isinstance(value, CallItem | UnevaluatedCall):
        if isinstance(value, CallItem):
            split, value = str(value.key) if isinstance(value.key, str) else split, value.of
        elif value.on is not None:
            changes, value = [*changes, value], value.on
        else:
            return RowsOrigin(value, split, [one for one in changes if one.name != "shuffle"])
    return None


def _rows(draft: Draft, script: TrainingScript, copies: FunctionModule) -> None:
    key, value = "train_dataset", script.parameters.get("train_dataset")
    if value is None:
        draft.refuse(key, None, "the trainer gets no rows. Write train_dataset=load_dataset(…).")
        return
    origin, shown = rows_origin(value), str(value)
    settings = origin.settings if origin is not None else None
    if origin is not None and settings is not None and not origin.changes:
        why = "all rows are loaded before training" if origin.call.keywords.get("streaming") else ""
        for path, ours in settings.items():
            draft.set(key, shown, path, ours, why)
        return
    try:
        name = copies.add_rows("train_rows", script.expression(key))
    except NotCopied as error:
        own = "Write the rows to a file, and data.path=FILE; or a function: data.rows=package.module:function."
        if origin is None or settings is None:
            draft.refuse(key, shown, f"{error}. {own}")
            return
        for path, ours in settings.items():
            draft.set(key, shown, path, ours, f"without the changes of its rows, because the script {error}")
        for change in origin.changes:
            draft.lose(f"{key}.{change.name}", str(change), f"lost: the rows are not changed. {own}")
    else:
        why = f"made by the statements of the script, which are copied to {script.module}.py"
        draft.set(key, shown, "data.rows", f"{script.module}:{name}", why)


def _held_out(draft: Draft, script: TrainingScript, copies: FunctionModule) -> None:
    key, value = "eval_dataset", script.parameters.get("eval_dataset")
    if value is None or not rules.evaluates(draft):
        draft.skip_rest([key], "eval_strategy=no: nothing is evaluated")
        return
    origin = rows_origin(value)
    settings = (origin.settings or {}) if origin is not None and not origin.changes else {}
    if "data.path" in settings:
        draft.set(key, str(value), "data.evaluation_path", settings["data.path"])
        return
    try:
        if origin is not None and "data.hub" in settings and origin.call.name == "load_dataset":
            path, name, split = [*settings["data.hub"].split(":"), "", ""][:3]
            loads = f"return load_dataset({path!r}, {name or None!r}, split={split or 'train'!r})"
            name = copies.add_text("evaluation_rows", f"from datasets import load_dataset\n\n{loads}")
        else:
            name = copies.add_rows("evaluation_rows", script.expression(key))
    except NotCopied as error:
        draft.lose(key, str(value), f"{error}: a tenth of the training rows is held out; or data.evaluation_path=FILE")
    else:
        why = f"made by the statements of the script, which are copied to {script.module}.py"
        draft.set(key, str(value), "data.evaluation_rows", f"{script.module}:{name}", why)


def _rewards(draft: Draft, script: TrainingScript, copies: FunctionModule) -> None:
    value = script.parameters.get("reward_funcs")
    functions = list(value) if isinstance(value, list | tuple) else [value]
    weights = draft.source.get("args.reward_weights")
    if weights is None:
        weights = [1.0] * len(functions)
    elif not isinstance(weights, list) or len(weights) != len(functions):
        draft.refuse("args.reward_weights", weights, f"there are {len(functions)} reward functions. Write as many.")
        return
    draft.skip_rest(["args.reward_weights"], "the weights of the rewards below")
    if value is None:
        draft.refuse("reward_funcs", None, "the trainer gets no reward. Write reward_funcs=[…].")
    ours: list[dict[str, Any]] = []
    for number, (function, weight) in enumerate(zip(functions, weights, strict=True)):
        key = f"reward_funcs.{number}"
        found = _reward(draft, key, function, weight, copies) if value is not None else None
        if found is not None:
            why = str(found.pop("why", ""))
            entry = found | ({"weight": weight} if weight != 1 else {})
            draft.lines.append(KeyReport("changed" if why else "mapped", key, str(function), "rewards", entry, why))
            ours.append(entry)
    if draft.settings.get("algorithm.advantage") == "gdpo" and any(weight != 1 for weight in weights):
        names = {
            str(one["args"].get("function", one["name"])).rpartition(":")[2]: one.pop("weight", 1.0) for one in ours
        }
        draft.settings["algorithm.args.reward_weights"] = names
    draft.settings["rewards"] = ours
    draft.skip_rest(["reward_funcs"], "each function below")


def _reward(draft: Draft, key: str, function: Any, weight: float, copies: FunctionModule) -> dict[str, Any] | None:
    """One of our rewards for one of their functions, with `why`; None if it is none, or refused."""
    name = (
        function.name if isinstance(function, UnevaluatedCall | ScriptDefinition) else str(function).rpartition(".")[2]
    )
    if (use := draft.uses.get(name)) is not None:
        draft.skip(key, name, f"--use {name}={use}")
        return None if use == "none" else {"name": use, "args": {}}
    if isinstance(function, str) and not isinstance(function, RunTimeValue):
        return {"name": "reward_model", "args": {"path": function}}
    if isinstance(function, UnevaluatedCall) and name == "from_pretrained" and function.args:
        return _reward(draft, key, function.args[0], weight, copies)
    if isinstance(function, UnevaluatedCall) and name == "get_soft_overlong_punishment":
        given = dict(zip(("max_completion_len", "soft_punish_cache"), function.args, strict=False)) | function.keywords
        tokens = {"max_tokens": given.get("max_completion_len"), "buffer": given.get("soft_punish_cache")}
        for path, ours in (tokens | {"penalty": weight}).items():
            draft.set(key, str(function), f"algorithm.overlong.{path}", ours)
        return None
    if isinstance(function, ImportedName):
        if function.path.startswith("trl.") and name in LIBRARY_REWARDS:
            ours, args, why = LIBRARY_REWARDS[name]
            return {"name": ours, "args": dict(args), "why": why}
        module, _, attribute = function.path.rpartition(".")
        needs = "needs the package trl" if module.startswith("trl") else f"put the folder of {module} on PYTHONPATH"
        if module and not module.startswith("."):
            return {"name": "trl_function", "args": {"function": f"{module}:{attribute}"}, "why": needs}
    try:
        if isinstance(function, ScriptDefinition) and not isinstance(function.node, ast.Lambda | ast.ClassDef):
            wanted = {one.arg for one in (*function.node.args.args, *function.node.args.kwonlyargs)}
            if missing := wanted & {"trainer_state", "environments"}:
                raise NotCopied(f"needs {missing.pop()}, which a reward does not get here")
            copied = copies.add_function(name)
        elif isinstance(function, UnevaluatedCall | ScriptDefinition):
            copied = copies.add_function(f"reward_{key.rpartition('.')[2]}", function.node)  # type: ignore[arg-type]
        else:
            is_own = isinstance(function, ImportedName)
            raise NotCopied("is imported from the script's package" if is_own else "is only known when the script runs")
    except NotCopied as error:
        use = f", and --use {name}=package.module:function, which gets an episode" if name.isidentifier() else ""
        draft.refuse(key, str(function), f"{error}. Write a function of the script's top level{use} (docs/rewards.md).")
        return None
    args = {"function": f"{copies.script.module}:{copied}"}
    return {"name": "trl_function", "args": args, "why": f"copied to {copies.script.module}.py"}


def _tools(draft: Draft, script: TrainingScript, copies: FunctionModule) -> None:
    value = script.parameters.get("tools")
    if not value:
        return
    ours = []
    for number, function in enumerate(value if isinstance(value, list | tuple) else [value]):
        try:
            if not isinstance(function, ScriptDefinition):
                raise NotCopied("is no function of the script")
            ours.append(f"{script.module}:{copies.add_function(function.name)}")
        except NotCopied as error:
            advice = "Leave it out, and write tools=[package.module:function]."
            draft.refuse(f"tools.{number}", str(function), f"{error}. {advice}")
    draft.set("tools", str(value), "tools", ours, f"copied to {script.module}.py")
    draft.set("tools", str(value), "agent.name", "tool")
