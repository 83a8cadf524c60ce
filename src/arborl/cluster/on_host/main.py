"""The requests."""

from __future__ import annotations

import os

from .answers import Refused, tell
from .head import nodes, stop_job, submit
from .logs import logs
from .start import look, start, stop

VERBS = {
    "look": look, "start": start, "stop": stop, "nodes": nodes, "submit": submit, "stop_job": stop_job, "logs": logs,
}  # fmt: skip


def main(asked):
    """Answer one request."""
    try:
        tell(answer=VERBS[asked["verb"]](asked))
    except Refused as error:
        tell(refused=str(error))
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        tell(refused=f"{error.filename or asked['verb']}: {error.strerror or error}.")
    except Exception as error:  # a defect, or a Ray that answers otherwise: said where it can be read
        tell(refused=f"{asked['verb']}: {type(error).__name__}: {error}")
