"""Names of settings in TRL, verl and others, and the settings to write instead. Whole files: `arborl convert`."""

from __future__ import annotations

from collections.abc import Mapping

_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "algorithm.args.gae_lambda": ("lam", "lambd"),
    "algorithm.clip_low and algorithm.clip_high": ("clip_ratio", "cliprange", "clip_eps", "clip_range", "epsilon"),
    "algorithm.clip_high": ("clip_ratio_high", "epsilon_high"),
    "algorithm.clip_low": ("clip_ratio_low", "epsilon_low"),
    "algorithm.entropy_coef": ("entropy_coeff", "ent_coef"),
    "algorithm.kl.coef, or algorithm.args.beta for DPO": ("beta",),
    "algorithm.kl.coef": ("init_kl_coef", "kl_coef", "kl_loss_coef"),
    "algorithm.loss": ("loss_type",),
    "algorithm.name": ("adv_estimator",),
    "engine.kv_tokens": ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "engine=vllm": ("use_vllm",),
    "evaluation.every": ("eval_freq", "eval_steps", "test_freq"),
    "evaluation.before": ("val_before_train",),
    "learner.decay": ("lr_scheduler", "lr_scheduler_type"),
    "learner.epochs": ("num_iterations", "num_ppo_epochs", "ppo_epochs"),
    "learner.lr": ("actor_lr", "learning_rate"),
    "learner.micro_batch_tokens, or leave it out: the default follows from the memory": (
        "gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
    ),
    "learner.minibatches": ("mini_batch_size", "num_mini_batches", "ppo_mini_batch_size"),
    "learner.ranks": ("n_gpus", "n_gpus_per_node", "nproc_per_node", "num_gpus", "num_processes", "world_size"),
    "learner.recompute": ("enable_gradient_checkpointing", "gradient_checkpointing"),
    "learner.warmup": ("lr_warmup_steps", "warmup_ratio", "warmup_steps"),
    "model.dtype": ("bf16", "fp16", "torch_dtype"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.rank": ("lora_r", "lora_rank"),
    "model.name": ("model_name", "model_name_or_path", "model_path", "pretrained"),
    "rollout.group_size": ("n", "n_samples_per_prompt", "num_generations", "num_return_sequences", "rollout_n"),
    "rollout.tasks_per_step": (
        "batch_size", "per_device_train_batch_size", "prompts_per_step", "rollout_batch_size", "train_batch_size",
    ),
    "sampling.max_context": ("max_length", "max_model_len", "max_seq_len", "max_seq_length"),
    "sampling.max_tokens": (
        "max_completion_length", "max_new_tokens", "max_response_length", "response_length", "generate_max_len",
    ),
    "track.trackers": ("log_with", "logger", "report_to"),
    "trainer.epochs": ("num_epochs", "num_train_epochs", "total_epochs"),
    "trainer.keep": ("max_actor_ckpt_to_keep", "save_total_limit"),
    "trainer.save_every": ("checkpoint_every", "checkpoint_interval", "save_freq", "save_interval", "save_steps"),
    "trainer.steps": ("max_iterations", "max_steps", "num_steps", "total_steps", "total_training_steps"),
}  # fmt: skip

SETTING_OF: Mapping[str, str] = {name: setting for setting, names in _SETTINGS.items() for name in names}
