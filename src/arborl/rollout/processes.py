"""Environments in processes: they use other cores, and one that hangs or crashes can be killed.

A process holds several environments, each in a thread of its own there. When one of them does not answer in time the
process is killed; its neighbours are then set up in another one and brought to where they were by playing their
messages again, which task, seed and messages decide.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from arborl.envs.env import Env, Observation, Step
from arborl.rollout.holder import Holder, WorkerLost
from arborl.rollout.process_main import DROP, MAKE, RANDOM, UNSAFE
from arborl.sandbox import unsafe_allowed
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image

log = logging.getLogger(__name__)

LOOK = 0.1
"""Seconds between looks at whether a request is overdue."""
LOSSES = 8
"""Processes that an episode may lose, by whoever's fault, before it is given up."""
START = 60.0
"""Seconds a process may take to start."""


class Process(Holder):
    """A process of this machine, behind a pipe."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__(alone, START)
        ours, theirs = socket.socketpair()
        # stdout is ours to keep clean; what an environment prints goes to stderr
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "arborl.rollout.process_main", str(theirs.fileno()), *_told()],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        theirs.close()
        self.pipe = Connection(ours.detach())
        threading.Thread(target=self._listen, name="arborl-process", daemon=True).start()

    def _send(self, packed: bytes) -> None:
        self.pipe.send_bytes(packed)

    def kill(self) -> None:
        self.lost = True
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def gone(self) -> str:
        return f"its process is gone, exit code {self.child.poll()}"

    def _listen(self) -> None:
        """Hands answers out, and looks after those that are overdue, until the process is gone."""
        looked = time.monotonic()
        try:
            while True:
                if self.pipe.poll(LOOK):
                    self._hear(self.pipe.recv_bytes())
                if time.monotonic() - looked > LOOK:  # however busy the others are
                    self._look()
                    looked = time.monotonic()
        except (EOFError, OSError):
            pass
        ended, self.lost = self.lost, True
        with suppress(OSError):
            self.pipe.close()
        self.child.wait()
        if not ended:
            self._say_gone()
        self._orphan()


def _told() -> list[str]:
    """What this process was allowed and its processes are too."""
    return [UNSAFE] if unsafe_allowed() else []


async def _heard(outcome: Future[Any]) -> Any:
    """The answer. Who stops waiting for it leaves it to come, and to be lost."""
    answer = asyncio.wrap_future(outcome)
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(answer)


class Processes:
    """The processes of a rollout, started when they are needed.

    Args:
        per_process: environments in one; 0 divides them among as many processes as there may be.
        most: processes; without it, as many as there are cores.
        start: makes one; it is told whether it is for one environment alone.
    """

    def __init__(self, per_process: int = 0, most: int | None = None, start: Callable[[bool], Holder] = Process):
        self.per_process, self.start = per_process, start
        self.most = None if per_process else most or os.cpu_count() or 1
        self.alive: list[Holder] = []
        self.places = 0
        self.replaced = self.hung = 0
        self.seconds_lost = 0.0
        """That episodes lost with a process: from the call that was lost until they were where they had been."""
        weakref.finalize(self, _kill, self.alive)

    def take(self, alone: bool = False) -> tuple[Holder, int]:
        """A process with room, or a new one for this environment alone; and a number for the environment in it."""
        self._sweep()
        shared = [process for process in self.alive if not process.alone]
        least = min(shared, key=lambda process: process.envs, default=None)
        full = least is None or least.envs >= (self.per_process or 1)
        if least is None or alone or (full and (self.most is None or len(shared) < self.most)):
            least = self.start(alone)
            self.alive.append(least)
        least.envs += 1
        self.places += 1
        return least, self.places

    def _sweep(self) -> None:
        gone = [process for process in self.alive if process.lost]
        self.replaced += len(gone)
        self.hung += sum(bool(process.killed_for) for process in gone)
        for process in gone:
            self.alive.remove(process)

    def metrics(self) -> Metrics:
        """Since the last call: processes that were lost and replaced, those of them that hung, and the seconds that
        episodes lost with them; and how many there are."""
        self._sweep()
        replaced, hung, self.replaced, self.hung = self.replaced, self.hung, 0, 0
        seconds, self.seconds_lost = self.seconds_lost, 0.0
        return {
            "rollout/processes_replaced": float(replaced),
            "rollout/processes_hung": float(hung),
            "rollout/processes": float(len(self.alive)),
            "rollout/seconds_lost": seconds,
        }

    def close(self) -> None:
        _kill(self.alive)


def _kill(processes: list[Holder]) -> None:
    while processes:
        processes.pop().kill()


class ProcessEnv(Env):
    """An environment that lives in a process.

    It keeps the deadline of a call itself, by killing the process: to find another process, and to be brought to where
    it was, is no part of the call.

    Args:
        env: fresh; it is sent there.
        pool: where processes come from.
        where: what it is called when it hangs.
        seconds: what one call may take.
    """

    def __init__(self, env: Env, pool: Processes, where: str, seconds: float):
        try:
            self.packed = pickle.dumps(env)
        except Exception as error:
            raise TypeError(
                f"{type(env).__name__} cannot be sent to a process ({type(error).__name__}: {error}). Define it in a "
                "module and let it open what it needs in reset(), or write rollout.workers=thread."
            ) from error
        self.pool, self.where, self.seconds = pool, where, seconds
        self.process: Holder | None = None
        self.place = 0
        self.alone = False
        """Its last process crashed, and this environment may be why: the next one it does not share."""
        self.losses = self.crashes = 0
        """Processes lost; and those of them that may have been its doing."""
        self.since: float | None = None
        """When the call began that it lost its process in, until it has another and is where it was."""
        self.stuck = False
        """A call was given up before it came back."""
        self.played: list[tuple[str, tuple[Any, ...]]] = []
        self.numbers: Metrics = {}

    def _set_up(self) -> Iterator[Future[Any]]:
        """Find a process and bring the environment there to where the episode stands; each answer is to be awaited."""
        self.process, self.place = self.pool.take(self.alone)
        yield self.process.ready
        yield self._ask(MAKE, self.packed)
        for method, args in self.played:
            yield self._ask(method, *args)
        if self.since is not None:
            self.pool.seconds_lost += time.monotonic() - self.since
            self.since = None

    def _ask(self, method: str, *args: Any) -> Future[Any]:
        assert self.process is not None
        return self.process.ask(self.where, self.seconds, self.place, method, *args)

    def _lose(self, began: float = math.inf) -> None:
        """The process is gone, and with it the call that `began` then. A second crash in a process of its own is this
        environment's doing."""
        process, self.process = self.process, None
        self.losses += 1
        self.since = self.since if self.since is not None else min(began, time.monotonic())
        if process is not None:
            process.envs -= 1
            if self.losses >= LOSSES:
                raise WorkerLost(f"{process.why()}; it has lost {LOSSES} processes")
            if process.killed_for or process.unborn:
                return
            self.crashes += 1
            if self.alone:
                raise WorkerLost(f"{process.why()}, twice")
            self.alone = process.suspects or self.crashes > 1

    async def open(self) -> None:
        """Take a place in a process; in another, where that one is lost meanwhile."""
        while self.process is None:
            try:
                for outcome in self._set_up():
                    await _heard(outcome)
            except asyncio.CancelledError:
                raise
            except WorkerLost:
                self._lose()
            except BaseException:  # it cannot be made there
                await self.close()
                raise

    async def reset(self, task: Task, seed: int) -> Observation:
        self.played.clear()
        return await self._call("reset", task, seed)  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        return await self._call("step", action)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Let it go. One that is busy with a call nobody waits for is closed when that returns."""
        process, self.process = self.process, None
        if process is None:
            return
        process.envs -= 1
        outcome = process.ask(self.where, self.seconds, self.place, DROP)
        if not self.stuck:
            with suppress(WorkerLost):
                self.numbers = await _heard(outcome)
        if process.alone:
            process.kill()

    async def _call(self, method: str, *args: Any) -> Any:
        began = math.inf
        while True:
            try:
                if self.process is None:
                    await self.open()
                self.stuck, began = True, time.monotonic()
                answer = await _heard(self._ask(method, *args))
            except WorkerLost as error:
                self.stuck = False
                self._lose(began)
                self._check_time(method, began, error)
            except Exception:
                self.stuck = False
                raise
            else:
                self.stuck = False
                self.played.append((method, args))
                return answer

    def _now(self, method: str, *args: Any) -> Any:
        """An answer for somebody who cannot wait for it in the event loop; the process is killed at the deadline."""
        began = math.inf
        while True:
            try:
                if self.process is None:
                    for outcome in self._set_up():
                        outcome.result()
                began = time.monotonic()
                return self._ask(method, *args).result()
            except WorkerLost as error:
                self._lose(began)
                self._check_time(method, began, error)

    def _check_time(self, method: str, began: float, error: WorkerLost) -> None:
        """The process was lost. If it was killed for this very call, there is no point in asking again elsewhere."""
        if time.monotonic() - began >= self.seconds:
            raise TimeoutError(f"{method}() took longer than {self.seconds:g} s") from error

    def metrics(self) -> Metrics:
        return self.numbers if self.process is None else self._now("metrics")  # type: ignore[no-any-return]

    def actions(self) -> list[str]:
        return self._now("actions")  # type: ignore[no-any-return]

    def oracle(self) -> str | None:
        return self._now("oracle")  # type: ignore[no-any-return]

    def random(self, chance: Generator) -> str | None:
        text, chance.bit_generator.state = self._now(RANDOM, chance)
        return text  # type: ignore[no-any-return]

    def state_key(self) -> str:
        return self._now("state_key")  # type: ignore[no-any-return]

    def snapshot(self) -> Any:
        return self._now("snapshot")

    def restore(self, snapshot: Any) -> None:
        self._now("restore", snapshot)
        self.played = [*self.played[:1], ("restore", (snapshot,))]

    def render(self) -> str:
        return self._now("render")  # type: ignore[no-any-return]

    def picture(self) -> Image | None:
        return self._now("picture")  # type: ignore[no-any-return]
