"""TRL's part of `step.py`: its trainer and its tool-call loop."""

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
    LEARNING_RATE,
    Case,
    FixedLengthLake,
    ModelSpec,
    Timing,
    fastest,
    id_reward,
    lake_seeds,
    make_prompts,
    peak_gib,
    run_synchronously,
    synchronize,
)
from texts import Texts
from trl import GRPOConfig, GRPOTrainer

from arborl.types import Message, Task

EVERY_REPLY_IS_A_TOOL_CALL = {
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


class CountingGRPOTrainer(GRPOTrainer):
    """Counts prefilled and sampled tokens and the time of generation."""

    read = sampled = 0
    generating = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generating += time.perf_counter() - began
        wrong = {len(ids) for ids in completion_ids} - {self.args.generation_kwargs["max_new_tokens"]}
        if wrong:
            raise RuntimeError(f"replies of {sorted(wrong)} tokens, a length that was not requested")
        sampled = sum(map(len, completion_ids))
        self.sampled += sampled
        self.read += (
            sum(map(len, prompt_ids)) + sampled - len(completion_ids)
        )  # the last token of a reply is not an input
        return completion_ids, logprobs


class StepTimer(hf.TrainerCallback):
    """Measures each step, from its first micro-batch to the end of the optimizer step."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self.trainer: CountingGRPOTrainer | None = None

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
    """FrozenLake in the form of TRL's tool environments."""

    def __init__(self, turns: int):
        self._env = FixedLengthLake(turns)

    def reset(self, **row: Any) -> None:
        run_synchronously(self._env.reset(Task("lake", seed=row["seed"]), row["seed"]))

    def move(self, text: str):  # type: ignore[no-untyped-def]  # TRL would add the type to the prompt
        """Say something to the lake.

        Args:
            text: What to say.
        """
        return run_synchronously(self._env.step(Message("assistant", text))).observation.messages[-1].content


def id_rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [id_reward(ids) for ids in completion_ids]


def word_tokenizer(vocabulary: int) -> hf.PreTrainedTokenizerFast:
    """A tokenizer whose token 7 is the word `w7`; the model cannot sample its end token."""
    vocab = {f"w{number}": number for number in range(vocabulary)} | {"<end>": vocabulary}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="w0", unk_token="w0")


def lake_tokenizer(model_spec: ModelSpec) -> hf.PreTrainedTokenizerFast:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = hf.AutoTokenizer.from_pretrained(model_spec.tokenizer_folder(Path(folder)))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.response_template = EVERY_REPLY_IS_A_TOOL_CALL
    return tokenizer


def dataset_rows(case: Case, steps: int, texts: Texts) -> list[dict[str, Any]]:
    if case.turns == 1:
        prompts = [prompt for step in range(steps) for prompt in make_prompts(case, texts, step)]
        return [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
    rows = []
    for seed in (seed for step in range(steps) for seed in lake_seeds(case, step)):
        observation = run_synchronously(FixedLengthLake(case.turns).reset(Task("lake", seed=seed), seed))
        rows.append({"prompt": [{"role": m.role, "content": m.content} for m in observation.messages], "seed": seed})
    return rows


def adapter_config(model_spec: ModelSpec) -> Any:
    """The adapters of Arbor as peft's configuration."""
    if not model_spec.lora:
        return None
    import peft

    return peft.LoraConfig(r=model_spec.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def trl_steps(case: Case, model_spec: ModelSpec, repeats: int, size: int, folder: str) -> list[Timing]:
    """Timings of TRL's steps with micro-batches of `size` sequences, including the warm-up step."""
    model = model_spec.load(case)
    cpu = model.device.type == "cpu"
    num_micro_batches = case.episodes // size
    settings = GRPOConfig(
        output_dir=folder, use_cpu=cpu, bf16=model.dtype == torch.bfloat16, max_steps=repeats + 1,
        per_device_train_batch_size=size, gradient_accumulation_steps=num_micro_batches,
        steps_per_generation=num_micro_batches, num_generations=case.group,
        max_completion_length=case.context or case.sampled, generation_kwargs={"max_new_tokens": case.sampled},
        max_tool_calling_iterations=case.turns - 1,
        temperature=1.0, top_p=case.top_p, top_k=0, beta=0.0, num_iterations=1, loss_type="grpo",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", gradient_checkpointing=False, shuffle_dataset=False,
        disable_tqdm=True, logging_strategy="no", save_strategy="no", report_to="none",
    )  # fmt: skip
    timer = StepTimer()
    vocabulary = model.config.vocab_size
    tokenizer = word_tokenizer(vocabulary) if case.turns == 1 else lake_tokenizer(model_spec)
    rows = dataset_rows(case, repeats + 1, model_spec.texts(vocabulary))
    trainer = timer.trainer = CountingGRPOTrainer(
        model, id_rewards, settings, datasets.Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[timer], peft_config=adapter_config(model_spec),
        environment_factory=(lambda: LakeTool(case.turns)) if case.turns > 1 else None,
    )  # fmt: skip
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    timer.trainer = None
    return timer.timings


def measure_trl(case: Case, model_spec: ModelSpec, repeats: int) -> tuple[Timing, dict[str, Any]]:
    """The fastest step of the best micro-batch size."""
    seconds_by_size: dict[int, float | str] = {}
    found: list[tuple[Timing, float, float]] = []
    for size in case.tried:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                timings = trl_steps(case, model_spec, repeats, size, folder)
                timing = fastest(timings)
                seconds_by_size[size] = round(timing.seconds, 4)
                found.append((timing, round(timings[0].seconds, 2), peak_gib(case.device)))
            except torch.OutOfMemoryError:
                seconds_by_size[size] = "out of memory"
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not found:
        raise RuntimeError(f"{case.name}: no micro-batch of {case.tried} fits into the GPU's memory")
    timing, first, peak = min(found, key=lambda one: one[0].seconds)
    return timing, {"baseline_tried": seconds_by_size, "baseline_first_step_s": first, "baseline_peak_gib": peak}
