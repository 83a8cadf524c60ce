"""ROLL's model, optimizer, batch and sampling. Its defaults are written out."""

from __future__ import annotations

import re
from typing import Any

from arborl.convert.devices import DeviceRequest
from arborl.convert.draft import Draft, as_number, names

TYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "none", "constant_with_warmup": "constant_with_warmup",
}  # fmt: skip
GPUS = re.compile(r"list\(\s*range\(\s*(?:(\d+)\s*,)?\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)\s*\)|\[([\d\s,]*)\]")
"""A part of `device_mapping`; parts are added: `list(range(0,4)) + [6, 7]`."""
SAMPLING = {
    "temperature": (0.95, "temperature"), "top_p": (0.7, "top_p"), "top_k": (50, "top_k"),
    "max_new_tokens": (8192, "max_tokens"),
}  # fmt: skip
"""ROLL's default and our name of each of the `generating_args`."""


def model(draft: Draft, role: str, name: str) -> None:
    """The policy: `name` is the key of its weights, `role` the worker that trains it."""
    at = f"{role}.model_args."
    own = draft.source.get(name)
    if own is None or _names_all(draft, role):
        own = draft.source.get(f"{at}model_name_or_path") or own
    if own is None:
        draft.refuse(name, None, f"names no model. Write {name}: MODEL.")
        return
    for key in (name, f"{at}model_name_or_path"):
        if key in draft.source:
            why = "" if draft.source[key] in (own, None) else "another key names the model, and goes before it"
            draft.set(key, draft.source[key], "model.name", own, why)
    dtype = draft.source.get(f"{at}dtype") or "bf16"
    if dtype not in TYPES:
        draft.lose(f"{at}dtype", dtype, f"no such type. Known: {', '.join(TYPES)}")
    else:
        draft.say(f"{at}dtype", "bf16", "model.dtype", TYPES[dtype])
    draft.put(f"{at}disable_gradient_checkpointing", False, "learner.recompute", lambda off: not off)
    lora(draft, at)


def _names_all(draft: Draft, role: str) -> bool:
    """Whether models of single workers count: ROLL takes `pretrain` unless the policy and the reference name one."""
    roles = ("actor_train", "actor_infer", "reference") if role == "actor_train" else (role,)
    return all(draft.source.get(f"{one}.model_args.model_name_or_path") for one in roles)


def lora(draft: Draft, at: str) -> None:
    """Adapters, which there are once `lora_target` names layers."""
    target = draft.source.get(f"{at}lora_target")
    if target in (None, ""):
        keys = [f"{at}lora_{name}" for name in ("rank", "alpha", "dropout", "target")]
        draft.skip_rest(keys, "no adapters without lora_target")
        return
    rank = draft.put(f"{at}lora_rank", 8, "model.lora.rank")
    draft.put(f"{at}lora_alpha", None, "model.lora.alpha", lambda alpha: float(alpha or 2 * rank))
    draft.put(f"{at}lora_dropout", 0.0, "model.lora.dropout", lambda rate: float(rate or 0))
    every_layer = str(target) in ("all", "all-linear")
    draft.set(f"{at}lora_target", target, "model.lora.target", ["all-linear"] if every_layer else names(target))


def optimiser(draft: Draft, role: str) -> None:
    """AdamW as transformers has it."""
    at = f"{role}.training_args."
    draft.put(f"{at}learning_rate", 5e-5, "learner.lr", float)
    draft.put(f"{at}weight_decay", 0.0, "learner.weight_decay", lambda value: float(value or 0))
    betas = {"adam_beta1": draft.number(f"{at}adam_beta1", 0.9), "adam_beta2": draft.number(f"{at}adam_beta2", 0.999)}
    for key, value in betas.items():
        if f"{at}{key}" in draft.source:
            draft.set(f"{at}{key}", value, "learner.betas", list(betas.values()))
    draft.default(f"{at}adam_beta2", 0.999, "learner.betas", list(betas.values()))
    schedule = draft.source.get(f"{at}lr_scheduler_type", "linear")
    if schedule in SCHEDULES:
        draft.say(f"{at}lr_scheduler_type", "linear", "learner.decay", SCHEDULES[schedule])
    else:
        draft.lose(f"{at}lr_scheduler_type", schedule, f"no such schedule here. Known: {', '.join(SCHEDULES)}")
    if f"{at}warmup_steps" in draft.source:
        draft.put(f"{at}warmup_steps", None, "learner.warmup")
    ratio = draft.source.get(f"{at}warmup_ratio")
    if ratio and not draft.source.get(f"{at}warmup_steps"):
        draft.set(f"{at}warmup_ratio", ratio, "learner.warmup", float(ratio))
    elif ratio is not None:
        draft.skip(f"{at}warmup_ratio", ratio, "0, or warmup_steps goes before it")
    draft.put("max_grad_norm", 1.0, "learner.max_grad_norm", lambda value: float(value or 1.0))


def optimiser_batch(draft: Draft, role: str) -> tuple[int, int | None]:
    """Rows of one optimizer step on one copy of the model, and data-parallel copies (None: unknown)."""
    rows = draft.whole(f"{role}.training_args.per_device_train_batch_size", 8)
    rows *= draft.whole(f"{role}.training_args.gradient_accumulation_steps", 1)
    across = draft.whole(f"{role}.model_args.ulysses_size", 1)
    for kind in ("tensor_model", "pipeline_model", "context"):
        across *= draft.whole(f"{role}.strategy_args.strategy_config.{kind}_parallel_size", 1)
    numbers = gpu_numbers(draft.source.get(f"{role}.device_mapping"))
    return rows, max(len(numbers) // across, 1) if numbers else None


def minibatches(draft: Draft, role: str, episodes: int, tasks: int, steps: bool) -> None:
    """Optimizer steps of a pass: the batch divided by rows a device, times accumulation, times devices."""
    rows, devices = optimiser_batch(draft, role)
    why = ""
    if steps:
        count, why = 1, "rows are turns there, so that optimiser steps follow from how many there are; here it is one"
    elif devices is None:
        count, why = 1, f"{role}.device_mapping does not say how many devices share a batch: one optimiser step"
    else:
        per_step = rows * devices
        count = min(max(episodes // per_step, 1), tasks)
        if (episodes % per_step and episodes > per_step) or count != max(episodes // per_step, 1):
            why = f"{episodes} episodes by {per_step}: here each holds whole groups, {count} a pass"
    keys = [f"{role}.training_args.{key}" for key in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    for key in [key for key in keys if key in draft.source] or ["training_args"]:
        draft.say(key, "8 x 1", "learner.minibatches", count, why)
    draft.put("ppo_epochs", 1, "learner.epochs")


def sampling(draft: Draft, at: str, into: str) -> None:
    """`generating_args` at `at` as our section `into`, ROLL's defaults included."""
    for name, (otherwise, ours) in SAMPLING.items():
        key = f"{at}{name}"
        theirs = value = otherwise if draft.source.get(key) is None else draft.source[key]
        if name == "top_k":
            value = max(round(as_number(key, theirs)), 0)
        greedy = name == "temperature" and (draft.source.get(f"{at}do_sample") is False or as_number(key, theirs) == 0)
        value = 0.0 if greedy else value
        if greedy and into == "sampling":
            draft.lose(key, theirs, "training needs chance: temperature is 1 here")
        elif key not in draft.accounted() and key in draft.source:
            draft.set(key, theirs, f"{into}.{ours}", value)
        elif key not in draft.accounted():
            draft.default(key, theirs, f"{into}.{ours}", value)
    if stop := draft.source.get(f"{at}stop_strings"):
        draft.set(f"{at}stop_strings", stop, "sampling.stop", stop)
    neutral: dict[str, Any] = {"repetition_penalty": 1.0, "num_beams": 1, "length_penalty": 1.0}
    for name, usual in neutral.items():
        if (value := draft.source.get(f"{at}{name}")) is not None:
            same = value == usual
            (draft.skip if same else draft.lose)(f"{at}{name}", value, "as it is here" if same else f"no {name} here")


# ------------------------------------------------------------------------------------------------ devices


TRAINERS = ("student_train", "actor_train", "sft_train", "student")
SAMPLERS = ("student_infer", "actor_infer")
PARALLEL = tuple(
    f"strategy_args.strategy_config.{kind}"
    for kind in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "fsdp_size", "efsdp_size",
        "ep_size", "tp_size", "pp_size", "use_distributed_optimizer", "sequence_parallel", "zero_optimization.stage",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
    )
)  # fmt: skip
ZERO = re.compile(r"\$\{\s*deepspeed_zero(\d?)(_cpuoffload)?\s*\}")
"""A reference to one of ROLL's former DeepSpeed fragments, by its name."""
OFFLOAD = ("offload_policy", "zero_optimization.offload_param.device", "optimizer_cpu_offload")


def gpu_numbers(mapping: Any) -> list[int]:
    """GPUs of a `device_mapping`; empty where it cannot be read."""
    if isinstance(mapping, list):
        return [int(one) for one in mapping if str(one).isdigit()]
    text = str(mapping or "")
    if GPUS.sub("", text).strip("+ "):
        return []
    found: list[int] = []
    for start, stop, step, listed in GPUS.findall(text):
        found += (
            [int(one) for one in listed.split(",") if one.strip()]
            if not stop
            else range(int(start or 0), int(stop), int(step or 1))
        )
    return found


def devices(draft: Draft) -> DeviceRequest:
    """GPUs of the worker that trains and of the one that samples."""
    source = draft.source
    train, infer = (
        next((role for role in roles if draft.below(f"{role}.")), roles[-1]) for roles in (TRAINERS, SAMPLERS)
    )
    learner = gpu_numbers(source.get(f"{train}.device_mapping"))
    engines = gpu_numbers(source.get(f"{infer}.device_mapping"))
    at = f"{infer}.strategy_args.strategy_"
    strategy, offload = _strategy(draft, f"{train}.strategy_args.")
    name = str(source.get(f"{at}name") or "")
    split = source.get(f"{at}config.tensor_parallel_size") or source.get(f"{at}config.tp_size") or 1
    layers = source.get(f"{at}config.pipeline_parallel_size") or 1
    share = source.get(f"{at}config.gpu_memory_utilization") or source.get(f"{at}config.mem_fraction_static")
    count, per_node = max(len(learner), 1), source.get("num_gpus_per_node")
    separate = bool(engines) and not set(engines) & set(learner)
    needed = max([*learner, *engines, 0]) + 1
    return DeviceRequest(
        learner=count,
        nodes=-(-needed // per_node) if isinstance(per_node, int) and per_node > 0 else 1,
        strategy=strategy,
        offload=offload,
        engine=name if name in ("vllm", "sglang") else "",
        engines=range(count, count + len(engines)) if separate else (),
        split=int(split) * int(layers) if str(split).isdigit() and str(layers).isdigit() else 1,
        memory_share=float(share) if isinstance(share, int | float) else None,
        keys={
            "learner": (f"{train}.device_mapping", "num_gpus_per_node", "num_nodes"),
            "strategy": tuple(f"{train}.strategy_args.strategy_{key}" for key in ("name", "config")),
            "parallel": (*(f"{train}.{key}" for key in PARALLEL), f"{train}.model_args.ulysses_size"),
            "offload": tuple(f"{train}.strategy_args.strategy_config.{key}" for key in OFFLOAD),
            "engine": (f"{at}name", f"{at}config"),
            "split": (
                *(f"{at}config.{key}" for key in ("tensor_parallel_size", "tp_size", "pipeline_parallel_size")),
                f"{infer}.num_gpus_per_worker",
            ),
            "memory_share": tuple(f"{at}config.{key}" for key in ("gpu_memory_utilization", "mem_fraction_static")),
            "mapping": (f"{infer}.device_mapping",),
        },
    )


def _strategy(draft: Draft, at: str) -> tuple[str, str]:
    """How the learner is sharded, and what it offloads."""
    config = f"{at}strategy_config"
    given = draft.below(f"{config}.")
    name = re.sub(r"_(train|infer)$", "", str(draft.source.get(f"{at}strategy_name") or "ddp"))
    stage = given.get("zero_optimization.stage")
    offload = "all" if given.get(OFFLOAD[0]) or given.get(OFFLOAD[1]) not in (None, "none") else "none"
    if offload == "none" and given.get(OFFLOAD[2]):
        offload = "optimizer"
    if fragment := ZERO.fullmatch(str(draft.source.get(config))):
        stage, offload = int(fragment[1] or 0), "all" if fragment[2] else offload
    if name == "deepspeed":
        name = f"zero{stage}" if stage in (1, 2, 3) else "ddp"
    return (name if name in ("fsdp2", "megatron", "zero1", "zero2", "zero3") else "ddp"), offload
