"""The other side of `processes.py`: a process that holds environments, each in a thread of its own.

Started as `python -m arborl.rollout.process_main FD [--allow-unsafe]`; ends when the pipe does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from arborl import sandbox
from arborl.envs.env import Env
from arborl.rollout.threads import Hand, Threads

UNSAFE = "--allow-unsafe"
"""As `sandbox.allow_unsafe`, which this process cannot know otherwise."""
MAKE, DROP, RANDOM = "make", "drop", "random"
"""What is done to an environment besides calling its methods; and the method that uses up somebody's chance."""


Answer = Callable[[bytes], None]
"""Takes (number, whether it worked, what came), packed."""


class Worker:
    """Holds environments, and answers requests: (number, environment, method, arguments)."""

    def __init__(self) -> None:
        self.threads = Threads()
        self.hands: dict[int, Hand] = {}
        self.envs: dict[int, Env] = {}

    def take(self, packed: bytes, answer: Answer) -> None:
        """Do what is asked, in the environment's thread, and `answer` from there."""
        number, place, method, args = pickle.loads(packed)
        if method == MAKE:
            self.hands[place] = self.threads.take()
        function = {MAKE: self._make, DROP: self._drop}.get(method, self._ask)
        self.hands[place].submit(partial(_answer, answer, number, function, place, method, args))

    def _make(self, place: int, method: str, args: tuple[Any, ...]) -> None:
        self.envs[place] = pickle.loads(args[0])

    def _ask(self, place: int, method: str, args: tuple[Any, ...]) -> Any:
        value = self.hands[place].settle(getattr(self.envs[place], method)(*args))
        return (value, args[0].bit_generator.state) if method == RANDOM else value

    def _drop(self, place: int, method: str, args: tuple[Any, ...]) -> Any:
        """Close it, and tell its numbers; one that could not be made has none."""
        hand, env = self.hands.pop(place), self.envs.pop(place, None)
        try:
            if env is None:
                return {}
            hand.settle(env.close())
            return hand.settle(env.metrics())
        finally:
            self.threads.give_back(hand)


def serve(pipe: Connection) -> None:
    """Answer what comes through the pipe, until it ends."""
    worker, lock = Worker(), threading.Lock()

    def answer(packed: bytes) -> None:
        with lock, suppress(OSError):  # nobody is there any more
            pipe.send_bytes(packed)

    answer(pickle.dumps((0, True, None)))  # ready
    with suppress(EOFError):
        while True:
            worker.take(pipe.recv_bytes(), answer)


def _answer(answer: Answer, number: int, function: Any, *args: Any) -> None:
    try:
        packed = pickle.dumps((number, True, function(*args)))
    except BaseException as error:
        packed = _pack(number, error)
    answer(packed)


def _pack(number: int, error: BaseException) -> bytes:
    """An error as it is where that can be sent, else its words."""
    trace = "".join(traceback.format_exception(error))
    words = RuntimeError(f"{type(error).__name__}: {error}")
    kept = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else words
    try:
        packed = pickle.dumps((number, False, (kept, trace)))
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps((number, False, (words, trace)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who interrupts a run means the run, and the pipe ends with it
    sandbox.allow_unsafe(UNSAFE in sys.argv[2:])
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # not even a thread that hangs keeps it


if __name__ == "__main__":
    main()
