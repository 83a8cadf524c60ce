"""One run: evaluation before training, the training loop, evaluation after it, and the files of the run."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as Terminal

from arborl.config.algorithm_config import is_custom
from arborl.config.config_base import to_plain
from arborl.config.secrets import mask_secrets
from arborl.config.training_config import default_learning_rate
from arborl.diagnosis.step_rules import step_remark
from arborl.errors import AlarmStopped, LearnerRankLost, RunStopped
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.registry import short_name
from arborl.rollout.episode_store import EpisodeStore
from arborl.track import Console, JsonlTracker, TensorBoardTracker, Tracker, Trackers, table_before_after
from arborl.track.background_tracker import BackgroundTracker
from arborl.track.console import thousands
from arborl.track.jsonl import read_metrics
from arborl.track.run_log import RunLog
from arborl.track.timeline import Timeline
from arborl.track.tracing import traced
from arborl.track.tracker import RunStart
from arborl.trainer.evaluation import EvaluationResult
from arborl.trainer.hooks import (
    Evaluate,
    RefreshReference,
    SaveCheckpoints,
    TrackEpisodes,
    WriteEpisodes,
    WriteTerms,
    evaluation_step_metrics,
)
from arborl.trainer.trainer import Hook, Trainer
from arborl.training_run import run_folder
from arborl.training_run.alarm_recovery import AlarmRecovery
from arborl.training_run.artifacts import EpisodeRenderer, write_artifacts
from arborl.training_run.build import RunParts
from arborl.training_run.rank_recovery import RankRecovery
from arborl.training_run.resume import ResumePoint, resume_messages
from arborl.types import Group, Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

EPISODES_EVERY = 10
"""Steps between training episodes that are sent to trackers, without `track.render_every`."""


class RunSession:
    def __init__(
        self,
        parts: RunParts,
        home: Path,
        *,
        start: ResumePoint | None = None,
        saving: Callable[[], None] = lambda: None,
        hooks: Sequence[Hook] = (),
        recovery: RankRecovery | None = None,
        alarms: AlarmRecovery | None = None,
        warnings: Sequence[logging.LogRecord] = (),
    ):
        self.parts, self.config, self.home, self.start = parts, parts.config, home, start
        self.saving, self.hooks, self.recovery = saving, list(hooks), recovery or RankRecovery(0)
        self.alarms = alarms or AlarmRecovery(self.config)
        self.start_time = time.monotonic()
        self.before: Metrics = {}
        self.log = RunLog(home / "run.log", to_plain(self.config), warnings)
        self.trackers = Trackers([])
        self.summary: dict[str, Any] = {}
        self.execution: dict[str, str] = {}
        self.status = "failed"
        self.rolled_back: list[str] = []
        track = self.config.track
        self.render: EpisodeRenderer | None = None
        if track.render_every:
            decode = parts.renderer.tokenizer.decode
            self.render = EpisodeRenderer(
                parts.episode_factories, decode, home / "frames", track.render_every, track.gifs, self._picture
            )
        self.episodes = WriteEpisodes(home / "episodes")
        imitation = self.config.demonstrations.steps
        self.held_out = Evaluate(parts.evaluator, self.config.evaluation.every, self._keep_evaluation, imitation)

    def profile(self) -> None:
        from arborl.trainer.hooks import ProfileSteps

        self.hooks.append(ProfileSteps(self.home / "profile.json"))

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate again, and write all files; returns the summary."""
        trainer, save = self._trainer()
        try:
            self._begin(trainer, save)
        except BaseException:
            await self.parts.close()
            raise
        steps = self.config.track.timeline
        with self.log, traced(self.home.name), Timeline(self.home / "timeline.json", steps) if steps else nullcontext():
            try:
                return await self._run(trainer, save)
            except (asyncio.CancelledError, RunStopped):
                self.status = "stopped"
                raise
            finally:
                self.trackers.finish(self.summary, self.status)
                self.trackers.close()

    async def _run(self, trainer: Trainer, save: SaveCheckpoints) -> dict[str, Any]:
        console = Console(
            trainer.num_steps, self._title(), start=trainer.step, step_remark=step_remark, on_line=self.log.say
        )
        with console:
            self._open(trainer, console)
            try:
                after = await self._train(trainer, save, console)
            except asyncio.CancelledError:
                self._save(trainer, save, console)
                raise
            except LearnerRankLost as lost:
                first = self.start.step if self.start is not None else 0
                if not self.recovery.count(lost, trainer.step, {first: self.start_time} | save.snapshot_times):
                    self._summarise(trainer, {}, stopped=True)
                raise
            except AlarmStopped as stopped:
                self.episodes.close()
                save.close()
                can_restart = (
                    not isinstance(self.parts.learner, LearnerGroup) or self.parts.learner.launcher is not None
                )
                default = default_learning_rate(self.parts.model.num_parameters(), self.config.model.lora.rank > 0)
                self.alarms.react(stopped, self.home, can_restart, default / self.parts.learner.lr)
                if not stopped.restarts:
                    await self._report_stop(trainer, console, alarm=stopped.alarm.as_json())
                raise
            except RunStopped:
                if trainer.step > 0:
                    self._save(trainer, save, console)
                await self._report_stop(trainer, console)
                raise
            finally:
                self.episodes.close()
                save.close()
                await self.parts.close()
        return await self._finish(trainer, after)

    async def _report_stop(self, trainer: Trainer, console: Console, **more: Any) -> None:
        self._summarise(trainer, {}, stopped=True, **more)
        written = await write_artifacts(self.parts, self.home, [], trainer.step)
        console.note(f"The report is {written.get('report', self.home)}")

    def _open(self, trainer: Trainer, console: Console) -> None:
        """Start trackers, warm up the engine, check execution paths, and log how the run is executed."""
        trainer.tracker = self.trackers = self._trackers(console, trainer.step)
        config = mask_secrets(to_plain(self.config))
        self.trackers.begin(RunStart(self.home.name, self.home, config, trainer.step))
        messages = resume_messages(self.start) if self.start is not None else []
        for line in (*messages, *self.recovery.resumed(trainer.step), *self.rolled_back):
            console.note(line)
        log.info("memory: %s", self.parts.plan.summary)
        if self.parts.plan.warning:
            log.warning("%s", self.parts.plan.warning)
        self.parts.engine.warm_up(self.parts.rollout.sampling)
        self.parts.learner.check_paths()
        self.execution = execution_of(self.parts.model)
        run_folder.write_json(self.home / "execution.json", self.execution)
        console.note(", ".join(f"{name}: {value}" for name, value in self.execution.items()))

    async def _train(self, trainer: Trainer, save: SaveCheckpoints, console: Console) -> EvaluationResult:
        if trainer.step == 0 and self.config.evaluation.before and not self.before:
            console.progress("evaluating held-out tasks before training")
            before = await self._measure(trainer)
            self._set_before(before.metrics, save)
            trainer.failure_monitor.check("evaluation", 0, before.episodes)
        await trainer.fit()
        console.progress("evaluating held-out tasks after training")
        after = await self._measure(trainer)
        trainer.failure_monitor.failures.add(after.episodes, "the last evaluation")
        self.episodes.flush()
        save.finish()
        save.score_last(trainer.step, evaluation_step_metrics(after.metrics))
        return after

    def _set_before(self, metrics: Metrics, save: SaveCheckpoints) -> None:
        self.before = metrics
        save.extra = {**save.extra, "before": metrics}

    def _trainer(self) -> tuple[Trainer, SaveCheckpoints]:
        parts, config = self.parts, self.config
        state: dict[str, Any] = {"before": self.before, "config": mask_secrets(to_plain(config))}
        write_tokenizer: Callable[[Path], None] = parts.save_tokenizer
        if parts.faults is not None:
            state["faults"] = parts.faults.state()
            parts.faults.episode_files(self.episodes)
            write_tokenizer = parts.faults.checkpoint_files(write_tokenizer)
        save = SaveCheckpoints(
            self.home / "checkpoints", config.trainer.save_every, config.trainer.keep, state, write_tokenizer,
            self.episodes.flush, self.alarms.keeps, config.trainer.keep_best,
        )  # fmt: skip
        hooks: list[Hook] = [self.episodes] if config.track.episodes else []
        if config.track.episodes and config.track.terms:
            hooks.append(WriteTerms(self.home / "terms", config.track.terms))
        if parts.tracker_makers:
            hooks.append(TrackEpisodes(config.track.render_every or EPISODES_EVERY))
        if self.render is not None:
            hooks.append(self.render)
        if config.demonstrations.steps:
            hooks.append(RefreshReference(config.demonstrations.steps))
        if (config.evaluation.every or config.demonstrations.steps) and config.evaluation.tasks:
            hooks.append(self.held_out)
        hooks += [self.recovery, self.alarms, *self.hooks, *([parts.faults] if parts.faults is not None else [])]
        trainer = Trainer(
            config, parts.source, parts.rollout, parts.rewards, parts.algorithm, parts.learner, parts.engine,
            Trackers([]), hooks, save, parts.steps,
        )  # fmt: skip
        return trainer, save

    def _begin(self, trainer: Trainer, save: SaveCheckpoints) -> None:
        """Write the configuration of a new run, or restore the checkpoint."""
        start = self.start
        self.rolled_back = self.alarms.resumed(self.home, start.step if start is not None else 0)
        self.parts.learner.scale_lr(self.alarms.lr_factor)
        run_folder.rewind_episodes(self.home, start.step if start is not None else -1)
        save.rewind(start.step if start is not None else None)
        if start is None:
            self._set_aside_summary(0)
            run_folder.link_checkpoints(self.home, self.config.trainer.checkpoint_dir)
            run_folder.write_config(self.home, self.config)
            return
        trainer.restore(start.state)
        self._set_before(start.state["before"], save)
        if self.parts.faults is not None:
            self.parts.faults.load_state(start.state.get("faults", {}))
        self.parts.learner.load(start.folder)
        metrics = self.home / "metrics.jsonl"
        rows = read_metrics(metrics) if metrics.is_file() else iter(())
        trainer.diagnosis_monitor.restore(row for row in rows if row["step"] <= trainer.step)
        self._set_aside_summary(trainer.step)
        run_folder.remove_later_configs(self.home, trainer.step)
        if start.changes:
            run_folder.change_config(self.home, start.before, self.config, trainer.step)

    def _set_aside_summary(self, step: int) -> None:
        with suppress(FileNotFoundError):  # it is outdated from this step on
            (self.home / "summary.json").replace(self.home / f"summary.before-step-{step:06}.json")

    def _trackers(self, console: Console, step: int) -> Trackers:
        done = None if self.start is None else step
        chosen: list[Tracker] = [console, JsonlTracker(self.home / "metrics.jsonl", done)]
        if self.config.track.tensorboard:
            chosen.append(TensorBoardTracker(self.home / "tensorboard", done))
        return Trackers([*chosen, *(BackgroundTracker(name, make) for name, make in self.parts.tracker_makers.items())])

    def _title(self) -> list[str]:
        config = self.config
        custom = [short_name(part) for part in (config.algorithm.advantage, config.algorithm.loss) if is_custom(part)]
        algorithm = config.algorithm.name + (f" ({', '.join(custom)})" if custom else "")
        task = "offline rows" if config.data.offline else short_name(config.env.name)
        what = f"{config.model.name} learns {task} with {algorithm}, seed {config.seed}"
        sandbox = [f"code runs under {self.parts.sandbox}"] if self.parts.sandbox is not None else []
        cluster = [f"on {self.parts.cluster}"] if self.parts.cluster is not None else []
        stub = "stub, scripted replies: " if config.stub else ""
        stub += "with injected faults: " if self.parts.faults is not None else ""
        view = f"into {self.home}   (arborl view {shlex.quote(str(self.home))})"
        return [f"{config.name}: {stub}{what}", view, *self._sizes(), *sandbox, *cluster]

    def _sizes(self) -> list[str]:
        """Model with its adapters; learning rate; size of a step."""
        config, learner, lora = self.config, self.parts.learner, self.config.model.lora
        parameters = list(self.parts.model.parameters())
        model = f"model {config.model.name}: {thousands(sum(p.numel() for p in parameters))} parameters"
        if lora.rank:
            trained = thousands(sum(p.numel() for p in parameters if p.requires_grad))
            model += f", LoRA rank {lora.rank} on {', '.join(lora.target)}: {trained} trained"
        decay = config.learner.decay.replace("_", " ")
        rate = f"learning rate {learner.lr * self.alarms.lr_factor:.3g}" + (f", {decay}" if decay != "none" else "")
        tasks, group, limit = config.rollout.tasks_per_step, config.rollout.group_size, config.sampling
        if config.data.offline:
            return [model, f"{rate}; {tasks} rows per step"]
        most = tasks * group * min(config.rollout.max_turns * limit.max_tokens, limit.max_context)
        return [model, f"{rate}; {tasks} tasks x {group} episodes per step, at most {thousands(most)} tokens"]

    async def _measure(self, trainer: Trainer) -> EvaluationResult:
        if self.config.evaluation.tasks == 0:
            return EvaluationResult({}, [])
        measured = await self.held_out.measure(trainer)
        trainer.tracker.log(evaluation_step_metrics(measured.metrics), trainer.step)
        return measured

    async def _keep_evaluation(self, step: int, groups: Sequence[Group]) -> None:
        if self.config.track.episodes:
            EpisodeStore(self.home / "episodes" / "evaluation").write(step, groups)
        self.trackers.episodes([episode for group in groups for episode in group.episodes], step, "evaluation")
        if self.render is not None:
            await self.render.draw("validation", step, groups)

    def _picture(self, path: Path, step: int, kind: str) -> None:
        self.trackers.picture(path, step, kind)

    def _save(self, trainer: Trainer, save: SaveCheckpoints, console: Console) -> None:
        self.saving()
        path = save.save_now(trainer)
        console.note(f"Stopped at step {trainer.step}; saved {path}")
        console.note(f"Resume with:  arborl train --resume latest output_dir={self.home}")

    def _summarise(self, trainer: Trainer, after: Metrics, **more: Any) -> dict[str, Any]:
        self.summary = {
            "before": self.before,
            "after": after,
            "train_seconds": round(trainer.train_seconds, 3),
            "steps": trainer.step,
            "seed": self.config.seed,
            "failures": trainer.failure_monitor.failures.state(),
            "accounting": trainer.accounting.summary(),
            "quarantine": trainer.source.set_aside(),
            "execution": self.execution,
        } | more
        if self.alarms.rollbacks:
            self.summary["rollbacks"] = self.alarms.summary()
        if self.config.stub:
            self.summary["stub"] = True
        if self.parts.faults is not None:
            self.summary["faults"] = dict(self.parts.faults.counts)
        if self.parts.sandbox is not None:
            self.summary["sandbox"] = str(self.parts.sandbox)
        run_folder.write_json(self.home / "summary.json", self.summary)
        return self.summary

    async def _finish(self, trainer: Trainer, after: EvaluationResult) -> dict[str, Any]:
        summary = self._summarise(trainer, after.metrics)
        episodes = [episode for episode in after.episodes if episode.failure is None and not episode.is_offline]
        written = await write_artifacts(self.parts, self.home, episodes, trainer.step)
        for name, path in written.items():
            if path.suffix in (".gif", ".png"):
                self._picture(path, trainer.step, "final" if path.suffix == ".gif" else name)
        if after.metrics:
            self._print(table_before_after(summary["before"], summary["after"]))
        for cause in trainer.failure_monitor.failures:
            self._print(f"        failed  {cause}")
        for back in self.alarms.rollbacks:
            self._print(f"   rolled back  {back}")
        for name, path in written.items():
            self._print(f"{'replay' if path.suffix == '.gif' else name:>14}  {path}")
        self.status = "finished"
        copied: dict[str, Any] = json.loads(json.dumps(summary))
        return copied

    def _print(self, content: Any) -> None:
        Terminal().print(content, highlight=False, soft_wrap=isinstance(content, str), markup=False)
        self.log.show(content)


def execution_of(model: PreTrainedModel) -> dict[str, str]:
    """Device, precision, and the execution paths of engine and learner; for the console, files and `arborl doctor`."""
    import torch

    from arborl.models.execution_paths import execution_paths
    from arborl.models.model_loading import compute_device

    place = compute_device(model)
    name = str(place.device)
    if place.device.type == "cuda":
        name += f" ({torch.cuda.get_device_name(place.device)})"
    elif place.device.type == "cpu":
        name += f" ({torch.get_num_threads()} threads)"
    return {"device": name, "precision": str(place.dtype).removeprefix("torch."), **execution_paths(model)}
