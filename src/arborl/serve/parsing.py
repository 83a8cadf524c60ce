"""From the bytes of a request to a checked object: within bounds, outside the event loop, with a deadline."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from arborl.serve.source import Refused, Unavailable
from arborl.tools.core.background_threads import TooManyHangingCalls, run_in_thread
from arborl.tools.core.json_bounds import JsonBoundsError, load_json

T = TypeVar("T")
SMALL_BODY = 8192
"""Bytes. Work on smaller bodies takes milliseconds at most, less than a thread may cost."""
WORKERS = 4
SECONDS = 10.0
LARGE_BODY, TRIM_SECONDS = 2**20, 5.0
"""Bytes of a body after which freed memory is returned to the system, and seconds until then."""
TOO_COMPLEX = "body_too_complex"


class RequestWorkers:
    """Threads that parse, validate, render and tokenise large requests, so that the event loop keeps answering others.

    Args:
        most: threads at once; more requests wait.
        seconds: from the beginning of the wait until the work is done. A thread cannot be stopped, so the work itself
            must be bounded too.
    """

    def __init__(self, most: int = WORKERS, seconds: float = SECONDS):
        self.seconds = seconds
        self._slots = asyncio.Semaphore(most)
        self._trimming: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, which belongs to a request with a body of `size` bytes.

        Raises:
            Unavailable: it took too long.
        """
        if size <= SMALL_BODY:
            return work()
        try:
            async with asyncio.timeout(self.seconds), self._slots:
                result: T = await run_in_thread(work, "reading requests", self.seconds)
                return result
        except (TimeoutError, TooManyHangingCalls) as error:
            message = f"reading the request took longer than {self.seconds:g} s: send less, or try again later"
            raise Unavailable(message, code="request_timeout") from error
        finally:
            if size >= LARGE_BODY and self._trimming is None:
                self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        threading.Thread(target=trim_memory, name="arborl-trim", daemon=True).start()


def trim_memory() -> None:
    """Return freed memory to the system. The C library keeps most of what large requests took, for later ones."""
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


class ParsedRequest(Request):
    """A request whose body is parsed already. FastAPI takes the object as it is."""

    parsed: BaseModel

    async def body(self) -> bytes:
        return b"parsed"

    async def json(self) -> Any:
        return self.parsed


def bounded_route(workers: RequestWorkers) -> type[APIRoute]:
    """A class of routes whose bodies are parsed by `workers`; for `APIRouter(route_class=…)`.

    `request.state.body_size` is the size of the body in bytes, for what the route itself runs by `workers`.
    """

    class ParsedBodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            model: Any = self.body_field.field_info.annotation

            async def parsed_first(request: Request) -> Response:
                given = ParsedRequest(request.scope, request.receive)
                _check_content_type(given)
                data = await request.body()
                given.state.body_size = len(data)
                given.parsed = await workers.run(partial(parse_body, data, model), len(data))
                return await handle(given)

            return parsed_first

    return ParsedBodyRoute


def parse_body(data: bytes, model: type[BaseModel]) -> BaseModel:
    """The request in a body.

    Raises:
        Refused: the body is not JSON, or exceeds a bound.
        RequestValidationError: it is not a request of this kind.
    """
    try:
        given = load_json(data)
    except JsonBoundsError as error:
        raise Refused(str(error), code=TOO_COMPLEX) from None
    except ValueError as error:
        raise Refused(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None


def _check_content_type(request: Request) -> None:
    """A page in a browser can send other types to any address without being asked."""
    kind, _, sub = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (sub == "json" or sub.endswith("+json")):
        raise Refused("send the body as Content-Type: application/json", code="invalid_content_type")
