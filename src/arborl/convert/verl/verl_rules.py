"""What becomes of verl's keys that are not simply another name: rows, lengths, batches, schedules, the run itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from arborl.convert.draft import Draft, Rule, names
from arborl.convert.verl.verl_defaults import A, M, R, known, number

DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "half": "float16",
    "float32": "float32", "fp32": "float32",
}  # fmt: skip
UNSEEN = re.compile(r"\$\([^()]*\)|`[^`]*`|\$\{?\w+\}?")
"""What a script only learns by running."""


def num(path: str, change: Callable[[Any], Any] | None = None, why: str = "") -> Rule:
    """A number, ours at `path`. One that the script only learns when it runs is refused: it cannot be guessed."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None:
            draft.skip(key, value, "null, which leaves it at verl's default")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            draft.refuse(key, value, "not a number that can be read without running the script. Write it there.")
        else:
            draft.set(key, value, path, change(value) if change else value, why)

    return rule


def text(path: str, why: str = "") -> Rule:
    """A path or a name, ours at `path`."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if value is None:
            draft.skip(key, value, "null: not given")
            return
        unseen = UNSEEN.search(str(value))
        reason = f"{unseen[0]} is only known when the script runs: write it yourself" if unseen else why
        draft.set(key, value, path, str(value), reason)

    return rule


def choice(path: str, table: Mapping[str, Any], remedy: str) -> Rule:
    """One of several; another is refused, because nothing else would do the same."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if str(value) not in table:
            draft.refuse(key, value, f"there is no {value!r} here. {remedy}")
        else:
            draft.set(key, value, path, table[str(value)])

    return rule


def unless(usual: Any, why: str) -> Rule:
    """Nothing to do at its usual value; at another, something that Arbor does not do."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        same = value in usual if isinstance(usual, tuple) else value == usual
        if same or value is None:
            draft.skip(key, value, "as it is here anyway")
        else:
            draft.drop(key, value, why)

    return rule


# ------------------------------------------------------------------------------------------------ rows and lengths


def files(path: str) -> Rule:
    """A file or several, which are read as one."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        paths = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        if value in (None, [], ""):
            draft.skip(key, value, "no file given")
            return
        unseen = UNSEEN.search(" ".join(paths))
        why = f"{unseen[0]} is only known when the script runs: write it yourself" if unseen else ""
        draft.set(key, value, path, paths[0] if len(paths) == 1 else paths, why)

    return rule


def prompt_key(draft: Draft, key: str, value: Any) -> None:
    if value in (None, "prompt"):
        draft.skip(key, value, "the column `prompt` is read anyway")
    else:
        draft.set(key, value, "data.question", str(value))


def context(draft: Draft) -> int:
    """Tokens of a prompt and all that follows. verl bounds both; an agent that edits its context has one window."""
    prompt = draft.source.get(f"{R}prompt_length") or number(draft, "data.max_prompt_length", 512)
    answer = draft.source.get(f"{R}response_length") or number(draft, "data.max_response_length", 512)
    total = int(prompt) + int(answer)
    window = draft.source.get(f"{R}max_model_len")
    if not isinstance(window, int):
        return total
    return window if f"{R}multi_turn.single_turn_max_tokens" in draft.source else min(window, total)


def answer_length(draft: Draft, key: str, value: Any) -> None:
    """Tokens of a call. verl's are those of all calls and tools together; the context bounds these here."""
    if not isinstance(value, int):
        num("sampling.max_tokens")(draft, key, value)
        return
    if key.startswith("data.") and f"{R}response_length" in draft.source:
        draft.skip(key, value, "rollout.response_length is read in its place")
        return
    if f"{R}multi_turn.single_turn_max_tokens" not in draft.source:
        several = known(draft, f"{R}multi_turn.enable") is True
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
    dropped = known(draft, "data.filter_overlong_prompts")
    cut = known(draft, "data.truncation")
    if dropped:
        draft.set(key, value, "data.overlong", "drop")
    elif cut == "error":
        draft.set(key, value, "data.overlong", "refuse")
    else:
        draft.set(key, value, "data.overlong", "cut", f"there {cut} tokens go, here the end of the longest message")


def validation_rows(draft: Draft, key: str, value: Any) -> None:
    most = value if isinstance(value, int) and value > 0 else 10_000
    draft.set(key, value, "evaluation.tasks", most)


# ------------------------------------------------------------------------------------------------ batches and rates


def steps_of_an_update(draft: Draft) -> int:
    """Optimiser steps of one training step."""
    tasks = number(draft, "data.train_batch_size", 1024)
    minibatch = number(draft, f"{A}ppo_mini_batch_size", 256)
    return max(math.ceil(tasks / max(minibatch, 1)), 1) * int(number(draft, f"{A}ppo_epochs", 1))


def minibatch(draft: Draft, key: str, value: Any) -> None:
    tasks = number(draft, "data.train_batch_size", 1024)
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
    times = steps_of_an_update(draft)
    if isinstance(value, int | float) and value > 0:
        why = f"counted in optimiser steps, of which a training step has {times}" if times > 1 else ""
        draft.set(key, value, "learner.warmup", int(value) * times, why)
    else:
        draft.skip(key, value, "no number of steps: lr_warmup_steps_ratio is read")


def warmup_share(draft: Draft, key: str, value: Any) -> None:
    if number(draft, f"{A}optim.lr_warmup_steps", -1) > 0:
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
    decays = known(draft, f"{A}optim.warmup_style") or known(draft, f"{A}optim.lr_scheduler_type")
    if decays != "cosine" or not value:
        draft.skip(key, value, "read with lr_scheduler_type=cosine, and above 0, only")
    else:
        draft.set(key, value, "learner.min_lr", value * number(draft, f"{A}optim.lr", 1e-6))


def betas(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int | float) for one in value):
        draft.set(key, value, "learner.betas", list(value))
    else:
        draft.refuse(key, value, "not two numbers. Write [0.9, 0.999].")


def micro_tokens(draft: Draft, key: str, value: Any) -> None:
    if known(draft, f"{A}use_dynamic_bsz"):
        num("learner.micro_batch_tokens")(draft, key, value)
    else:
        draft.skip(key, value, "read with use_dynamic_bsz only; it changes memory, and no result")


def weights_kept(draft: Draft, key: str, value: Any) -> None:
    """In what precision the optimiser has the weights."""
    ours = DTYPES.get(str(value))
    if ours is None:
        choice("learner.master", {}, "Write fp32 or bf16.")(draft, key, value)
    else:
        draft.set(key, value, "learner.master", "float32" if ours == "float32" else "none")


# ------------------------------------------------------------------------------------------------ the run


def length_of_the_run(draft: Draft, key: str, value: Any) -> None:
    """`total_training_steps`, and `total_epochs` where that is not given."""
    steps = draft.source.get("trainer.total_training_steps")
    if key == "trainer.total_training_steps":
        to_steps = num("trainer.steps")
        to_steps(draft, key, value)
    elif isinstance(steps, int):
        draft.skip(key, value, "total_training_steps says how long to train")
    else:
        num("trainer.epochs")(draft, key, value)


def evaluation(draft: Draft, key: str, value: Any) -> None:
    """`val_kwargs.temperature` and `do_sample`."""
    sampled = known(draft, f"{R}val_kwargs.do_sample")
    draft.set(
        key, value, "evaluation.sampling.temperature", number(draft, f"{R}val_kwargs.temperature") if sampled else 0.0
    )
    draft.set(key, value, "evaluation.greedy", False)


def named(draft: Draft, key: str, value: Any) -> None:
    shown = re.sub(r"[^\w.-]+", "-", UNSEEN.sub("", str(value))).strip("-._")
    if not shown:
        draft.skip(key, value, "only known when the script runs; a run is called after its file")
        return
    why = "what is only known when the script runs is left out" if UNSEEN.search(str(value)) else ""
    draft.set(key, value, "name", shown, why)


def folder(draft: Draft, key: str, value: Any) -> None:
    if value is None or UNSEEN.search(str(value)):
        draft.skip(key, value, "only known when the script runs; a run lies in runs/NAME-001")
    else:
        draft.set(key, value, "output_dir", str(value))


def loggers(draft: Draft, key: str, value: Any) -> None:
    trackers = names(value)
    draft.set(key, value, "track.tensorboard", "tensorboard" in trackers)
    project, run = (_bare(draft, f"trainer.{name}_name") for name in ("project", "experiment"))
    called = {"name": run} if run else {}
    ours: list[dict[str, Any]] = []
    if "wandb" in trackers:
        ours.append({"name": "wandb", "args": {"project": project or "verl_examples"} | called})
    if "mlflow" in trackers:  # the address is that of MLFLOW_TRACKING_URI there
        place = {"uri": "sqlite:////tmp/mlruns.db", "experiment": project or "verl_examples"}
        ours.append({"name": "mlflow", "args": place | called})
    if ours:
        why = "the address of MLflow is what MLFLOW_TRACKING_URI says there" if "mlflow" in trackers else ""
        draft.set(key, value, "track.trackers", ours, why)
    for other in trackers:
        if other not in ("console", "tensorboard", "wandb", "mlflow", "file"):
            draft.drop(key, other, "no such tracker here; yours can be named as track.trackers=[package.module:Class]")


def _bare(draft: Draft, key: str) -> str:
    return UNSEEN.sub("", str(draft.source.get(key) or "")).strip("-_. ")


def keep(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, int) and value > 0:
        draft.set(key, value, "trainer.keep", value)
    else:
        draft.skip(key, value, "all checkpoints there, the last two here: trainer.keep")


# ------------------------------------------------------------------------------------------------ the model


def if_set(rule: Rule) -> Rule:
    """A key that counts where it is not null."""

    def checked(draft: Draft, key: str, value: Any) -> None:
        if value is None:
            draft.skip(key, value, "null: not given")
        else:
            rule(draft, key, value)

    return checked


def adapters(draft: Draft, key: str, value: Any) -> None:
    if_set(text("model.name", "a folder of adapters knows its base, and they go on being trained"))(draft, key, value)


def with_adapters(path: str) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        if number(draft, f"{M}lora_rank"):
            num(path)(draft, key, value)
        else:
            draft.skip(key, value, "read with a lora_rank above 0 only")

    return rule


def adapted_layers(draft: Draft, key: str, value: Any) -> None:
    if not number(draft, f"{M}lora_rank"):
        draft.skip(key, value, "read with a lora_rank above 0 only")
    elif isinstance(value, str) and value != "all-linear" and re.search(r"[\\^$.*+?|()]", value):
        draft.drop(key, value, "a pattern; name the layers in model.lora.target, all-linear else")
    else:
        draft.set(key, value, "model.lora.target", names(value))


def precision(draft: Draft, key: str, value: Any) -> None:
    choice("model.dtype", DTYPES, "Write bfloat16, float16 or float32.")(draft, key, value)


def chat_args(draft: Draft, key: str, value: Any) -> None:
    """Of the chat template: `enable_thinking`."""
    draft.set(key, value, f"model.chat_args.{key.removeprefix('data.apply_chat_template_kwargs.')}", value)


def clip_grad(draft: Draft, key: str, value: Any) -> None:
    """Megatron's name for `grad_clip`."""
    if f"{A}grad_clip" in draft.source:
        draft.skip(key, value, "actor.grad_clip is read in its place")
    else:
        num("learner.max_grad_norm")(draft, key, value)


def only_validation(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.refuse(key, value, "this trains nothing. Write: arborl evaluate RUN")
    else:
        draft.skip(key, value, "it trains")


def dump_folder(draft: Draft, key: str, value: Any) -> None:
    if UNSEEN.search(str(value)):
        draft.skip(key, value, "only known when the script runs; they go to the folder `trajectories`")
    else:
        draft.set(key, value, "agent.args.dump_trajectories_dir", str(value))
