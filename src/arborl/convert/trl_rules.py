"""Rules for TRL's training arguments: batches, length, optimizer, precision, adapters, losses, sampling, trackers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from arborl.config.run_config import folder_name
from arborl.convert.common_rules import Rule, choice, idle, known, num, refuse, text
from arborl.convert.conversion_report import KeyReport
from arborl.convert.devices import DeviceRequest
from arborl.convert.draft import Draft
from arborl.convert.reading.python_scripts import RunTimeValue, has_run_time_value
from arborl.convert.verl.verl_rules import DTYPES, adapted_layers

GRPO, SFT, KTO = (known("trainer", f"{name}Trainer") for name in ("GRPO", "SFT", "KTO"))
VLLM = known("args.use_vllm", True)
LORA, MODEL_LORA = known("peft_config.class"), known("model_config.use_peft", True)
ALGORITHMS = {"GRPOTrainer": "grpo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto"}
GRPO_LOSSES = {
    "grpo": ("ppo", "episode"), "dapo": ("ppo", "token"), "bnpo": ("ppo", "token"), "dr_grpo": ("ppo", "fixed"),
    "cispo": ("cispo", "token"), "sapo": ("sapo", "episode"),
}  # fmt: skip
"""TRL's loss -> loss and aggregation."""
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "none", "constant_with_warmup": "constant_with_warmup",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip
STAGES = ("accelerate.deepspeed_config.zero_stage", "args.deepspeed.zero_optimization.stage")
"""Keys of DeepSpeed's stage."""
OFFLOADED = ("param", "optimizer")
TARGETS = ["q_proj", "v_proj"]
"""peft's choice for Llama, Qwen, Mistral and Gemma."""
NO_LIMIT = 8192
"""Context where TRL has no limit."""
PROMPT_ROOM = 2048
VISION = re.compile(r"[-_](?:VL|Omni|Vision)\b|vlm", re.IGNORECASE)


def number(draft: Draft, name: str) -> Any:
    """Their number of `args.NAME`; 0 without one."""
    return draft.number_or(f"args.{name}")


def written(rule: Rule) -> Rule:
    """The rule, for values that are written in the script; others are refused."""

    def checked(draft: Draft, key: str, value: Any) -> None:
        if has_run_time_value(value):
            draft.refuse(key, value, "is only known when the script runs: write it into the script.")
        else:
            rule(draft, key, value)

    return checked


# ------------------------------------------------------------------------------------------------ batches and length


def batch(draft: Draft) -> tuple[int, int, str, int]:
    """Tasks of a step, mini-batches, what was assumed, and completions beyond whole groups.

    A step here is one batch of completions there: `steps_per_generation` micro-batches of every process, of which
    `gradient_accumulation_steps` are an optimizer step.
    """
    each, accumulated = count(draft, "per_device_train_batch_size"), count(draft, "gradient_accumulation_steps")
    group = count(draft, "num_generations") if GRPO(draft) else 1
    processes = int(draft.number_or("accelerate.num_processes"))
    why = "" if processes else "for one process; with N processes, N times as many"
    slices = accumulated
    if GRPO(draft):
        whole = count(draft, "generation_batch_size", 0) // (each * max(processes, 1))
        slices = max(whole or count(draft, "steps_per_generation", 0), accumulated)
    if not processes:
        processes = next(n for n in range(1, group + 1) if each * slices * n % group == 0)
        why = why if processes == 1 else f"for {processes} processes, the smallest number that makes whole groups"
    tasks, rest = divmod(each * slices * processes, group)
    return max(tasks, 1), min(max(round(slices / accumulated), 1), max(tasks, 1)), why, rest


def count(draft: Draft, name: str, least: int = 1) -> int:
    """Their whole number of `args.NAME`, at least `least`; the rule of its own key refuses others."""
    return max(int(number(draft, name)), least)


def updates(draft: Draft) -> int:
    """Optimizer steps of a step here."""
    return batch(draft)[1] * count(draft, "num_iterations") if GRPO(draft) else 1


def batch_size(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.skip(key, value, "null: as gradient_accumulation_steps says")
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        draft.refuse(key, value, "is not a whole number from 1 on. Write one.")
        return
    tasks, minibatches, why, rest = batch(draft)
    if rest:
        draft.refuse(key, value, "the completions of a step are no multiple of num_generations. Write one.")
        return
    draft.set(key, value, "rollout.tasks_per_step", tasks, why)
    if GRPO(draft):
        groups = "a mini-batch has whole groups here, there any completions of the step" if minibatches > 1 else ""
        draft.set(key, value, "learner.minibatches", minibatches, groups)


def whole_number(path: str) -> Rule:
    """A whole number from 1 on."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            draft.refuse(key, value, "is not a whole number from 1 on. Write one.")
        else:
            draft.set(key, value, path, value)

    return rule


def steps(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, int | float) or number(draft, "max_steps") <= 0:
        draft.skip(key, value, "num_train_epochs sets the length of the run")
        return
    each = updates(draft)
    why = f"a step here has {each} of their optimizer steps" if each > 1 else ""
    draft.set(key, value, "trainer.steps", math.ceil(value / each), why)


def epochs(draft: Draft, key: str, value: Any) -> None:
    if number(draft, "max_steps") > 0:
        draft.skip(key, value, "max_steps sets the length of the run")
        return
    why = "" if value % 1 == 0 else "whole passes only; trainer.steps sets any length"
    draft.set(key, value, "trainer.epochs", max(math.ceil(value), 1), why)


def interval(draft: Draft, key: str, value: Any) -> None:
    """`save_steps`, `save_strategy`."""
    strategy = word(draft.known("args.save_strategy"))
    if strategy in ("no", "best"):
        draft.set(key, value, "trainer.save_every", 1_000_000, "only the last step is saved")
    elif strategy == "epoch" or number(draft, "save_steps") < 1:
        draft.lose(key, value, "checkpoints are counted in steps: trainer.save_every")
    else:
        draft.set(key, value, "trainer.save_every", math.ceil(number(draft, "save_steps") / updates(draft)))


def word(value: Any) -> str:
    """A choice, also as a member of an enumeration (`IntervalStrategy.NO`), or as YAML reads `no`."""
    return "no" if value is False else str(value).rpartition(".")[2].lower()


def evaluates(draft: Draft) -> bool:
    """Whether the script evaluates held-out rows."""
    return word(draft.known("args.evaluation_strategy") or draft.known("args.eval_strategy")) != "no"


def evaluation(draft: Draft, key: str, value: Any) -> None:
    """`eval_strategy`, `eval_steps`, `eval_on_start`."""
    if not evaluates(draft):
        draft.set(key, value, "evaluation.tasks", 0)
        draft.set(key, value, "data.evaluation_share", 1e-6, "one row is held out; there all are trained on")
        return
    draft.set(key, value, "evaluation.tasks", 10_000)
    draft.set(key, value, "evaluation.before", draft.known("args.eval_on_start") is True)
    every = number(draft, "eval_steps") or number(draft, "logging_steps") or 10
    strategy = word(draft.known("args.evaluation_strategy") or draft.known("args.eval_strategy"))
    if strategy == "steps" and every >= 1:
        draft.set(key, value, "evaluation.every", math.ceil(every / updates(draft)))
    else:
        draft.lose(key, value, "held-out rows are evaluated at the end; evaluation.every counts steps")
    if GRPO(draft):
        several = number(draft, "num_generations_eval") or number(draft, "num_generations")
        draft.set(key, value, "evaluation.group_size", several)
        draft.set(key, value, "evaluation.greedy", False)
        draft.set(key, value, "evaluation.sampling.temperature", number(draft, "temperature"))


def devices(draft: Draft) -> DeviceRequest:
    """Processes of `accelerate launch`, with DeepSpeed or FSDP; GPUs of vLLM."""
    learner = max(int(draft.number_or("accelerate.num_processes", 1)), 1)
    split = count(draft, "vllm_tensor_parallel_size")
    has_vllm = bool(GRPO(draft) and VLLM(draft))
    server = has_vllm and draft.source.get("args.vllm_mode") == "server"
    stage = draft.source.get(STAGES[0], draft.source.get(STAGES[1]))
    fsdp = draft.source.get("args.fsdp") or "FSDP" in str(draft.source.get("accelerate.distributed_type"))
    moved = [draft.source.get(f"accelerate.deepspeed_config.offload_{name}_device") == "cpu" for name in OFFLOADED]
    share = draft.source.get("args.vllm_gpu_memory_utilization")
    return DeviceRequest(
        learner=learner,
        nodes=max(int(draft.number_or("accelerate.num_machines", 1)), 1),
        strategy=f"zero{stage}" if stage in (1, 2, 3) else "fsdp2" if fsdp else "ddp",
        offload="all" if moved[0] else "optimizer" if moved[1] else "none",
        engine="vllm" if has_vllm else "",
        engines=range(learner, learner + split) if server else (),
        split=split,
        memory_share=float(share) if isinstance(share, int | float) else None,
        keys={
            "learner": ("accelerate.num_processes", "accelerate.num_machines"),
            "strategy": (*STAGES, "accelerate.distributed_type", "args.fsdp", "args.deepspeed"),
            "offload": tuple(f"accelerate.deepspeed_config.offload_{name}_device" for name in OFFLOADED),
            "engine": ("args.use_vllm", "args.vllm_mode"),
            "split": ("args.vllm_tensor_parallel_size",),
            "memory_share": ("args.vllm_gpu_memory_utilization",),
        },
    )


# ------------------------------------------------------------------------------------------------ optimizer and model


def betas(draft: Draft, key: str, value: Any) -> None:
    draft.set(key, value, "learner.betas", [number(draft, "adam_beta1"), number(draft, "adam_beta2")])


def schedule(draft: Draft, key: str, value: Any) -> None:
    choice("learner.decay", SCHEDULES, f"Write one of {', '.join(SCHEDULES)}.")(draft, key, word(value))


def lowest_rate(draft: Draft, key: str, value: Any) -> None:
    """`lr_scheduler_kwargs.min_lr` and `min_lr_rate`."""
    if key.endswith(("min_lr", "min_lr_rate")) and word(draft.known("args.lr_scheduler_type")) == "cosine_with_min_lr":
        num("learner.min_lr", lambda n: n if key.endswith("lr") else n * number(draft, "learning_rate"))(
            draft, key, value
        )
    else:
        draft.lose(key, value, "no such argument of a schedule here: learner.decay, learner.min_lr")


def warmup(draft: Draft, key: str, value: Any) -> None:
    """`warmup_steps`, in transformers 5 also a share below 1; `warmup_ratio` before."""
    if word(draft.known("args.lr_scheduler_type")) == "constant":
        draft.skip(key, value, "lr_scheduler_type=constant has no warm-up")
    elif not value or (key == "args.warmup_ratio" and number(draft, "warmup_steps")):
        draft.skip(key, value, "no warm-up, or that of warmup_steps")
    else:
        draft.set(key, value, "learner.warmup", value)


def optimizer(draft: Draft, key: str, value: Any) -> None:
    name = word(value)
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision"):
        draft.skip(key, value, "AdamW, as here")
    elif "adamw" in name:
        draft.lose(key, value, "AdamW with moments in float32; learner.offload=optimizer saves GPU memory")
    else:
        draft.refuse(key, value, "the optimizer here is AdamW. Write optim=adamw_torch.")


def precision(draft: Draft, key: str, value: Any) -> None:
    """`bf16`, `fp16` and the `dtype` of the model, which are read together."""
    names = ("args.model_init_kwargs.dtype", "args.model_init_kwargs.torch_dtype", "from_pretrained.dtype",
             "from_pretrained.torch_dtype")  # fmt: skip
    given = next((draft.source[name] for name in names if draft.source.get(name) is not None), "float32")
    loaded = DTYPES.get(str(given).rpartition(".")[2], "auto" if given == "auto" else "")
    half = draft.known("args.fp16") is True
    autocast = "float16" if half else "bfloat16" if draft.known("args.bf16") is not False else "float32"
    if not loaded:
        draft.refuse(key, value, f"{given} is no data type here. Write float32, bfloat16 or float16.")
    elif loaded == "bfloat16" and not (LORA(draft) or MODEL_LORA(draft)):
        draft.set(key, value, "model.dtype", "bfloat16")
        draft.set(key, value, "learner.master", "none", "weights in bfloat16 without a float32 copy, as there")
    else:
        draft.set(key, value, "model.dtype", autocast if loaded == "float32" else loaded)


def lora_alpha(draft: Draft, key: str, value: Any) -> None:
    at, _, name = key.rpartition(".")
    rank = draft.number_or(f"{at}.lora_r" if name == "lora_alpha" and at == "model_config" else f"{at}.r", 1)
    rooted = draft.known(f"{at}.use_rslora") is True
    why = "rank-stabilized: alpha is multiplied by the root of the rank" if rooted else ""
    draft.set(key, value, "model.lora.alpha", value * math.sqrt(rank) if rooted else value, why)


def layers(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.set(key, value, "model.lora.target", TARGETS, "peft's choice for Llama, Qwen, Mistral and Gemma")
    else:
        adapted_layers(draft, key, value)


def adapters(draft: Draft, key: str, value: Any) -> None:
    """The class of the adapters, or a call that makes them of `ModelConfig`."""
    known_classes, calls = ("LoraConfig", "get_peft_model", "BitsAndBytesConfig"), ("get_peft_config(", "get_quantiz")
    if str(value) in known_classes or str(value).startswith(calls):
        draft.skip(key, value, "adapters and quantization: model.lora, model.quantize")
    elif has_run_time_value(value):
        draft.refuse(key, value, "is only known when the script runs: write it into the script.")
    else:
        draft.refuse(key, value, "adapters here are LoRA's, and quantization is bitsandbytes'. Write LoraConfig(…).")


def four_bits(draft: Draft, key: str, value: Any) -> None:
    if value is True:
        draft.set(key, value, "model.quantize", "4bit")
    else:
        draft.skip(key, value, "off")


def model_name(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        draft.refuse(key, value, "names no model. Write it into the script, or give the command line in a second file.")
    elif VISION.search(str(value)):
        draft.refuse(key, value, "Arbor trains text models only. Write a text model.")
    else:
        text("model.name")(draft, key, value)


def model_class(draft: Draft, key: str, value: Any) -> None:
    if str(value).endswith(("ForCausalLM", "FastLanguageModel", "FastModel", "AutoPeftModelForCausalLM")):
        draft.skip(key, value, "a causal language model")
    else:
        draft.refuse(key, value, "Arbor trains causal language models of text. Write AutoModelForCausalLM.")


# ------------------------------------------------------------------------------------------------ algorithms


def algorithm(draft: Draft, key: str, value: Any) -> None:
    if value in ALGORITHMS:
        draft.set(key, value, "algorithm.name", ALGORITHMS[value])


def loss_type(draft: Draft, key: str, value: Any) -> None:
    if GRPO(draft):
        grpo_loss(draft, key, value)
    elif SFT(draft):
        usual = (None, "nll", "chunked_nll")
        (idle("the loss of a token is its negative log-probability") if value in usual else refuse(
            "the loss of SFT here is nll. Write loss_type='nll'."))(draft, key, value)  # fmt: skip
    elif KTO(draft):
        choice("algorithm.loss", {"kto": "kto"}, "Write kto.")(draft, key, value)
    else:
        names = value if isinstance(value, list) else [value]
        name = names[0] if len(names) == 1 else ", ".join(map(str, names))
        choice("algorithm.loss", {"sigmoid": "dpo", "ipo": "ipo"}, "Write sigmoid or ipo.")(draft, key, name)


def grpo_loss(draft: Draft, key: str, value: Any) -> None:
    """`loss_type` and `importance_sampling_level`."""
    name, by_sequence = str(draft.known("args.loss_type")), draft.known("args.importance_sampling_level") == "sequence"
    if name not in GRPO_LOSSES or (by_sequence and name in ("cispo", "sapo")):
        draft.refuse(key, value, f"there is no such loss here. Write one of {', '.join(GRPO_LOSSES)}, at token level.")
        return
    loss, aggregation = GRPO_LOSSES[name]
    draft.set(key, value, "algorithm.loss", "gspo" if by_sequence else loss)
    by_token = {"bnpo": "of each micro-batch", **dict.fromkeys(("dapo", "cispo"), "of the step, in equal parts")}
    is_same = name not in by_token or (name != "bnpo" and batch(draft)[1] == 1)
    why = "" if is_same else f"there the mean over tokens {by_token[name]}, here over those of a mini-batch"
    draft.set(key, value, "algorithm.aggregation", aggregation, why)
    if aggregation == "fixed":
        draft.set(key, value, "algorithm.args.fixed_length", int(number(draft, "max_completion_length")))


def clip(draft: Draft, key: str, value: Any) -> None:
    """`epsilon` and `epsilon_high`, which is `epsilon` if it is not given."""
    name, high = draft.known("args.loss_type"), number(draft, "epsilon_high") or number(draft, "epsilon")
    if value is None or name == "sapo":
        draft.skip(key, value, "null, or a loss that does not clip")
    elif name != "cispo":
        draft.set(key, value, "algorithm.clip_low", min(number(draft, "epsilon"), 1 - 1e-6))
        draft.set(key, value, "algorithm.clip_high", high)
    elif high <= 1:
        draft.refuse(key, value, "with loss_type=cispo it is the largest ratio. Write epsilon_high above 1, as 5.0.")
    else:
        draft.set(key, value, "algorithm.clip_high", high - 1)


def two_sided(draft: Draft, key: str, value: Any) -> None:
    is_ppo = GRPO_LOSSES.get(str(draft.known("args.loss_type")), ("",))[0] == "ppo"
    if value is not None and is_ppo and draft.known("args.importance_sampling_level") != "sequence":
        draft.set(key, value, "algorithm.args.dual_clip", value)
    else:
        draft.skip(key, value, "null, or not read with this loss")


def penalty(draft: Draft, key: str, value: Any) -> None:
    """`beta`: of the KL penalty; of the losses of pairs and labels."""
    if not GRPO(draft):
        num("algorithm.args.beta")(draft, key, value)
        return
    num("algorithm.kl.coef")(draft, key, value)
    bias = "args.use_bias_correction_kl"
    if value and bias not in draft.source:
        why = "the KL penalty is not multiplied by the ratio"
        draft.lines.append(KeyReport("lost", bias, True, why=why, explicit=False))


def prompt_length(draft: Draft, key: str, value: Any) -> None:
    """Of TRL before version 1."""
    if not GRPO(draft):
        draft.lose(key, value, "the whole row has a limit: sampling.max_context")
    elif value is None:
        draft.skip(key, value, "no limit; see sampling.max_context")
    else:
        draft.set(key, value, "data.max_prompt_tokens", value)
        draft.set(
            key, value, "data.overlong", "cut", "the longest message loses its end, there the prompt its beginning"
        )


def completion_length(draft: Draft, key: str, value: Any) -> None:
    if not isinstance(value, int):
        draft.refuse(key, value, "a completion has a limit here. Write a number of tokens.")
        return
    draft.set(key, value, "sampling.max_tokens", value)
    room = number(draft, "max_prompt_length") or PROMPT_ROOM
    if number(draft, "vllm_max_model_length") <= value:
        why = "" if number(draft, "max_prompt_length") else f"prompts have no limit there; here {room} tokens"
        draft.set(key, value, "sampling.max_context", value + int(room), why)


def row_length(draft: Draft, key: str, value: Any) -> None:
    """`max_length` of a row; `max_seq_length` in older versions."""
    if value is None:
        draft.set(key, value, "sampling.max_context", NO_LIMIT, f"no limit there; here {NO_LIMIT} tokens")
    else:
        num("sampling.max_context")(draft, key, value)
    draft.set(key, value, "data.overlong", "cut")


def truncated(rule: Rule) -> Rule:
    """Sampling from a part of the distribution."""

    def changed(draft: Draft, key: str, value: Any) -> None:
        if not value or value == 1.0:
            rule(draft, key, 0 if value is None else value)
            return
        rule(draft, key, value)
        why = "log-probabilities are of the tokens that can be sampled, there of all tokens"
        draft.lines = [replace(one, kind="changed", why=why) if one in draft.mapped and one.key == key else one
                       for one in draft.lines]  # fmt: skip

    return changed


def correction(draft: Draft, key: str, value: Any) -> None:
    """`vllm_importance_sampling_*`, which are read together."""
    at, mode = "algorithm.importance_weights.", str(draft.known("args.vllm_importance_sampling_mode"))
    if draft.known("args.vllm_importance_sampling_correction") is False or not VLLM(draft):
        draft.skip(key, value, "no importance weights, or the engine shares the learner's weights")
        return
    cap = draft.known("args.vllm_importance_sampling_cap")
    high = draft.known("args.vllm_importance_sampling_clip_max") if cap is None else cap
    low = draft.known("args.vllm_importance_sampling_clip_min")
    draft.set(key, value, f"{at}kind", "tis" if mode.endswith("truncate") else "mis")
    draft.set(key, value, f"{at}high", 1e9 if high is None else high)
    if mode.startswith("sequence"):
        draft.set(
            key, value, f"{at}level", "sequence", "the geometric mean of a sequence's ratios, there their product"
        )
    if low is not None and mode.endswith("mask"):
        draft.set(key, value, f"{at}low", low)
    elif low is not None:
        draft.lose("args.vllm_importance_sampling_clip_min", low, "weights are bounded from above only")


def objectives(draft: Draft, key: str, value: Any) -> None:
    if value == "normalize_then_sum":
        draft.set(key, value, "algorithm.advantage", "gdpo")
        draft.set(key, value, "algorithm.whiten", True)
    else:
        draft.skip(key, value, "rewards are added before they are compared, as here")


def chat_argument(draft: Draft, key: str, value: Any) -> None:
    draft.set(key, value, f"model.chat_args.{key.removeprefix('args.chat_template_kwargs.')}", value)


def scaled(draft: Draft, key: str, value: Any) -> None:
    ways = {"True": "group", "False": "none", "group": "group", "batch": "batch", "none": "none"}
    if draft.known("args.multi_objective_aggregation") == "normalize_then_sum":
        draft.skip(key, value, "not read with multi_objective_aggregation=normalize_then_sum")
    else:
        choice("algorithm.std", ways, "Write group, batch or none.")(draft, key, value)


# ------------------------------------------------------------------------------------------------ names and trackers


def output(draft: Draft, key: str, value: Any) -> None:
    if value is None or isinstance(value, RunTimeValue):
        draft.skip(key, value, "only known when the script runs; a run is in runs/NAME-001")
    else:
        draft.set(key, value, "output_dir", str(value))


def run_name(draft: Draft, key: str, value: Any) -> None:
    name = "" if value is None or isinstance(value, RunTimeValue) else folder_name(str(value))
    if name:
        draft.set(key, value, "name", name)
    else:
        draft.skip(key, value, "only known when the script runs; a run is called after its file")


def trackers(draft: Draft, key: str, value: Any) -> None:
    names = [value] if isinstance(value, str) else list(value or [])
    run = draft.source.get("args.run_name")
    called = {"name": run} if isinstance(run, str) and not isinstance(run, RunTimeValue) else {}
    project = draft.source.get("args.project")
    is_written = isinstance(project, str) and not isinstance(project, RunTimeValue)
    args: dict[str, dict[str, Any]] = {"wandb": {"project": project if is_written else "huggingface"},
            "mlflow": {"uri": "sqlite:///mlruns.db", "experiment": "huggingface"}}  # fmt: skip
    if ours := [{"name": name, "args": args[name] | called} for name in args if name in names]:
        draft.set(key, value, "track.trackers", ours, "the project is that of the environment there")
    for other in names:
        if other in ("none", "tensorboard"):
            draft.skip(key, other, "TensorBoard files are always written")
        elif other not in args:
            draft.lose(key, other, "no such tracker here; yours can be named as track.trackers=[package.module:Class]")
