"""One trace from a client's ``traceparent`` to the engine's decode: what is in it, and that a collector gets it."""

import asyncio
import os
import sys
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clients.fake_transport import FakeTransport, Hang, final
from gateway_doubles import ASKED, FROM_ABOVE, PARENT, TRACE, Asked, client_of, create, line, listening, over
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from test_connections import left

from tessera_client import DeadlineExceeded, Delta
from tessera_client.tracing import STAGES
from tessera_gateway import tracing
from tessera_gateway.cli import gateway_main
from tessera_gateway.settings import Settings

REQUEST, CHAT = "POST /v1/chat/completions", "chat vlm"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 ms pass between two looks at the SDK's clock, so that the stages have room; no collector is named."""
    ticks = count(10**18, 10**8)
    monkeypatch.setattr("tessera_client.tracing.time", SimpleNamespace(time_ns=lambda: next(ticks)))
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class Traced(Asked):
    """A gateway whose spans are kept in memory."""

    def __init__(self, *script: Any, **settings: Any) -> None:
        self.memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        super().__init__(FakeTransport(script), Settings(**settings), provider)

    def spans(self) -> dict[str, ReadableSpan]:
        finished = self.memory.get_finished_spans()
        named = {span.name: span for span in finished}
        assert len(named) == len(finished)
        return named


def outcome(span: ReadableSpan) -> tuple[Any, ...]:
    assert span.attributes is not None and span.status.description is None and not span.events
    return span.status.status_code.name, span.attributes.get("error.type")


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_from_the_client_to_the_engine(stream: bool) -> None:
    door = Traced([Delta("a"), final("nswer")] if stream else [final("answer")], model_names=("ours",))
    headers = FROM_ABOVE | {"X-Request-Id": "mine"}
    sent = door("POST", "/v1/chat/completions", json=ASKED | {"model": "ours", "stream": stream}, headers=headers)
    assert sent.status_code == 200
    spans = door.spans()
    assert set(spans) == {REQUEST, CHAT, *STAGES}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    asked, chat = spans[REQUEST], spans[CHAT]
    assert asked.parent is not None and f"{asked.parent.span_id:016x}" == PARENT
    assert chat.parent == asked.context and all(spans[name].parent == chat.context for name in STAGES)
    assert asked.kind is SpanKind.SERVER and outcome(asked) == outcome(chat) == ("UNSET", None)
    assert asked.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": ("mine",),
        "gen_ai.request.model": "ours",
    }
    (_, request_id, _) = door.fake.requests[0]
    assert request_id.startswith(f"{TRACE}-mine-")
    assert chat.attributes is not None and chat.attributes["gen_ai.response.id"] == request_id


@pytest.mark.parametrize(("stream", "broken"), [(True, True), (True, False), (False, False)])
def test_what_is_no_whole_answer_is_an_error_though_its_status_was_200(stream: bool, broken: bool) -> None:
    """One that breaks, and one whose client goes away."""
    door = Traced([Delta("a"), DeadlineExceeded("too late") if broken else Hang()])
    if broken:
        assert door.ask(stream=stream).status_code == 200
    else:
        left(door, stream, b'"a"' if stream else b"")
    found = [outcome(door.spans()[name])[1] for name in (REQUEST, CHAT)]
    assert found == (["504", "DeadlineExceeded"] if broken else ["499", "Cancelled"])
    assert {outcome(door.spans()[name])[0] for name in (REQUEST, CHAT)} == {"ERROR"}


def test_a_refused_request_is_no_error_of_the_gateways_and_what_is_no_completion_has_no_span(tmp_path: Path) -> None:
    """Nor has one that is not sampled; and one without a trace begins one."""
    (tmp_path / "keys").write_text("key")
    door, key = Traced(keys=tmp_path / "keys"), {"Authorization": "Bearer key"}
    assert door("GET", "/health").status_code == 200 and door("GET", "/metrics").status_code == 401
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00", **key}
    assert door("POST", "/v1/chat/completions", json=ASKED, headers=unsampled).status_code == 200
    assert not door.spans() and door.fake.requests[0][1].startswith(f"{TRACE}-")
    assert door("POST", "/v1/chat/completions", json=ASKED, headers={"traceparent": "nonsense"}).status_code == 401
    (asked,) = door.spans().values()
    assert outcome(asked) == ("UNSET", None) and asked.parent is None
    assert asked.attributes is not None and asked.attributes["http.response.status_code"] == 401


def test_a_batchs_question_is_a_trace_of_its_own(tmp_path: Path) -> None:
    door = Traced(batch_folder=tmp_path)
    with listening(door.app) as address, client_of(address) as client:
        over(client, create(client, line("a")))
    spans = door.spans()
    assert set(spans) == {CHAT, *STAGES} and spans[CHAT].parent is None
    assert all(spans[name].parent == spans[CHAT].context for name in STAGES)


def test_a_collector_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.01)
    for_ever = threading.Event()
    asyncio.run(tracing.shut_down(SimpleNamespace(shutdown=for_ever.wait)))  # type: ignore[arg-type]
    for_ever.set()


def test_the_environments_name_of_the_service_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=door,rack=7")
    provider = tracing.provider()
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "door" and provider.resource.attributes["rack"] == "7"
    provider.shutdown()


def test_off() -> None:
    for rest in ({}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "True"}):
        assert tracing.wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", **rest}) is not bool(rest)
    assert not tracing.wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[otel\]'"):
        tracing.wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"})


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--otel", "localhost:4318"], {}, "like http://collector:4318, not to 'localhost:4318/v1/traces'"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "a:4317"}, "not to 'a:4317'"),
        (["--otel", "http://a"], {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "not by otlp over grpc"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    flags: Any, environment: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {tracing.ENDPOINT: "", **environment}.items():  # the first, so that it is put back
        monkeypatch.setenv(name, value)
    assert gateway_main(["--port", "0", *flags]) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]
