"""`/v1/agents`: sessions with trained agents over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from arborl.serve.chat import NO_BUFFER, call_of, event
from arborl.serve.parsing import RequestWorkers, bounded_route
from arborl.serve.problems import as_problem
from arborl.serve.reading import attended, clean
from arborl.serve.schemas import SayRequest, SessionRequest
from arborl.serve.sessions import AgentSession, Happened, Reply, Sessions
from arborl.serve.source import Refused, Unavailable
from arborl.types import Message

Object = dict[str, Any]


def agent_routes(
    sessions: Sessions, seconds: float | None = None, prefix: str = "/v1", workers: RequestWorkers | None = None
) -> APIRouter:
    """The routes. `request.state.key` names the key of a request: a session belongs to the key that began it.

    Args:
        sessions: that there are.
        seconds: longest time for one answer.
        prefix: of their paths.
        workers: read requests outside the event loop; an application has one for all its routes.
    """
    workers = workers or RequestWorkers()
    router = APIRouter(prefix=prefix, route_class=bounded_route(workers))

    @router.get("/agents")
    async def agents() -> Object:
        """Who can be talked to."""
        return {"object": "list", "data": [{"id": name, "object": "agent"} for name in sessions.company.agents]}

    @router.post("/agents/{name}/sessions", status_code=201)
    async def begin(name: str, body: SessionRequest, request: Request) -> Object:
        """Begin a session."""
        given = await workers.run(lambda: clean(body.fields), request.state.body_size)
        more = {"fields": given, "seed": body.seed, "temperature": body.temperature}
        return about(await sessions.open(name, request.state.key, **more))

    @router.get("/agents/{name}/sessions/{id}")
    async def look(name: str, id: str, request: Request) -> Object:
        """What was said in it."""
        session = sessions.find(name, request.state.key, id)
        return {**about(session), "messages": transcript(session)}

    @router.delete("/agents/{name}/sessions/{id}", status_code=204)
    async def end(name: str, id: str, request: Request) -> Response:
        """End it."""
        await sessions.end(name, request.state.key, id)
        return Response(status_code=204)

    @router.post("/agents/{name}/sessions/{id}/messages", response_model=None)
    async def say(name: str, id: str, body: SayRequest, request: Request) -> Response:
        """Say something to the agent; its answer, with the tool calls on the way."""
        session = sessions.find(name, request.state.key, id)
        content = clean(body.content)
        if body.stream:
            events = told(session, content, seconds)
            first = await attended(request, anext(events))
            return StreamingResponse(_then(first, events), media_type="text/event-stream", headers=NO_BUFFER)
        reply = await attended(request, within(session.say(content), seconds))
        request.state.usage = usage(reply)
        return JSONResponse(answer(reply))

    return router


async def within(work: Any, seconds: float | None) -> Reply:
    try:
        async with asyncio.timeout(seconds):
            return await work  # type: ignore[no-any-return]
    except TimeoutError as error:
        raise Unavailable("the agent took longer than an answer may", status=504, code="timeout") from error


async def told(session: AgentSession, content: str, seconds: float | None) -> AsyncIterator[bytes]:
    """What happens, as it happens, and at last the answer."""
    news: asyncio.Queue[Happened | None] = asyncio.Queue()
    if session.busy:
        raise Refused("the agent is still answering; one message at a time", code="busy", status=409)
    session.watch = news.put_nowait
    task = asyncio.create_task(within(session.say(content), seconds))
    task.add_done_callback(lambda _: news.put_nowait(None))
    try:
        yield event({"type": "begun", "session": session.id})
        while (new := await news.get()) is not None:
            yield event({"type": "happened", "message": plain(new.message)})
        try:
            yield event({"type": "answer", **answer(task.result())})
        except (Refused, Unavailable) as error:
            yield event(as_problem(error)[1])
        yield b"data: [DONE]\n\n"
    finally:
        task.cancel()
        session.watch = lambda happened: None


async def _then(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for one in events:
            yield one
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def about(session: AgentSession) -> Object:
    tools = [{"name": spec.name, "description": spec.description, "parameters": spec.parameters}
             for spec in session.tools]  # fmt: skip
    return {"id": session.id, "object": "agent.session", "agent": session.agent, "tools": tools}


def answer(reply: Reply) -> Object:
    return {
        "object": "agent.message",
        "content": reply.content,
        "happened": [plain(one.message) for one in reply.happened],
        "over": reply.over,
        "usage": usage(reply),
    }


def usage(reply: Reply) -> Object:
    return {"prompt_tokens": reply.given, "completion_tokens": reply.sampled,
            "total_tokens": reply.given + reply.sampled}  # fmt: skip


def transcript(session: AgentSession) -> list[Object]:
    """What person and agent said to one another."""
    told: list[Object] = []
    for episode in session.episodes:
        told += [plain(message) for message in episode.opening]
        for turn in episode.turns:
            told += [plain(turn.message), *(plain(message) for message in turn.observation)]
    return told


def plain(message: Message) -> Object:
    shown: Object = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [call_of(one) for one in message.tool_calls]
    if message.name:
        shown["name"] = message.name
    return shown
