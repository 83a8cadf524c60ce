"""Agent `endpoint`: an external program plays the episode and calls the model over HTTP."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Literal

from arborl.agents.agent_interface import Agent, Model
from arborl.envs.env import Env
from arborl.errors import ConfigError, EpisodeError, boundary
from arborl.rollout.recorder import Recorder
from arborl.types import Message, Task

if TYPE_CHECKING:  # needs the extra `serve`
    from arborl.serve.episode_server import ExternalEpisode

EXIT_SECONDS = 5.0  # time for a program to exit after it posted its reward


class EndpointAgent(Agent):
    """Runs a program on the task, with a URL of OpenAI's API for this episode.

    Exactly one of `command`, `call` and `url` is required.

    Args:
        command: words of a program that is started for each task.
        call: a function, as `package.module:function`.
        url: a service that receives each task as a POST.
        answer: the answer that rewards read: `program`: the program's, or the model's last message if it gives none;
            `reply`: always the model's last message.
        max_calls: model calls of an episode; further ones are errors.
        processes: processes of `command` at once; 0 for four per core.
        warm: fork the processes of a Python `command` from one that has imported its packages; by default on Linux.
        host, port: address to listen on; port 0 for any free one.
        public: URL for programs if it differs from that address: `http://10.0.0.5:8123`.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        call: str | None = None,
        url: str | None = None,
        answer: Literal["program", "reply"] = "program",
        max_calls: int = 64,
        processes: int = 0,
        warm: bool | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public: str | None = None,
    ):
        if sum(value is not None for value in (command, call, url)) != 1:
            raise ValueError("agent=endpoint needs one of command, call and url: agent.args.command=[python,script.py]")
        if answer not in ("program", "reply"):
            raise ValueError(f"answer={answer!r}: write program or reply")
        for name, value, minimum in (("max_calls", max_calls, 1), ("processes", processes, 0)):
            if value < minimum:
                raise ValueError(f"{name}={value}: must be at least {minimum}")
        if warm not in (None, True, False) or (warm is not None and command is None):
            raise ValueError(f"warm={warm!r}: write true or false, with command only")
        self.program = _make_program(command, call, url, processes or 4 * (os.cpu_count() or 1), warm)
        self.answer, self.max_calls = answer, max_calls
        self.address: tuple[str, int, str | None] = (host, port, public.rstrip("/") if public else None)

    async def run(self, task: Task, env: Env, model: Model) -> None:
        from arborl.serve.episode_server import EpisodeServer, ExternalEpisode

        assert isinstance(model, Recorder)
        observation = await env.reset(task, task.seed)
        server = await EpisodeServer.get(*self.address)
        episode = ExternalEpisode(task, observation.messages, env, model, self.max_calls)
        with server.open(episode) as url:
            answer = await self._play(episode, url)
            await episode.finish()
        if episode.max_turns is not None:
            raise episode.max_turns
        if not episode.num_steps:
            answer = answer if episode.answer is None else episode.answer
            last_reply = episode.backend.last_reply or Message("assistant")
            await env.step(last_reply if answer is None or self.answer == "reply" else Message("assistant", answer))

    async def _play(self, episode: ExternalEpisode, url: str) -> str | None:
        """The program's answer. If the program fails after it exceeded a limit, the episode ends by that limit; if the
        engine or environment failed first, that failure is raised."""
        backend = episode.backend
        try:
            async with boundary(f"program {self.program.name!r}"):
                answer = await self._run_program(episode, url)
                if not backend.num_calls:
                    raise RuntimeError("it never called the model. Does it read its address from OPENAI_BASE_URL?")
        except EpisodeError as error:
            raise backend.failure or backend.limit_reached or error from error
        if backend.failure is not None:
            raise backend.failure
        return answer

    async def _run_program(self, episode: ExternalEpisode, url: str) -> str | None:
        """Wait until the program ends, posts its reward, or the episode fails."""
        program = asyncio.ensure_future(self.program.play(episode, url))
        ends = [asyncio.ensure_future(event.wait()) for event in (episode.rewarded, episode.backend.failed)]
        try:
            await asyncio.wait([program, *ends], return_when=asyncio.FIRST_COMPLETED)
            if episode.rewarded.is_set() and not program.done():
                await asyncio.wait([program], timeout=EXIT_SECONDS)
            if episode.rewarded.is_set() or episode.backend.failure is not None:
                return None
            if program.cancelled():
                raise RuntimeError("it cancelled itself")
            return program.result()
        finally:
            for task in (program, *ends):
                task.cancel()
            await asyncio.wait([program, *ends], timeout=EXIT_SECONDS)  # a program may ignore its cancellation
            if program.done() and not program.cancelled():
                program.exception()  # mark as retrieved


def _make_program(command: Any, call: str | None, url: str | None, max_processes: int, warm: bool | None) -> Any:
    try:
        from arborl.serve.external_programs import CommandProgram, FunctionProgram, HttpProgram
    except ImportError as error:
        raise ConfigError(f"agent=endpoint needs {error.name}. Install it: pip install 'arborl[serve]'.") from error
    if command is not None:
        return CommandProgram(command, max_processes, warm)
    return FunctionProgram(call) if call is not None else HttpProgram(str(url))
