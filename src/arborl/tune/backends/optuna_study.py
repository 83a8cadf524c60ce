"""Optuna: its tree-structured Parzen estimator chooses, its database remembers.

The database is the truth, and a trial in it is somebody's as long as that somebody lives: every process holds a lock of
its own, which the system lets go of however the process ends. So a study that was killed goes on, and several processes
share one: whoever comes next marks what a dead one left as lost, and has it tried again.
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
from arborl.tune.backends.backend import Tell, missing
from arborl.tune.space import Choice, Domain, Params
from arborl.tune.trial import Objective, Outcome, Plan, State, Trial, attempt

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

NAME = "study"
WAIT = 0.5
"""Seconds between two looks at trials of other processes, which may die and leave some."""
ENOUGH = 4
"""Trials that must have come to their end before one is stopped for doing worse than they did."""
DIED = "the process ended in the middle of it"


class OptunaBackend:
    """Trials one after another, or `plan.jobs` at a time; a killed study goes on with those that are missing."""

    def __init__(self) -> None:
        try:
            import optuna
        except ImportError as error:
            raise missing("optuna", "optuna", "optuna", error) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    async def run(self, plan: Plan, objective: Objective, tell: Tell) -> list[Trial]:
        board = Board(plan)
        try:
            workers = [asyncio.create_task(_work(board, objective, tell)) for _ in range(plan.jobs)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            return board.trials()
        finally:
            board.close()


async def _work(board: Board, objective: Objective, tell: Tell) -> None:
    while not board.enough():
        claimed = board.claim()
        if claimed is None:
            await asyncio.sleep(WAIT)  # others are at the last ones
            continue
        try:
            outcome = await attempt(objective, claimed.params, claimed, lambda: claimed.stopped)  # noqa: B023
        except BaseException:
            board.lose(claimed)
            raise
        tell(board.settle(claimed, outcome))


@dataclass(slots=True)
class Claim:
    """A trial that this process has taken, and its report."""

    handle: optuna.Trial
    params: Params
    """Empty: the settings as they are."""
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


class Board:
    """The study in its database, as one of the processes that work on it sees it."""

    def __init__(self, plan: Plan):
        import optuna

        self.plan = plan
        self.me = uuid.uuid4().hex
        with disk_errors(plan.folder):
            (plan.folder / "workers").mkdir(parents=True, exist_ok=True)
        self.guard = FileLock(plan.folder / ".lock")
        self.alive = self._lock_of(self.me)
        with self.guard:
            self._hold(self.alive)
            self.storage = _database(plan.folder / "study.db")
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=NAME,
                direction=plan.direction,
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(ENOUGH) if plan.pruning else optuna.pruners.NopPruner(),
            )
            if not self.study.get_trials(deepcopy=False):
                self.study.enqueue_trial(plan.known, user_attrs={"default": True})

    def close(self) -> None:
        with self.guard:
            self.alive.release()
            Path(self.alive.lock_file).unlink(missing_ok=True)
        self.storage.remove_session()
        self.storage.engine.dispose()

    # -------------------------------------------------------------------------------------------- taking one

    def enough(self) -> bool:
        """Whether all trials of the plan have ended."""
        return sum(trial.state in ("done", "pruned", "failed") for trial in self.trials()) >= self.plan.trials

    def claim(self) -> Claim | None:
        """The next trial; none where the others are being played."""
        with self.guard:
            self._bury()
            if sum(trial.state != "lost" for trial in self.trials()) >= self.plan.trials:
                return None
            trial = self.study.ask()
            trial.set_user_attr("worker", self.me)
            default = bool(trial.user_attrs.get("default"))
            names = self.plan.known if default else self.plan.space
            self.study.sampler = self._sampler(trial.number)
            drawn = {name: _suggest(trial, name, self.plan.space[name]) for name in names}
            folder = self.plan.folder_of(trial.number)
            return Claim(trial, {} if default else drawn, default, folder, self.plan.pruning and not default)

    def _sampler(self, number: int) -> Any:
        """One for each trial, so that a study that goes on does not draw again what it drew at its beginning."""
        import optuna

        startup = 3 + len(self.plan.space)  # drawn at random, before there is much to estimate from
        seed = derive(self.plan.seed, "tune", number) % 2**32
        return optuna.samplers.TPESampler(n_startup_trials=startup, seed=seed, multivariate=False)

    # -------------------------------------------------------------------------------------------- ending it

    def settle(self, claim: Claim, outcome: Outcome) -> Trial:
        """Write down how it ended."""
        import optuna

        states = optuna.trial.TrialState
        state = {"done": states.COMPLETE, "pruned": states.PRUNED}.get(outcome.state, states.FAIL)
        with self.guard:
            claim.handle.set_user_attr("seconds", outcome.seconds)
            claim.handle.set_user_attr("reason", outcome.reason)
            self.study.tell(claim.handle, outcome.value if outcome.state == "done" else None, state=state)
        return next(trial for trial in self.trials() if trial.number == claim.trial)

    def lose(self, claim: Claim) -> None:
        """It was interrupted, for no fault of its own: it does not count, and is tried again."""
        with self.guard:
            trial = self.study.get_trials(deepcopy=False)[claim.trial]
            self._lose(trial, "it was interrupted", bool(trial.user_attrs.get("again")))

    def _bury(self) -> None:
        """Trials whose process is gone are lost."""
        import optuna

        for trial in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            owner = trial.user_attrs.get("worker")
            if owner == self.me:
                continue
            if owner is not None:
                lock = self._lock_of(owner)
                try:
                    lock.acquire(blocking=False)
                except Timeout:
                    continue  # it lives
                lock.release()
                Path(lock.lock_file).unlink(missing_ok=True)
            if trial.user_attrs.get("again"):  # it may well be its doing: out of memory, say
                self._fail(trial, f"{DIED}, twice")
            else:
                self._lose(trial, DIED, again=True)

    def _lose(self, trial: optuna.trial.FrozenTrial, reason: str, again: bool) -> None:
        """It does not count; the same is tried anew.

        Args:
            again: whether a process has died of it.
        """
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
        """All that have begun."""
        found = self.study.get_trials(deepcopy=False)
        return [self._read(trial) for trial in found if trial.state.name != "WAITING"]

    def _read(self, trial: optuna.trial.FrozenTrial) -> Trial:
        attributes, folder = trial.user_attrs, self.plan.folder_of(trial.number)
        default = bool(attributes.get("default"))
        states: dict[str, State] = {"COMPLETE": "done", "PRUNED": "pruned", "RUNNING": "running"}
        return Trial(
            trial.number,
            dict(self.plan.default) if default else dict(trial.params),
            states.get(trial.state.name, "lost" if attributes.get("lost") else "failed"),
            trial.value if trial.state.name in ("COMPLETE", "PRUNED") else None,
            attributes.get("reason", ""),
            attributes.get("seconds", 0.0),
            default,
            str(folder.relative_to(self.plan.folder)) if folder.exists() else "",
        )

    def _lock_of(self, owner: str) -> FileLock:
        return FileLock(self.plan.folder / "workers" / f"{owner}.lock")

    def _hold(self, lock: FileLock) -> None:
        try:
            lock.acquire(blocking=False)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.plan.folder}: this file system has no locks, without which nobody knows whether a trial is "
                "still being played. Write --study FOLDER on another."
            ) from error


def _database(path: Path) -> optuna.storages.RDBStorage:
    """The file is opened by its path: in an address, a `?`, a `%` or a brace of the path would mean something."""
    import sqlite3

    import optuna
    from sqlalchemy.pool import NullPool

    def opened() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=60, check_same_thread=False)

    return optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": opened, "poolclass": NullPool})


def _suggest(trial: optuna.Trial, name: str, domain: Domain) -> Any:
    if isinstance(domain, Choice):
        return trial.suggest_categorical(name, domain.choices)
    if domain.whole:
        return trial.suggest_int(name, int(domain.low), int(domain.high))
    return trial.suggest_float(name, domain.low, domain.high, log=domain.log)
