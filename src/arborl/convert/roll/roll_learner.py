"""ROLL's model, optimizer, batch and sampling. Its defaults are written out."""

from __future__ import annotations

import re
from typing import Any

from arborl.convert.draft import Draft, names

TYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "none", "constant_with_warmup": "constant_with_warmup",
}  # fmt: skip
RANGE = re.compile(r"list\(\s*range\(\s*(?:(\d+)\s*,)?\s*(\d+)\s*\)\s*\)")
SAMPLING = {
    "temperature": (0.95, "temperature"), "top_p": (0.7, "top_p"), "top_k": (50, "top_k"),
    "max_new_tokens": (8192, "max_tokens"),
}  # fmt: skip
"""ROLL's default and our name of each of the `generating_args`."""


def model(draft: Draft, role: str, name: str) -> None:
    """The policy: `name` is the key of its weights, `role` the worker that trains it."""
    at = f"{role}.model_args."
    own = draft.source.get(f"{at}model_name_or_path") or draft.source.get(name)
    if own is None:
        draft.refuse(name, None, f"names no model. Write {name}: MODEL.")
        return
    for key in (name, f"{at}model_name_or_path"):
        if key in draft.source:
            draft.set(key, own, "model.name", own)
    dtype = draft.source.get(f"{at}dtype") or "bf16"
    if dtype not in TYPES:
        draft.drop(f"{at}dtype", dtype, f"no such type. Known: {', '.join(TYPES)}")
    else:
        draft.say(f"{at}dtype", "bf16", "model.dtype", TYPES[dtype])
    draft.put(f"{at}disable_gradient_checkpointing", False, "learner.recompute", lambda off: not off)
    lora(draft, at)


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
        draft.drop(f"{at}lr_scheduler_type", schedule, f"no such schedule here. Known: {', '.join(SCHEDULES)}")
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
    mapping = draft.source.get(f"{role}.device_mapping")
    if isinstance(mapping, list):
        devices = len(mapping)
    elif isinstance(mapping, str) and (found := RANGE.search(mapping)):
        devices = int(found[2]) - int(found[1] or 0)
    else:
        return rows, None
    return rows, max(devices // across, 1)


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
            value = max(int(theirs), 0)
        greedy = name == "temperature" and (draft.source.get(f"{at}do_sample") is False or float(theirs) == 0)
        if greedy and into == "sampling":
            draft.drop(key, theirs, "training needs chance: temperature is 1 here")
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
            (draft.skip if same else draft.drop)(f"{at}{name}", value, "as it is here" if same else f"no {name} here")
