"""Environments in processes: they use other cores, and a process that hangs or crashes can be killed.

A process holds several environments, each in its own thread. If one of them exceeds its deadline, the process is
killed. The other environments are made again in another process, and their task, seed and messages are replayed.

The process is started as `python -m arborl.rollout.env_processes FD [--allow-unsafe]` and ends with its pipe.
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
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from arborl import sandbox
from arborl.child_process import supervised_command
from arborl.envs.env import Env, Observation, Step
from arborl.errors import ArborError
from arborl.rollout.env_threads import ElsewhereEnv, EnvThread, ThreadPool
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
MAX_LOSSES = 8
"""Processes that an episode may lose before it fails."""
START_SECONDS = 60.0
UNSAFE = "--allow-unsafe"
"""Passes `sandbox.allow_unsafe` on to the process."""
MAKE, DROP, RANDOM = "make", "drop", "random"
"""Requests besides the methods of `Env`; `random` also returns the state of the generator."""


class WorkerLost(ArborError):
    """The process of the environment has ended."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    outcome: Future[Any]
    where: str
    deadline: float


class EnvProcess(ABC):
    """A process of environments and its pending requests, on this host or another."""

    blames_envs = True
    """Whether a crash is attributed to its environments at once; on a cluster the node may be the cause."""

    def __init__(self, alone: bool, start_seconds: float) -> None:
        self.alone = alone
        self.lock = threading.RLock()  # a lost process may answer at once, in the requesting thread
        self.pending: dict[int, PendingRequest] = {}
        self.number = 0
        self.num_envs = 0
        self.lost = False
        self.killed_for = ""
        self.ready: Future[None] = Future()
        deadline = time.monotonic() + start_seconds
        self.pending[0] = PendingRequest(self.ready, "the start of an environment process", deadline)

    def request(self, where: str, seconds: float, env: int, method: str, *args: Any) -> Future[Any]:
        """Send a request. The process is killed if the answer takes longer than `seconds`."""
        outcome: Future[Any] = Future()
        with self.lock:
            self.number += 1
            number = self.number
            packed = pickle.dumps((number, env, method, args))
            self.pending[number] = PendingRequest(outcome, where, time.monotonic() + seconds)
            try:
                if self.lost:
                    raise OSError
                self._send(packed)
            except OSError:
                del self.pending[number]
                outcome.set_exception(WorkerLost(self.loss_reason()))
        return outcome

    @abstractmethod
    def _send(self, packed: bytes) -> None:
        """Raises OSError if the process has ended."""

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def exit_reason(self) -> str:
        """Why the process ended, if it was not killed here."""

    def _receive(self, packed: bytes) -> None:
        number, is_result, value = pickle.loads(packed)
        with self.lock:
            request = self.pending.pop(number, None)
        if request is None:
            return
        if is_result:
            set_outcome(request.outcome, value, None)
        else:
            error, trace = value
            error.add_note(trace)
            set_outcome(request.outcome, None, error)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        with self.lock:
            overdue = [request for request in self.pending.values() if now > request.deadline]
        if overdue and not self.lost:
            self.killed_for = overdue[0].where
            log.warning("%s exceeded its deadline: its process is killed and replaced", overdue[0].where)
            self.kill()

    def _log_loss(self) -> None:
        reason = self.exit_reason()
        log.warning("a process of %d environments is lost; they are restarted in another: %s", self.num_envs, reason)

    def _fail_pending(self) -> None:
        with self.lock:
            self.lost = True
            pending, self.pending = self.pending, {}
        for request in pending.values():
            set_outcome(request.outcome, None, WorkerLost(self.loss_reason()))

    @property
    def failed_to_start(self) -> bool:
        """Whether it ended before it was ready, on a cluster: the node is the cause, not an environment."""
        return not self.blames_envs and self.ready.done() and self.ready.exception() is not None

    def loss_reason(self) -> str:
        if self.killed_for:
            return f"its process was killed because {self.killed_for} hung"
        return self.exit_reason()


class LocalEnvProcess(EnvProcess):
    def __init__(self, alone: bool = False) -> None:
        super().__init__(alone, START_SECONDS)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "arborl.rollout.env_processes", str(theirs.fileno())]
        command += [UNSAFE] if sandbox.unsafe_allowed() else []
        self.child = subprocess.Popen(
            supervised_command(command, keep_stderr=True),
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints must not mix with the run's stdout
            start_new_session=True,
        )
        theirs.close()
        self.pipe = Connection(ours.detach())
        threading.Thread(target=self._listen, name="arborl-process", daemon=True).start()

    def _send(self, packed: bytes) -> None:
        self.pipe.send_bytes(packed)

    def kill(self) -> None:
        self.lost = True
        self.child.terminate()

    def exit_reason(self) -> str:
        return f"its process is gone, exit code {self.child.poll()}"

    def _listen(self) -> None:
        last_check = time.monotonic()
        try:
            while True:
                if self.pipe.poll(POLL_SECONDS):
                    self._receive(self.pipe.recv_bytes())
                if time.monotonic() - last_check > POLL_SECONDS:
                    self._kill_overdue()
                    last_check = time.monotonic()
        except (EOFError, OSError):
            pass
        was_killed, self.lost = self.lost, True
        with suppress(OSError):
            self.pipe.close()
        self.child.wait()
        if not was_killed:
            self._log_loss()
        self._fail_pending()


def set_outcome(outcome: Future[Any], value: Any, error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # cancelled
        outcome.set_exception(error) if error is not None else outcome.set_result(value)


async def _wait_for(outcome: Future[Any]) -> Any:
    """The answer. A cancelled caller leaves the request pending."""
    answer = asyncio.wrap_future(outcome)
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(answer)


class ProcessPool:
    def __init__(
        self, per_process: int = 0, most: int | None = None, start: Callable[[bool], EnvProcess] = LocalEnvProcess
    ):
        self.per_process, self.start = per_process, start
        self.most = None if per_process else most or os.cpu_count() or 1
        self.alive: list[EnvProcess] = []
        self.num_envs = 0
        self.num_replaced = self.num_hung = 0
        self.seconds_lost = 0.0
        """Time that episodes lost with a process: from the lost call until their state was restored."""
        weakref.finalize(self, _kill_all, self.alive)

    def take(self, alone: bool = False) -> tuple[EnvProcess, int]:
        """A process with room, or a new one; and the number of the environment."""
        self._remove_lost()
        shared = [process for process in self.alive if not process.alone]
        least = min(shared, key=lambda process: process.num_envs, default=None)
        is_full = least is None or least.num_envs >= (self.per_process or 1)
        if least is None or alone or (is_full and (self.most is None or len(shared) < self.most)):
            least = self.start(alone)
            self.alive.append(least)
        least.num_envs += 1
        self.num_envs += 1
        return least, self.num_envs

    def _remove_lost(self) -> None:
        lost = [process for process in self.alive if process.lost]
        self.num_replaced += len(lost)
        self.num_hung += sum(bool(process.killed_for) for process in lost)
        for process in lost:
            self.alive.remove(process)

    def metrics(self) -> Metrics:
        """Since the last call: processes replaced, those of them that hung, time lost; and the current number."""
        self._remove_lost()
        replaced, hung, self.num_replaced, self.num_hung = self.num_replaced, self.num_hung, 0, 0
        seconds, self.seconds_lost = self.seconds_lost, 0.0
        return {
            "rollout/processes_replaced": float(replaced),
            "rollout/processes_hung": float(hung),
            "rollout/processes": float(len(self.alive)),
            "rollout/seconds_lost": seconds,
        }

    def close(self) -> None:
        _kill_all(self.alive)


def _kill_all(processes: list[EnvProcess]) -> None:
    while processes:
        processes.pop().kill()


class ProcessEnv(ElsewhereEnv):
    """An environment in a process. It enforces the deadline of a call by killing the process. The time to start another
    process and to restore the state there does not count."""

    has_own_deadline = True

    def __init__(self, env: Env, pool: ProcessPool, where: str, seconds: float):
        try:
            self.packed = pickle.dumps(env)
        except Exception as error:
            raise TypeError(
                f"{type(env).__name__} cannot be sent to a process ({type(error).__name__}: {error}). Define it in a "
                "module and open what it needs in reset(), or write rollout.workers=thread."
            ) from error
        self.pool, self.where, self.seconds = pool, where, seconds
        self.process: EnvProcess | None = None
        self.number = 0
        self.alone = False
        """Its last process crashed, perhaps because of this environment: it does not share the next one."""
        self.num_losses = self.num_crashes = 0
        """Processes lost, and those of them that this environment may have crashed."""
        self.lost_since: float | None = None
        """Start of the call that lost its process, until the state is restored."""
        self.is_stuck = False
        self.history: list[tuple[str, tuple[Any, ...]]] = []
        self.final_metrics: Metrics = {}

    def _restore(self) -> Iterator[Future[Any]]:
        """Take a process and replay the calls of the episode there; each answer is to be awaited."""
        self.process, self.number = self.pool.take(self.alone)
        yield self.process.ready
        yield self._request(MAKE, self.packed)
        for method, args in self.history:
            yield self._request(method, *args)
        if self.lost_since is not None:
            self.pool.seconds_lost += time.monotonic() - self.lost_since
            self.lost_since = None

    def _request(self, method: str, *args: Any) -> Future[Any]:
        assert self.process is not None
        return self.process.request(self.where, self.seconds, self.number, method, *args)

    def _on_loss(self, start: float = math.inf) -> None:
        """The process has ended, and with it the call that started at `start`. A second crash, in a process without
        other environments, is caused by this environment."""
        process, self.process = self.process, None
        self.num_losses += 1
        self.lost_since = self.lost_since if self.lost_since is not None else min(start, time.monotonic())
        if process is not None:
            process.num_envs -= 1
            if self.num_losses >= MAX_LOSSES:
                raise WorkerLost(f"{process.loss_reason()}; it has lost {MAX_LOSSES} processes")
            if process.killed_for or process.failed_to_start:
                return
            self.num_crashes += 1
            if self.alone:
                raise WorkerLost(f"{process.loss_reason()}, twice")
            self.alone = process.blames_envs or self.num_crashes > 1

    async def open(self) -> None:
        """Make the environment in a process; in another one if that is lost meanwhile."""
        while self.process is None:
            try:
                for outcome in self._restore():
                    await _wait_for(outcome)
            except asyncio.CancelledError:
                raise
            except WorkerLost:
                self._on_loss()
            except BaseException:  # it cannot be made there
                await self.close()
                raise

    async def reset(self, task: Task, seed: int) -> Observation:
        self.history.clear()
        return await self._call("reset", task, seed)  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        return await self._call("step", action)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Drop the environment. One with an abandoned call is closed when that call returns."""
        process, self.process = self.process, None
        if process is None:
            return
        process.num_envs -= 1
        outcome = process.request(self.where, self.seconds, self.number, DROP)
        if not self.is_stuck:
            with suppress(WorkerLost):
                self.final_metrics = await _wait_for(outcome)
        if process.alone:
            process.kill()

    async def _call(self, method: str, *args: Any) -> Any:
        start = math.inf
        while True:
            try:
                if self.process is None:
                    await self.open()
                self.is_stuck, start = True, time.monotonic()
                answer = await _wait_for(self._request(method, *args))
            except WorkerLost as error:
                self.is_stuck = False
                self._on_loss(start)
                self._check_deadline(method, start, error)
            except Exception:
                self.is_stuck = False
                raise
            else:
                self.is_stuck = False
                self.history.append((method, args))
                return answer

    def _call_sync(self, method: str, *args: Any) -> Any:
        """Call a method and wait for it without the event loop; the process is killed at the deadline."""
        start = math.inf
        while True:
            try:
                if self.process is None:
                    for outcome in self._restore():
                        outcome.result()
                start = time.monotonic()
                return self._request(method, *args).result()
            except WorkerLost as error:
                self._on_loss(start)
                self._check_deadline(method, start, error)

    def _check_deadline(self, method: str, start: float, error: WorkerLost) -> None:
        """A call for which the process was killed is not repeated in another process."""
        if time.monotonic() - start >= self.seconds:
            raise TimeoutError(f"{method}() took longer than {self.seconds:g} s") from error

    def metrics(self) -> Metrics:
        return self.final_metrics if self.process is None else self._call_sync("metrics")  # type: ignore[no-any-return]

    def random(self, rng: Generator) -> str | None:
        text, rng.bit_generator.state = self._call_sync(RANDOM, rng)
        return text  # type: ignore[no-any-return]

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        self.history = [*self.history[:1], ("restore", (snapshot,))]


# ------------------------------------------------------------------------------------------------ inside the process

SendAnswer = Callable[[bytes], None]
"""Sends a pickled (request number, whether it is a result, result or error)."""


class EnvServer:
    """Holds environments and answers requests: (number, environment, method, arguments)."""

    def __init__(self) -> None:
        self.pool = ThreadPool()
        self.threads: dict[int, EnvThread] = {}
        self.envs: dict[int, Env] = {}

    def submit(self, packed: bytes, answer: SendAnswer) -> None:
        """Handle a request in the environment's thread and send the answer from there."""
        number, env, method, args = pickle.loads(packed)
        if method == MAKE:
            self.threads[env] = self.pool.take()
        function = {MAKE: self._make, DROP: self._drop}.get(method, self._call)
        self.threads[env].submit(partial(_answer, answer, number, function, env, method, args))

    def _make(self, env: int, method: str, args: tuple[Any, ...]) -> None:
        self.envs[env] = pickle.loads(args[0])

    def _call(self, env: int, method: str, args: tuple[Any, ...]) -> Any:
        value = self.threads[env].run_awaitable(getattr(self.envs[env], method)(*args))
        return (value, args[0].bit_generator.state) if method == RANDOM else value

    def _drop(self, number: int, method: str, args: tuple[Any, ...]) -> Any:
        """Close the environment and return its metrics; none if it could not be made."""
        thread, env = self.threads.pop(number), self.envs.pop(number, None)
        try:
            if env is None:
                return {}
            thread.run_awaitable(env.close())
            return thread.run_awaitable(env.metrics())
        finally:
            self.pool.give_back(thread)


def serve(pipe: Connection) -> None:
    server, lock = EnvServer(), threading.Lock()

    def answer(packed: bytes) -> None:
        with lock, suppress(OSError):  # the pipe is closed
            pipe.send_bytes(packed)

    answer(pickle.dumps((0, True, None)))  # ready
    with suppress(EOFError):
        while True:
            server.submit(pipe.recv_bytes(), answer)


def _answer(answer: SendAnswer, number: int, function: Any, *args: Any) -> None:
    try:
        packed = pickle.dumps((number, True, function(*args)))
    except BaseException as error:
        packed = _pack_error(number, error)
    answer(packed)


def _pack_error(number: int, error: BaseException) -> bytes:
    """The error itself if it can be pickled, else a RuntimeError with its text."""
    trace = "".join(traceback.format_exception(error))
    text = RuntimeError(f"{type(error).__name__}: {error}")
    kept = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else text
    try:
        packed = pickle.dumps((number, False, (kept, trace)))
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps((number, False, (text, trace)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; the pipe ends with it
    sandbox.allow_unsafe(UNSAFE in sys.argv[2:])
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # threads that hang do not delay the exit


if __name__ == "__main__":
    main()
