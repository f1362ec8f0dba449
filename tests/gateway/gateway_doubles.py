"""A gateway before a scripted transport: asked in this process, or over a port by real clients; and its batches."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from clients.fake_transport import FakeTransport
from fastapi import FastAPI
from openai.types import Batch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessera_client import AsyncClient, Retry
from tessera_gateway import cli
from tessera_gateway.app import create_app
from tessera_gateway.connections import Connection
from tessera_gateway.settings import Settings

ONCE = Retry(attempts=1)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FROM_ABOVE = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]
ASKED = {"model": "vlm", "messages": HELLO}


ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in ("python_backends", "clients", "tests"))
COMMAND = ("-m", "tessera_command.cli", "gateway")
NOBODY = "127.0.0.1:1"  # no server is there: the gateway's own pages need none


class Asked:
    """A gateway, and the transport behind it."""

    def __init__(self, fake: FakeTransport, settings: Settings, provider: TracerProvider | None = None) -> None:
        self.fake = fake
        tracer = provider and provider.get_tracer("tests")
        client = AsyncClient(transport=fake, retry=ONCE, timeout=settings.timeout_s, tracer=tracer)
        self.app = create_app(settings, client, provider)

    def ask(self, messages: Any = HELLO, **fields: Any) -> httpx.Response:
        """One chat completion."""
        return self("POST", "/v1/chat/completions", json={**ASKED, "messages": messages, **fields})

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request, in this process."""
        return asyncio.run(self.send(method, path, **options))

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=JSON) as client:
            return await client.request(method, path, **options)


def gateway(*script: Any, **settings: Any) -> Asked:
    """A gateway whose servers play the script (see FakeTransport)."""
    return Asked(FakeTransport(script), Settings(**settings))


@contextmanager
def stoppable(
    app: Any, log_level: str = "critical", grace: int = 1, **more: Any
) -> Iterator[tuple[uvicorn.Server, str]]:
    """An application that is served in a thread until ``should_exit`` of its server is set, and its address."""
    with cli._listen("127.0.0.1", 0) as listener:
        is_gateway = isinstance(app, FastAPI) and hasattr(app.state, "door")  # or else what stands behind one
        options: Any = {"http": Connection if is_gateway else "auto", "ws": "none", "log_level": log_level, **more}
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=grace, **options))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(90)
            assert not thread.is_alive()


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an application that is served in a thread."""
    with stoppable(app) as (_, address):
        yield address


@contextmanager
def served(*script: Any, fake: FakeTransport | None = None, **settings: Any) -> Iterator[tuple[Asked, str]]:
    """A gateway behind a port, and its address; its servers play the script, or ``fake`` does."""
    asked = Asked(fake or FakeTransport(script), Settings(**settings))
    with listening(asked.app) as address:
        yield asked, address


@contextmanager
def started(
    *flags: str, server: str = NOBODY, program: Sequence[str] = COMMAND
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The gateway as a process, killed in the end, and where it listens."""
    command, pipe = [sys.executable, *program, "--url", server, "--port", "0", *flags], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("tessera gateway: ready: http://127.0.0.1:"), process.communicate()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Returns when it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_there(url: str) -> bool:
    """Whether a gateway is there."""
    try:
        return httpx.get(f"{url}/v1/models", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def collecting() -> Iterator[tuple[str, dict[str, Any]]]:
    """A collector of traces: its address for OTLP over HTTP, and the spans that it was sent, by their names."""
    received: dict[str, Any] = {}

    async def collect(request: Request) -> Response:
        for each in ExportTraceServiceRequest.FromString(await request.body()).resource_spans:
            attributes = {attribute.key: attribute.value.string_value for attribute in each.resource.attributes}
            assert attributes["service.name"] == "tessera-gateway"
            assert attributes["telemetry.sdk.name"] == "opentelemetry"
            received.update((span.name, span) for scope in each.scope_spans for span in scope.spans)
        return Response()

    with listening(Starlette(routes=[Route("/v1/traces", collect, methods=["POST"])])) as address:
        yield address, received


def client_of(address: str) -> openai.OpenAI:
    """OpenAI's client of a gateway, which tries once."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def line(custom_id: str, text: str = "", **body: Any) -> str:
    """A line that asks one question."""
    asked = {"model": "vlm", "messages": [{"role": "user", "content": [{"type": "text", "text": text or custom_id}]}]}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**asked, **body}}
    )


def upload(client: openai.OpenAI, *lines: str) -> str:
    """The id of a file of these lines."""
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def create(client: openai.OpenAI, *lines: str, **options: Any) -> Batch:
    """A batch of these lines."""
    fields: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, *lines), **fields)


def over(client: openai.OpenAI, batch: Batch, seconds: float = 30.0) -> Batch:
    """The batch when nothing more becomes of it."""

    def now() -> Batch:
        return client.batches.retrieve(batch.id)

    until(lambda: now().status in ("completed", "failed", "cancelled", "expired"), seconds)
    return now()


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; of none where there is no file."""
    return [json.loads(row) for row in client.files.content(file_id).text.splitlines()] if file_id else []


def answers(client: openai.OpenAI, batch: Batch) -> dict[str, str]:
    """The answers' texts by custom_id, of which none stands twice."""
    found = rows(client, batch.output_file_id)
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in found}
    assert len(texts) == len(found)
    return texts
