"""A client that goes away takes its request along, whole or streamed, before the first token and after."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from clients.fake_transport import Hang
from gateway_doubles import ASKED, Asked, gateway, listening, until

from tessera_client import Delta
from tessera_gateway import cli


async def leave(door: Asked, stream: bool, after: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Sends a request and goes away after this many messages of the answer; what was sent until then."""
    body = json.dumps({**ASKED, "stream": stream, **fields}).encode()
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


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (True, 0), (True, 5)])
@pytest.mark.parametrize("answers", [1, 3])
def test_all_that_was_asked_goes_along(stream: bool, after: int, answers: int) -> None:
    door = gateway(*[[Delta("a"), Delta("b"), Hang()] if after else [Hang()]] * answers)
    sent = asyncio.run(leave(door, stream, min(after, 2 + answers), n=answers))
    assert sorted(door.fake.cancelled) == sorted(name for _, name, _ in door.fake.requests)
    assert len(door.fake.cancelled) in ((answers,) if after else range(1, answers + 1))  # some may not be sent yet
    counted = door.app.state.counters.total
    assert counted('requests_total{status="499"}') == 1 and counted("requests_under_way") == 0
    assert not after or (sent[0]["status"] == 200 and any(b'"a"' in each.get("body", b"") for each in sent))


def test_one_that_stops_reading_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "STALLED_MS", 250)
    door = gateway([*[Delta("a" * 1_000_000)] * 20, Hang()])  # more than the system's buffers take
    body = json.dumps({**ASKED, "stream": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with listening(door.app) as address, socket.create_connection(("127.0.0.1", httpx.URL(address).port or 0)) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: door.fake.cancelled)
    assert door.fake.cancelled == [door.fake.requests[0][1]]
    assert door.app.state.counters.total('requests_total{status="499"}') == 1
