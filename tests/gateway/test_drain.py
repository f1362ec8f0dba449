"""A gateway that is told to stop: answers under way may end, then they are ended with an error that says so."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from clients.fake_transport import FakeTransport, Hang, final
from gateway_doubles import HELLO, Asked, started

from tessera_client import Delta
from tessera_client.transports.base import Sent
from tessera_gateway import cli
from tessera_gateway.connections import Connection
from tessera_gateway.settings import Settings


class Stopping:
    """A gateway that serves in a thread until it is told to stop."""

    def __init__(self, script: Any, drain_s: float) -> None:
        self.asked = Asked(FakeTransport(script), Settings(drain_s=drain_s))
        self._listener = cli._listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(self.asked.app, http=Connection, log_level="info", timeout_graceful_shutdown=60)
        self.client = httpx.Client()
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self._listener],))

    def stop(self) -> None:
        self.server.should_exit = True


@contextmanager
def serving(*script: Any, drain_s: float) -> Iterator[Stopping]:
    served = Stopping(script, drain_s)
    served.thread.start()
    try:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
            served.client = client
            yield served
    finally:
        served.stop()
        served.thread.join(60)
        assert not served.thread.is_alive()


def test_a_stream_ends_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    with serving([Delta("The "), Hang()], [Hang()], drain_s=0.05) as served:
        whole: list[httpx.Response] = []
        body = {"model": "vlm", "messages": HELLO}
        with served.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            assert json.loads(next(lines))["choices"][0]["delta"]["role"] == "assistant"
            other = threading.Thread(
                target=lambda: whole.append(httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=30))
            )
            other.start()
            while len(served.asked.fake.requests) < 2:
                pass
            served.stop()
            *_, event, done = lines
        other.join()
        assert json.loads(event)["error"] == {
            "message": "the gateway is stopping", "type": "server_error", "param": None, "code": "server_unavailable",
        }  # fmt: skip
        assert done == "[DONE]" and served.asked.app.state.counters.total('requests_total{status="503"}') == 2
        assert (whole[0].status_code, whole[0].headers["retry-after"]) == (503, "1")
        assert len(served.asked.fake.cancelled) == 2  # the servers know
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

    with serving(drain_s=30) as served:
        served.asked.app.state.client._transport = Slow()
        body = {"model": "vlm", "messages": HELLO, "stream": True}
        with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            next(lines)
            served.stop()
            with pytest.raises(httpx.TransportError):
                while True:  # until it listens no more
                    httpx.get(f"{served.url}/version", trust_env=False, timeout=5)
            go_on.set()
            assert list(lines)[-1] == "[DONE]"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_as_a_process_it_drains_and_its_port_is_free_at_once(workers: str) -> None:
    """A request that waits for a server which is not there is under way for long."""
    with started("--workers", workers, "--drain", "0.2") as (process, url):
        assert process.stderr is not None
        assert httpx.get(f"{url}/version", trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            while True:
                httpx.get(f"{url}/version", trust_env=False, timeout=5)
        said = process.stderr.read()
        assert process.wait(30) in (0, -signal.SIGTERM) and "Traceback" not in said
