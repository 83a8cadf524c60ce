"""Optuna: chooses parameters with its tree-structured Parzen estimator and stores trials in its database.

Several processes can share a study, and a killed study resumes. Every process holds a file lock, which the system
releases when the process ends; the trials of a dead process are marked as lost and repeated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from arborl.errors import ConfigError, disk_errors
from arborl.seeds import derive
from arborl.tune.backends import OnTrialEnd, missing_package
from arborl.tune.space import ChoiceDomain, Domain, Params
from arborl.tune.trial import Objective, StudyPlan, Trial, TrialOutcome, TrialState, run_trial_once

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

NAME = "study"
POLL_SECONDS = 0.5
"""Interval of checks for trials of dead processes."""
MIN_FINISHED = 4
"""Finished trials before pruning starts."""
DIED = "its process died"


class OptunaBackend:
    """Runs `plan.jobs` trials at a time; a killed study resumes with the missing ones."""

    def __init__(self) -> None:
        try:
            import optuna
        except ImportError as error:
            raise missing_package("optuna", "optuna", "optuna", error) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    async def run(self, plan: StudyPlan, objective: Objective, tell: OnTrialEnd) -> list[Trial]:
        storage = StudyStorage(plan)
        try:
            workers = [asyncio.create_task(_work(storage, objective, tell)) for _ in range(plan.jobs)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            return storage.trials()
        finally:
            storage.close()


async def _work(storage: StudyStorage, objective: Objective, tell: OnTrialEnd) -> None:
    while not storage.is_finished():
        claimed = storage.claim()
        if claimed is None:
            await asyncio.sleep(POLL_SECONDS)  # other processes run the last trials
            continue
        try:
            outcome = await run_trial_once(objective, claimed.params, claimed, lambda: claimed.stopped)  # noqa: B023
        except BaseException:
            storage.lose(claimed)
            raise
        tell(storage.finish(claimed, outcome))


@dataclass(slots=True)
class ClaimedTrial:
    """A trial that this process runs; also its report."""

    handle: optuna.Trial
    params: Params
    """Empty for the unchanged settings."""
    default: bool
    folder: Path
    pruning: bool
    stopped: bool = False

    @property
    def trial(self) -> int:
        return self.handle.number

    def __call__(self, step: int, value: float) -> bool:
        if math.isfinite(value):
            self.handle.report(value, step)
            self.stopped = self.stopped or (self.pruning and bool(self.handle.should_prune()))
        return self.stopped


class StudyStorage:
    """The study's database, shared by several processes."""

    def __init__(self, plan: StudyPlan):
        import optuna

        self.plan = plan
        self.worker_id = uuid.uuid4().hex
        with disk_errors(plan.folder):
            (plan.folder / "workers").mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(plan.folder / ".lock")
        self.worker_lock = self._lock_of(self.worker_id)
        with self.lock:
            try:
                self.worker_lock.acquire(blocking=False)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{plan.folder}: this file system has no locks, which detect dead processes. "
                    "Write --study FOLDER on another file system."
                ) from error
            self.storage = _database(plan.folder / "study.db")
            pruner = optuna.pruners.MedianPruner(MIN_FINISHED) if plan.pruning else optuna.pruners.NopPruner()
            self.study = optuna.create_study(
                storage=self.storage, study_name=NAME, direction=plan.direction, load_if_exists=True, pruner=pruner
            )
            if not self.study.get_trials(deepcopy=False):
                self.study.enqueue_trial(plan.known, user_attrs={"default": True})

    def close(self) -> None:
        with self.lock:
            self.worker_lock.release()
            Path(self.worker_lock.lock_file).unlink(missing_ok=True)
        self.storage.remove_session()
        self.storage.engine.dispose()

    # -------------------------------------------------------------------------------------------- taking one

    def is_finished(self) -> bool:
        """Whether all trials of the plan have ended."""
        return sum(trial.state in ("done", "pruned", "failed") for trial in self.trials()) >= self.plan.trials

    def claim(self) -> ClaimedTrial | None:
        """The next trial; None if all others are running."""
        with self.lock:
            self._mark_lost_trials()
            if sum(trial.state != "lost" for trial in self.trials()) >= self.plan.trials:
                return None
            trial = self.study.ask()
            trial.set_user_attr("worker", self.worker_id)
            default = bool(trial.user_attrs.get("default"))
            names = self.plan.known if default else self.plan.space
            self.study.sampler = self._sampler(trial.number)
            drawn = {name: _suggest(trial, name, self.plan.space[name]) for name in names}
            folder = self.plan.trial_folder(trial.number)
            return ClaimedTrial(trial, {} if default else drawn, default, folder, self.plan.pruning and not default)

    def _sampler(self, number: int) -> Any:
        """A new sampler for each trial, so that a resumed study does not repeat its first samples."""
        import optuna

        startup = 3 + len(self.plan.space)  # random trials before the estimator is used
        seed = derive(self.plan.seed, "tune", number) % 2**32
        return optuna.samplers.TPESampler(n_startup_trials=startup, seed=seed, multivariate=False)

    # -------------------------------------------------------------------------------------------- ending it

    def finish(self, claim: ClaimedTrial, outcome: TrialOutcome) -> Trial:
        """Store the outcome."""
        import optuna

        states = optuna.trial.TrialState
        state = {"done": states.COMPLETE, "pruned": states.PRUNED}.get(outcome.state, states.FAIL)
        with self.lock:
            claim.handle.set_user_attr("seconds", outcome.seconds)
            claim.handle.set_user_attr("reason", outcome.reason)
            self.study.tell(claim.handle, outcome.value if outcome.state == "done" else None, state=state)
        return next(trial for trial in self.trials() if trial.number == claim.trial)

    def lose(self, claim: ClaimedTrial) -> None:
        """An interrupted trial does not count and is repeated."""
        with self.lock:
            trial = self.study.get_trials(deepcopy=False)[claim.trial]
            self._lose(trial, "it was interrupted", bool(trial.user_attrs.get("again")))

    def _mark_lost_trials(self) -> None:
        """Mark the trials of dead processes as lost."""
        import optuna

        for trial in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            owner = trial.user_attrs.get("worker")
            if owner == self.worker_id:
                continue
            if owner is not None:
                lock = self._lock_of(owner)
                try:
                    lock.acquire(blocking=False)
                except Timeout:
                    continue  # its process is alive
                lock.release()
                Path(lock.lock_file).unlink(missing_ok=True)
            if trial.user_attrs.get("again"):  # the trial may be the cause, for example out of memory
                self._fail(trial, f"{DIED}, twice")
            else:
                self._lose(trial, DIED, again=True)

    def _lose(self, trial: optuna.trial.FrozenTrial, reason: str, again: bool) -> None:
        """The trial does not count and is repeated."""
        default = bool(trial.user_attrs.get("default"))
        self.study.enqueue_trial(dict(trial.params), user_attrs={"default": default, "again": again})
        self._fail(trial, reason, lost=True)

    def _fail(self, trial: optuna.trial.FrozenTrial, reason: str, lost: bool = False) -> None:
        import optuna

        study = self.storage.get_study_id_from_name(NAME)
        own = self.storage.get_trial_id_from_study_id_trial_number(study, trial.number)
        self.storage.set_trial_user_attr(own, "reason", reason)
        self.storage.set_trial_user_attr(own, "lost", lost)
        self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    # -------------------------------------------------------------------------------------------- reading

    def trials(self) -> list[Trial]:
        """All trials that have started."""
        found = self.study.get_trials(deepcopy=False)
        return [self._read(trial) for trial in found if trial.state.name != "WAITING"]

    def _read(self, trial: optuna.trial.FrozenTrial) -> Trial:
        attributes = trial.user_attrs
        states: dict[str, TrialState] = {"COMPLETE": "done", "PRUNED": "pruned", "RUNNING": "running"}
        state = states.get(trial.state.name, "lost" if attributes.get("lost") else "failed")
        value = trial.value if state in ("done", "pruned") else None
        outcome = TrialOutcome(state, value, attributes.get("reason", ""), attributes.get("seconds", 0.0))
        return self.plan.trial(trial.number, trial.params, outcome, bool(attributes.get("default")))

    def _lock_of(self, owner: str) -> FileLock:
        return FileLock(self.plan.folder / "workers" / f"{owner}.lock")


def _database(path: Path) -> optuna.storages.RDBStorage:
    """Opened by path, not by URL: `?`, `%` and braces of the path have a meaning in a URL."""
    import sqlite3

    import optuna
    from sqlalchemy.pool import NullPool

    def opened() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=60, check_same_thread=False)

    return optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": opened, "poolclass": NullPool})


def _suggest(trial: optuna.Trial, name: str, domain: Domain) -> Any:
    if isinstance(domain, ChoiceDomain):
        return trial.suggest_categorical(name, domain.choices)
    if domain.whole:
        return trial.suggest_int(name, int(domain.low), int(domain.high))
    return trial.suggest_float(name, domain.low, domain.high, log=domain.log)
