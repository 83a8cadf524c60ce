"""Train and evaluate: configuration in, a run folder out."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console as Terminal

from arborl.api import folder as folders
from arborl.api.losses import Losses
from arborl.api.measure import Asked, play, policies
from arborl.api.objects import name_objects
from arborl.api.resume import Start, find_start, finished, keep_dtype, refuse
from arborl.api.signals import Stops
from arborl.build import build, count_steps
from arborl.checkpoint import any_of
from arborl.config.base import plain, validate
from arborl.config.load import from_kwargs
from arborl.config.run import RunConfig
from arborl.errors import LearnerLost
from arborl.track.tracing import traced

if TYPE_CHECKING:
    from arborl.api.session import RunSession
    from arborl.trainer.standings import Played
    from arborl.trainer.trainer import Hook

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its folder and its numbers."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Parts that were given as Python objects, by their names in `config.yaml`."""

    def evaluate(self, overrides: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Numbers of the last checkpoint on held-out tasks, with the very objects of the run.

        Example:
            run.evaluate(["evaluation.tasks=500"])["greedy"]["success"]
        """
        return evaluate(str(self.folder), overrides, self.objects, trust=True)

    def view(self) -> Path:
        """Open the report in a browser; returns its path."""
        import webbrowser

        report = self.folder / "report.html"
        webbrowser.open(report.resolve().as_uri())
        return report


def run(**settings: Any) -> Run:
    """Train from Python. Keywords are those of a configuration file; tools, rewards, agents, environments, group
    filters and functions that give rows may be given as objects, and rows as a list.

    Example:
        run = arborl.run(model="seedling", data="train.json", agent="tool", tools=[calculator], rewards=[exact],
                         algorithm="grpo", steps=50)
    """
    resume, stub = settings.pop("resume", None), settings.pop("stub", False)
    named, objects = name_objects(settings)
    return train(from_kwargs(**named), resume=resume, stub=stub, objects=objects)


def train(
    config: RunConfig,
    *,
    resume: str | None = None,
    stub: bool = False,
    objects: Mapping[str, Any] | None = None,
    hooks: Sequence[Hook] = (),
    profile: bool = False,
) -> Run:
    """Train as the configuration says; everything that can be wrong with it is found before anything is written.

    Args:
        config: the run.
        resume: `latest`, a step, or a checkpoint's path.
        stub: a few small steps on scripted replies, to see the whole loop work.
        objects: parts handed in by Python code, by the name the configuration uses for them.
        hooks: further things to do after a step.
        profile: write torch's trace of two steps.
    """
    config, objects = stubbed(config) if stub else config, objects or {}
    if config.learner.strategy != "single" and os.environ.get("RANK", "0") != "0":
        from arborl.learner.launch import serve_launched

        if serve_launched(config.learner, config.model.device):
            return Run(config.output_dir or Path())
    plain(config)  # an object among the arguments, which no file can hold, is found before anything starts
    losses = Losses(config.learner.restarts)

    def once(home: Path, resume: str | None) -> Run | None:
        try:
            with _prepared(home, config, resume, objects, hooks, losses, stops.saving) as found:
                if profile and not isinstance(found, Run):
                    found.profile()
                return found if isinstance(found, Run) else Run(home, wait_for(found.run(), stops), objects)
        except LearnerLost as lost:
            if not losses.count(lost) or stops.got is not None:
                raise
            return None

    with Stops(config.trainer.stop_seconds) as stops, folders.claimed(config, resuming=resume is not None) as home:
        while (done := once(home, resume)) is None:
            resume = _again(home, resume)
        return done


async def train_here(
    config: RunConfig, *, resume: str | None = None, objects: Mapping[str, Any], hooks: Sequence[Hook] = ()
) -> Run:
    """`train` in the caller's own event loop: cancelling it stops the run at its next checkpoint, and signals are the
    caller's.

    Args:
        config, resume, objects: as of `train`.
        hooks: further things to do after a step.
    """
    plain(config)  # as in `train`
    losses, task = Losses(config.learner.restarts), asyncio.current_task()
    assert task is not None

    async def once(home: Path, resume: str | None) -> Run | None:
        try:
            with _prepared(home, config, resume, objects, hooks, losses) as found:
                return found if isinstance(found, Run) else Run(home, await found.run(), objects)
        except LearnerLost as lost:
            if not losses.count(lost) or task.cancelling():
                raise
            return None

    with folders.claimed(config, resuming=resume is not None) as home:
        while (done := await once(home, resume)) is None:
            resume = _again(home, resume)
        return done


def _again(home: Path, resume: str | None) -> str | None:
    """From where a run goes on that has lost a rank; where it has saved nothing yet, from where it had begun. What it
    was made of is gone before the same is made once more: two models might not fit."""
    gc.collect()
    return "latest" if any_of(home / "checkpoints") else resume


@contextmanager
def _prepared(
    home: Path,
    config: RunConfig,
    resume: str | None,
    objects: Mapping[str, Any],
    hooks: Sequence[Hook],
    losses: Losses,
    saving: Callable[[], None] = lambda: None,
) -> Iterator[RunSession | Run]:
    """The run, ready to begin or to go on, in its folder; or what it came to, where it is finished already."""
    start = find_start(home, resume, config) if resume is not None else None
    config = config if start is None else keep_dtype(start.before, config)
    if start is not None:
        steps = count_steps(config, objects)
        if (summary := finished(home, start, steps)) is not None:
            Terminal().print(_nothing_to_do(home, start, config), highlight=False, markup=False, soft_wrap=True)
            yield Run(home, summary, objects)
            return
        refuse(start, config, steps, objects)
    parts = build(config, objects)
    from arborl.api.session import RunSession  # needs torch, which takes seconds; what is wrong has been said by now

    try:
        yield RunSession(parts, home, start, saving, hooks, losses)
    finally:
        parts.leave()


def _nothing_to_do(home: Path, start: Start, config: RunConfig) -> str:
    done = f"{home} is finished: all {start.step} steps are done. Nothing is changed."
    left = f" Not applied: {'; '.join(map(str, start.changes))}." if start.changes else ""
    passes = config.trainer.epochs
    more = f"trainer.steps={2 * start.step}" if passes is None else f"trainer.epochs={2 * passes}"
    return f"{done}{left} Write {more} to go on."


def evaluate(
    path: str, overrides: Sequence[str] = (), objects: Mapping[str, Any] | None = None, trust: bool = False
) -> dict[str, dict[str, float]]:
    """Numbers of a run's last checkpoint, of a checkpoint, of a model by name, or of the model that a YAML file begins
    with, on held-out tasks; by way of playing.

    Args:
        path: the folder, the file or the name.
        overrides: settings on top of the run's, as on the command line.
        objects: parts handed in by Python code, by the name the configuration uses for them.
        trust: import what a run's folder names though this user did not write it.
    """
    return {one.way: one.metrics for one in measure([path], Asked(overrides, trust=trust), objects)}


def measure(names: Sequence[str], asked: Asked, objects: Mapping[str, Any] | None = None) -> list[Played]:
    """Several policies on the same tasks or prompts, one after the other.

    Example:
        played = measure(["runs/a", "seedling"], Asked(["evaluation.tasks=100"], attempts=4))
        played[0].scores()["pass@4"]

    Args:
        names: runs, checkpoints, models, YAML files, or `openai:NAME`.
        asked: what to play, and how.
        objects: as of `evaluate`.
    """
    found: list[Played] = []
    for policy in policies(names, asked):
        with traced(policy.name):
            found += wait_for(play(policy, asked, objects))
    return found


def stubbed(config: RunConfig) -> RunConfig:
    """The same run, small and on scripted replies."""
    tree = config.model_dump()
    if not config.data.offline:
        tree["engine"] = config.engine.scripted()
    tree["trainer"] |= {"steps": min(config.trainer.steps or 3, 3), "epochs": None}
    tree["demonstrations"] |= {"steps": min(config.demonstrations.steps, 1)}
    if not config.rollout.envs.tags:  # a partition stays what it is
        few = min(config.rollout.tasks_per_step, 4)
        tree["rollout"] |= {"tasks_per_step": few, "envs": tree["rollout"]["envs"] | {"num_env_groups": None}}
    tree["learner"] |= {"minibatches": 1}
    tree["track"] |= {"top_logprobs": 0}  # a script has none
    tree["placement"] = {"name": "local"}  # there is nothing to gain elsewhere
    tree["evaluation"] |= {"tasks": min(config.evaluation.tasks, 8)}
    return validate(RunConfig, tree)


def wait_for(work: Coroutine[Any, Any, T], stops: Stops | None = None) -> T:
    """Run to the end, also where a loop is running already (a notebook)."""
    run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run if stops is None else stops.run
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # and out of here: what the work raises was not raised while handling this
    else:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(run, work).result()
    return run(work)
