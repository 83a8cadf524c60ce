"""Export of a run's spans with OpenTelemetry."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arborl import spans

log = logging.getLogger(__name__)

ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SHUTDOWN_SECONDS = 5.0
"""Seconds to send the last spans."""


@contextmanager
def traced(run: str) -> Iterator[None]:
    """Send the spans inside `with` to the process's provider or to the endpoint of the environment variables."""
    own, tracer = _provider()
    if tracer is None:
        yield
        return
    spans.set_tracer(tracer)
    try:
        with spans.span("arborl.run", inside_arborl__run=run):
            yield
    finally:
        spans.set_tracer(None)
        if own is not None:
            end = threading.Thread(target=own.shutdown, daemon=True)  # does not wait for a server that hangs
            end.start()
            end.join(SHUTDOWN_SECONDS)


class OnceFilter(logging.Filter):
    """Passes one record: the exporter logs an unreachable server at every attempt."""

    has_passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        first, self.has_passed = not self.has_passed, True
        return first


def _provider() -> tuple[Any, Any]:
    """A provider to shut down, if one was created, and a tracer."""
    endpoint = next((os.environ[name] for name in ADDRESSES if os.environ.get(name)), None)
    if endpoint is None and "opentelemetry.trace" not in sys.modules:
        return None, None
    try:
        from opentelemetry import trace

        found = trace.get_tracer_provider()
        if not isinstance(found, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None, found.get_tracer("arborl")
        if endpoint is None:
            return None, None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("%s is set, but %s. Write pip install 'arborl[otel]'.", ADDRESSES[1], error)
        return None, None
    own = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "arborl")}))
    own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(OnceFilter())
    return own, own.get_tracer("arborl")
