"""TRL's side of `step.py`: its own trainer, and its own loop over tool calls."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers as hf
from step_work import (
    RATE,
    Body,
    Case,
    Lake,
    Timing,
    fastest,
    lake_seeds,
    now,
    peak_gib,
    prompts_of,
    reward_of,
    synchronize,
)
from texts import Texts
from trl import GRPOConfig, GRPOTrainer

from arborl.types import Message, Task

# ------------------------------------------------------------------------------------------------ TRL's

EVERY_REPLY_IS_A_CALL = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?=[\s\S])",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "move", "arguments": {"text": "{content}"}}},
        },
        "content": {"content": "text"},
    },
}


class Counted(GRPOTrainer):
    """Counts what it reads and samples, and for how long."""

    read = sampled = 0
    generating = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generating += time.perf_counter() - began
        wrong = {len(ids) for ids in completion_ids} - {self.args.generation_kwargs["max_new_tokens"]}
        if wrong:
            raise RuntimeError(f"replies of {sorted(wrong)} tokens, which were not asked for")
        sampled = sum(map(len, completion_ids))
        self.sampled += sampled
        self.read += sum(map(len, prompt_ids)) + sampled - len(completion_ids)  # the last one is not read
        return completion_ids, logprobs


class Watch(hf.TrainerCallback):
    """Times each step, from its first micro-batch to after the optimiser's step."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self.trainer: Counted | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        synchronize(self.trainer.model)
        self.trainer.read, self.trainer.sampled, self.trainer.generating = 0, 0, 0.0
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        assert trainer is not None
        synchronize(trainer.model)
        seconds = time.perf_counter() - self.began
        self.timings.append(Timing(seconds, trainer.generating, trainer.sampled, trainer.read))


class LakeTool:
    """A lake as TRL plays it."""

    def __init__(self, turns: int):
        self._env = Lake(turns)

    def reset(self, **row: Any) -> None:
        now(self._env.reset(Task("lake", seed=row["seed"]), row["seed"]))

    def move(self, text: str):  # type: ignore[no-untyped-def]  # TRL would tell the model of the type
        """Say something to the lake.

        Args:
            text: What to say.
        """
        return now(self._env.step(Message("assistant", text))).observation.messages[-1].content


def scores(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def words(vocabulary: int) -> hf.PreTrainedTokenizerFast:
    """Token 7 is the word `w7`; the end token is one the model cannot say."""
    known = {f"w{number}": number for number in range(vocabulary)} | {"<end>": vocabulary}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="w0", unk_token="w0")


def lake_tokenizer(body: Body) -> hf.PreTrainedTokenizerFast:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = hf.AutoTokenizer.from_pretrained(body.tokenizer_folder(Path(folder)))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.response_template = EVERY_REPLY_IS_A_CALL
    return tokenizer


def rows_of(case: Case, steps: int, texts: Texts) -> list[dict[str, Any]]:
    if case.turns == 1:
        prompts = [prompt for step in range(steps) for prompt in prompts_of(case, texts, step)]
        return [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
    rows = []
    for seed in (seed for step in range(steps) for seed in lake_seeds(case, step)):
        opening = now(Lake(case.turns).reset(Task("lake", seed=seed), seed))
        rows.append({"prompt": [{"role": m.role, "content": m.content} for m in opening.messages], "seed": seed})
    return rows


def adapters(body: Body) -> Any:
    """As ours has them, in TRL's own way."""
    if not body.lora:
        return None
    import peft

    return peft.LoraConfig(r=body.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def trl_steps(case: Case, body: Body, repeats: int, size: int, folder: str) -> list[Timing]:
    """Timings of TRL's steps with micro-batches of `size` sequences, the warm-up first."""
    model = body.make(case)
    cpu = model.device.type == "cpu"
    parts = case.episodes // size
    settings = GRPOConfig(
        output_dir=folder, use_cpu=cpu, bf16=model.dtype == torch.bfloat16, max_steps=repeats + 1,
        per_device_train_batch_size=size, gradient_accumulation_steps=parts, steps_per_generation=parts,
        num_generations=case.group, max_completion_length=case.context or case.sampled,
        generation_kwargs={"max_new_tokens": case.sampled}, max_tool_calling_iterations=case.turns - 1,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=RATE,
        lr_scheduler_type="constant", gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True,
        logging_strategy="no", save_strategy="no", report_to="none",
    )  # fmt: skip
    watch = Watch()
    vocabulary = model.config.vocab_size
    tokenizer = words(vocabulary) if case.turns == 1 else lake_tokenizer(body)
    rows = rows_of(case, repeats + 1, body.texts(vocabulary))
    trainer = watch.trainer = Counted(
        model, scores, settings, datasets.Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[watch], peft_config=adapters(body),
        environment_factory=(lambda: LakeTool(case.turns)) if case.turns > 1 else None,
    )  # fmt: skip
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    watch.trainer = None
    return watch.timings


def measure_trl(case: Case, body: Body, repeats: int) -> tuple[Timing, dict[str, Any]]:
    """The best micro-batch's best step."""
    tried: dict[int, float | str] = {}
    found: list[tuple[Timing, float, float]] = []
    for size in case.tried:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                timings = trl_steps(case, body, repeats, size, folder)
                timing = fastest(timings)
                tried[size] = round(timing.seconds, 4)
                found.append((timing, round(timings[0].seconds, 2), peak_gib(case.device)))
            except torch.OutOfMemoryError:
                tried[size] = "out of memory"
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not found:
        raise RuntimeError(f"{case.name}: no micro-batch of {case.tried} fits into the GPU's memory")
    timing, first, peak = min(found, key=lambda one: one[0].seconds)
    return timing, {"baseline_tried": tried, "baseline_first_step_s": first, "baseline_peak_gib": peak}
