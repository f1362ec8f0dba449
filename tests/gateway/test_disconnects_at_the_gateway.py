"""A client that goes away takes its request along, whole or streamed, before the first token and after."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest
from clients.fake_transport import Hang, final
from gateway_doubles import HELLO, Asked, gateway, listening

from tessera_client import Delta
from tessera_gateway import cli


async def leave(door: Asked, stream: bool, after: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Sends a request and goes away after this many messages of the answer; what was sent until then."""
    body = json.dumps({"model": "vlm", "messages": HELLO, "stream": stream, **fields}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []
    enough = asyncio.Event()
    if not after:
        enough.set()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await enough.wait()
        while not door.fake.requests:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) >= after:
            enough.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    serving = asyncio.ensure_future(door.app(scope, receive, send))
    done, _ = await asyncio.wait({serving}, timeout=10)
    assert done, "it goes on"
    serving.result()
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(stream: bool) -> None:
    door = gateway([Hang()])
    asyncio.run(leave(door, stream))
    assert door.fake.cancelled == [door.fake.requests[0][1]]
    counters = door.app.state.counters
    assert counters.total('requests_total{status="499"}') == 1 and counters.total("requests_under_way") == 0


def test_in_the_middle_of_a_stream() -> None:
    door = gateway([Delta("a"), Delta("b"), Hang()])
    sent = asyncio.run(leave(door, stream=True, after=3))
    assert sent[0]["status"] == 200 and b'"a"' in sent[2]["body"]
    assert door.fake.cancelled == [door.fake.requests[0][1]]
    assert door.app.state.counters.total('requests_total{status="499"}') == 1


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (True, 0), (True, 5)])
def test_all_of_several_answers_go_along(stream: bool, after: int) -> None:
    door = gateway(*[[Delta("a"), Hang()] if stream and after else [Hang()]] * 3)
    asyncio.run(leave(door, stream, after, n=3))
    assert sorted(door.fake.cancelled) == sorted(name for _, name, _ in door.fake.requests)
    assert len(door.fake.cancelled) in ((3,) if after else (1, 2, 3))  # some may not have been sent yet


def test_one_that_stops_reading_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "STALLED_MS", 250)
    door = gateway([*[Delta("a" * 1_000_000)] * 20, Hang()])  # more than the system's buffers take
    body = json.dumps({"model": "vlm", "messages": HELLO, "stream": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with listening(door.app) as address, socket.create_connection(("127.0.0.1", httpx.URL(address).port or 0)) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        deadline = time.monotonic() + 30
        while not door.fake.cancelled:
            assert time.monotonic() < deadline, "its request goes on"
            time.sleep(0.02)
    assert door.fake.cancelled == [door.fake.requests[0][1]]
    assert door.app.state.counters.total('requests_total{status="499"}') == 1


def test_a_client_that_stays_is_not_cancelled() -> None:
    door = gateway([Delta("a"), final("b")])
    assert door.ask(stream=True).status_code == 200
    assert door.fake.cancelled == []
    assert door.app.state.counters.total('requests_total{status="200"}') == 1
