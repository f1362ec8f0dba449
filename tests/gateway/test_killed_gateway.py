"""A gateway killed by SIGKILL leaves no work behind on the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import ExitStack

import httpx
import pytest
from gateway_doubles import started
from server.http_door import read, total

from tessera.launcher.guard import descendants
from tessera.launcher.process import Server, command_line
from tessera_client import Client

pytestmark = [pytest.mark.server, pytest.mark.faults]

LONG_ANSWERS = 40


def wait_for(server: Server, in_flight: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (found := total(read(server.metrics_url), "tessera_requests_in_flight")) != in_flight:
        assert time.monotonic() < deadline, f"{found} requests in flight, not {in_flight}"
        time.sleep(0.02)


def ask(address: str, number: int) -> socket.socket:
    """Sends a request and reads nothing of its answer."""
    messages = [{"role": "user", "content": f"Describe {number}."}]
    body = json.dumps(
        {"model": "vlm", "messages": messages, "max_tokens": 7000, "ignore_eos": True, "stream": number % 2 == 0}
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    url = httpx.URL(address)
    line = socket.create_connection((url.host, url.port))
    line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return line


@pytest.mark.parametrize("victim", ["one process", "parent of two workers", "workers"])
def test_its_work_ends_with_it(server: Server, victim: str) -> None:
    wait_for(server, 0, 60)
    workers = "1" if victim == "one process" else "2"
    with ExitStack() as lines, started("--workers", workers, server=server.grpc_url) as (process, url):
        for number in range(LONG_ANSWERS):
            lines.enter_context(ask(url, number))
        wait_for(server, LONG_ANSWERS, 60)
        victims = [process.pid]
        if victim == "workers":
            victims = [pid for pid in descendants(process.pid) if "spawn_main" in " ".join(command_line(pid))]
            assert len(victims) == 2
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_for(server, 0, 5)
    with Client(server.grpc_url) as client:
        assert client.ask(None, "Hello", max_tokens=2, timeout=20).attempts == 1
