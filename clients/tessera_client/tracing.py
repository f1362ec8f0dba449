"""Spans of OpenTelemetry: one for each question, and under it one for each stage that the server gave its time to.

The server knows nothing of traces. The last response of every answer says how many milliseconds each stage took, so
any holder of the answer can make the spans; and the request id begins with the trace id, so that a line of the server's
log leads to the trace. Spans hold counts and names alone, nothing of what was asked, shown or answered.
"""

import json
import time
from dataclasses import astuple

from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from tessera_client.messages import Delta, Request
from tessera_client.transports import Deliver, Item
from tessera_wire.errors import TesseraClientError

STAGES = ("preprocess", "vision_queue", "vision", "queue", "prefill", "decode")
"""The spans' names, in the order of :class:`~tessera_client.messages.Timings`."""
OF_PICTURES = ("vision_queue", "vision")
FINISHED = ("stop", "length")
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
"""What GenAI's conventions call ``gen_ai.request.*`` as the server does."""


class Trace:
    """The span of one question, with all its attempts; a child of the caller's current span.

    Args:
        tracer: of OpenTelemetry.
        model: what the server calls the model.
    """

    def __init__(self, tracer: Tracer, model: str, request: Request) -> None:
        self._tracer = tracer
        self._began = self._arrived = time.time_ns()
        attributes: dict[str, str | bool | int | float] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "tessera",
            "gen_ai.request.model": model,
            "gen_ai.request.stream": request.stream,
            "tessera.request.pictures": len(request.images),
        }
        sampling = json.loads(request.sampling or "{}")
        for name in SAMPLING:
            value = sampling.get(name)
            if isinstance(value, (int, float)) and abs(value) < 1 << 63:  # more is none of OTLP's integers
                attributes[f"gen_ai.request.{name}"] = value
        self._span: Span = tracer.start_span(
            f"chat {model}", kind=SpanKind.CLIENT, attributes=attributes, start_time=self._began
        )

    def id_of(self, unique: str) -> str:
        """A request id that begins with the trace id, if there is one."""
        trace_id = self._span.get_span_context().trace_id
        return f"{trace_id:032x}-{unique}" if trace_id else unique

    def noting(self, deliver: Deliver) -> Deliver:
        """``deliver``, which also notes when a delta came: its reader may take it much later."""

        def note(item: Item) -> None:
            if item is not None:
                self._arrived = time.time_ns()
            deliver(item)

        return note

    def end(self, outcome: Delta | BaseException, request_id: str, attempts: int) -> None:
        """Ends the span, unless it has ended: by the last delta, at its arrival and with the stages under it, or by
        what was raised instead; what is no error of ours is a cancellation."""
        if not self._span.is_recording():
            return
        self._span.set_attribute("gen_ai.response.id", request_id)
        self._span.set_attribute("tessera.attempts", attempts)
        if isinstance(outcome, BaseException):
            self._say_failed(type(outcome).__name__ if isinstance(outcome, TesseraClientError) else "Cancelled")
            self._span.end()
            return
        self._span.set_attribute("gen_ai.response.finish_reasons", [outcome.finish_reason])
        if outcome.usage is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", outcome.usage.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", outcome.usage.completion_tokens)
            self._span.set_attribute("tessera.usage.image_tokens", outcome.usage.image_tokens)
        if outcome.finish_reason not in FINISHED:
            self._say_failed(outcome.finish_reason)
        self._add_stages(outcome)
        self._span.end(self._arrived)

    def _say_failed(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)  # without the message, which may quote the request

    def _add_stages(self, last: Delta) -> None:
        """Back from the arrival of the last delta, whose way here is short: a request with its pictures, and its wait
        for preprocess, take longer, and are the gap before the first stage. The clock is this side's."""
        if last.timings is None:
            return
        parent, end = set_span_in_context(self._span), self._arrived
        pictures = last.usage is None or last.usage.image_tokens > 0
        for name, milliseconds in reversed(list(zip(STAGES, astuple(last.timings), strict=True))):
            began = max(self._began, end - round(milliseconds * 1e6))
            if began < end and (pictures or name not in OF_PICTURES):
                self._tracer.start_span(name, parent, start_time=began).end(end)
            end = began
