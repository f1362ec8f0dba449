"""A gateway before a scripted transport: asked in this process, or over a real port by real clients."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from clients.fake_transport import FakeTransport
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from tessera_client import AsyncClient, Retry
from tessera_gateway import cli
from tessera_gateway.app import create_app
from tessera_gateway.connections import Connection
from tessera_gateway.settings import Settings

ONCE = Retry(attempts=1)
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


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
        return self("POST", "/v1/chat/completions", json={"model": "vlm", "messages": messages, **fields})

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request, in this process."""
        return asyncio.run(self._send(method, path, **options))

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=JSON) as client:
            return await client.request(method, path, **options)


def gateway(*script: Any, **settings: Any) -> Asked:
    """A gateway whose servers play the script (see FakeTransport)."""
    return Asked(FakeTransport(script), Settings(**settings))


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an application that is served in a thread."""
    with cli._listen("127.0.0.1", 0) as listener:
        is_gateway = isinstance(app, FastAPI) and hasattr(app.state, "door")  # or else what stands behind one
        options: Any = {"http": Connection if is_gateway else "auto", "ws": "none", "log_level": "critical"}
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **options))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


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


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def collecting() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector of traces: its address for OTLP over HTTP, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()
