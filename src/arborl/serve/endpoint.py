"""Agent `endpoint`: a program that knows nothing of Arbor plays, calls the model over HTTP, and is trained."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Literal

from arborl.agents.agent_interface import Agent, Model
from arborl.envs.env import Env
from arborl.errors import ConfigError, EpisodeError, boundary
from arborl.rollout.recorder import Recorder
from arborl.types import Message, Task

if TYPE_CHECKING:  # what needs the extra `serve`
    from arborl.serve.episodes import Visit

GRACE = 5.0
"""Seconds in which a program that has posted its reward may end by itself."""


class EndpointAgent(Agent):
    """Sets a program to work on the task, at an address of OpenAI's API that is this episode's alone.

    Give one of `command`, `call` and `url`.

    Args:
        command: words of a program that is started for each task.
        call: a function, as `package.module:function`.
        url: a program that is told of each task by a POST.
        answer: what rewards read: what the program said, else the model's last message (`program`); or always that
            (`reply`).
        max_calls: calls of the model in an episode; the next is refused.
        processes: of `command`, at once; 0 for four a core.
        host, port: where to listen; port 0 is any that is free.
        public: what programs are told to call, where that is not this address: `http://10.0.0.5:8123`.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        call: str | None = None,
        url: str | None = None,
        answer: Literal["program", "reply"] = "program",
        max_calls: int = 64,
        processes: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        public: str | None = None,
    ):
        given = {"command": command, "call": call, "url": url}
        if sum(one is not None for one in given.values()) != 1:
            raise ValueError("agent=endpoint needs one of command, call and url: agent.args.command=[python,script.py]")
        if answer not in ("program", "reply"):
            raise ValueError(f"answer={answer!r}: give program or reply")
        for name, value, least in (("max_calls", max_calls, 1), ("processes", processes, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: give {least} or more")
        self.program = _program(command, call, url, processes or 4 * (os.cpu_count() or 1))
        self.answer, self.max_calls = answer, max_calls
        self.where: tuple[str, int, str | None] = (host, port, public.rstrip("/") if public else None)

    async def run(self, task: Task, env: Env, model: Model) -> None:
        from arborl.serve.episodes import Endpoint, Visit

        assert isinstance(model, Recorder)
        observation = await env.reset(task, task.seed)
        endpoint = await Endpoint.here(*self.where)
        visit = Visit(task, observation.messages, env, model, self.max_calls)
        with endpoint.open(visit) as at:
            said = await self._played(visit, at)
            await visit.settled()
        if visit.stepped_out is not None:
            raise visit.stepped_out
        if not visit.steps:
            await env.step(self._answer(said, visit))

    async def _played(self, visit: Visit, at: str) -> str | None:
        """What the program answered. Where it failed over a limit of the episode the episode ends by that limit; where
        something else broke first, that is told."""
        source = visit.source
        try:
            async with boundary(f"program {self.program.name!r}"):
                said = await self._watched(visit, at)
                if not source.calls:
                    raise RuntimeError("it never called the model: does it take its address from OPENAI_BASE_URL?")
        except EpisodeError as error:
            raise source.failed or source.over or error from error
        if source.failed is not None:
            raise source.failed
        return said

    async def _watched(self, visit: Visit, at: str) -> str | None:
        """Wait for the program, or until nobody needs to: the episode has failed, or has its reward."""
        program = asyncio.ensure_future(self.program.play(visit, at))
        ends = [asyncio.ensure_future(event.wait()) for event in (visit.rewarded, visit.source.broke)]
        try:
            await asyncio.wait([program, *ends], return_when=asyncio.FIRST_COMPLETED)
            if visit.rewarded.is_set() and not program.done():
                await asyncio.wait([program], timeout=GRACE)
            if visit.rewarded.is_set() or visit.source.failed is not None:
                return None
            if program.cancelled():  # by itself: nobody else has
                raise RuntimeError("it has cancelled itself")
            return program.result()
        finally:
            for task in (program, *ends):
                task.cancel()
            await asyncio.wait([program, *ends], timeout=GRACE)  # one may not want to
            if program.done() and not program.cancelled():
                program.exception()  # has been seen

    def _answer(self, said: str | None, visit: Visit) -> Message:
        last = visit.source.last or Message("assistant")
        said = said if visit.answer is None else visit.answer
        return last if said is None or self.answer == "reply" else Message("assistant", said)


def _program(command: Any, call: str | None, url: str | None, processes: int) -> Any:
    try:
        from arborl.serve.programs import Address, Command, Function
    except ImportError as error:
        raise ConfigError(f"agent=endpoint: {error}. Install what serves: pip install 'arborl[serve]'.") from error
    if command is not None:
        return Command(command, processes)
    return Function(call) if call is not None else Address(str(url))
