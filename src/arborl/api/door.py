"""Train and evaluate: configuration in, a run folder out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console as Terminal

from arborl import checkpoint
from arborl.api import folder as folders
from arborl.api.render import Render
from arborl.api.souvenirs import keepsakes
from arborl.build import Parts, build
from arborl.config.base import validate
from arborl.config.load import from_kwargs, load
from arborl.config.run import RunConfig
from arborl.errors import ConfigError, RunStopped
from arborl.models.load import holds_model
from arborl.rollout.store import EpisodeStore
from arborl.track import Console, JsonlTracker, TensorBoardTracker, Tracker, Trackers, table_before_after
from arborl.trainer.diagnosis import remark
from arborl.trainer.evaluate import Measured
from arborl.trainer.failing import FailureWatch
from arborl.trainer.hooks import Evaluate, KeepEpisodes, Save, named
from arborl.trainer.trainer import Hook, Trainer
from arborl.types import Group, Metrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its folder and its numbers."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)

    def view(self) -> Path:
        """Open the report in a browser; returns its path."""
        import webbrowser

        report = self.folder / "report.html"
        webbrowser.open(report.resolve().as_uri())
        return report


def run(**settings: Any) -> Run:
    """Train from Python. Keywords are those of a configuration file; tools, rewards, agents and environments may be
    given as objects.

    Example:
        run = arborl.run(model="seedling", data="train.json", agent="tool", tools=[calculator], rewards=[exact],
                         algorithm="grpo", steps=50)
    """
    resume, stub = settings.pop("resume", None), settings.pop("stub", False)
    named, objects = name_objects(settings)
    return train(from_kwargs(**named), resume=resume, stub=stub, objects=objects)


def train(
    config: RunConfig, *, resume: str | None = None, stub: bool = False, objects: Mapping[str, Any] | None = None
) -> Run:
    """Train as the configuration says; everything that can be wrong with it is found before anything is written.

    Args:
        config: the run.
        resume: `latest`, a step, or a checkpoint's path.
        stub: a few small steps on scripted replies, to see the whole loop work.
        objects: parts handed in by Python code, by the name the configuration uses for them.
    """
    config = stubbed(config) if stub else config
    home = folders.choose(config, resuming=resume is not None)
    start = checkpoint.find(home / "checkpoints", resume) if resume is not None else None
    parts = build(config, objects)
    return wait_for(Session(parts, home, start).run())


def evaluate(path: str, overrides: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Numbers of a run's last checkpoint, of a checkpoint, of a model by name, or of the model that a YAML file begins
    with, on held-out tasks."""
    place = Path(path)
    model: str | Path
    if place.suffix == ".yaml":
        config = load(place, overrides)
        model = config.model.name
    elif (place / "config.yaml").exists():
        config, model = (
            load(place / "config.yaml", overrides),
            checkpoint.find(place / "checkpoints", "latest") / "model",
        )
    elif holds_model(place / "model"):
        config, model = load(place.parent.parent / "config.yaml", overrides), place / "model"
    elif place.exists() and not holds_model(place):
        raise ConfigError(f"{path!r} is neither a run folder, a checkpoint, a model folder nor a YAML file.")
    else:
        config, model = load(None, overrides), place
    if config.evaluation.tasks == 0:
        raise ConfigError("evaluation.tasks=0: nothing to evaluate. Write evaluation.tasks=200.")
    named = config.model_copy(update={"model": config.model.model_copy(update={"name": str(model)})})
    found = wait_for(build(named).evaluator.measure())
    FailureWatch().look("evaluation", 0, found.episodes)
    measured = found.metrics
    greedy = {name.removeprefix("greedy_"): value for name, value in measured.items() if name.startswith("greedy_")}
    sampled = {name: value for name, value in measured.items() if not name.startswith("greedy_")}
    return {"sampled": sampled} | ({"greedy": greedy} if greedy else {})


def stubbed(config: RunConfig) -> RunConfig:
    """The same run, small and on scripted replies."""
    tree = config.model_dump()
    tree["engine"] |= {"name": "scripted"}
    tree["trainer"] |= {"steps": min(config.trainer.steps, 3)}
    if not config.rollout.envs.tags:  # a partition stays what it is
        few = min(config.rollout.tasks_per_step, 4)
        tree["rollout"] |= {"tasks_per_step": few, "envs": tree["rollout"]["envs"] | {"num_env_groups": None}}
    tree["learner"] |= {"minibatches": 1}
    tree["evaluation"] |= {"tasks": min(config.evaluation.tasks, 8)}
    return validate(RunConfig, tree)


def name_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings with names in place of objects, and the objects by those names."""
    objects: dict[str, Any] = {}

    def named(value: Any) -> Any:
        if isinstance(value, str | Mapping | Path | int | float) or value is None:
            return value
        name = str(getattr(value, "name", None) or getattr(value, "__name__", type(value).__name__))
        objects[name] = value
        return name

    def section(given: Mapping[str, Any]) -> dict[str, Any]:
        out = dict(given)
        for key in ("agent", "env", "rows"):
            if key in out:
                out[key] = named(out[key])
        for key in ("tools", "rewards"):
            if key in out and out[key] is not None:
                several = out[key] if isinstance(out[key], list | tuple) else [out[key]]
                out[key] = [named(value) for value in several]
        if isinstance(out.get("data"), Mapping):
            out["data"] = section(out["data"])
        if isinstance(out.get("sources"), Mapping):
            sources = out["sources"].items()
            out["sources"] = {name: section(one) if isinstance(one, Mapping) else one for name, one in sources}
        return out

    return section(settings), objects


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also where a loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # and out of here: what the work raises was not raised while handling this
    else:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, work).result()
    return asyncio.run(work)


class Session:
    """One run from its first evaluation to its last file."""

    def __init__(self, parts: Parts, home: Path, start: Path | None):
        self.parts, self.config, self.home, self.start = parts, parts.config, home, start
        self.memory: dict[str, Any] = {"before": {}, "seed": self.config.seed}
        track = self.config.track
        self.render: Render | None = None
        if track.render_save_dir is not None:
            decode = parts.renderer.tokenizer.decode
            self.render = Render(parts.cast, decode, track.render_save_dir, track.render_every, track.render_episodes)
        self.held_out = Evaluate(parts.evaluator, self.config.evaluation.every, self._show)

    async def run(self) -> Run:
        """Measure, train, measure again, and leave everything worth keeping in the folder."""
        trainer, save = self._trainer()
        self._begin(trainer)
        console = Console(self.config.trainer.steps, self._title(), start=trainer.step, remark=remark)
        with console:
            trainer.tracker = self._trackers(console, trainer.step)
            try:
                if self.start is None:
                    console.progress("measuring on held-out tasks, before training")
                    before = await self._measure(trainer)
                    self.memory["before"] = before.metrics
                    trainer.watch.look("evaluation", 0, before.episodes)
                await trainer.fit()
                console.progress("measuring on held-out tasks, after training")
                after = await self._measure(trainer)
                trainer.watch.failures.add(after.episodes, "the last evaluation")
            except asyncio.CancelledError:
                self._save(trainer, save, console)
                raise
            except RunStopped:
                if trainer.step > 0:
                    self._save(trainer, save, console)
                self._summarise(trainer, {}, stopped=True)
                written = await keepsakes(self.parts, self.home, [])
                console.note(f"What happened is in {written.get('report', self.home)}")
                raise
            finally:
                trainer.tracker.close()
                await self.parts.engine.close()
                self.parts.rollout.close()
        return await self._finish(trainer, after)

    def _trainer(self) -> tuple[Trainer, Save]:
        parts, config = self.parts, self.config
        save = Save(
            self.home / "checkpoints", config.trainer.save_every, config.trainer.keep, self.memory, parts.copy_tokenizer
        )
        hooks: list[Hook] = [KeepEpisodes(self.home / "episodes")] if config.track.episodes else []
        if self.render is not None:
            hooks.append(self.render)
        if config.evaluation.every and config.evaluation.tasks:
            hooks.append(self.held_out)
        trainer = Trainer(
            config, parts.source, parts.rollout, parts.rewards, parts.algorithm, parts.learner, parts.engine,
            Trackers([]), hooks, save,
        )  # fmt: skip
        return trainer, save

    def _begin(self, trainer: Trainer) -> None:
        """From the start, or exactly where the checkpoint left off."""
        if self.start is not None:
            state = checkpoint.load_state(self.start)
            trainer.restore(state)
            self.memory["before"] = state["before"]
            if state["seed"] != self.config.seed:
                raise ConfigError(
                    f"seed={self.config.seed}: the checkpoint was made with seed={state['seed']}. Write that."
                )
            self.parts.learner.load(self.start)
            checkpoint.rewind(self.home / "checkpoints", trainer.step)
        folders.open_folder(self.home, self.config)

    def _trackers(self, console: Console, step: int) -> Trackers:
        done = None if self.start is None else step
        chosen: list[Tracker] = [console, JsonlTracker(self.home / "metrics.jsonl", done)]
        if self.config.track.tensorboard:
            chosen.append(TensorBoardTracker(self.home / "tensorboard", done))
        return Trackers(chosen)

    def _title(self) -> list[str]:
        config = self.config
        what = f"{config.model.name} learns {config.env.name} with {config.algorithm.name}, seed {config.seed}"
        fenced = [f"code runs under {self.parts.sandbox}"] if self.parts.sandbox is not None else []
        return [f"{config.name}: {what}", f"into {self.home}", *fenced]

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
        if self.render is not None:
            await self.render.draw("validation", step, groups)

    def _save(self, trainer: Trainer, save: Save, console: Console) -> None:
        """The run ends before its time: keep where it stands, and say how to go on."""
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
        } | more
        if self.parts.sandbox is not None:
            summary["sandbox"] = str(self.parts.sandbox)
        folders.write_summary(self.home, summary)
        return summary

    async def _finish(self, trainer: Trainer, after: Measured) -> Run:
        summary = self._summarise(trainer, after.metrics)
        episodes = [episode for episode in after.episodes if episode.failure is None]
        written = await keepsakes(self.parts, self.home, episodes)
        terminal = Terminal()
        if after.metrics:
            terminal.print(table_before_after(summary["before"], summary["after"]))
        for cause in trainer.watch.failures:
            terminal.print(f"        failed  {cause}", highlight=False, soft_wrap=True, markup=False)
        for name, path in written.items():
            terminal.print(f"{name:>14}  {path}", highlight=False, soft_wrap=True)
        return Run(self.home, json.loads(json.dumps(summary)))
