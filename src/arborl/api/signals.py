"""Being told to stop: Ctrl-C, and the SIGTERM or SIGHUP of a scheduler or a closed terminal, all end a run in one way.

The first signal cancels the run: episodes in play are dropped, an update in progress is finished, a checkpoint is
written. The second ends the process at once. A scheduler kills some time after its SIGTERM, so after that signal or
SIGHUP a run that has not come to its checkpoint within `trainer.stop_seconds` ends without one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

from arborl.rollout.watchdog import holder
from arborl.tools.core.background_threads import abandoned_calls

T = TypeVar("T")

NAMES = 5
"""Names that are listed of calls that had not returned."""
SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Stops:
    """Inside, signals stop what `run` runs. Elsewhere than in the main thread signals are left alone.

    Args:
        seconds: from SIGTERM or SIGHUP until `saving` must have been called.

    Example:
        with Stops(25) as stops:
            stops.run(session.run(stops.saving))
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.got: int | None = None
        """The signal that asked to stop."""
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
                names = ", ".join(f"{name} ×{count}" for name, count in running.most_common(NAMES))
                self._say(f"{signal.Signals(self.got).name}: calls in threads had not returned: {names}.")
            self._leave()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """To the end, or to a signal."""

        async def watched() -> T:
            self._task = asyncio.current_task()
            return await work

        return asyncio.run(watched())

    def saving(self) -> None:
        """It has come to the checkpoint, whose writing may take what it takes."""
        if self._timer is not None:
            self._timer.cancel()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.got is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.got = number
        if self._task is None or self._task.done():
            self._leave()
        if number != signal.SIGINT:
            if number != signal.SIGTERM:
                self._hang_up()
            self._timer = threading.Timer(self.seconds, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _hang_up(self) -> None:
        """Without its terminal, whatever the run says on the way to its checkpoint must not be an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def _leave(self) -> NoReturn:
        """End as a process ends that a signal has ended."""
        assert self.got is not None
        if self.got == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.got)

    def _give_up(self) -> None:
        assert self.got is not None
        name = signal.Signals(self.got).name
        held = (
            blocking_code(sys._current_frames().get(threading.main_thread().ident or 0))
            or "an update or an environment"
        )
        self._say(
            f"{self.seconds:g} s after {name}, {held} still runs. Ends without saving; --resume latest goes on from "
            "the last checkpoint."
        )
        os._exit(128 + self.got)

    def _say(self, words: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"arborl: {words}\n")
            sys.stderr.flush()
