"""What holds environments, wherever that is: what it has been asked, and what happens when it is gone."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from arborl.errors import ArborError

log = logging.getLogger(__name__)


class WorkerLost(ArborError):
    """The process that held the environment is gone."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has not been answered."""

    outcome: Future[Any]
    where: str
    due: float


class Holder(ABC):
    """What holds environments, wherever that is, and what it has been asked. Answers come to `_hear` or, when it is
    gone, to `_orphan`."""

    suspects = True
    """Whether its death is laid to its environments at once, rather than to where it was."""

    def __init__(self, alone: bool, patience: float) -> None:
        self.alone = alone
        self.lock = threading.RLock()  # who is gone may answer that at once, in the very thread that asks
        self.asked: dict[int, Asked] = {}
        self.number = 0
        self.envs = 0
        self.lost = False
        self.killed_for = ""
        self.ready: Future[None] = Future()
        self.asked[0] = Asked(self.ready, "a process of environments, starting,", time.monotonic() + patience)

    def ask(self, where: str, seconds: float, place: int, method: str, *args: Any) -> Future[Any]:
        """The answer to come. A request that takes longer than `seconds` costs the process."""
        outcome: Future[Any] = Future()
        with self.lock:
            self.number += 1
            number = self.number
            packed = pickle.dumps((number, place, method, args))
            self.asked[number] = Asked(outcome, where, time.monotonic() + seconds)
            try:
                if self.lost:
                    raise OSError
                self._send(packed)
            except OSError:
                del self.asked[number]
                outcome.set_exception(WorkerLost(self.why()))
        return outcome

    @abstractmethod
    def _send(self, packed: bytes) -> None:
        """OSError where nobody is there."""

    @abstractmethod
    def kill(self) -> None:
        """End it, whatever it does."""

    @abstractmethod
    def gone(self) -> str:
        """What is known of its end, where nobody here has killed it."""

    def _hear(self, packed: bytes) -> None:
        number, worked, value = pickle.loads(packed)
        with self.lock:
            one = self.asked.pop(number, None)
        if one is None:
            return
        if worked:
            _settle(one.outcome, value, None)
        else:
            error, trace = value
            error.add_note(trace)
            _settle(one.outcome, None, error)

    def _look(self) -> None:
        now = time.monotonic()
        with self.lock:
            late = [one for one in self.asked.values() if now > one.due]
        if late and not self.lost:
            self.killed_for = late[0].where
            log.warning("%s did not answer in time: its process is killed and replaced", late[0].where)
            self.kill()

    def _say_gone(self) -> None:
        """Nobody here has ended it."""
        log.warning("a process of %d environments is lost, and they are set up elsewhere: %s", self.envs, self.gone())

    def _orphan(self) -> None:
        """It is gone: whoever waits is told."""
        with self.lock:
            self.lost = True
            orphans, self.asked = self.asked, {}
        for one in orphans.values():
            _settle(one.outcome, None, WorkerLost(self.why()))

    @property
    def unborn(self) -> bool:
        """Whether it was gone before it was ready: none of its environments was ever there. Where a process is started
        on a node that is about to be missed, that is the node's doing."""
        return not self.suspects and self.ready.done() and self.ready.exception() is not None

    def why(self) -> str:
        if self.killed_for:
            return f"its process was killed because {self.killed_for} hung"
        return self.gone()


def _settle(outcome: Future[Any], value: Any, error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # nobody waits any more
        outcome.set_exception(error) if error is not None else outcome.set_result(value)
