"""Signs of life of the processes on a cluster.

A process that dies is told of at once. Of a node whose network is cut nobody tells: Ray asks it several times and gives
it up after a minute or more, and until then whoever waits for an answer from there waits. So every process is asked
here, every few seconds, in a thread of its own that neither its work nor its requests hold up. One that has answered
before and then is silent for `SILENT` seconds is ended, which everybody who waits for it is told of as of any other
end. Where nothing else on its node has answered meanwhile either, what takes its place is not put there.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from arborl.cluster.host import Told

log = logging.getLogger(__name__)

BEAT = 5.0
"""Seconds between two questions."""
SILENT = 20.0
"""Seconds without an answer, after which a process is taken for lost."""
SHUNNED = 120.0
"""Seconds for which nothing is put on its node; Ray itself has given it up by then, or it is back."""
GROUP = "pulse"
"""The thread of a process that these questions are answered in."""


@dataclass(slots=True)
class Watched:
    """A process."""

    actor: Any
    answer: Any
    """To come: who it is, at first, and then that it is there."""
    since: float
    told: Told | None = None
    """Until it has said who it is, whoever has started it waits for it as long as they like."""


class Pulse:
    """Watches the processes that a run has on a cluster.

    Args:
        ray: the module.
        here: the driver's node, by its id.
    """

    def __init__(self, ray: Any, here: str):
        self.ray, self.here = ray, here
        self.watched: dict[Any, Watched] = {}
        """By their actors; several threads add and take away."""
        self.silent: dict[str, float] = {}
        """Nodes with a process that was silent, and when."""
        self.looked = time.monotonic()
        self.ended = threading.Event()
        threading.Thread(target=self._watch, name="arborl-pulse", daemon=True).start()

    def add(self, actor: Any) -> None:
        self.watched[actor] = Watched(actor, actor.told.remote(), time.monotonic())

    def forget(self, actor: Any) -> None:
        self.watched.pop(actor, None)

    def close(self) -> None:
        self.ended.set()

    @property
    def shunned(self) -> list[str]:
        """Nodes, by id, on which nothing is to be put now."""
        now = time.monotonic()
        return sorted(node for node, when in self.silent.items() if now - when < SHUNNED)

    def _watch(self) -> None:
        while not self.ended.wait(BEAT):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Hear who has answered, and give up who has not for too long."""
        if now - self.looked > BEAT + SILENT / 4:  # this process itself was stopped, or starved: nobody is to blame
            for one in list(self.watched.values()):
                one.since = now
        self.looked = now
        for one in list(self.watched.values()):
            with suppress(Exception):  # the cluster itself is gone, or this process is no longer of it
                self._hear(one, now)

    def _hear(self, one: Watched, now: float) -> None:
        if self.ray.wait([one.answer], timeout=0)[0]:
            try:
                said = self.ray.get(one.answer)
            except self.ray.exceptions.RayError:  # it is dead: who waits for it knows
                self.forget(one.actor)
                return
            one.told = one.told or said
            one.answer, one.since = one.actor.present.options(concurrency_group=GROUP).remote(), now
        elif one.told is not None and now - one.since > SILENT:
            where = f"process {one.told.pid} on {one.told.address}"
            log.warning("%s has given no sign of life for %.0f s and is given up", where, now - one.since)
            self.forget(one.actor)
            if not self._answers(one.told.node, one.since):
                self.silent[one.told.node] = now
            self.ray.kill(one.actor, no_restart=True)

    def _answers(self, node: str, since: float) -> bool:
        """Whether a node is within reach: the driver's own, and one of which a process has been heard since then."""
        there = [one for one in list(self.watched.values()) if one.told is not None and one.told.node == node]
        return node == self.here or any(one.since > since + BEAT for one in there)
