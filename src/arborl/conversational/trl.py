"""The same agent, environment and reward, trained by Hugging Face TRL's own `GRPOTrainer`.

Arbor plays, TRL learns. Each time TRL wants completions (its `rollout_func`) our engine takes TRL's weights as they are
then, plays the step's conversations, and hands over what was recorded: the ids that the model read and sampled, with a
mask (`env_mask`) that leaves all but the sampled ones out of TRL's loss. Nothing is tokenised again.

A completion of TRL's is one row of tokens, so a conversation must be one branch. One that is not fails, and costs
itself; an agent that always changes what was said before (compression, thinking that the template strips, a second
opinion) ends the run at its first step, which says so. `arborl.train` takes both.
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
from arborl.config.run_config import RunConfig
from arborl.conversational.agent import MultiTurnAgent
from arborl.conversational.config import TrainingConfig
from arborl.conversational.environment import Environment
from arborl.conversational.training import check_given, run_config, settled
from arborl.conversational.trl_terms import (
    ME,
    adapters,
    batch_of,
    earned,
    fail_branched,
    played,
    refuse,
    settings,
    weights_of,
)
from arborl.errors import ConfigError
from arborl.rollout.store import EpisodeStore
from arborl.seeds import derive
from arborl.track.jsonl import JsonlTracker
from arborl.trainer.failing import FailureWatch
from arborl.training_run import run_folder as folders
from arborl.training_run.artifacts import write_artifacts
from arborl.training_run.build import build
from arborl.types import Episode, Metrics

if TYPE_CHECKING:  # what needs torch
    from trl import GRPOTrainer

log = logging.getLogger("arborl.conversational")

T = TypeVar("T")
BUSY = threading.Lock()
"""Held while TRL trains: its seed, precision and device are the process's."""


class TRLGRPOTrainerWrapper:
    """Trains with TRL what `arborl.train` trains with Arbor's learner.

    Args:
        agent, environment, reward_fn: as of `arborl.train`.
        config: the same settings; one that TRL has no counterpart of is refused by name.
        eval_rewards: measured and reported beside, and never trained on.

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
        self.config, self.eval_rewards = settled(config, None, {}), eval_rewards

    async def train(self) -> Any:
        """The trained agent; the one that was given stays as it is. TRL runs in a thread: other tasks go on."""
        if find_spec("trl") is None:
            raise ConfigError(f"{ME} needs the package trl. Install it: pip install arborl[trl]; or use arborl.train.")
        agent, rewards = self.agent, [self.reward_fn] if self.reward_fn is not None else []
        check_given(agent, self.environment)
        if self.config.num_generations < 2:
            raise ConfigError(f"{ME}, num_generations=1: conversations are compared. Write at least 2.")
        run, objects = run_config(agent, self.environment, rewards, self.config, self.eval_rewards)
        refuse(self.config, run)
        if not BUSY.acquire(blocking=False):
            raise ConfigError(f"{ME}: TRL is training in this process already. Wait for it, or start another process.")
        try:
            await agent.close()
            with folders.claimed(run, resuming=False) as home:
                work = Work(run, self.config, home, agent.config.attn_implementation)
                summary = await aside(lambda runner: work.run(runner, objects))
        finally:
            BUSY.release()
        model = checkpoint.find(home / "checkpoints", "latest") / "model"
        system = agent.config.system_prompt or getattr(self.environment, "system", None) or None
        return agent.trained(str(model), system, home, summary)


async def aside(work: Callable[[asyncio.Runner], T]) -> T:
    """Do it in a thread that has an event loop of its own. Cancelled, it ends where it next waits in that loop."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def whole() -> T:
        with runner:
            return work(runner)

    thread = asyncio.ensure_future(asyncio.to_thread(whole))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        with suppress(RuntimeError):  # it has just ended
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        await asyncio.wait([thread])
        raise


class Work:
    """One run: Arbor measures and plays, TRL trains in between.

    Args:
        run, config: the settings, as Arbor and as the user says them.
        home: the run's folder.
        attention: how TRL's model attends.
    """

    def __init__(self, run: RunConfig, config: TrainingConfig, home: Path, attention: str):
        self.asked, self.config, self.home = run, config, home
        self.attention = "sdpa" if attention == "auto" else attention
        self.watch, self.heard = FailureWatch(), 0

    def run(self, runner: asyncio.Runner, objects: dict[str, Any]) -> dict[str, Any]:
        """Measure, train, measure again; returns the summary."""
        self.wait, self.parts = runner.run, build(played(self.asked), objects)
        try:
            trainer = self.trainer()
            folders.write_config(self.home, self.parts.config)
            (self.home / "trl.json").write_text(trainer.args.to_json_string())
            self.metrics = JsonlTracker(self.home / "metrics.jsonl")
            before = runner.run(self.measure(0))
            began = time.perf_counter()
            trainer.train()
            seconds, last = time.perf_counter() - began, trainer.state.global_step
            self.listen(trainer)
            runner.run(self.parts.engine.load(weights_of(trainer), version=last))
            checkpoint.save(self.home / "checkpoints", last, self.write, {"step": last, "before": before}, 1)
            after = runner.run(self.measure(last))
            told = {"before": before, "after": after, "train_seconds": round(seconds, 3), "steps": last}
            summary = told | {"seed": self.asked.seed, "failures": self.watch.failures.state()}
            folders.write_summary(self.home, summary)
            runner.run(write_artifacts(self.parts, self.home, []))
            return summary
        finally:
            runner.run(self.parts.close())

    def write(self, folder: Path) -> None:
        """The model as it was measured: a whole one, adapters added."""
        self.parts.model.save_pretrained(folder / "model")
        self.parts.save_tokenizer(folder / "model")

    def trainer(self) -> GRPOTrainer:
        """TRL's, with a model of its own. Its tokenizer says what to pad with and what ends a reply, no more."""
        import datasets
        import torch
        import trl
        from transformers import PreTrainedTokenizerFast, PrinterCallback
        from trl.trainer.utils import disable_dropout_in_model

        from arborl.models.load import read_weights

        parts, told = self.parts, settings(self.asked, self.config, self.parts, self.home)
        model = read_weights(parts.model_folder, dtype=torch.float32)
        disable_dropout_in_model(model)  # the engine has none either
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(parts.model_folder / "tokenizer.json"))
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(parts.renderer.stop[0])
        rows = datasets.Dataset.from_dict({"prompt": [""] * (parts.steps * self.asked.rollout.tasks_per_step)})
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that `rollout_func` may change
                model.set_attn_implementation(self.attention)
                trainer = trl.GRPOTrainer(
                    model, [earned], trl.GRPOConfig(**told), rows, processing_class=tokenizer,
                    peft_config=adapters(self.asked), rollout_func=self.play,
                )  # fmt: skip
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{ME}: TRL refuses these settings: {error}") from error
        if trainer.args.world_size > 1:
            raise ConfigError(f"{ME} trains in one process. Start it without a launcher.")
        trainer.remove_callback(PrinterCallback)
        return trainer

    # -------------------------------------------------------------------------------------------- while TRL trains

    def play(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL's `rollout_func`. Which scenarios are played, and by what chance, is Arbor's to say."""
        self.listen(trainer)
        episodes = self.wait(self.episodes(trainer.state.global_step, weights_of(trainer)))
        tokenizer: Any = trainer.processing_class
        return batch_of(episodes, tokenizer.pad_token_id)

    async def episodes(self, step: int, weights: dict[str, Any]) -> list[Episode]:
        """What the update after `step` learns from, group by group, played with these weights and scored."""
        from arborl.trainer.summary import summarize

        parts, rollout, seed = self.parts, self.asked.rollout, derive(self.asked.seed, "step", step)
        await parts.engine.load(weights, version=step)
        if step and self.config.eval_steps and step % self.config.eval_steps == 0:
            await self.measure(step)
        tasks = parts.source.take(step, rollout.tasks_per_step)
        groups = await parts.rollout.collect(tasks, seed, rollout.group_size)
        episodes = [episode for group in groups for episode in group.episodes]
        for episode in filter(fail_branched, episodes):
            parts.rollout.firsts.tell(episode)
        await parts.rewards.score(groups)
        EpisodeStore(self.home / "episodes").write(step + 1, groups)
        self.metrics.log(summarize(groups), step + 1)
        self.watch.look("step", step + 1, episodes)
        return episodes

    async def measure(self, step: int) -> Metrics:
        """On held-out scenarios, with the weights that the engine has."""
        if self.asked.evaluation.tasks == 0:
            return {}
        found = await self.parts.evaluator.measure()
        EpisodeStore(self.home / "episodes" / "evaluation").write(step, found.groups)
        self.metrics.log({f"evaluation/{name}": value for name, value in found.metrics.items()}, step)
        self.watch.look("evaluation", step, found.episodes)
        return found.metrics

    def listen(self, trainer: GRPOTrainer) -> None:
        """Write down what TRL has logged since the last time."""
        for said in trainer.state.log_history[self.heard :]:
            self.metrics.log({f"trl/{name}": value for name, value in said.items() if name != "step"}, said["step"])
            if "reward" in said:
                log.info("step %d of %d: reward %.3f", said["step"], self.parts.steps, said["reward"])
        self.heard = len(trainer.state.log_history)
