"""TRL's GRPOTrainer on a recipe of one question and one answer: the recipe's own tasks, prompts, rewards and samples.

    python benchmarks/real_model_trl.py smollm2-sums/plain --seed 0 --out runs/real-model-trl
    python benchmarks/real_model_trl.py smollm2-sums/plain --model RUN/checkpoints/step-000060/model

The tasks of each step are those that `arborl train` would take with the same seed, rewards are the environment's, and
the number of steps, tasks a step, episodes a task, the learning rate and its schedule are the recipe's. Demonstrations
of the recipe are left out: give `--model` to begin from a checkpoint that has imitated them. The model's weights are
float32 and computed with in bfloat16 on a GPU (`arborl train` keeps float32 copies of bfloat16 weights). The trained
model is written to `OUT/model` and measured by `arborl`'s own evaluation. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
import transformers as hf
from trl import GRPOConfig, GRPOTrainer

from arborl import training_run
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.data import open_source
from arborl.envs import ENVS
from arborl.envs.env import Env
from arborl.envs.prompt_wrapper import wrap_with_prompt
from arborl.learner.core.optimizer import default_lr
from arborl.models.model_files import resolve
from arborl.types import Message, Task

ROOT = Path(__file__).parents[1]


class Problems:
    """The tasks of a recipe whose episodes are one question and one answer."""

    def __init__(self, config: RunConfig):
        if config.data.has_rows or config.data.sources or [reward.name for reward in config.rewards] != ["env"]:
            raise SystemExit("TRL's side takes recipes of one environment that makes its tasks and judges them itself.")
        self.config = config
        self.source = open_source(config.data, config.env.name, config.seed)

    def env(self) -> Env:
        env = ENVS.build(self.config.env.name, self.config.env.args, "env.args")
        return wrap_with_prompt(env, self.config.env.prompt, self.config.agent.system)

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """Prompts in the order in which they are trained on, each with the task that it belongs to."""
        tasks = [task for step in range(steps) for task in self.source.take(step, self.config.rollout.tasks_per_step)]
        return [{"prompt": self.prompt(task), "task": json.dumps(asdict(task), default=str)} for task in tasks]

    def prompt(self, task: Task) -> list[dict[str, str]]:
        opening = asyncio.run(_opened(self.env(), task))
        return [{"role": message.role, "content": message.content} for message in opening]

    def reward(self, task: str, reply: str) -> float:
        """What the environment gives for a reply."""
        known = json.loads(task)
        return asyncio.run(_answered(self.env(), Task(known["id"], seed=known["seed"], fields=known["fields"]), reply))


async def _opened(env: Env, task: Task) -> tuple[Message, ...]:
    return (await env.reset(task, task.seed)).messages


async def _answered(env: Env, task: Task, reply: str) -> float:
    await env.reset(task, task.seed)
    return (await env.step(Message("assistant", reply))).reward


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


class Tokens(hf.TrainerCallback):
    """How many tokens were sampled, as TRL logs their mean length."""

    def __init__(self, episodes: int):
        self.episodes, self.sampled, self.curve = episodes, 0.0, list[list[float]]()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "completions/mean_length" in logs:
            self.sampled += logs["completions/mean_length"] * self.episodes
            self.curve.append([state.global_step, round(logs["reward"], 4)])


def settings_of(config: RunConfig, steps: int, size: int, model: hf.PreTrainedModel, folder: Path) -> GRPOConfig:
    """The recipe's settings in TRL's words."""
    asked, episodes = config.learner, config.rollout.tasks_per_step * config.rollout.group_size
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(folder), use_cpu=not cuda, bf16=cuda, max_steps=steps, seed=config.seed,
        per_device_train_batch_size=size, gradient_accumulation_steps=episodes // size,
        steps_per_generation=episodes // size, num_generations=config.rollout.group_size,
        max_completion_length=config.sampling.max_tokens, temperature=config.sampling.temperature, top_p=1.0, top_k=0,
        beta=0.0, num_iterations=1, loss_type="grpo", scale_rewards="group", epsilon=config.algorithm.clip_low,
        learning_rate=asked.lr or asked.lr_scale * default_lr(model.num_parameters()),
        lr_scheduler_type="linear", warmup_steps=asked.warmup, max_grad_norm=asked.max_grad_norm,
        adam_beta1=asked.betas[0], adam_beta2=asked.betas[1], weight_decay=asked.weight_decay,
        gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True, logging_steps=1,
        save_strategy="no", report_to="none",
    )  # fmt: skip


def train(config: RunConfig, model_name: str, steps: int, size: int, out: Path) -> dict[str, Any]:
    """Train with TRL and write the model to `out/model`; what it took."""
    folder, problems = resolve(model_name), Problems(config)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    counted = Tokens(episodes)

    def judge(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        return [problems.reward(one, text_of(said)) for one, said in zip(task, completions, strict=True)]

    trainer = GRPOTrainer(
        model, judge, settings_of(config, steps, size, model, out / "trl"),
        datasets.Dataset.from_list(problems.rows(steps)),
        processing_class=hf.AutoTokenizer.from_pretrained(folder), callbacks=[counted],
    )  # fmt: skip
    trainer.remove_callback(hf.PrinterCallback)
    began = time.perf_counter()
    trainer.train()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    trainer.model.save_pretrained(out / "model")
    trainer.processing_class.save_pretrained(out / "model")
    return {
        "train_s": round(seconds, 1), "steps": steps, "episodes": steps * episodes,
        "sampled_tokens": int(counted.sampled), "curve": counted.curve,
    }  # fmt: skip


def measured(recipe: Path, model: str, settings: list[str]) -> dict[str, Any]:
    """Held-out success of a model with the recipe's prompts, sampled and greedy, with 95 % intervals."""
    found: dict[str, Any] = {}
    for played in training_run.measure([str(recipe)], training_run.MeasureOptions([*settings, f"model.name={model}"])):
        metrics = played.metrics
        found[played.decoding] = [round(metrics[name], 4) for name in ("success", "success_low", "success_high")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a folder of recipes/, or FOLDER/FILE")
    parser.add_argument("--model", help="in place of the recipe's: a name or a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates; without it, those of the recipe that play episodes")
    parser.add_argument("--micro-batch", type=int, default=128, help="sequences that go through the model at once")
    parser.add_argument("--out", type=Path, default=Path("runs/real-model-trl"))
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings of the recipe")
    args = parser.parse_args()
    path = ROOT / "recipes" / args.recipe
    recipe = path / "run.yaml" if path.is_dir() else path.with_suffix(".yaml")
    settings = [*args.set, f"seed={args.seed}"]
    config = load(recipe, settings)
    steps = args.steps or (config.trainer.steps or 30) - config.demonstrations.steps
    size = min(args.micro_batch, config.rollout.tasks_per_step * config.rollout.group_size)
    model = args.model or config.model.name
    before = measured(recipe, model, settings)
    row = train(config, model, steps, size, args.out)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    about = {"recipe": args.recipe, "seed": args.seed, "trl": version("trl"), "device": device, "micro_batch": size}
    print(json.dumps(about | row | {"before": before, "after": measured(recipe, str(args.out / "model"), settings)}))


if __name__ == "__main__":
    sys.exit(main())
