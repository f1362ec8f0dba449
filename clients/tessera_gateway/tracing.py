"""Traces of completions by OpenTelemetry: who gets them, and each request's own span.

The span of a request continues the trace that its ``traceparent`` names, or begins one; the SDK's are under it. The
variables are OpenTelemetry's own, which its exporter reads itself. Nothing of its SDK is imported without them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import propagate
from opentelemetry.trace import SpanKind, StatusCode, TracerProvider
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera_gateway.errors import REQUEST_ID
from tessera_gateway.metrics import COMPLETIONS, MODEL, RESPONSES, STATUS
from tessera_gateway.request import Middleware

if TYPE_CHECKING:
    from opentelemetry.sdk import trace as sdk

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
FLUSH_S = 2.0  # for the last spans, where the collector does not answer
CUT = 499  # a client that went away, and all above it, are no whole answers


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether traces are to be sent. Raises ValueError where they are, but cannot be sent so."""

    def said(*names: str) -> str:
        return next((environment[name].strip() for name in names if environment.get(name)), "")

    endpoint, exporter = said(ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT"), said("OTEL_TRACES_EXPORTER") or "otlp"
    if not endpoint or exporter == "none" or said("OTEL_SDK_DISABLED").lower() == "true":
        return False
    protocol = said("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if (exporter, protocol) != ("otlp", "http/protobuf"):
        raise ValueError(f"traces go by otlp over http/protobuf, not by {exporter} over {protocol}; "
            "OTEL_TRACES_EXPORTER=none for no traces")  # fmt: skip
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"traces go to an address like http://collector:4318, not to {endpoint!r:.80}")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        raise ValueError("traces need packages that are not installed here: pip install '.[otel]' in Tessera's source; "
            "OTEL_TRACES_EXPORTER=none for no traces") from None  # fmt: skip
    return True


def provider() -> sdk.TracerProvider | None:
    """What sends spans to where the environment says; None where it says nothing."""
    if not wanted(os.environ):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk import resources, trace
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = resources.Resource({"service.name": "tessera-gateway"}).merge(resources.OTELResourceDetector().detect())
    made = trace.TracerProvider(resource=resources.Resource.create().merge(name), shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


async def shut_down(provider: sdk.TracerProvider) -> None:
    """Sends what is left. A collector that does not answer delays the end by FLUSH_S at most."""
    sending = Thread(target=provider.shutdown, name="last-spans", daemon=True)
    sending.start()
    await asyncio.to_thread(sending.join, FLUSH_S)


class TraceRequests(Middleware):
    """A completion's span, from its header to the end of its answer."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        super().__init__(app)
        self._tracer = provider.get_tracer("tessera")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in (COMPLETIONS, RESPONSES):
            return await self._app(scope, receive, send)
        about: dict[str, Any] = {"http.request.method": scope["method"], "http.route": scope["path"]}
        parent = propagate.extract(Headers(scope=scope))
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(
            name, parent, SpanKind.SERVER, about, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                return await self._app(scope, receive, send)
            finally:
                status = scope[STATUS]
                span.set_attribute("http.response.status_code", status)
                span.set_attribute("http.response.header.x-request-id", [scope[REQUEST_ID]])
                if MODEL in scope:
                    span.set_attribute("gen_ai.request.model", scope[MODEL])
                if status >= CUT:
                    span.set_attribute("error.type", str(status))
                    span.set_status(StatusCode.ERROR)
