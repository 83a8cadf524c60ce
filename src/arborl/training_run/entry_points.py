"""Train and evaluate: settings in, a run folder out. Python, the command line and the conversational API call these."""

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

from arborl.checkpoint import has_checkpoints
from arborl.config.config_base import to_plain
from arborl.config.load_config import from_kwargs
from arborl.config.run_config import RunConfig
from arborl.errors import AlarmStopped, ConfigError, LearnerRankLost
from arborl.track.run_log import recorded_warnings
from arborl.track.tracing import traced
from arborl.training_run.alarm_recovery import AlarmRecovery
from arborl.training_run.build import build, count_steps
from arborl.training_run.measure import MeasureOptions, play, policies
from arborl.training_run.object_names import name_objects
from arborl.training_run.rank_recovery import RankRecovery
from arborl.training_run.resume import ResumePoint, check_changes, find_resume_point, finished_summary, keep_dtype
from arborl.training_run.run_folder import claimed
from arborl.training_run.signals import StopSignals
from arborl.training_run.stub_run import stub_run

if TYPE_CHECKING:
    from arborl.trainer.policy_comparison import PolicyResult
    from arborl.trainer.trainer import Hook
    from arborl.training_run.run_session import RunSession
    from arborl.training_run.step_replay import StepReplay

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its folder and its summary."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Python objects of parts, by their names in `config.yaml`."""

    def evaluate(self, overrides: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Evaluate the last checkpoint on held-out tasks, with the objects of the run.

        Example:
            run.evaluate(["evaluation.tasks=500"])["greedy"]["success"]
        """
        return evaluate(str(self.folder), overrides, self.objects, trust=True)

    def replay(self, step: int) -> StepReplay:
        """Run an optimizer step again from the files of the run, with the objects of the run.

        Example:
            run.replay(12).equal
        """
        return replay(self.folder, step, objects=self.objects, trust=True)

    def view(self) -> Path:
        """Open the report in a browser; returns its path."""
        import webbrowser

        report = self.folder / "report.html"
        webbrowser.open(report.resolve().as_uri())
        return report


def run(**settings: Any) -> Run:
    """Train from Python. Keywords are the keys of a configuration file, and `resume`, `stub` and `profile` as in
    `train`. Tools, rewards, agents, environments, group filters and functions that return rows may be Python objects;
    `data` may be a path, a list of dicts, or a table of pandas, Polars, PyArrow or Hugging Face datasets.

    Example:
        run = arborl.run(model="seedling", data="train.json", agent="tool", tools=[calculator], rewards=[exact],
                         algorithm="grpo", steps=50)
    """
    options = {name: settings.pop(name) for name in ("resume", "stub", "profile") if name in settings}
    named, objects = name_objects(settings)
    return train(from_kwargs(**named), objects=objects, **options)


def train(
    config: RunConfig,
    *,
    resume: str | None = None,
    stub: bool = False,
    objects: Mapping[str, Any] | None = None,
    hooks: Sequence[Hook] = (),
    profile: bool = False,
) -> Run:
    """Train. Mistakes in the configuration are found before anything is written.

    Args:
        config: the run.
        resume: `latest`, `best`, a step, or the path of a checkpoint; `auto`: the newest usable checkpoint of
            `output_dir`, or a new run if there is none.
        stub: a few small steps with scripted replies, to test the loop.
        objects: Python objects of parts, by their names in the configuration.
        hooks: additional hooks, called after each step.
        profile: write torch's trace of two steps.
    """
    objects = objects or {}
    if stub or config.stub:
        config, objects = stub_run(config, objects, resuming=resume is not None)
    if config.learner.strategy != "single" and os.environ.get("RANK", "0") != "0":
        from arborl.learner.distributed.launch import serve_launched_rank

        if serve_launched_rank(config.learner, config.model.device):
            return Run(config.output_dir or Path())
    training = _Training(config, objects, hooks)

    def attempt(home: Path, resume: str | None) -> Run | None:
        try:
            with training.session(home, resume, stops.saving) as session:
                if isinstance(session, Run):
                    return session
                if profile:
                    session.profile()
                return Run(home, wait_for(session.run(), stops), objects)
        except (LearnerRankLost, AlarmStopped) as stopped:
            restarts = training.restarts(stopped)
            if restarts and stops.got is not None and isinstance(stopped, AlarmStopped):
                raise asyncio.CancelledError from stopped  # ends like any stop by a signal; the rollback is recorded
            if not restarts or stops.got is not None:
                raise
            return None

    with StopSignals(config.trainer.stop_seconds) as stops, claimed(config, resuming=_resumes(config, resume)) as home:
        while (done := attempt(home, resume)) is None:
            resume = _next_resume(home, resume)
        return done


async def train_async(
    config: RunConfig, *, resume: str | None = None, objects: Mapping[str, Any], hooks: Sequence[Hook] = ()
) -> Run:
    """`train` in the running event loop. Cancelling it stops the run at a checkpoint; signals are not handled."""
    training, task = _Training(config, objects, hooks), asyncio.current_task()
    assert task is not None

    async def attempt(home: Path, resume: str | None) -> Run | None:
        try:
            with training.session(home, resume) as session:
                return session if isinstance(session, Run) else Run(home, await session.run(), objects)
        except (LearnerRankLost, AlarmStopped) as stopped:
            if not training.restarts(stopped) or task.cancelling():
                raise
            return None

    with claimed(config, resuming=_resumes(config, resume)) as home:
        while (done := await attempt(home, resume)) is None:
            resume = _next_resume(home, resume)
        return done


class _Training:
    """Builds the session of each attempt of a run; further attempts follow the loss of a rank, or an alarm."""

    def __init__(self, config: RunConfig, objects: Mapping[str, Any], hooks: Sequence[Hook]):
        to_plain(config)  # raises now if an argument is an object that no file can hold
        self.config, self.objects, self.hooks = config, objects, hooks
        self.recovery, self.alarms = RankRecovery(config.learner.restarts), AlarmRecovery(config)

    def restarts(self, stopped: LearnerRankLost | AlarmStopped) -> bool:
        """Whether another attempt follows."""
        return stopped.restarts if isinstance(stopped, AlarmStopped) else self.recovery.count(stopped)

    @contextmanager
    def session(
        self, home: Path, resume: str | None, saving: Callable[[], None] = lambda: None
    ) -> Iterator[RunSession | Run]:
        """A session that starts or resumes the run in its folder; the `Run` itself if it is already finished."""
        self.alarms.load(home)
        start = find_resume_point(home, resume, self.config) if resume is not None else None
        config = self.config if start is None else keep_dtype(start.before, self.config)
        if start is not None:
            steps = count_steps(config, self.objects)
            if (summary := finished_summary(home, start, steps)) is not None:
                message = _finished_message(home, start, config)
                Terminal().print(message, highlight=False, markup=False, soft_wrap=True)
                yield Run(home, summary, self.objects)
                return
            check_changes(start, config, steps, self.objects)
        with recorded_warnings() as warnings:
            parts = build(config, self.objects)
        from arborl.training_run.run_session import RunSession  # imports torch, which takes seconds; after all checks

        try:
            yield RunSession(
                parts, home, start=start, saving=saving, hooks=self.hooks, recovery=self.recovery, alarms=self.alarms,
                warnings=warnings,
            )  # fmt: skip
        finally:
            parts.leave()


def _resumes(config: RunConfig, resume: str | None) -> bool:
    """Whether the run folder must exist."""
    if resume != "auto":
        return resume is not None
    if config.output_dir is None:
        raise ConfigError("--resume auto: the run folder must have the same name each time. Write output_dir=FOLDER.")
    return (config.output_dir / "config.yaml").is_file()


def _next_resume(home: Path, resume: str | None) -> str | None:
    """Where a run resumes after the loss of a rank or a rollback: its last checkpoint, else its first start. Objects of
    the former attempt are freed first: two models might not fit."""
    gc.collect()
    is_elsewhere = resume is not None and Path(resume).is_dir() and not has_checkpoints(home / "checkpoints")
    return resume if is_elsewhere else "auto"


def _finished_message(home: Path, start: ResumePoint, config: RunConfig) -> str:
    done = f"{home} is finished: all {start.step} steps are done. Nothing is changed."
    ignored = f" Not applied: {'; '.join(map(str, start.changes))}." if start.changes else ""
    epochs = config.trainer.epochs
    more = f"trainer.steps={2 * start.step}" if epochs is None else f"trainer.epochs={2 * epochs}"
    return f"{done}{ignored} Write {more} to continue."


def evaluate(
    path: str, overrides: Sequence[str] = (), objects: Mapping[str, Any] | None = None, trust: bool = False
) -> dict[str, dict[str, float]]:
    """Metrics on held-out tasks, by decoding mode (`sampled`, `greedy`).

    Args:
        path: a run folder (its last checkpoint), a checkpoint, a model name, or a YAML file (its initial model).
        overrides: settings as on the command line.
        objects: Python objects of parts, by their names in the configuration.
        trust: import parts that an unsigned run folder names.
    """
    return {one.decoding: one.metrics for one in measure([path], MeasureOptions(overrides, trust=trust), objects)}


def replay(
    run: str | Path,
    step: int,
    overrides: Sequence[str] = (),
    objects: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> StepReplay:
    """Run an optimizer step again from the files of its run, and compare it with the recorded one.

    Example:
        result = arborl.replay("runs/frozen-lake-001", step=12)
        result.equal, result.differences

    Args:
        run: the run folder.
        step: number of the update, from 1.
        overrides: settings as on the command line that replace those of the run.
        objects: Python objects of parts, by their names in the configuration.
        trust: import parts that an unsigned run folder names.
    """
    from arborl.training_run.step_replay import StepReplayer

    with StepReplayer(Path(run), step, overrides, objects, trust) as replayer:
        return replayer.replay()


def measure(
    names: Sequence[str], options: MeasureOptions, objects: Mapping[str, Any] | None = None
) -> list[PolicyResult]:
    """Evaluate several policies on the same tasks or prompts, one after the other.

    Example:
        played = measure(["runs/a", "seedling"], MeasureOptions(["evaluation.tasks=100"], attempts=4))
        played[0].scores()["pass@4"]

    Args:
        names: runs, checkpoints, models, YAML files, or `openai:NAME`.
        options: tasks and decoding.
        objects: as in `evaluate`.
    """
    results: list[PolicyResult] = []
    for policy in policies(names, options):
        with traced(policy.name):
            results += wait_for(play(policy, options, objects))
    return results


def wait_for(work: Coroutine[Any, Any, T], stops: StopSignals | None = None) -> T:
    """Run a coroutine to its end, in a thread if an event loop is running (as in a notebook)."""
    run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run if stops is None else stops.run
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # call `run` below, outside of this handler: its errors must not be chained to this one
    else:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(run, work).result()
    return run(work)
