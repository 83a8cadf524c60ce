"""Environments that block, hang, crash or tell where they are; in a module, so that processes can be sent them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

from arborl.envs.env import Env, Observation, Step
from arborl.sandbox import unsafe_allowed
from arborl.types import Message

HELLO = Observation((Message("user", "hello"),), "0")


class Sync(Env):
    """Plain functions; the id of a task may say what goes wrong: `sleep:2`, `exit`, `raise`, `quit`, `interrupt`, in
    the second step."""

    def __init__(self, length: int = 3):
        self.length = length

    def reset(self, task, seed):
        self.what, _, self.number = task.id.partition(":")
        self.seed, self.turns, self.threads = seed, 0, {threading.get_ident()}
        return HELLO

    def step(self, action):
        self.turns += 1
        self.threads.add(threading.get_ident())
        if self.turns == 2:
            self.trouble()
        text = f"{os.getpid()} {self.turns} {action.content}"
        return Step(Observation((Message("user", text),), str(self.turns)), 1.0, terminated=self.turns >= self.length)

    def trouble(self):
        if self.what == "sleep":
            time.sleep(float(self.number))
        elif self.what == "exit":
            os._exit(7)
        elif self.what == "raise":
            raise ZeroDivisionError("the ice broke")
        elif self.what == "quit":
            sys.exit("enough")
        elif self.what == "interrupt":
            raise KeyboardInterrupt("from within")

    def close(self):
        self.threads.add(threading.get_ident())

    def metrics(self):
        return {"turns": float(self.turns), "threads": float(len(self.threads)), "success": 1.0}

    def actions(self):
        return ["yes", "no"]

    def state_key(self):
        return str(self.turns)


class Isolated(Sync):
    """Asks for a process."""

    isolated = True


class Declared(Sync):
    """Async by its signature, and blocking by its own word."""

    blocking = True

    async def reset(self, task, seed):
        await asyncio.sleep(0)
        return super().reset(task, seed)

    async def step(self, action):
        await asyncio.sleep(0.001)
        return super().step(action)


class Secretive(Sync):
    """Async by its signature; that it blocks it does not say."""

    async def reset(self, task, seed):
        return super().reset(task, seed)

    async def step(self, action):
        return super().step(action)

    def oracle(self):
        self.trouble()
        return "yes"


class Promising(Secretive):
    """Says that it does not block, and does."""

    blocking = False


class Allowed(Sync):
    """Says what the sandbox of its process is allowed."""

    def render(self) -> str:
        return str(unsafe_allowed())
