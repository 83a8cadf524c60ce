"""OpenTelemetry: who listens to the spans of a run, if anybody does."""

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
PATIENCE = 5.0
"""Seconds for what is still to be sent at the end."""


@contextmanager
def traced(run: str) -> Iterator[None]:
    """Spans of what happens inside go to the provider that this process has set up, or to the address that the
    environment names. Where there is neither, nothing is imported and nothing is made."""
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
            end = threading.Thread(target=own.shutdown, daemon=True)  # a server that does not answer is not waited for
            end.start()
            end.join(PATIENCE)


class Once(logging.Filter):
    """Lets one line through: a server that is not there is told of at every attempt."""

    told = False

    def filter(self, record: logging.LogRecord) -> bool:
        first, self.told = not self.told, True
        return first


def _provider() -> tuple[Any, Any]:
    """A provider that is ours to shut down, if any; and a tracer."""
    asked = next((os.environ[name] for name in ADDRESSES if os.environ.get(name)), None)
    if asked is None and "opentelemetry.trace" not in sys.modules:
        return None, None
    try:
        from opentelemetry import trace

        found = trace.get_tracer_provider()
        if not isinstance(found, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None, found.get_tracer("arborl")
        if asked is None:
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
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(Once())
    return own, own.get_tracer("arborl")
