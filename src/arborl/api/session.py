"""One run, from its first evaluation to its last file."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal

from arborl import checkpoint
from arborl.api import folder as folders
from arborl.api.artifacts import keepsakes
from arborl.api.execution import execution_of
from arborl.api.losses import Losses
from arborl.api.render import Render
from arborl.api.resume import Start, told
from arborl.build import Parts
from arborl.config.algorithm import is_own
from arborl.config.base import plain
from arborl.config.secrets import masked
from arborl.errors import LearnerLost, RunStopped
from arborl.registry import short
from arborl.rollout.store import EpisodeStore
from arborl.track import Console, JsonlTracker, TensorBoardTracker, Tracker, Trackers, table_before_after
from arborl.track.aside import Aside
from arborl.track.run_log import RunLog
from arborl.track.timeline import Timeline
from arborl.track.tracing import traced
from arborl.track.tracker import Begun
from arborl.trainer.diagnosis import remark
from arborl.trainer.evaluate import Measured
from arborl.trainer.hooks import Evaluate, KeepEpisodes, RenewReference, Save, ShowEpisodes, named
from arborl.trainer.keep_terms import KeepTerms
from arborl.trainer.trainer import Hook, Trainer
from arborl.types import Group, Metrics

log = logging.getLogger(__name__)


class RunSession:
    """Holds what a run is made of while it lasts.

    Args:
        parts: the objects of the run.
        home: its folder.
        start: the checkpoint to go on from, if any.
        saving: called when the run was told to stop and comes to its last checkpoint.
        hooks: what else to do after a step, once all else is done.
        losses: ranks of the learner that the run has lost so far.
    """

    def __init__(
        self,
        parts: Parts,
        home: Path,
        start: Start | None,
        saving: Callable[[], None] = lambda: None,
        hooks: Sequence[Hook] = (),
        losses: Losses | None = None,
    ):
        self.parts, self.config, self.home, self.start = parts, parts.config, home, start
        self.saving, self.further, self.losses = saving, list(hooks), losses or Losses(0)
        self.began = time.monotonic()
        self.memory: dict[str, Any] = {"before": {}, "config": masked(plain(self.config))}
        self.log = RunLog(home / "run.log", plain(self.config))
        self.trackers = Trackers([])
        self.summary: dict[str, Any] = {}
        self.execution: dict[str, str] = {}
        """Device, precision and execution paths of the model."""
        self.ended = "failed"
        track = self.config.track
        self.render: Render | None = None
        if track.render_save_dir is not None:
            decode = parts.renderer.tokenizer.decode
            self.render = Render(
                parts.cast, decode, track.render_save_dir, track.render_every, track.render_episodes, self._drawn
            )
        self.episodes = KeepEpisodes(home / "episodes")
        also = self.config.demonstrations.steps
        self.held_out = Evaluate(parts.evaluator, self.config.evaluation.every, self._show, also)

    def profile(self) -> None:
        """Torch is to trace two steps."""
        from arborl.trainer.profile import Profile

        self.further.append(Profile(self.home / "profile.json"))

    async def run(self) -> dict[str, Any]:
        """Measure, train, measure again, and leave everything worth keeping in the folder; returns the summary."""
        trainer, save = self._trainer()
        try:
            self._begin(trainer)
        except BaseException:
            await self.parts.close()
            raise
        steps = self.config.track.timeline
        with self.log, traced(self.home.name), Timeline(self.home / "timeline.json", steps) if steps else nullcontext():
            try:
                return await self._run(trainer, save)
            except (asyncio.CancelledError, RunStopped):
                self.ended = "stopped"
                raise
            finally:
                self.trackers.finish(self.summary, self.ended)
                self.trackers.close()

    async def _run(self, trainer: Trainer, save: Save) -> dict[str, Any]:
        console = Console(trainer.last, self._title(), start=trainer.step, remark=remark, heard=self.log.say)
        with console:
            trainer.tracker = self.trackers = self._trackers(console, trainer.step)
            self.trackers.begin(Begun(self.home.name, self.home, self.memory["config"], trainer.step))
            for line in told(self.start) if self.start is not None else ():
                console.note(line)
            for line in self.losses.goes_on(trainer.step):
                console.note(line)
            log.info("memory: %s", self.parts.plan.told)
            if self.parts.plan.warning:
                log.warning("%s", self.parts.plan.warning)
            if (warm := getattr(self.parts.engine, "warm", None)) is not None:
                warm(self.parts.rollout.sampling)
            self.parts.learner.check_paths()
            self.execution = execution_of(self.parts.model)
            folders.write_execution(self.home, self.execution)
            console.note(", ".join(f"{name}: {value}" for name, value in self.execution.items()))
            try:
                first = trainer.step == 0 and self.config.evaluation.before
                if first and not self.memory["before"]:  # also where it was stopped while measuring
                    console.progress("measuring on held-out tasks, before training")
                    before = await self._measure(trainer)
                    self.memory["before"] = before.metrics
                    trainer.watch.look("evaluation", 0, before.episodes)
                await trainer.fit()
                console.progress("measuring on held-out tasks, after training")
                after = await self._measure(trainer)
                trainer.watch.failures.add(after.episodes, "the last evaluation")
                self.episodes.flush()
                save.finish()
            except asyncio.CancelledError:
                self._save(trainer, save, console)
                raise
            except LearnerLost as lost:
                begun = self.start.step if self.start is not None else 0
                if not self.losses.count(lost, trainer.step, {begun: self.began} | save.moments):
                    self._summarise(trainer, {}, stopped=True)
                raise
            except RunStopped:
                if trainer.step > 0:
                    self._save(trainer, save, console)
                self._summarise(trainer, {}, stopped=True)
                written = await keepsakes(self.parts, self.home, [], trainer.step)
                console.note(f"What happened is in {written.get('report', self.home)}")
                raise
            finally:
                self.episodes.close()
                save.close()
                await self.parts.close()
        return await self._finish(trainer, after)

    def _trainer(self) -> tuple[Trainer, Save]:
        parts, config = self.parts, self.config
        save = Save(
            self.home / "checkpoints", config.trainer.save_every, config.trainer.keep, self.memory,
            parts.copy_tokenizer, self.episodes.flush,
        )  # fmt: skip
        hooks: list[Hook] = [self.episodes] if config.track.episodes else []
        if config.track.episodes and config.track.terms:
            hooks.append(KeepTerms(self.home / "terms", config.track.terms))
        hooks += [ShowEpisodes(config.track.render_every)] if parts.followers else []
        if self.render is not None:
            hooks.append(self.render)
        if config.demonstrations.steps:
            hooks.append(RenewReference(config.demonstrations.steps))
        if (config.evaluation.every or config.demonstrations.steps) and config.evaluation.tasks:
            hooks.append(self.held_out)
        hooks += [self.losses, *self.further]
        trainer = Trainer(
            config, parts.source, parts.rollout, parts.rewards, parts.algorithm, parts.learner, parts.engine,
            Trackers([]), hooks, save, parts.steps,
        )  # fmt: skip
        return trainer, save

    def _begin(self, trainer: Trainer) -> None:
        """From the start, or exactly where the checkpoint left off."""
        start = self.start
        if start is None:
            folders.write_config(self.home, self.config)
            return
        trainer.restore(start.state)
        self.memory["before"] = start.state["before"]
        self.parts.learner.load(start.folder)
        checkpoint.rewind(self.home / "checkpoints", trainer.step)
        folders.set_aside(self.home / "summary.json", trainer.step)
        if start.changes:
            folders.change_config(self.home, start.before, self.config, trainer.step)

    def _trackers(self, console: Console, step: int) -> Trackers:
        done = None if self.start is None else step
        chosen: list[Tracker] = [console, JsonlTracker(self.home / "metrics.jsonl", done)]
        if self.config.track.tensorboard:
            chosen.append(TensorBoardTracker(self.home / "tensorboard", done))
        return Trackers([*chosen, *(Aside(name, make) for name, make in self.parts.followers.items())])

    def _title(self) -> list[str]:
        config = self.config
        own = [short(part) for part in (config.algorithm.advantage, config.algorithm.loss) if is_own(part)]
        algorithm = config.algorithm.name + (f" ({', '.join(own)})" if own else "")
        task = "from given rows" if config.data.offline else short(config.env.name)
        what = f"{config.model.name} learns {task} with {algorithm}, seed {config.seed}"
        fenced = [f"code runs under {self.parts.sandbox}"] if self.parts.sandbox is not None else []
        placed = [f"on {self.parts.cluster}"] if self.parts.cluster is not None else []
        return [f"{config.name}: {what}", f"into {self.home}", *fenced, *placed]

    async def _measure(self, trainer: Trainer) -> Measured:
        """At the first and the last step: measured, and logged as part of that step."""
        if self.config.evaluation.tasks == 0:
            return Measured({}, [])
        measured = await self.held_out.measure(trainer)
        trainer.tracker.log(named(measured.metrics), trainer.step)
        return measured

    async def _show(self, step: int, groups: Sequence[Group]) -> None:
        """Keep held-out episodes, as moving pictures too where so asked."""
        if self.config.track.episodes:
            EpisodeStore(self.home / "episodes" / "evaluation").write(step, groups)
        self.trackers.episodes([episode for group in groups for episode in group.episodes], step, "evaluation")
        if self.render is not None:
            await self.render.draw("validation", step, groups)

    def _drawn(self, path: Path, step: int, kind: str) -> None:
        self.trackers.picture(path, step, kind)

    def _save(self, trainer: Trainer, save: Save, console: Console) -> None:
        """The run ends before its time: keep where it stands, and say how to go on."""
        self.saving()
        path = save.now(trainer)
        console.note(f"Stopped at step {trainer.step}; saved {path}")
        console.note(f"Go on with:  arborl train --resume latest output_dir={self.home}")

    def _summarise(self, trainer: Trainer, after: Metrics, **more: Any) -> dict[str, Any]:
        summary = {
            "before": self.memory["before"],
            "after": after,
            "train_seconds": round(trainer.train_seconds, 3),
            "steps": trainer.step,
            "seed": self.config.seed,
            "failures": trainer.watch.failures.state(),
            "execution": self.execution,
        } | more
        if self.parts.sandbox is not None:
            summary["sandbox"] = str(self.parts.sandbox)
        folders.write_summary(self.home, summary)
        self.summary = summary
        return summary

    async def _finish(self, trainer: Trainer, after: Measured) -> dict[str, Any]:
        summary = self._summarise(trainer, after.metrics)
        episodes = [episode for episode in after.episodes if episode.failure is None and not episode.is_offline]
        written = await keepsakes(self.parts, self.home, episodes, trainer.step)
        for name, path in written.items():
            if path.suffix in (".gif", ".png"):
                self._drawn(path, trainer.step, "final" if path.suffix == ".gif" else name)
        if after.metrics:
            self._tell(table_before_after(summary["before"], summary["after"]))
        for cause in trainer.watch.failures:
            self._tell(f"        failed  {cause}")
        for name, path in written.items():
            self._tell(f"{name:>14}  {path}")
        self.ended = "finished"
        shown: dict[str, Any] = json.loads(json.dumps(summary))
        return shown

    def _tell(self, shown: Any) -> None:
        """On the terminal, and in the log."""
        Terminal().print(shown, highlight=False, soft_wrap=isinstance(shown, str), markup=False)
        self.log.show(shown)
