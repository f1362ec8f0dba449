"""Which models are pinged and how, and when a stage counts as dead; against a small HTTP server in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tessera.launcher.ping import NoAnswer, Pinger, ping_of

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
        self.completed = 0
        self.loaded = True
        self.pings = 0
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v2/models/stage/config":
                    self.reply(200, {"name": "stage", "max_batch_size": 0, "input": [PING]})
                elif self.path == "/v2/models/stage/stats" and not stage.loaded:
                    self.reply(400, {"error": "requested model 'stage' is not available"})
                elif self.path == "/v2/models/stage/stats":
                    success = {"success": {"count": stage.completed, "ns": 1}}
                    self.reply(200, {"model_stats": [{"name": "stage", "inference_stats": success}]})
                else:
                    self.reply(200 if self.path == "/v2/health/live" else 404, {})

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
        return Pinger(f"http://127.0.0.1:{self.listener.server_address[1]}", ["stage"], 0.02, timeout_s)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.listener.shutdown()
    made.listener.server_close()


def verdict(pinger: Pinger, seconds: float) -> str | None:
    """The failure, once there is one; None if there is none after ``seconds``."""
    deadline = time.monotonic() + seconds
    while pinger.failure() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return pinger.failure()


def test_answers_are_measured(stage: Stage) -> None:
    pinger = stage.pinger(5.0)
    assert pinger.last("stage") is None
    pinger.start()
    while pinger.last("stage") is None or pinger.last("tritonserver") is None:
        time.sleep(0.01)
    milliseconds, age = pinger.last("stage") or (0, 0)
    assert milliseconds > 0 and age >= 0 and pinger.failure() is None
    pinger.stop()


def test_a_stage_that_is_silent_for_the_whole_time_is_dead(stage: Stage) -> None:
    hold = threading.Event()
    stage.answer = lambda: 200 if hold.wait(10) else 500
    pinger = stage.pinger(0.3).start()
    assert verdict(pinger, 5.0) == "stage has not answered for 0.3 s (no answer)"
    hold.set()


def test_a_stage_that_answers_with_errors_is_dead_after_the_same_time(stage: Stage) -> None:
    stage.answer = lambda: 500
    pinger = stage.pinger(0.3).start()
    assert verdict(pinger, 5.0) == 'stage has not answered for 0.3 s ({"error": "broken"})'
    assert stage.pings > 1


def test_a_stage_at_work_is_alive_though_its_ping_waits_in_the_queue(stage: Stage) -> None:
    def busy() -> int:
        for _ in range(5):
            time.sleep(0.1)
            stage.completed += 1
        return 500

    stage.answer = busy
    pinger = stage.pinger(0.3).start()
    assert verdict(pinger, 1.2) is None
    stage.answer = lambda: 500
    assert verdict(pinger, 5.0) is not None
    pinger.stop()


def test_a_model_that_somebody_unloaded_is_not_missed(stage: Stage) -> None:
    stage.answer, stage.loaded = (lambda: 400), False
    pinger = stage.pinger(0.2).start()
    assert verdict(pinger, 0.8) is None
    pinger.stop()


def test_a_server_that_refuses_to_say_what_it_has(stage: Stage) -> None:
    stage.listener.shutdown()
    stage.listener.server_close()
    with pytest.raises(NoAnswer, match="refused"):
        stage.pinger(1.0).start()
