"""Routes of agent sessions: `/v1/agents`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from arborl.serve.middleware import error_of
from arborl.serve.model_backend import RequestError, ServiceUnavailable
from arborl.serve.openai_routes import (
    Object,
    event_bytes,
    stream_events,
    tool_call_object,
    until_disconnected,
    usage_object,
)
from arborl.serve.parsing import RequestWorkers, bounded_route, remove_surrogates
from arborl.serve.schemas import SessionMessageRequest, SessionRequest
from arborl.serve.sessions import AgentSession, SessionReply, SessionStore
from arborl.types import Message


def session_routes(
    sessions: SessionStore, seconds: float | None = None, prefix: str = "/v1", workers: RequestWorkers | None = None
) -> APIRouter:
    """Routes of sessions; arguments as of `openai_routes`. A session belongs to the key in `request.state.key`."""
    workers = workers or RequestWorkers()
    router = APIRouter(prefix=prefix, route_class=bounded_route(workers))

    @router.get("/agents")
    async def agents() -> Object:
        """List the agents."""
        return {"object": "list", "data": [{"id": name, "object": "agent"} for name in sessions.agents.names]}

    @router.post("/agents/{name}/sessions", status_code=201)
    async def open_session(name: str, body: SessionRequest, request: Request) -> Object:
        """Open a session."""
        fields = await workers.run(lambda: remove_surrogates(body.fields), request.state.body_size)
        options = {"fields": fields, "seed": body.seed, "temperature": body.temperature}
        return session_object(await sessions.open(name, request.state.key, **options))

    @router.get("/agents/{name}/sessions/{id}")
    async def get_session(name: str, id: str, request: Request) -> Object:
        """Show a session and its messages."""
        session = sessions.find(name, request.state.key, id)
        return {**session_object(session), "messages": session_messages(session)}

    @router.delete("/agents/{name}/sessions/{id}", status_code=204)
    async def end_session(name: str, id: str, request: Request) -> Response:
        """End a session."""
        await sessions.end(name, request.state.key, id)
        return Response(status_code=204)

    @router.post("/agents/{name}/sessions/{id}/messages", response_model=None)
    async def send_message(name: str, id: str, body: SessionMessageRequest, request: Request) -> Response:
        """Send a message to the agent; returns its answer and the tool calls before it."""
        session = sessions.find(name, request.state.key, id)
        content = remove_surrogates(body.content)
        if body.stream:
            return await stream_events(request, session_events(session, content, seconds), dict)
        reply = await until_disconnected(request, send_within(session, content, seconds))
        request.state.usage = usage_object(reply.prompt_tokens, reply.completion_tokens)
        return JSONResponse(reply_object(reply))

    return router


async def send_within(session: AgentSession, content: str, seconds: float | None) -> SessionReply:
    try:
        async with asyncio.timeout(seconds):
            return await session.send(content)
    except TimeoutError as error:
        message = "the agent exceeded the time limit of an answer"
        raise ServiceUnavailable(message, status=504, code="timeout") from error


async def session_events(session: AgentSession, content: str, seconds: float | None) -> AsyncIterator[bytes]:
    """Server-sent events: `start`, a `step` for each tool call and tool result, `answer`."""
    steps: asyncio.Queue[Message | None] = asyncio.Queue()
    session.check_idle()
    session.on_step = steps.put_nowait
    task = asyncio.create_task(send_within(session, content, seconds))
    task.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        yield event_bytes({"type": "start", "session": session.id})
        while (message := await steps.get()) is not None:
            yield event_bytes({"type": "step", "message": message_object(message)})
        try:
            yield event_bytes({"type": "answer", **reply_object(task.result())})
        except (RequestError, ServiceUnavailable) as error:
            yield event_bytes(error_of(error)[1])
        yield b"data: [DONE]\n\n"
    finally:
        task.cancel()
        session.on_step = lambda message: None


def session_object(session: AgentSession) -> Object:
    tools = [{"name": one.name, "description": one.description, "parameters": one.parameters} for one in session.tools]
    return {"id": session.id, "object": "agent.session", "agent": session.agent, "tools": tools}


def reply_object(reply: SessionReply) -> Object:
    return {
        "object": "agent.message",
        "content": reply.content,
        "steps": [message_object(message) for message in reply.steps],
        "stop_reason": reply.stop_reason,
        "usage": usage_object(reply.prompt_tokens, reply.completion_tokens),
    }


def session_messages(session: AgentSession) -> list[Object]:
    messages: list[Object] = []
    for episode in session.episodes:
        messages += [message_object(message) for message in episode.opening]
        for turn in episode.turns:
            messages += [message_object(turn.message), *(message_object(message) for message in turn.observation)]
    return messages


def message_object(message: Message) -> Any:
    data: Object = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [tool_call_object(call) for call in message.tool_calls]
    if message.name:
        data["name"] = message.name
    return data
