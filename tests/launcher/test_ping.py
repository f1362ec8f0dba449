"""Which models are pinged and how, and when a stage counts as dead."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tessera.launcher import ping
from tessera.launcher.ping import NoAnswer, Pinger, ping_of, request

PATIENCE_S = 60.0  # a machine may be overloaded
PING = {"name": "PING", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True}


def test_the_ping_follows_the_models_configuration() -> None:
    assert ping_of({"name": "echo", "input": [{"name": "IN", "data_type": "TYPE_STRING"}]}) is None
    assert ping_of({"name": "vlm", "platform": "ensemble"}) is None
    plain = ping_of({"name": "preprocess", "max_batch_size": 0, "input": [PING]})
    assert plain is not None and plain.path == "/v2/models/preprocess/infer"
    assert json.loads(plain.body)["inputs"][0]["shape"] == [1]
    batched = ping_of({"name": "vision_encoder", "max_batch_size": 64, "input": [PING]})
    assert batched is not None and json.loads(batched.body)["inputs"][0]["shape"] == [1, 1]
    decoupled = {"name": "language_model", "input": [PING], "model_transaction_policy": {"decoupled": True}}
    streamed = ping_of(decoupled)
    assert streamed is not None and streamed.path.endswith("/language_model/generate_stream")
    assert json.loads(streamed.body) == {"PING": "alive?"}


class Stage:
    """Plays tritonserver with one model `stage`, and the pinger's clock, which stands unless a ping takes a quarter of
    a second; `status` is the HTTP status of a ping, `works` what the stage does meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.status = 200
        self.works: Callable[[], None] = lambda: None
        self.completed = self.rows = self.pings = 0
        self.loaded = True

    def monotonic(self) -> float:
        return self.now

    def request(self, url: str, timeout_s: float, body: bytes | None = None) -> bytes:
        path, page, status = url.removeprefix("http://server"), {}, 200
        if body is not None:
            self.now += 0.25
            self.pings += 1
            self.works()
            status = self.status
        elif path == "/v2/models/stage/config":
            sign = {"SIGN_OF_WORK": {"string_value": '{"rows": '}}
            page = {"name": "stage", "max_batch_size": 0, "input": [PING], "parameters": sign}
        elif path == "/v2/models/stage/stats":
            status = 200 if self.loaded else 400
            self.now += 0.0 if self.loaded else 0.25
            page = {"model_stats": [{"inference_stats": {"success": {"count": self.completed}}}]}
        elif path == "/metrics":
            page = {"rows": self.rows}
        else:
            assert path == "/v2/health/live"
        if status != 200:
            raise NoAnswer("broken", status)
        return json.dumps(page).encode()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(ping, "request", made.request)
    monkeypatch.setattr(ping, "time", made)
    return made


@pytest.fixture
def pinger(stage: Stage) -> Iterator[Pinger]:
    """Of a second's patience, not started."""
    made = Pinger("http://server", "http://server/metrics", ["stage"], 0.02, 1.0)
    yield made
    made.stop()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_answers_are_measured(stage: Stage, pinger: Pinger) -> None:
    assert pinger.last("stage") == (None, None)
    pinger.start()
    until(lambda: None not in pinger.last("stage") + pinger.last("tritonserver"))
    milliseconds, age = pinger.last("stage")
    assert milliseconds == 250.0 and age >= 0.0 and pinger.failure() is None


def test_a_stage_that_answers_with_errors_is_dead_after_the_same_time(stage: Stage, pinger: Pinger) -> None:
    stage.status = 500
    pinger.start()
    until(pinger.failure)
    assert pinger.failure() == "stage has not answered for 1 s (broken)"
    assert stage.pings == 4  # each took a quarter of a second


@pytest.mark.parametrize("what", ["completed", "rows"])
def test_a_stage_at_work_is_alive_though_its_ping_waits_in_the_queue(stage: Stage, pinger: Pinger, what: str) -> None:
    """Rows change within a long batch, a dozen of the vision stage's forwards, of which the server counts nothing."""
    stage.status, stage.works = 500, lambda: setattr(stage, what, getattr(stage, what) + 1)
    pinger.start()
    until(lambda: stage.pings >= 10)
    assert pinger.failure() is None
    stage.works = lambda: None
    until(pinger.failure)


def test_a_model_that_somebody_unloaded_is_not_missed(stage: Stage, pinger: Pinger) -> None:
    stage.loaded = False
    pinger.start()
    until(lambda: stage.now >= 3.0)
    assert pinger.failure() is None


def test_what_brings_nothing_useful_is_no_answer() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b'{"error":\n "broken"}')

        log_message = print

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = "http://127.0.0.1:{1}/".format(*server.server_address)
        with pytest.raises(NoAnswer, match='{"error": "broken"}') as caught:
            request(url, PATIENCE_S, b"{}")
        assert caught.value.status == 500
    with pytest.raises(NoAnswer, match="refused"):
        Pinger(url, "", ["stage"], 1.0, 1.0).start()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoAnswer, match="^no answer$"):
        request(f"http://127.0.0.1:{silent.getsockname()[1]}/", 0.05)
