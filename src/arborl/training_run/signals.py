"""Stopping a run by SIGINT (Ctrl-C), SIGTERM or SIGHUP.

The first signal cancels the run: episodes in progress are dropped, an update in progress is given up if it has not
changed the weights (else it is finished), a checkpoint is written. A later signal ends the process at once.
Schedulers kill some time after SIGTERM: if the checkpoint has not begun within `trainer.stop_seconds` after SIGTERM or
SIGHUP, the run ends without it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

from arborl.rollout.deadlines import blocking_code
from arborl.tools.core.background_threads import abandoned_calls

T = TypeVar("T")

MAX_NAMES = 5
"""Listed names of calls that have not returned."""
REPEAT_SECONDS = 1.0
"""Signals within this time are one request: SIGHUP of a closed terminal may come from the system and from the shell,
and a launcher passes Ctrl-C on to processes that have it from the terminal."""
SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


@contextmanager
def signals_wake_loop() -> Iterator[None]:
    """Any signal wakes the running event loop, so that its handler runs at once. Without this the loop waits on if
    another thread receives the signal, or if it arrives in the moment before the loop waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, (reader, writer) = asyncio.get_running_loop(), socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, 4096)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reader)


class StopSignals:
    """Context in which signals cancel the coroutine of `run`. Only in the main thread."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.got: int | None = None
        self._got_at = 0.0
        self._is_saving = False
        self._before: dict[int, Any] = {}
        self._task: asyncio.Task[Any] | None = None
        self._timer: threading.Timer | None = None
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup, or a shell's background job
                    self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.saving()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.got is not None and isinstance(error, asyncio.CancelledError):
            if running := abandoned_calls.running():
                names = ", ".join(f"{name} ×{count}" for name, count in running.most_common(MAX_NAMES))
                self._print(f"{signal.Signals(self.got).name}: calls in threads have not returned: {names}.")
            self._exit()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def cancellable() -> T:
            self._task = asyncio.current_task()
            with signals_wake_loop():
                return await work

        return asyncio.run(cancellable())

    def saving(self) -> None:
        """The last checkpoint begins; its writing has no time limit."""
        self._is_saving = True
        if self._timer is not None:
            self._timer.cancel()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.got is None:
            self.got, self._got_at = number, time.monotonic()
            if self._task is None or self._task.done():
                self._exit()
            self._limit_time(number)
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        elif time.monotonic() - self._got_at < REPEAT_SECONDS:
            self._limit_time(number)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _limit_time(self, number: int) -> None:
        """Start the time limit of SIGTERM and SIGHUP until the checkpoint begins, unless it has begun."""
        if number not in (signal.SIGINT, signal.SIGTERM):
            self._close_terminal()
        if number == signal.SIGINT or self._timer is not None or self._is_saving:
            return
        self._timer = threading.Timer(self.seconds, self._abort)
        self._timer.daemon = True
        self._timer.start()

    def _close_terminal(self) -> None:
        """Redirect output to /dev/null: the terminal is closed, and output must not raise."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(null, descriptor)
        os.close(null)

    def _exit(self) -> NoReturn:
        """Exit with the status of a process that was ended by the signal."""
        assert self.got is not None
        if self.got == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.got)

    def _abort(self) -> None:
        assert self.got is not None
        name = signal.Signals(self.got).name
        held = (
            blocking_code(sys._current_frames().get(threading.main_thread().ident or 0))
            or "an update or an environment"
        )
        self._print(
            f"{self.seconds:g} s after {name}, {held} still runs. The run ends without saving; --resume latest resumes "
            "from the last checkpoint."
        )
        os._exit(128 + self.got)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"arborl: {text}\n")
            sys.stderr.flush()
