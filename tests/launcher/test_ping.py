"""Which models are pinged and how, and when a stage counts as dead; against a small HTTP server in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tessera.launcher import ping
from tessera.launcher.ping import NoAnswer, Pinger, ping_of

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
    """Plays tritonserver with one model `stage`; `answer` says how its ping is answered."""

    def __init__(self) -> None:
        self.answer: Callable[[], int] = lambda: 200
        self.completed = self.rows = 0
        self.loaded = True
        self.pings = 0
        self.ping_limit = PATIENCE_S
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v2/models/stage/config":
                    sign = {"SIGN_OF_WORK": {"string_value": '{"rows": '}}
                    self.reply(200, {"name": "stage", "max_batch_size": 0, "input": [PING], "parameters": sign})
                elif self.path == "/v2/models/stage/stats" and not stage.loaded:
                    self.reply(stage.answer(), {"error": "requested model 'stage' is not available"})
                elif self.path == "/v2/models/stage/stats":
                    success = {"success": {"count": stage.completed, "ns": 1}}
                    self.reply(200, {"model_stats": [{"name": "stage", "inference_stats": success}]})
                else:
                    self.reply(200 if self.path in ("/v2/health/live", "/metrics") else 404, {"rows": stage.rows})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                stage.pings += 1
                status = stage.answer()
                stage.completed += status == 200
                self.reply(status, {"error": "broken"})

            def reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass  # the pinger went away, as it must

        self.listener = Listener(("127.0.0.1", 0), Handler)
        self.listener.daemon_threads = True
        threading.Thread(target=self.listener.serve_forever, args=(0.02,), daemon=True).start()

    def pinger(self, timeout_s: float) -> Pinger:
        url = f"http://127.0.0.1:{self.listener.server_address[1]}"
        return Pinger(url, f"{url}/metrics", ["stage"], 0.02, timeout_s)


class Clock:
    """The pinger's clock, which stands unless a stage's answer takes a quarter of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 0.25


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Whoever waits for it has patience, but a ping waits for ``ping_limit``."""
    made, ask = Stage(), ping.request

    def patiently(url: str, timeout_s: float, body: bytes | None = None) -> bytes:
        return ask(url, made.ping_limit if body else PATIENCE_S, body)

    monkeypatch.setattr(ping, "request", patiently)
    yield made
    made.listener.shutdown()
    made.listener.server_close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ping, "time", made)
    return made


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_are_measured(stage: Stage) -> None:
    pinger = stage.pinger(5.0)
    assert pinger.last("stage") == (None, None)
    pinger.start()
    until(lambda: None not in pinger.last("stage") + pinger.last("tritonserver"))
    milliseconds, age = pinger.last("stage")
    assert milliseconds > 0 and age >= 0 and pinger.failure() is None
    pinger.stop()


def test_a_stage_that_is_silent_for_the_whole_time_is_dead(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the true clock: whoever does not answer in time does not in more time either."""
    hold = threading.Event()
    stage.answer = lambda: 200 if hold.wait() else 500
    stage.ping_limit = 0.3
    pinger = stage.pinger(0.3).start()
    until(pinger.failure)
    assert pinger.failure() == "stage has not answered for 0.3 s (no answer)"
    hold.set()


def test_a_stage_that_answers_with_errors_is_dead_after_the_same_time(stage: Stage, clock: Clock) -> None:
    stage.answer = lambda: clock.tick() or 500
    pinger = stage.pinger(1.0).start()
    until(pinger.failure)
    assert pinger.failure() == 'stage has not answered for 1 s ({"error": "broken"})'
    assert stage.pings == 4  # each took a quarter of a second


def test_a_stage_at_work_is_alive_though_its_ping_waits_in_the_queue(stage: Stage, clock: Clock) -> None:
    def busy() -> int:
        clock.tick()
        stage.completed += 5
        return 500

    stage.answer = busy
    pinger = stage.pinger(1.0).start()
    until(lambda: stage.pings >= 10)
    assert pinger.failure() is None
    stage.answer = lambda: clock.tick() or 500
    until(pinger.failure)


def test_a_stage_within_a_long_batch_is_alive_while_its_sign_of_work_changes(stage: Stage, clock: Clock) -> None:
    """As the vision stage, a dozen of whose forwards are one batch to the server."""

    def busy() -> int:
        clock.tick()
        stage.rows += 1
        return 500

    stage.answer = busy
    pinger = stage.pinger(1.0).start()
    until(lambda: stage.pings >= 10)
    assert pinger.failure() is None
    stage.answer = lambda: clock.tick() or 500
    until(pinger.failure)


def test_a_model_that_somebody_unloaded_is_not_missed(stage: Stage, clock: Clock) -> None:
    stage.answer, stage.loaded = (lambda: clock.tick() or 400), False
    pinger = stage.pinger(1.0).start()
    until(lambda: clock.now >= 3.0)
    assert pinger.failure() is None
    pinger.stop()


def test_a_server_that_refuses_to_say_what_it_has(stage: Stage) -> None:
    stage.listener.shutdown()
    stage.listener.server_close()
    with pytest.raises(NoAnswer, match="refused"):
        stage.pinger(1.0).start()
