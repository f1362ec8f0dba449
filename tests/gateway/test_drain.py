"""A gateway that is told to stop: answers under way may end, then they are ended with an error that says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from clients.fake_transport import FakeTransport, Hang, final
from gateway_doubles import ASKED, Asked, stoppable, until

from tessera_client import Delta
from tessera_client.transports.base import Sent
from tessera_gateway.settings import Settings


@contextmanager
def serving(fake: FakeTransport, drain_s: float) -> Iterator[tuple[Asked, uvicorn.Server, httpx.Client]]:
    asked = Asked(fake, Settings(drain_s=drain_s))
    with (
        stoppable(asked.app, "info", 60) as (server, url),
        httpx.Client(base_url=url, trust_env=False, timeout=30) as http,
    ):
        yield asked, server, http


def test_a_stream_ends_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTransport([[Delta("The "), Hang()], [Hang()]])
    with serving(fake, 0.05) as (asked, server, http), ThreadPoolExecutor() as threads:
        with http.stream("POST", "/v1/chat/completions", json={**ASKED, "stream": True}) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            assert json.loads(next(lines))["choices"][0]["delta"]["role"] == "assistant"
            whole = threads.submit(http.post, "/v1/chat/completions", json=ASKED)
            until(lambda: len(fake.requests) == 2)
            server.should_exit = True
            *_, event, done = lines
        assert json.loads(event)["error"] == {
            "message": "the gateway is stopping", "type": "server_error", "param": None, "code": "server_unavailable",
        }  # fmt: skip
        assert done == "[DONE]"
        assert (whole.result().status_code, whole.result().headers["retry-after"]) == (503, "1")
    assert asked.app.state.counters.total('requests_total{status="503"}') == 2
    assert len(fake.cancelled) == 2  # the servers know
    assert not [record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()]


def test_an_answer_under_way_may_end() -> None:
    go_on = threading.Event()

    class Slow(FakeTransport):
        def send(self, request: Any, request_id: str, timeout: Any, deliver: Any) -> Sent:
            def later() -> None:
                go_on.wait(30)
                deliver(final("done"))
                deliver(None)

            deliver(Delta("It is "))
            threading.Thread(target=later).start()
            return Sent(lambda: None, lambda: None)

    asked = {**ASKED, "stream": True}
    with serving(Slow(), 30) as (_, server, http), http.stream("POST", "/v1/chat/completions", json=asked) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        next(lines)
        server.should_exit = True
        with pytest.raises(httpx.TransportError):
            while True:  # until it listens no more
                httpx.get(http.base_url.join("/version"), trust_env=False, timeout=5)
        go_on.set()
        assert list(lines)[-1] == "[DONE]"
