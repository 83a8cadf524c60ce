"""TRL's GRPOTrainer on the tasks, prompts and rewards of a single-turn recipe.

    python benchmarks/real_model_trl.py smollm2-sums/plain --seed 0 --out runs/real-model-trl
    python benchmarks/real_model_trl.py smollm2-sums/plain --model RUN/checkpoints/step-000060/model

Each step has the tasks that `arborl train` takes with the same seed. Rewards come from the environment; the number of
steps, tasks per step, episodes per task, the learning rate and its schedule come from the recipe. Demonstrations of the
recipe are not used: `--model` starts from a checkpoint that was trained on them. Weights are float32 with bfloat16
autocast on a GPU (`arborl train` keeps float32 copies of bfloat16 weights). The trained model is written to `OUT/model`
and evaluated by `arborl`. Prints one JSON line.
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
from arborl.models.model_files import resolve
from arborl.types import Message, Task

ROOT = Path(__file__).parents[1]


class RecipeTasks:
    """The tasks of a recipe whose episodes have one prompt and one reply."""

    def __init__(self, config: RunConfig):
        if config.data.has_rows or config.data.sources or [reward.name for reward in config.rewards] != ["env"]:
            raise SystemExit(
                "This benchmark needs a recipe with one environment that generates its tasks and computes the reward."
            )
        self.config = config
        self.source = open_source(config.data, config.env.name, config.seed)

    def env(self) -> Env:
        env = ENVS.build(self.config.env.name, self.config.env.args, "env.args")
        return wrap_with_prompt(env, self.config.env.prompt, self.config.agent.system)

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """Prompts in training order, each with its task as JSON."""
        tasks = [task for step in range(steps) for task in self.source.take(step, self.config.rollout.tasks_per_step)]
        return [{"prompt": self.prompt(task), "task": json.dumps(asdict(task), default=str)} for task in tasks]

    def prompt(self, task: Task) -> list[dict[str, str]]:
        messages = asyncio.run(_first_messages(self.env(), task))
        return [{"role": message.role, "content": message.content} for message in messages]

    def reward(self, task: str, reply: str) -> float:
        """Reward of the environment for a reply."""
        row = json.loads(task)
        return asyncio.run(_reply_reward(self.env(), Task(row["id"], seed=row["seed"], fields=row["fields"]), reply))


async def _first_messages(env: Env, task: Task) -> tuple[Message, ...]:
    return (await env.reset(task, task.seed)).messages


async def _reply_reward(env: Env, task: Task, reply: str) -> float:
    await env.reset(task, task.seed)
    return (await env.step(Message("assistant", reply))).reward


def completion_text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


class SampledTokenCounter(hf.TrainerCallback):
    """Counts sampled tokens by the mean completion length that TRL logs."""

    def __init__(self, episodes: int):
        self.episodes, self.sampled, self.curve = episodes, 0.0, list[list[float]]()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "completions/mean_length" in logs:
            self.sampled += logs["completions/mean_length"] * self.episodes
            self.curve.append([state.global_step, round(logs["reward"], 4)])


def trl_config(config: RunConfig, steps: int, size: int, model: hf.PreTrainedModel, folder: Path) -> GRPOConfig:
    """The recipe's settings as TRL's configuration."""
    learner, episodes = config.learner, config.rollout.tasks_per_step * config.rollout.group_size
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(folder), use_cpu=not cuda, bf16=cuda, max_steps=steps, seed=config.seed,
        per_device_train_batch_size=size, gradient_accumulation_steps=episodes // size,
        steps_per_generation=episodes // size, num_generations=config.rollout.group_size,
        max_completion_length=config.sampling.max_tokens, temperature=config.sampling.temperature, top_p=1.0, top_k=0,
        beta=0.0, num_iterations=1, loss_type="grpo", scale_rewards="group", epsilon=config.algorithm.clip_low,
        learning_rate=learner.learning_rate(model.num_parameters()),
        lr_scheduler_type="linear", warmup_steps=learner.warmup, max_grad_norm=learner.max_grad_norm,
        adam_beta1=learner.betas[0], adam_beta2=learner.betas[1], weight_decay=learner.weight_decay,
        gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True, logging_steps=1,
        save_strategy="no", report_to="none",
    )  # fmt: skip


def train(config: RunConfig, model_name: str, steps: int, size: int, out: Path) -> dict[str, Any]:
    """Train with TRL and write the model to `out/model`; returns time, token count and reward curve."""
    folder, tasks = resolve(model_name), RecipeTasks(config)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    token_counter = SampledTokenCounter(episodes)

    def score_replies(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        return [
            tasks.reward(one, completion_text(completion)) for one, completion in zip(task, completions, strict=True)
        ]

    trainer = GRPOTrainer(
        model, score_replies, trl_config(config, steps, size, model, out / "trl"),
        datasets.Dataset.from_list(tasks.rows(steps)),
        processing_class=hf.AutoTokenizer.from_pretrained(folder), callbacks=[token_counter],
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
        "sampled_tokens": int(token_counter.sampled), "curve": token_counter.curve,
    }  # fmt: skip


def evaluate(recipe: Path, model: str, settings: list[str]) -> dict[str, Any]:
    """Success rate of a model on the recipe's held-out tasks, sampled and greedy, with 95 % intervals."""
    success: dict[str, Any] = {}
    for evaluation in training_run.measure(
        [str(recipe)], training_run.MeasureOptions([*settings, f"model.name={model}"])
    ):
        metrics = evaluation.metrics
        success[evaluation.decoding] = [round(metrics[name], 4) for name in ("success", "success_low", "success_high")]
    return success


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a folder of recipes/, or FOLDER/FILE")
    parser.add_argument("--model", help="name or folder; default: the recipe's model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates; default: the recipe's steps without imitation")
    parser.add_argument("--micro-batch", type=int, default=128, help="sequences per micro-batch")
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
    before = evaluate(recipe, model, settings)
    row = train(config, model, steps, size, args.out)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    run_info = {"recipe": args.recipe, "seed": args.seed, "trl": version("trl"), "device": device, "micro_batch": size}
    print(json.dumps(run_info | row | {"before": before, "after": evaluate(recipe, str(args.out / "model"), settings)}))


if __name__ == "__main__":
    sys.exit(main())
