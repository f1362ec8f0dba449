"""The SDK's spans: when each stage was, what an unfinished answer looks like, and what is not in them."""

import asyncio
import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_transport import USAGE, FakeTransport, Hang, final
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tessera_client import AsyncClient, Client, Delta, InvalidRequest, Retry, Unavailable
from tessera_client.tracing import STAGES

MS = 1_000_000
MEMORY = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(MEMORY))
TRACER = PROVIDER.get_tracer("tests")
SOON = Retry(first_delay=0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The SDK's clock for spans, set by hand; nothing is in memory yet."""
    MEMORY.clear()
    clock = SimpleNamespace(ns=1_000 * MS, time_ns=lambda: clock.ns)
    monkeypatch.setattr("tessera_client.tracing.time", clock)
    return clock


class Slow(FakeTransport):
    """Answers 100 ms after it was asked."""

    def __init__(self, clock: SimpleNamespace, *script: Any) -> None:
        super().__init__(script)
        self._clock = clock

    def send(self, *arguments: Any) -> Any:
        self._clock.ns += 100 * MS
        return super().send(*arguments)


def client(transport: FakeTransport) -> Client:
    return Client(transport=transport, retry=SOON, tracer=TRACER)


def spans() -> dict[str, ReadableSpan]:
    finished = MEMORY.get_finished_spans()
    named = {span.name: span for span in finished}
    assert len(named) == len(finished)
    return named


def when(span: ReadableSpan) -> tuple[int, int]:
    """Milliseconds, from the span's begin to its end."""
    assert span.start_time is not None and span.end_time is not None
    return span.start_time // MS, span.end_time // MS


def outcome(span: ReadableSpan) -> tuple[Any, Any]:
    assert span.attributes is not None and span.status.description is None and not span.events
    return span.status.status_code.name, span.attributes.get("error.type")


def test_the_stages_end_when_the_answer_came(clock: SimpleNamespace) -> None:
    answer = client(Slow(clock)).ask(b"jpeg", "a wire?", max_tokens=5, temperature=0.5, stop=["secret"])
    found = spans()
    asked = found.pop("chat vlm")
    assert when(asked) == (1000, 1100) and asked.kind is trace.SpanKind.CLIENT and asked.parent is None
    assert tuple(reversed(found)) == STAGES
    assert [when(found[name]) for name in STAGES] == [
        *((1079, 1080), (1080, 1082), (1082, 1085)),
        *((1085, 1089), (1089, 1094), (1094, 1100)),
    ]
    assert all(span.parent == asked.context for span in found.values())
    assert {span.context.trace_id for span in found.values()} == {asked.context.trace_id}
    assert outcome(asked) == ("UNSET", None)
    assert asked.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tessera",
        "gen_ai.request.model": "vlm",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": answer.request_id,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "tessera.usage.image_tokens": 4,
        "tessera.request.pictures": 1,
        "tessera.attempts": 1,
    }


def test_the_request_id_begins_with_the_trace_id_and_stays_unique() -> None:
    """Also of a second attempt, which is no span of its own; and where OpenTelemetry's API alone hands the same span
    back for each new one."""
    fake = FakeTransport([[Unavailable("not now")]])
    with TRACER.start_as_current_span("job") as job:
        client(fake).ask(None, "one")
        bare = Client(transport=fake, tracer=trace.NoOpTracer())
        assert list(bare.ask_many([(None, "two"), (None, "three")], concurrency=1))
    ids = [request_id for _, request_id, _ in fake.requests]
    assert len(set(ids)) == 4
    assert all(each.startswith(f"{job.get_span_context().trace_id:032x}-") for each in ids)
    asked = spans()["chat vlm"]
    assert asked.attributes is not None and asked.attributes["tessera.attempts"] == 2
    assert outcome(asked) == ("UNSET", None)


def test_text_alone_has_no_spans_of_vision(clock: SimpleNamespace) -> None:
    transport = Slow(clock, [replace(final("yes"), usage=replace(USAGE, image_tokens=0))])
    client(transport).ask(None, "a wire?")
    found = spans()
    assert set(STAGES) - set(found) == {"vision_queue", "vision"}
    assert when(found["preprocess"]) == (1079, 1080)


def test_a_slow_reader_lengthens_nothing(clock: SimpleNamespace) -> None:
    with client(Slow(clock, [Delta("a"), final("b")])).stream(None, "a wire?") as stream:
        assert next(stream).text == "a"
        clock.ns += 60_000 * MS
        assert stream.answer().text == "ab"
    found = spans()
    assert when(found["chat vlm"]) == (1000, 1100) and when(found["decode"]) == (1094, 1100)


def test_an_error_ends_the_span_without_its_words() -> None:
    with pytest.raises(InvalidRequest, match="a wire"):
        client(FakeTransport([[InvalidRequest("'a wire?' is no question")]])).ask(None, "a wire?")
    found = spans()
    assert list(found) == ["chat vlm"] and outcome(found["chat vlm"]) == ("ERROR", "InvalidRequest")


@pytest.mark.parametrize("reason", ["deadline", "cancelled"])
def test_an_answer_that_was_cut_short_is_an_error_with_its_stages(reason: str, clock: SimpleNamespace) -> None:
    client(Slow(clock, [final("a", reason)])).ask(b"jpeg", "a wire?")
    found = spans()
    assert outcome(found["chat vlm"]) == ("ERROR", reason) and set(STAGES) < set(found)


@pytest.mark.parametrize("way", ["dropped", "broken"])
def test_a_cut_stream_is_an_error(way: str, caplog: pytest.LogCaptureFixture) -> None:
    script = [Delta("a"), Unavailable("gone")] if way == "broken" else [Delta("a"), Hang()]
    stream = client(FakeTransport([script])).stream(None, "a wire?")
    next(stream)
    if way == "dropped":
        del stream
        gc.collect()
    else:
        with pytest.raises(Unavailable):
            next(stream)
        stream.close()  # which is no second end
    assert not caplog.records  # OpenTelemetry complains of a span that ends twice
    expected = "Unavailable" if way == "broken" else "Cancelled"
    assert outcome(spans()["chat vlm"]) == ("ERROR", expected)


def test_a_cancelled_task_is_an_error() -> None:
    fake = FakeTransport([[Hang()]])

    async def run() -> None:
        asking = asyncio.ensure_future(AsyncClient(transport=fake, tracer=TRACER).ask(None, "a wire?"))
        while not fake.requests:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

    asyncio.run(run())
    assert outcome(spans()["chat vlm"]) == ("ERROR", "Cancelled") and fake.cancelled == [fake.requests[0][1]]


def test_a_job_is_under_its_callers_span() -> None:
    items = [(None, "one"), (None, "two")]

    async def ask_many() -> None:
        async for _ in AsyncClient(transport=FakeTransport(), tracer=TRACER).ask_many(items):
            pass

    with TRACER.start_as_current_span("job") as job:
        assert len(list(client(FakeTransport()).ask_many(items))) == 2
        asyncio.run(ask_many())
    asked = [span for span in MEMORY.get_finished_spans() if span.name == "chat vlm"]
    assert [span.parent for span in asked] == 4 * [job.get_span_context()]


def test_a_seed_that_no_collector_can_be_sent_is_left_out(clock: SimpleNamespace) -> None:
    client(FakeTransport()).ask(None, "Why?", seed=1 << 63, top_k=7)
    attributes = spans()["chat vlm"].attributes
    assert attributes is not None and attributes["gen_ai.request.top_k"] == 7
    assert "gen_ai.request.seed" not in attributes
