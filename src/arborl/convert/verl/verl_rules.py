"""Rules for verl's data, batches, optimizer, trackers and models."""

from __future__ import annotations

import math
import re
from typing import Any

from arborl.convert.common_rules import NO_PICTURES, UNSEEN, VISION_MODEL, choice, num, text
from arborl.convert.devices import DeviceRequest
from arborl.convert.draft import Draft, names
from arborl.errors import ConfigError

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
T = f"{R}multi_turn."
DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "half": "float16",
    "float32": "float32", "fp32": "float32",
}  # fmt: skip


TRAINERS = ("main_ppo", "main_dapo", "main_ppo_split", "fully_async_main")
CLUSTER_VARIABLES = (
    "MASTER_IP", "WORKER_NODES", "CONDA_ENV", "CONDA_PATH", "RAY_TEMP_DIR", "RAY_DASHBOARD_PORT", "WANDB_DIR",
)  # fmt: skip
"""Of the scripts that start a cluster."""


def cluster_variable(draft: Draft, key: str, value: Any) -> None:
    if key != "WANDB_DIR":
        draft.skip(key, value, "of the cluster: arborl convert cluster SCRIPT")
    elif "wandb" not in names(draft.source.get("trainer.logger")):
        draft.skip(key, value, "read by the tracker wandb only")


def module(draft: Draft, key: str, value: Any) -> None:
    """The module or file that a script starts."""
    name = str(value).removesuffix(".py")
    last = re.split(r"[./]", name)[-1]
    if "generation" in name or "main_eval" in name:
        draft.refuse(key, value, "this trains nothing. Write: arborl evaluate RUN")
    elif last in TRAINERS or name.startswith("agentfly."):
        draft.skip(key, value, "arborl train")
    else:
        why = "a trainer of its own, whose steps are not verl's. Convert a script of verl.trainer.main_ppo."
        draft.refuse(key, value, why)


def configuration(draft: Draft, key: str, value: Any) -> None:
    usual = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "_generated_ppo_trainer")
    if str(value).removesuffix(".yaml") in usual:
        draft.skip(key, value, "verl's own defaults, which are written out")
    else:
        advice = "Give it first: arborl convert verl FILE.yaml SCRIPT"
        draft.refuse(key, value, f"no such file near the script, and what it says would be lost. {advice}")


# ------------------------------------------------------------------------------------------------ rows and lengths


def prompt_key(draft: Draft, key: str, value: Any) -> None:
    if value in (None, "prompt"):
        draft.skip(key, value, "the column `prompt` is read anyway")
    else:
        draft.set(key, value, "data.question", str(value))


def answer_tokens(draft: Draft) -> int:
    """verl's limit of all calls and tool results together."""
    return int(draft.source.get(f"{R}response_length") or draft.number_or("data.max_response_length", 512))


def context(draft: Draft) -> int:
    """Tokens of a prompt and all that follows. verl bounds both; an agent that edits its context has one window."""
    prompt = draft.source.get(f"{R}prompt_length") or draft.number_or("data.max_prompt_length", 512)
    total = int(prompt) + answer_tokens(draft)
    most = draft.source.get(f"{R}max_model_len")
    if not isinstance(most, int):
        return total
    return most if f"{T}single_turn_max_tokens" in draft.source else min(most, total)


def answer_length(draft: Draft, key: str, value: Any) -> None:
    """Tokens of a call. verl's are those of all calls and tools together; the context bounds these here."""
    if not isinstance(value, int):
        num("sampling.max_tokens")(draft, key, value)
        return
    if key.startswith("data.") and f"{R}response_length" in draft.source:
        draft.skip(key, value, "rollout.response_length is read in its place")
        return
    if f"{T}single_turn_max_tokens" not in draft.source:
        several = draft.known(f"{T}enable") is True
        why = "there all turns together, here each call; sampling.max_context bounds the whole" if several else ""
        draft.set(key, value, "sampling.max_tokens", value, why)
    draft.set(key, value, "sampling.max_context", context(draft))


def window(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, int):
        draft.set(key, value, "sampling.max_context", context(draft))
    else:
        num("sampling.max_context")(draft, key, value)


def overlong_prompts(draft: Draft, key: str, value: Any) -> None:
    """`data.filter_overlong_prompts` and `data.truncation`, which are read together."""
    cut = draft.known("data.truncation")
    if draft.known("data.filter_overlong_prompts"):
        draft.set(key, value, "data.overlong", "drop")
    elif cut == "error":
        draft.set(key, value, "data.overlong", "refuse")
    else:
        draft.set(key, value, "data.overlong", "cut", f"there {cut} tokens go, here the end of the longest message")


def validation_rows(draft: Draft, key: str, value: Any) -> None:
    draft.set(key, value, "evaluation.tasks", value if isinstance(value, int) and value > 0 else 10_000)


def ratio(draft: Draft, key: str, value: Any) -> None:
    """`data.mixed_dataset.dataset_ratios.taco`."""
    if draft.source.get("data.mixed_dataset.enabled") is False:
        draft.skip(key, value, "data.mixed_dataset.enabled is off")
        return
    draft.settings.setdefault("data.by", "data_source")
    num(f"data.sources.{key.rpartition('.')[2]}.ratio")(draft, key, value)


# ------------------------------------------------------------------------------------------------ batches and rates


def minibatch(draft: Draft, key: str, value: Any) -> None:
    tasks = draft.number_or("data.train_batch_size", 1024)
    if not isinstance(value, int) or value < 1:
        num("learner.minibatches")(draft, key, value)
        return
    why = ""
    if value > tasks:
        why = "more tasks than a batch has, which verl refuses"
    elif tasks % value:
        why = "they do not divide the batch: there the last is smaller, here all are about equal"
    draft.set(key, value, "learner.minibatches", math.ceil(tasks / value), why)


def warmup(draft: Draft, key: str, value: Any) -> None:
    """verl counts training steps; the learner counts optimizer steps."""
    minibatches = draft.number_or("data.train_batch_size", 1024) / max(
        draft.number_or(f"{A}ppo_mini_batch_size", 256), 1
    )
    times = max(math.ceil(minibatches), 1) * int(draft.number_or(f"{A}ppo_epochs", 1))
    if isinstance(value, int | float) and value > 0:
        why = f"counted in optimiser steps, of which a training step has {times}" if times > 1 else ""
        draft.set(key, value, "learner.warmup", int(value) * times, why)
    else:
        draft.skip(key, value, "no number of steps: lr_warmup_steps_ratio is read")


def warmup_share(draft: Draft, key: str, value: Any) -> None:
    if draft.number_or(f"{A}optim.lr_warmup_steps", -1) > 0:
        draft.skip(key, value, "lr_warmup_steps is read in its place")
    elif value in (None, 0):
        draft.skip(key, value, "no warm-up, as here")
    else:
        num("learner.warmup")(draft, key, value)


def schedule(draft: Draft, key: str, value: Any) -> None:
    """`lr_scheduler_type`; `warmup_style` in older scripts, `lr_decay_style` with Megatron."""
    newer = f"{A}optim.lr_scheduler_type"
    if value is None or (key != newer and newer in draft.source):
        draft.skip(key, value, "lr_scheduler_type is read in its place")
        return
    ways = {"constant": "none", "cosine": "cosine", "linear": "linear"}
    choice("learner.decay", ways, "Write learner.decay yourself, after lr_scheduler_type=constant.")(draft, key, value)


def lowest_rate(draft: Draft, key: str, value: Any) -> None:
    decays = draft.known(f"{A}optim.warmup_style") or draft.known(f"{A}optim.lr_scheduler_type")
    if decays != "cosine" or not value:
        draft.skip(key, value, "read with lr_scheduler_type=cosine, and above 0, only")
    else:
        draft.set(key, value, "learner.min_lr", value * draft.number_or(f"{A}optim.lr", 1e-6))


def last_rate(draft: Draft, key: str, value: Any) -> None:
    """`optim.min_lr` of Megatron."""
    style = draft.known(f"{A}optim.lr_decay_style") or draft.known(f"{A}optim.lr_scheduler_type")
    if style not in ("cosine", "linear") or not value:
        draft.skip(key, value, "read with lr_decay_style=cosine or linear, and above 0, only")
    else:
        num("learner.min_lr")(draft, key, value)


def micro_batch(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, int) and value > 0:
        draft.set(key, value, "learner.micro_batch_tokens", value)
    else:
        draft.lose(key, value, "not a number that can be read without running the script; micro-batches fit the memory")


def deterministic(draft: Draft, key: str, value: Any) -> None:
    if value is True:
        draft.set(key, value, "deterministic", True, "of the whole run: episodes depend on the seed only")
    else:
        draft.skip(key, value, "off, as here")


def betas(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int | float) for one in value):
        draft.set(key, value, "learner.betas", list(value))
    else:
        draft.refuse(key, value, "not two numbers. Write [0.9, 0.999].")


# ------------------------------------------------------------------------------------------------ the run


def evaluation(draft: Draft, key: str, value: Any) -> None:
    """`val_kwargs.temperature` and `do_sample`."""
    sampled = draft.known(f"{R}val_kwargs.do_sample")
    temperature = draft.number_or(f"{R}val_kwargs.temperature") if sampled else 0.0
    draft.set(key, value, "evaluation.sampling.temperature", temperature)
    draft.set(key, value, "evaluation.greedy", False)


def run_name(draft: Draft, key: str, value: Any) -> None:
    name = re.sub(r"[^\w.-]+", "-", UNSEEN.sub("", str(value))).strip("-._")
    if not name:
        draft.skip(key, value, "only known when the script runs; a run is called after its file")
        return
    why = "what is only known when the script runs is left out" if UNSEEN.search(str(value)) else ""
    draft.set(key, value, "name", name, why)


def loggers(draft: Draft, key: str, value: Any) -> None:
    trackers = names(value)
    draft.set(key, value, "track.tensorboard", "tensorboard" in trackers)
    project, run = (
        UNSEEN.sub("", str(draft.source.get(f"trainer.{name}_name") or "")).strip("-_. ")
        for name in ("project", "experiment")
    )
    group, called = project or "verl_examples", {"name": run} if run else {}
    where = {"dir": str(draft.source["WANDB_DIR"])} if draft.source.get("WANDB_DIR") else {}
    args = {"wandb": {"project": group} | where, "mlflow": {"uri": "sqlite:////tmp/mlruns.db", "experiment": group}}
    if ours := [{"name": name, "args": args[name] | called} for name in args if name in trackers]:
        why = "the address of MLflow is what MLFLOW_TRACKING_URI says there" if "mlflow" in trackers else ""
        draft.set(key, value, "track.trackers", ours, why)
        if where and "wandb" in trackers:
            draft.set("WANDB_DIR", draft.source["WANDB_DIR"], "track.trackers", ours)
    for other in trackers:
        if other not in ("console", "tensorboard", "wandb", "mlflow", "file"):
            draft.lose(key, other, "no such tracker here; yours can be named as track.trackers=[package.module:Class]")


# ------------------------------------------------------------------------------------------------ the model


def model_path(draft: Draft, key: str, value: Any) -> None:
    if VISION_MODEL.search(str(value).rpartition("/")[2]):
        draft.refuse(key, value, NO_PICTURES)
    else:
        text("model.name", variable="MODEL_PATH")(draft, key, value)


def pictures(draft: Draft, key: str, value: Any) -> None:
    """A column of pictures. A dump of the whole configuration has both, and need not have such rows."""
    if value is None:
        draft.skip(key, value, "null: rows of text")
    elif {"data.image_key", "data.video_key"} <= draft.source.keys():
        draft.lose(key, value, "pictures of rows are not read: models of text are trained")
    else:
        draft.refuse(key, value, f"rows with pictures: {NO_PICTURES}")


MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",), "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Megatron's names of layers, and those of transformers."""


def megatron_layers(draft: Draft, key: str, value: Any) -> None:
    listed = names(value)
    if all(name in MEGATRON_LAYERS for name in listed):
        ours = [one for name in listed for one in MEGATRON_LAYERS[name]]
        draft.set(key, value, "model.lora.target", ["all-linear"] if len(listed) == 4 else ours)
    else:
        draft.lose(key, value, "layers by Megatron's names; name them in model.lora.target, all-linear else")


def adapted_layers(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, str) and value != "all-linear" and re.search(r"[\\^$.*+?|()]", value):
        draft.lose(key, value, "a pattern; name the layers in model.lora.target, all-linear else")
    else:
        draft.set(key, value, "model.lora.target", names(value))


def chat_args(draft: Draft, key: str, value: Any) -> None:
    """Of the chat template: `enable_thinking`."""
    draft.set(key, value, f"model.chat_args.{key.removeprefix('data.apply_chat_template_kwargs.')}", value)


# ------------------------------------------------------------------------------------------------ devices


OFFLOADS = ("param_offload", "optimizer_offload", "grad_offload", "offload_policy")
OPTIMIZER_OFFLOAD = "optim.override_optimizer_config.optimizer_cpu_offload"
OFFLOAD = (
    *(f"{A}{section}.{part}" for section in ("fsdp_config", "megatron") for part in OFFLOADS),
    f"{A}{OPTIMIZER_OFFLOAD}",
)
REFERENCE_OFFLOAD = tuple(
    f"actor_rollout_ref.ref.{section}.{part}" for section in ("fsdp_config", "megatron") for part in OFFLOADS
)
CRITIC_OFFLOAD = (
    *(f"critic.{section}.{part}" for section in ("model.fsdp_config", "megatron") for part in OFFLOADS),
    f"critic.{OPTIMIZER_OFFLOAD}",
)
PARALLEL = tuple(
    f"{A}{key}"
    for key in (
        "ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size", "fsdp_config.fsdp_size",
        "fsdp_config.strategy",
        "megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size",
        "megatron.virtual_pipeline_model_parallel_size", "megatron.context_parallel_size",
        "megatron.expert_model_parallel_size", "megatron.expert_tensor_parallel_size",
    )
)  # fmt: skip


def devices(draft: Draft) -> DeviceRequest:
    """GPUs of the learner and of the rollout, which share them unless `rollout.n_gpus_per_node` says otherwise.

    Files that name no number of GPUs (8 is the default there) are converted for one.
    """
    nodes, per_node = (
        _count(draft, f"trainer.{name}", usual) for name, usual in (("nnodes", 1), ("n_gpus_per_node", 1))
    )
    megatron = "megatron" in str(draft.source.get("--config-name")) or bool(draft.below(f"{A}megatron."))
    strategy = str(draft.source.get(f"{A}strategy") or ("megatron" if megatron else "fsdp"))
    moved = {key.rpartition(".")[2] for key in OFFLOAD if draft.source.get(key) is True}
    has_critic = draft.known("algorithm.adv_estimator") == "gae"
    has_reference = bool(draft.known(f"{A}use_kl_loss") or draft.known("algorithm.use_kl_in_reward"))
    engine = str(draft.source.get(f"{R}name") or "vllm").removesuffix("_async")
    own = _count(draft, "rollout.n_gpus_per_node", 0) * _count(draft, "rollout.nnodes", 1)
    learner = max(nodes * per_node, 1)
    share = draft.source.get(f"{R}gpu_memory_utilization")
    return DeviceRequest(
        learner=learner,
        nodes=max(nodes, 1),
        strategy=strategy if strategy in ("fsdp", "fsdp2", "megatron") else "fsdp",
        offload="all" if moved - {"optimizer_offload", "optimizer_cpu_offload"} else "optimizer" if moved else "none",
        engine=engine if engine in ("vllm", "sglang") else "",
        engines=range(learner, learner + own),
        split=max(_count(draft, f"{R}tensor_model_parallel_size", 1), 1),
        memory_share=float(share) if isinstance(share, int | float) else None,
        keys={
            "learner": ("trainer.n_gpus_per_node", "trainer.nnodes"),
            "strategy": (f"{A}strategy",),
            "parallel": PARALLEL,
            "offload": OFFLOAD,
            "reference_offload": REFERENCE_OFFLOAD if has_reference else (),
            "critic_offload": CRITIC_OFFLOAD if has_critic else (),
            "engine": (f"{R}name",),
            "split": tuple(f"{R}{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "data", "expert")),
            "memory_share": (f"{R}gpu_memory_utilization",),
            "mapping": ("rollout.nnodes", "rollout.n_gpus_per_node"),
        },
    )


def _count(draft: Draft, key: str, usual: int) -> int:
    """A number of nodes or GPUs; `usual` where it is only known when the script runs."""
    value = draft.source.get(key, usual)
    if value in (None, "") or UNSEEN.search(str(value)):
        return usual
    if not isinstance(value, int) or isinstance(value, bool) or value < min(usual, 1):
        raise ConfigError(f"{key}={value!r}: must be a whole number >= {min(usual, 1)}.")
    return value
