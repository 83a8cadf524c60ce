"""verl's supervised trainers: `fsdp_sft_trainer` with `sft_trainer.yaml`, and `sft_trainer` with its engine's keys.

Rows hold a prompt and a response, by columns that may be nested; or whole conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arborl.convert.common_rules import (
    MICRO,
    Rule,
    choice,
    folder,
    idle,
    known,
    num,
    positive,
    refuse,
    text,
    to,
    together,
    unless,
    when,
)
from arborl.convert.devices import DeviceRequest
from arborl.convert.draft import Draft, names
from arborl.convert.reading.source_files import SourceKeys
from arborl.convert.verl import verl_rules as rules
from arborl.convert.verl.verl_key_lists import CHECKPOINTS, CLASS, EMPTY, SPEED, back_ends, named

MEAN = "a mean over all tokens of the batch; there over those of each micro-batch"
DECAYED = "all weights there; here matrices, not norms and biases"
DECAYS = {"constant": "none", "cosine": "cosine", "linear": "linear"}
ENDS = "an answer ends as the chat template ends it; there with the tokenizer's end of sequence"
HAS_LORA, WITHOUT_LORA = known("model.lora_rank"), "read with a lora_rank above 0 only"
MULTI_TURN = known("data.multiturn.enable")


def is_supervised(collected: SourceKeys) -> bool:
    module = str(collected.keys.get("--module"))
    return module.endswith("sft_trainer") or "model.partial_pretrain" in collected.keys


def has_engine(draft: Draft) -> bool:
    """Whether it is the newer trainer, whose rows are conversations."""
    return str(draft.source.get("--module")).rpartition(".")[2] == "sft_trainer"


def column(key: str, nested: str, field: str) -> Rule:
    """A column of the rows, with the keys inside it: `extra_info` and `[question]` are `extra_info.question`."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if has_engine(draft) or MULTI_TURN(draft):
            draft.skip(name, value, "rows are conversations")
            return
        path = ".".join([str(draft.known(key)), *names(draft.source.get(nested))])
        why = ENDS if field == "completion" else ""
        draft.set(name, value, f"data.fields.{field}", path, why)

    return rule


def conversation(draft: Draft, key: str, value: Any) -> None:
    """The column of conversations."""
    if not has_engine(draft) and not MULTI_TURN(draft):
        draft.skip(key, value, "rows have a prompt and a response")
    elif value == "messages":
        draft.skip(key, value, "the column `messages` is read anyway")
    else:
        draft.set(key, value, "data.fields.messages", str(value))


def overlong(draft: Draft, key: str, value: Any) -> None:
    ways = {"error": ("refuse", ""), "right": ("cut", ""), "left": ("cut", "there the beginning goes, here the end")}
    if str(value) not in ways:
        draft.refuse(key, value, "no such way. Write error, left or right.")
    else:
        draft.set(key, value, "data.overlong", *ways[str(value)])


def warmup(draft: Draft, key: str, value: Any) -> None:
    steps = draft.source.get("optim.lr_warmup_steps")
    if key.endswith("_ratio") and isinstance(steps, int) and steps > 0:
        draft.skip(key, value, "lr_warmup_steps is read in its place")
    elif not isinstance(value, int | float) or value <= 0:
        draft.skip(key, value, "no warm-up, or the other key says how long")
    else:
        num("learner.warmup")(draft, key, value)


def lowest_rate(draft: Draft, key: str, value: Any) -> None:
    if decay(draft) != "cosine" or not value:
        draft.skip(key, value, "read with a cosine, and above 0, only")
    else:
        draft.set(key, value, "learner.min_lr", value * draft.number_or("optim.lr", 1e-5))


def decay(draft: Draft) -> Any:
    keys = ("optim.lr_scheduler", "optim.lr_scheduler_type", "optim.warmup_style", "optim.lr_decay_style")
    return next((draft.source[key] for key in keys if draft.source.get(key)), draft.known("optim.lr_scheduler"))


def rate(draft: Draft, key: str, value: Any) -> None:
    if value is None or value != decay(draft):
        draft.skip(key, value, "another key says how the rate decays")
    else:
        choice("learner.decay", DECAYS, "Write learner.decay yourself, after lr_scheduler=constant.")(draft, key, value)


def length(draft: Draft, key: str, value: Any) -> None:
    if isinstance(draft.source.get("trainer.total_training_steps"), int):
        draft.skip(key, value, "total_training_steps says how long to train")
    else:
        num("trainer.epochs")(draft, key, value)


ROWS: dict[str, Rule | tuple[Rule, Any]] = {
    "--module": idle("arborl train algorithm=sft"),
    "--config-name": rules.configuration,
    "--config-path": idle("place of the configuration"),
    "data.train_files": (text("data.path", variable="TRAIN_FILES"), "~/data/gsm8k/train.parquet"),
    "data.val_files": (text("data.evaluation_path"), "~/data/gsm8k/test.parquet"),
    "data.train_batch_size": (num("rollout.tasks_per_step"), 256),
    "data.train_max_samples": unless(-1, "all rows are used. Write a shorter file."),
    "data.val_max_samples": (rules.validation_rows, -1),
    "data.prompt_key": (column("data.prompt_key", "data.prompt_dict_keys", "prompt"), "question"),
    "data.response_key": (column("data.response_key", "data.response_dict_keys", "completion"), "answer"),
    "data.prompt_dict_keys": column("data.prompt_key", "data.prompt_dict_keys", "prompt"),
    "data.response_dict_keys": column("data.response_key", "data.response_dict_keys", "completion"),
    "data.multiturn.enable": idle("see data.multiturn.messages_key"),
    **named(conversation, "data.", "multiturn.messages_key messages_key"),
    **named(
        unless("tools", "tools of a conversation are read from the column `tools`"), "data.",
        "multiturn.tools_key tools_key",
    ),
    **named(
        unless("enable_thinking", "model.chat_args is the same for all rows"), "data.",
        "multiturn.enable_thinking_key enable_thinking_key",
    ),
    "data.max_length": (num("sampling.max_context"), 1024),
    "data.truncation": (overlong, "error"),
    "data.max_token_len_per_gpu": when(
        known("data.use_dynamic_bsz"), num("learner.micro_batch_tokens"), "read with use_dynamic_bsz only"
    ),
    **named(idle(MICRO), "data.", "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz"),
    **named(idle("there is no padding: tokens are packed as trees"), "", "data.pad_mode use_remove_padding"),
    "model.use_remove_padding": idle("there is no padding: tokens are packed as trees"),
    **named(idle(SPEED), "", "data.balance_dp_token data.use_shm model.use_shm model.use_liger"),
    "data.chat_template": text("model.chat_template"),
    "data.ignore_input_ids_mismatch": idle("a conversation is rendered as in a rollout, message by message"),
    "data.custom_cls.path": refuse(
        "rows of a class of yours. Write them to a file, or name a function: data.rows=package.module:function.",
        off="null: the usual rows",
    ),
    "data.custom_cls.name": idle("read with custom_cls.path only"),
    "data.apply_chat_template_kwargs": unless(EMPTY, "arguments of the chat template are a table"),
    "model.partial_pretrain": rules.model_path,
    "model.path": rules.model_path,
    "model.tokenizer_path": unless(None, "a model's own tokenizer is used"),
    "model.hf_config_path": unless(None, "a model is as its own configuration says"),
    "model.custom_chat_template": text("model.chat_template"),
    "model.override_config": unless(EMPTY, "a model is as its own configuration says"),
    "model.external_lib": unless(None, "nothing else is imported"),
    "model.trust_remote_code": unless(False, "code of a model's repository is not run"),
    "model.enable_gradient_checkpointing": to("learner.recompute", bool),
    **named(
        idle(SPEED), "model.",
        "enable_activation_offload use_fused_kernels fused_kernel_options.impl_backend tiled_mlp.enabled "
        "tiled_mlp.num_shards fsdp_config.wrap_policy.min_num_params",
    ),
    "model.lora_rank": (num("model.lora.rank"), 0),
    "model.lora_alpha": (when(HAS_LORA, num("model.lora.alpha"), WITHOUT_LORA), 16),
    "model.target_modules": when(HAS_LORA, rules.adapted_layers, WITHOUT_LORA),
    "model.exclude_modules": unless(None, "no layer is left out: name those that are adapted in model.lora.target"),
    "model.lora_adapter_path": text("model.name", "a folder of adapters knows its base, and they go on being trained"),
    "model.fsdp_config.model_dtype": (
        choice("learner.master", {n: "float32" if d == "float32" else "none" for n, d in rules.DTYPES.items()}, "fp32"),
        "fp32",
    ),
    "engine.model_dtype": together,
    "engine.dtype": choice("model.dtype", rules.DTYPES, "Write bfloat16, float16 or float32."),
    "optim.lr": (num("learner.lr"), 1e-5),
    "optim.betas": (rules.betas, [0.9, 0.95]),
    "optim.weight_decay": (num("learner.weight_decay", why=DECAYED), 0.01),
    "optim.lr_warmup_steps": warmup,
    "optim.lr_warmup_steps_ratio": (warmup, 0.1),
    "optim.clip_grad": (num("learner.max_grad_norm"), 1.0),
    "optim.lr_scheduler": (rate, "cosine"),
    **named(rate, "optim.", "lr_scheduler_type warmup_style lr_decay_style"),
    "optim.min_lr_ratio": lowest_rate,
    "optim.min_lr": unless((0, None), "a cosine goes down to optim.min_lr_ratio of the rate"),
    "optim.lr_warmup_init": unless(0, "a warm-up begins at 0"),
    "optim.num_cycles": unless(0.5, "a cosine comes down once"),
    "optim.total_training_steps": idle("known from the length of the run"),
    "optim.optimizer": unless(("AdamW", "adam", "adamw", "Adam"), "the optimiser is AdamW"),
    "optim.optimizer_impl": unless("torch.optim", "the optimiser is torch's AdamW"),
    "optim.override_optimizer_config": unless(EMPTY, "the optimiser is torch's AdamW"),
    **named(idle("choices of Hydra's groups: the keys below them are read"), "", "engine optim model"),
    **named(idle(CLASS), "", "optim._target_ model._target_ model.mtp._target_ checkpoint._target_"),
    "model.mtp.enable": unless(False, "heads for several tokens are not trained"),
    "trainer.total_epochs": (length, 4),
    "trainer.total_training_steps": num("trainer.steps", why="the decay ends with it, too"),
    "trainer.seed": (num("seed"), 1),
    "trainer.experiment_name": rules.run_name,
    "trainer.project_name": idle("runs are in runs/, under their names; trackers get the project"),
    "trainer.default_local_dir": folder("output_dir", "a run is in runs/NAME-001"),
    "trainer.default_hdfs_dir": unless(None, "nothing is copied to HDFS: output_dir"),
    "trainer.logger": rules.loggers,
    "trainer.save_freq": positive("trainer.save_every"),
    "trainer.test_freq": positive("evaluation.every"),
    "trainer.max_ckpt_to_keep": positive("trainer.keep", "all checkpoints there, the last two here: trainer.keep"),
    "trainer.resume_mode": idle("`arborl train --resume latest` goes on with a run"),
    "trainer.resume_from_path": unless(None, "verl's checkpoints are not read; a model of them can be model.name"),
    **named(idle(CHECKPOINTS), "", "trainer.checkpoint.save_contents trainer.checkpoint.load_contents"),
    **named(idle(CHECKPOINTS), "checkpoint.", "save_contents load_contents"),
    "trainer.device": idle("model.device is found"),
    "trainer.profile_interval": idle("no profile is written; a step's times are metrics"),
}  # fmt: skip
"""Rules by key, with the defaults of `sft_trainer.yaml` that change the result."""
ENGINE_DEFAULTS: dict[str, Any] = {
    "data.val_files": None, "optim.lr": 1e-3, "optim.betas": [0.9, 0.999], "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler": "constant",
}  # fmt: skip
"""Of the newer trainer, where they differ."""
TABLE: dict[str, Rule] = back_ends("engine.", "engine.", "engine.") | {
    key: row[0] if isinstance(row, tuple) else row for key, row in ROWS.items()
}
DEFAULTS: dict[str, Any] = {key: row[1] for key, row in ROWS.items() if isinstance(row, tuple)}
PREFIXES: dict[str, Rule] = {
    "data.apply_chat_template_kwargs.": rules.chat_args,
    "hydra.": idle("place of verl's own configuration"),
    "profiler.": idle("profiles of verl's workers; here every step's times are metrics"),
}


def complete(draft: Draft) -> None:
    """What a script does not say."""
    defaults = DEFAULTS | (ENGINE_DEFAULTS if has_engine(draft) else {})
    draft.settings |= {"algorithm.name": "sft"}
    if draft.source.get("data.val_files", defaults["data.val_files"]) is None:
        draft.default("data.val_files", None, "evaluation.tasks", 0)
    assumed = Draft(source=draft.source, settings=dict(draft.settings), defaults=defaults)
    for key, value in defaults.items():
        if key not in draft.source and value is not None:
            TABLE[key](assumed, key, value)
    for line in assumed.lines:
        if line.path:
            draft.default(line.key, line.value, line.path, line.ours, line.why)
    if "model.name" not in draft.settings:
        draft.refuse("model.partial_pretrain", None, "names no model. Write model.partial_pretrain=MODEL.")
    draft.default("the loss", "token mean", "algorithm.aggregation", "token", MEAN)
    draft.default("validation before training", None, "evaluation.before", False)
    draft.default("precision", "bfloat16", "model.dtype", "bfloat16")
    if not isinstance(processes := draft.source.get("--nproc_per_node", 1), int):
        why = "only known when the script runs: convert with --gpus N, or write learner.ranks"
        draft.lose("--nproc_per_node", processes, why)
    draft.skip_rest(["engine.model_dtype"], "weights of the optimiser are float32: learner.master")


# ------------------------------------------------------------------------------------------------ devices

OFFLOADS = (
    "model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params",
    *(f"engine.{part}" for part in rules.OFFLOADS),
)  # fmt: skip
PARALLEL = (
    "ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size", "engine.fsdp_size",
    *(f"engine.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context",
                                                  "expert_model", "expert_tensor")),
)  # fmt: skip


def devices(draft: Draft) -> DeviceRequest:
    """Processes of `torchrun`; a number that only a running script knows is 1."""
    source: Mapping[str, Any] = draft.source
    counts = [source.get(key) for key in ("--nproc_per_node", "--nnodes")]
    if not isinstance(counts[0], int):
        counts[0] = source.get("trainer.n_gpus_per_node") if "--nproc_per_node" not in source else 1
    processes, nodes = (max(count, 1) if isinstance(count, int) else 1 for count in counts)
    moved = {key for key in OFFLOADS if source.get(key) is True}
    strategy = str(source.get("engine.strategy") or source.get("model.strategy") or "fsdp2")
    return DeviceRequest(
        learner=processes * nodes,
        nodes=nodes,
        strategy=strategy if strategy in ("fsdp", "fsdp2", "megatron") else "fsdp2",
        offload="all" if moved else "none",
        keys={
            "learner": ("--nproc_per_node", "--nnodes", "trainer.n_gpus_per_node", "trainer.nnodes"),
            "strategy": ("model.strategy", "engine.strategy"),
            "parallel": PARALLEL,
            "offload": OFFLOADS,
        },
    )
