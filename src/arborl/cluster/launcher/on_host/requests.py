"""Table of requests."""

from __future__ import annotations

import os

from .dashboard import nodes, stop_job, submit
from .host_commands import inspect, start, stop
from .log_files import logs
from .replies import RequestRefused, send

VERBS = {
    "look": inspect, "start": start, "stop": stop, "nodes": nodes, "submit": submit, "stop_job": stop_job, "logs": logs,
}  # fmt: skip


def main(request):
    """Answer one request."""
    try:
        send(answer=VERBS[request["verb"]](request))
    except RequestRefused as error:
        send(refused=str(error))
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        send(refused=f"{error.filename or request['verb']}: {error.strerror or error}.")
    except Exception as error:  # a defect, or an unknown answer of Ray
        send(refused=f"{request['verb']}: {type(error).__name__}: {error}")
