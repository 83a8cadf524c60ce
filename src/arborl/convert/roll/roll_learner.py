"""ROLL's model, optimiser, batch and sampling. What it does without a word is written out."""

from __future__ import annotations

import re
from typing import Any

from arborl.convert.draft import Draft, names

TYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "none", "constant_with_warmup": "constant_with_warmup",
}  # fmt: skip
RANGE = re.compile(r"list\(\s*range\(\s*(?:(\d+)\s*,)?\s*(\d+)\s*\)\s*\)")
SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "max_new_tokens": 8192}
"""What ROLL draws with where `generating_args` leave it out."""
OURS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}


def model(draft: Draft, role: str, name: str) -> None:
    """The policy: `name` is the key of its weights, `role` the worker that trains it."""
    at = f"{role}.model_args."
    own = draft.source.get(f"{at}model_name_or_path") or draft.source.get(name)
    if own is None:
        draft.refuse(name, None, f"names no model. Write {name}: MODEL.")
        return
    draft.set(name if name in draft.source else f"{at}model_name_or_path", own, "model.name", own)
    if f"{at}model_name_or_path" in draft.source and name in draft.source:
        draft.set(f"{at}model_name_or_path", own, "model.name", own)
    dtype = draft.source.get(f"{at}dtype") or "bf16"
    if dtype not in TYPES:
        draft.drop(f"{at}dtype", dtype, f"no such type. Known: {', '.join(TYPES)}")
    else:
        draft.put(f"{at}dtype", "bf16", "model.dtype", lambda value: TYPES[value or "bf16"])
    draft.put(f"{at}disable_gradient_checkpointing", False, "learner.recompute", lambda off: not off)
    lora(draft, at)


def lora(draft: Draft, at: str) -> None:
    """Adapters, which there are once `lora_target` names layers."""
    target = draft.source.get(f"{at}lora_target")
    if target in (None, ""):
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target"):
            if f"{at}{key}" in draft.source:
                draft.skip(f"{at}{key}", draft.source[f"{at}{key}"], "no adapters without lora_target")
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
    first, second = draft.number(f"{at}adam_beta1", 0.9), draft.number(f"{at}adam_beta2", 0.999)
    for key, value in (("adam_beta1", first), ("adam_beta2", second)):
        if f"{at}{key}" in draft.source:
            draft.set(f"{at}{key}", value, "learner.betas", [first, second])
    draft.default(f"{at}adam_beta2", 0.999, "learner.betas", [first, second])
    schedule = draft.source.get(f"{at}lr_scheduler_type", "linear")
    if schedule in SCHEDULES:
        draft.put(f"{at}lr_scheduler_type", "linear", "learner.decay", lambda value: SCHEDULES[str(value)])
    else:
        draft.drop(f"{at}lr_scheduler_type", schedule, f"no such schedule here. Known: {', '.join(SCHEDULES)}")
    if f"{at}warmup_steps" in draft.source:
        draft.set(
            f"{at}warmup_steps",
            draft.source[f"{at}warmup_steps"],
            "learner.warmup",
            draft.source[f"{at}warmup_steps"],
        )
    ratio = draft.source.get(f"{at}warmup_ratio")
    if ratio and not draft.source.get(f"{at}warmup_steps"):
        draft.settings.pop("learner.warmup", None)
        draft.set(f"{at}warmup_ratio", ratio, "learner.warmup", float(ratio))
    elif ratio is not None:
        draft.skip(f"{at}warmup_ratio", ratio, "0, or warmup_steps goes before it")
    draft.put("max_grad_norm", 1.0, "learner.max_grad_norm", lambda value: float(value or 1.0))


def copies(draft: Draft, role: str) -> int | None:
    """Data-parallel copies of the model that trains; None where its devices cannot be read."""
    mapping = draft.source.get(f"{role}.device_mapping")
    at = f"{role}.strategy_args.strategy_config."
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    across = 1
    for key in sizes:
        across *= draft.whole(f"{at}{key}", 1)
    across *= draft.whole(f"{role}.model_args.ulysses_size", 1)
    if isinstance(mapping, list):
        devices = len(mapping)
    elif isinstance(mapping, str) and (found := RANGE.search(mapping)):
        devices = int(found[2]) - int(found[1] or 0)
    else:
        return None
    return max(devices // across, 1)


def optimiser_batch(draft: Draft, role: str) -> tuple[int, int | None]:
    """Rows of one optimiser step on one copy of the model, and copies."""
    at = f"{role}.training_args."
    rows = draft.whole(f"{at}per_device_train_batch_size", 8)
    return rows * draft.whole(f"{at}gradient_accumulation_steps", 1), copies(draft, role)


def minibatches(draft: Draft, role: str, episodes: int, tasks: int, steps: bool) -> None:
    """Optimiser steps of a pass: the batch divided by rows a device, times accumulation, times devices."""
    rows, devices = optimiser_batch(draft, role)
    at = f"{role}.training_args."
    keys = [
        key for key in (f"{at}per_device_train_batch_size", f"{at}gradient_accumulation_steps") if key in draft.source
    ]
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
    for key in keys or ["training_args"]:
        say = draft.set if key in draft.source else draft.default
        say(key, draft.source.get(key, "8 x 1"), "learner.minibatches", count, why)
    draft.put("ppo_epochs", 1, "learner.epochs")


def sampling(draft: Draft, at: str, into: str) -> dict[str, Any]:
    """`generating_args` at `at` as our section `into`. Gives theirs, defaults included."""
    found: dict[str, Any] = dict(SAMPLING)
    for name, otherwise in SAMPLING.items():
        written = draft.source.get(f"{at}{name}")
        found[name] = otherwise if written is None else written
    greedy = draft.source.get(f"{at}do_sample") is False or float(found["temperature"]) == 0
    for name, ours in OURS.items():
        value: Any = found[name]
        if name == "top_k":
            value = max(int(value), 0)
        if name == "temperature" and greedy and into == "sampling":
            draft.drop(f"{at}temperature", value, "training needs chance: temperature is 1 here")
            value = 1.0
        say = draft.set if f"{at}{name}" in draft.source else draft.default
        if f"{at}{name}" not in draft.accounted():
            say(f"{at}{name}", found[name], f"{into}.{ours}", value)
    if stop := draft.source.get(f"{at}stop_strings"):
        draft.set(f"{at}stop_strings", stop, "sampling.stop", stop)
    for name, neutral in (("repetition_penalty", 1.0), ("num_beams", 1), ("length_penalty", 1.0)):
        if (value := draft.source.get(f"{at}{name}")) is not None:
            same = value == neutral
            (draft.skip if same else draft.drop)(f"{at}{name}", value, "as it is here" if same else f"no {name} here")
    return found
