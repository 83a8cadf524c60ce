"""What a client is told when there is no answer, in OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from arborl.serve.source import Refused, Unavailable
from arborl.tools.remote.tool_protocol import replace_surrogates

KINDS = {
    401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error", 413: "invalid_request_error",
    421: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


def problem(
    status: int, message: str, code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An answer that is no result."""
    return JSONResponse(shaped(status, message, code, param), status, headers)


def shaped(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": replace_surrogates(message)[:2000], "type": kind, "param": param, "code": code}}


def as_problem(error: Refused | Unavailable) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error."""
    param = error.param if isinstance(error, Refused) else None
    return error.status, shaped(error.status, str(error), error.code, param)


def add_problems(app: FastAPI) -> None:
    """Errors of the API as answers."""

    async def told(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused | Unavailable)
        status, body = as_problem(error)
        wait = isinstance(error, Unavailable) and status in (429, 503)
        headers = {"Retry-After": str(math.ceil(error.seconds))} if wait and isinstance(error, Unavailable) else None
        return JSONResponse(body, status, headers)

    async def not_a_request(request: Request, error: Exception) -> Response:
        """Says what is wrong without repeating what was sent, which may have no JSON form."""
        faults = error.errors() if isinstance(error, RequestValidationError) else []
        clauses = [(".".join(str(part) for part in fault.get("loc", ())[1:]), fault.get("msg", "")) for fault in faults]
        message = "; ".join(f"{where}: {what}" if where else what for where, what in clauses)
        return problem(400, message or "not a request", param=clauses[0][0] if clauses else None)

    async def no_such_thing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    app.add_exception_handler(Refused, told)
    app.add_exception_handler(Unavailable, told)
    app.add_exception_handler(RequestValidationError, not_a_request)
    app.add_exception_handler(HTTPException, no_such_thing)
