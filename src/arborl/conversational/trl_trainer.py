"""Training with Hugging Face TRL's `GRPOTrainer`: Arbor plays the episodes, TRL computes the updates.

When TRL needs completions (`rollout_func`), Arbor's engine loads TRL's current weights, plays the conversations of the
step and returns the recorded token ids, with a mask (`env_mask`) that restricts TRL's loss to sampled tokens. Nothing
is tokenized again.

A completion of TRL is one sequence of tokens, so a conversation must have one branch. An episode with more branches
fails; an agent that always rewrites its history (compression, thoughts that the template removes) ends the run at its
first step with that error. `arborl.train` supports both.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from arborl import checkpoint
from arborl.config.algorithm_config import KLConfig
from arborl.config.run_config import RunConfig
from arborl.conversational.agent_training import check_arguments, resolve_config, run_config, trained_agent
from arborl.conversational.config import TrainingConfig
from arborl.conversational.environment import Environment
from arborl.conversational.multi_turn_agent import MultiTurnAgent
from arborl.diagnosis.run_monitor import FailureMonitor
from arborl.errors import ConfigError, EpisodeError
from arborl.models.model_files import read_model_config, resolve
from arborl.rollout.episode_store import EpisodeStore
from arborl.seeds import derive
from arborl.track.jsonl import JsonlTracker
from arborl.training_run import run_folder as folders
from arborl.training_run.artifacts import write_artifacts
from arborl.training_run.build import RunParts, build
from arborl.types import Episode, Metrics

if TYPE_CHECKING:  # needs torch
    from trl import GRPOTrainer

log = logging.getLogger("arborl.conversational")

T = TypeVar("T")
NAME = "TRLGRPOTrainerWrapper"
TRAINING_LOCK = threading.Lock()
"""Held while TRL trains: its seed, precision and device are global to the process."""
LOSS_TYPES = {"episode": "grpo", "token": "dapo", "fixed": "dr_grpo"}
"""TRL's `loss_type` by `algorithm.aggregation`."""
ROLLOUT_KEYS = (
    "rollout.episode_seconds", "rollout.step_seconds", "rollout.max_turns", "rollout.concurrency", "rollout.workers",
    "sampling.", "evaluation.", "env.", "agent.", "data.", "engine.", "model.chat_args", "learner.recompute",
)  # fmt: skip
"""Keys of a run that apply here too: those of rollout and evaluation."""


class TRLGRPOTrainerWrapper:
    """Trains with TRL what `arborl.train` trains with Arbor's learner.

    Args:
        agent, environment, reward_fn: as of `arborl.train`.
        config: settings; those that TRL does not support are errors.
        eval_rewards: rewards that are reported and not trained on.

    Example:
        trained = await TRLGRPOTrainerWrapper(agent, environment, HelpfulnessReward(), TrainingConfig()).train()
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment | Any,
        reward_fn: Any = None,
        config: TrainingConfig | None = None,
        eval_rewards: Sequence[Any] = (),
    ):
        self.agent, self.environment, self.reward_fn = agent, environment, reward_fn
        self.config, self.eval_rewards = resolve_config(config), eval_rewards

    async def train(self) -> Any:
        """Train; returns a copy of the agent with the new weights. TRL runs in a thread."""
        if find_spec("trl") is None:
            raise ConfigError(f"{NAME} needs the package trl: pip install arborl[trl]. Or use arborl.train.")
        agent, rewards = self.agent, [self.reward_fn] if self.reward_fn is not None else []
        check_arguments(agent, self.environment)
        if self.config.num_generations < 2:
            raise ConfigError(f"{NAME}, num_generations=1: must be at least 2.")
        run, objects = run_config(agent, self.environment, rewards, self.config, self.eval_rewards)
        check_supported(self.config, run)
        if not TRAINING_LOCK.acquire(blocking=False):
            raise ConfigError(f"{NAME}: TRL is already training in this process. Wait, or start another process.")
        try:
            await agent.close()
            with folders.claimed(run, resuming=False) as folder:
                trl_run = TRLRun(run, self.config, folder, agent.config.attn_implementation)
                summary = await run_in_thread(lambda runner: trl_run.run(runner, objects))
        finally:
            TRAINING_LOCK.release()
        return trained_agent(agent, self.environment, folder, summary)


async def run_in_thread(work: Callable[[asyncio.Runner], T]) -> T:
    """Run `work` in a thread with its own event loop. A cancellation takes effect at its next `await` in that loop."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def run() -> T:
        with runner:
            return work(runner)

    thread = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        with suppress(RuntimeError):  # the loop has just ended
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        await asyncio.wait([thread])
        raise


class TRLRun:
    """One run: Arbor plays and evaluates, TRL trains."""

    def __init__(self, run_config: RunConfig, config: TrainingConfig, folder: Path, attention: str):
        self.run_config, self.config, self.folder = run_config, config, folder
        self.attention = "sdpa" if attention == "auto" else attention
        self.watch, self.num_logged = FailureMonitor(), 0

    def run(self, runner: asyncio.Runner, objects: dict[str, Any]) -> dict[str, Any]:
        """Evaluate, train, evaluate; returns the summary."""
        self.wait, self.parts = runner.run, build(rollout_config(self.run_config), objects)
        try:
            trainer = self.make_trainer()
            folders.write_config(self.folder, self.parts.config)
            (self.folder / "trl.json").write_text(trainer.args.to_json_string())
            self.metrics = JsonlTracker(self.folder / "metrics.jsonl")
            before = runner.run(self.evaluate(0))
            start = time.perf_counter()
            trainer.train()
            seconds, last = time.perf_counter() - start, trainer.state.global_step
            self.copy_log(trainer)
            runner.run(self.parts.engine.load(weights_of(trainer), version=last))
            checkpoint.save(self.folder / "checkpoints", last, self.write_model, {"step": last, "before": before}, 1)
            after = runner.run(self.evaluate(last))
            summary = {"before": before, "after": after, "train_seconds": round(seconds, 3), "steps": last}
            summary |= {"seed": self.run_config.seed, "failures": self.watch.failures.state()}
            folders.write_json(self.folder / "summary.json", summary)
            runner.run(write_artifacts(self.parts, self.folder, []))
            return summary
        finally:
            runner.run(self.parts.close())

    def write_model(self, folder: Path) -> None:
        self.parts.model.save_pretrained(folder / "model")
        self.parts.save_tokenizer(folder / "model")

    def make_trainer(self) -> GRPOTrainer:
        """TRL's trainer with its own model. Its tokenizer only provides the padding and end tokens."""
        import datasets
        import torch
        import trl
        from transformers import PreTrainedTokenizerFast, PrinterCallback
        from trl.trainer.utils import disable_dropout_in_model

        from arborl.models.model_loading import read_weights

        parts = self.parts
        args = trl_arguments(self.run_config, self.config, parts, self.folder)
        model = read_weights(parts.model_folder, dtype=torch.float32)
        disable_dropout_in_model(model)  # the engine has none either
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(parts.model_folder / "tokenizer.json"))
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(parts.renderer.stop[0])
        rows = datasets.Dataset.from_dict({"prompt": [""] * (parts.steps * self.run_config.rollout.tasks_per_step)})
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # `rollout_func` is experimental
                model.set_attn_implementation(self.attention)
                trainer = trl.GRPOTrainer(
                    model, [posted_rewards], trl.GRPOConfig(**args), rows, processing_class=tokenizer,
                    peft_config=lora_config(self.run_config), rollout_func=self.rollout,
                )  # fmt: skip
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{NAME}: TRL rejects these settings: {error}") from error
        if trainer.args.world_size > 1:
            raise ConfigError(f"{NAME} trains in one process. Start it without a launcher.")
        trainer.remove_callback(PrinterCallback)
        return trainer

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL's `rollout_func`. Arbor selects scenarios and seeds."""
        self.copy_log(trainer)
        episodes = self.wait(self.play(trainer.state.global_step, weights_of(trainer)))
        tokenizer: Any = trainer.processing_class
        return rollout_batch(episodes, tokenizer.pad_token_id)

    async def play(self, step: int, weights: dict[str, Any]) -> list[Episode]:
        """Scored episodes of the update after `step`, group by group, sampled with these weights."""
        from arborl.trainer.step_metrics import episode_metrics

        parts, rollout, seed = self.parts, self.run_config.rollout, derive(self.run_config.seed, "step", step)
        await parts.engine.load(weights, version=step)
        if step and self.config.eval_steps and step % self.config.eval_steps == 0:
            await self.evaluate(step)
        tasks = parts.source.take(step, rollout.tasks_per_step)
        groups = await parts.rollout.collect(tasks, seed, rollout.group_size)
        episodes = [episode for group in groups for episode in group.episodes]
        for episode in filter(fail_branched, episodes):
            parts.rollout.firsts.tell(episode)
        await parts.rewards.score(groups)
        EpisodeStore(self.folder / "episodes").write(step + 1, groups)
        self.metrics.log(episode_metrics(groups), step + 1)
        self.watch.check("step", step + 1, episodes)
        return episodes

    async def evaluate(self, step: int) -> Metrics:
        if self.run_config.evaluation.tasks == 0:
            return {}
        result = await self.parts.evaluator.measure()
        EpisodeStore(self.folder / "episodes" / "evaluation").write(step, result.groups)
        self.metrics.log({f"evaluation/{name}": value for name, value in result.metrics.items()}, step)
        self.watch.check("evaluation", step, result.episodes)
        return result.metrics

    def copy_log(self, trainer: GRPOTrainer) -> None:
        """Write new entries of TRL's log as metrics."""
        for row in trainer.state.log_history[self.num_logged :]:
            self.metrics.log({f"trl/{name}": value for name, value in row.items() if name != "step"}, row["step"])
            if "reward" in row:
                log.info("step %d of %d: reward %.3f", row["step"], self.parts.steps, row["reward"])
        self.num_logged = len(trainer.state.log_history)


# ------------------------------------------------------------------------------------------------ settings


def check_supported(config: TrainingConfig, run: RunConfig) -> None:
    """Raise a `ConfigError` for settings that TRL does not support."""
    algorithm, problem = run.algorithm, ""
    if algorithm.advantage != "grpo" or algorithm.loss not in ("ppo", "gspo"):
        problem = (
            f"algorithm={algorithm.name}: not supported by TRL's trainer. Write grpo, dapo, dr_grpo, bnpo or gspo."
        )
    elif config.resume_from_checkpoint is not None:
        problem = "resume_from_checkpoint: not supported with TRL. Leave it out, or use arborl.train."
    elif config.wandb_project is not None:
        problem = "wandb_project: TRL reads it from the environment. Set WANDB_PROJECT instead."
    elif run.model.dtype == "float64":
        problem = "torch_dtype=float64: TRL's losses are in float32. Write float32."
    elif not read_model_config(resolve(run.model.name)):
        problem = f"model_name={run.model.name}: contains only adapters. Write the folder of a whole model."
    elif unused := sorted(key for key in config.overrides if not key.startswith(ROLLOUT_KEYS)):
        problem = f"overrides, {unused[0]}: is a setting of Arbor's learner, which TRL replaces. Leave it out."
    if problem:
        raise ConfigError(f"{NAME}, {problem}")
    if run.sampling.top_p < 1 or run.sampling.top_k or run.sampling.min_p:
        log.warning(
            "top_p, top_k, min_p: TRL's loss uses probabilities over all tokens, not the truncated distribution"
        )


def rollout_config(run: RunConfig) -> RunConfig:
    """The part of a run that Arbor does: without adapters, reference model and float32 master weights."""
    model = run.model.model_copy(update={"lora": type(run.model.lora)()})
    algorithm = run.algorithm.model_copy(update={"kl": KLConfig()})
    learner = run.learner.model_copy(update={"master": "none"} if run.model.dtype == "bfloat16" else {})
    return run.model_copy(update={"model": model, "algorithm": algorithm, "learner": learner})


def trl_arguments(run: RunConfig, config: TrainingConfig, parts: RunParts, folder: Path) -> dict[str, Any]:
    """Fields of `GRPOConfig`. TRL counts a batch in conversations, Arbor in groups. Weights are float32 and computation
    has the model's data type, which equals Arbor's float32 master weights."""
    from arborl.learner.core.optimizer import warmup_steps

    algorithm, learner, sampling, device = run.algorithm, run.learner, run.sampling, parts.model.device
    if device.type == "cuda" and device.index:
        raise ConfigError(f"{NAME}, device_map={device}: TRL uses the first GPU. Set CUDA_VISIBLE_DEVICES instead.")
    lora_scale = 10 if run.model.lora.rank and learner.lr is None else 1
    is_fixed = algorithm.aggregation == "fixed"
    return {
        "output_dir": str(folder / "trl"), "run_name": folder.name, "seed": run.seed, "max_steps": parts.steps,
        "num_generations": config.num_generations, "shuffle_dataset": False,
        "per_device_train_batch_size": config.per_device_train_batch_size * config.num_generations,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "learning_rate": parts.learner.lr * lora_scale, "weight_decay": learner.weight_decay,
        "adam_beta1": learner.betas[0], "adam_beta2": learner.betas[1], "max_grad_norm": learner.max_grad_norm,
        "warmup_steps": warmup_steps(learner, parts.steps),
        "lr_scheduler_type": "constant_with_warmup" if learner.decay == "none" else learner.decay,
        "loss_type": LOSS_TYPES[algorithm.aggregation], "scale_rewards": algorithm.std,
        "importance_sampling_level": "sequence" if algorithm.loss == "gspo" else "token",
        "epsilon": algorithm.clip_low, "epsilon_high": algorithm.clip_high,
        "beta": algorithm.kl.coef, "entropy_coef": algorithm.entropy_coef,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "max_completion_length": algorithm.options.fixed_length if is_fixed else sampling.max_context,
        "bf16": run.model.dtype == "bfloat16", "fp16": run.model.dtype == "float16", "use_cpu": device.type == "cpu",
        "gradient_checkpointing": learner.recompute,
        "save_strategy": "steps", "save_steps": config.save_steps, "save_total_limit": config.save_total_limit,
        "logging_steps": config.logging_steps, "report_to": list(config.trackers) or "none", "disable_tqdm": True,
    }  # fmt: skip


def lora_config(run: RunConfig) -> Any:
    """The `LoraConfig` of a run; None without adapters."""
    lora = run.model.lora
    if not lora.rank:
        return None
    if find_spec("peft") is None:
        raise ConfigError(f"{NAME}, use_lora=True: needs the package peft: pip install arborl[peft].")
    import peft

    target = "all-linear" if lora.target == ("all-linear",) else list(lora.target)
    alpha: Any = lora.alpha
    return peft.LoraConfig(
        r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=target, task_type="CAUSAL_LM"
    )


# ------------------------------------------------------------------------------------------------ tokens and weights


def fail_branched(episode: Episode) -> bool:
    """Fail an episode with more than one branch; whether it was failed.

    An agent that edits its history always branches. Any other does if the model samples a control token, which the next
    prompt contains as text.
    """
    if episode.failure is not None or len(set(episode.branches)) < 2:
        return False
    message = (
        "a prompt does not extend the last one, and TRL trains one sequence of tokens per conversation. Train this "
        "agent with arborl.train, or only append to its history"
    )
    episode.fail(EpisodeError(NAME, ValueError(message)))
    return True


def episode_tokens(episode: Episode) -> tuple[list[int], list[int], list[float]]:
    """Token ids of an episode in order, a mask of its trained tokens, and log-probabilities. Empty for an episode that
    failed or has no model call."""
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    for call in episode.calls if episode.failure is None else ():
        prompt, sampled = call.prompt[len(ids) :], call.completion.tokens
        ids += [*prompt, *sampled]
        mask += [0] * len(prompt) + [int(call.trained)] * len(sampled)
        logprobs += [0.0] * len(prompt) + list(call.completion.logprobs)
    return ids, mask, logprobs


def rollout_batch(episodes: Sequence[Episode], pad_token: int) -> dict[str, list[Any]]:
    """The result of TRL's `rollout_func`.

    All prompts are cut to the shortest one; the rest of longer ones is masked. TRL would pad them on the left, which
    shifts learned position embeddings. A failed episode has no reward: TRL excludes it from the group's mean and gives
    it no advantage.
    """
    rows = [episode_tokens(episode) for episode in episodes]
    cut = min((len(e.calls[0].prompt) for e, (ids, *_) in zip(episodes, rows, strict=True) if ids), default=1)
    padding = [pad_token] * (cut + 1), [0] * (cut + 1), [0.0] * (cut + 1)
    rows = [row if row[0] else padding for row in rows]
    return {
        "prompt_ids": [ids[:cut] for ids, _, _ in rows],
        "completion_ids": [ids[cut:] for ids, _, _ in rows],
        "env_mask": [mask[cut:] for _, mask, _ in rows],
        "logprobs": [logprobs[cut:] for _, _, logprobs in rows],
        "episode_reward": [None if episode.failure is not None else episode.reward for episode in episodes],
    }


def posted_rewards(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the rewards of `rollout_batch`."""
    return episode_reward


def weights_of(trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's weights by their names in a plain model, with adapters merged."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "peft_config"):
        return dict(model.state_dict())
    base = model.get_base_model()
    weights = {
        name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora_" not in name
    }
    for name, module in base.named_modules():
        if hasattr(module, "get_delta_weight"):
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + module.get_delta_weight("default").detach()
    return weights
