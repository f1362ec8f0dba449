"""When a stage counts as dead; the health port over HTTP, and what several servers are together."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fakes.backend import wait_until

from tessera.errors import ConfigError
from tessera.launcher import health
from tessera.launcher.health import NoAnswer, Pinger, health_port, ping_of, request, service_page
from tessera_command import terminal as client_side

PATIENCE_S = 60.0  # a machine may be overloaded
PING = {"name": "PING", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True}


def test_the_ping_follows_the_models_configuration() -> None:
    assert ping_of({"name": "echo", "input": [{"name": "IN", "data_type": "TYPE_STRING"}]}) is None
    assert ping_of({"name": "vlm", "platform": "ensemble"}) is None
    made = ping_of({"name": "language_model", "input": [PING]})
    assert made is not None and made.path == "/v2/models/language_model/generate_stream"
    assert json.loads(made.body or b"") == {"PING": "alive?"} and made.sign is None


class Stage:
    """Plays tritonserver with one model `stage`, and the pinger's clock, which stands unless a ping takes a quarter of
    a second; `status` is the HTTP status of a ping, `works` what the stage does meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.status = 200
        self.works: Callable[[], None] = lambda: None
        self.answer = b""
        self.rows = self.pings = 0

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
            page = {"model_stats": [{"inference_stats": {"success": {"count": 0}}}]}
        elif path == "/metrics":
            page = {"rows": self.rows}
        else:
            assert path == "/v2/health/live"
        if status != 200:
            raise NoAnswer("broken", status)
        return self.answer if self.answer and body is not None else json.dumps(page).encode()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(health, "request", made.request)
    monkeypatch.setattr(health, "time", made)
    return made


@pytest.fixture
def pinger(stage: Stage) -> Iterator[Pinger]:
    """Of a second's patience, not started."""
    made = Pinger("http://server", "http://server/metrics", ["stage"], 0.02, 1.0)
    yield made
    made.stop()


def test_a_stage_that_answers_with_errors_is_dead_after_the_same_time(stage: Stage, pinger: Pinger) -> None:
    stage.status = 500
    pinger.start()
    wait_until(pinger.failure, PATIENCE_S)
    assert pinger.failure() == "stage has not answered for 1 s (broken)"
    assert stage.pings == 4  # each took a quarter of a second


def test_what_a_stage_says_of_a_cascade_in_answer_to_its_ping_is_kept(stage: Stage, pinger: Pinger) -> None:
    said = {"alarm": 'answers escalated: 9 of "10"', "cascade_audits": 3}
    stage.answer = b'data: {"cascade":%s,"model_name":"language_model"}\n\n' % json.dumps(json.dumps(said)).encode()
    assert pinger.cascade == {}
    pinger.start()
    wait_until(lambda: pinger.cascade == said, PATIENCE_S)
    stage.answer = b'data: {"cascade":"","model_name":"language_model"}\n\n'
    wait_until(lambda: pinger.cascade == {}, PATIENCE_S)


def test_a_stage_at_work_is_alive_though_its_ping_waits_in_the_queue(stage: Stage, pinger: Pinger) -> None:
    """Rows change within a long batch, a dozen of the vision stage's forwards, of which the server counts nothing."""
    stage.status, stage.works = 500, lambda: setattr(stage, "rows", stage.rows + 1)
    pinger.start()
    wait_until(lambda: stage.pings >= 6, PATIENCE_S)
    assert pinger.failure() is None
    stage.works = lambda: None
    wait_until(pinger.failure, PATIENCE_S)


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


def page_of(number: int, state: str = "ready", reason: str = "", restarts: int = 0) -> dict[str, Any]:
    stage = {"alive": True, "pid": number, "last_ping_ms": 0.5, "last_ping_age_s": None}
    page = {"state": state, "since": f"2026-01-0{number}", "restarts": restarts, "reason": reason}
    page |= {"grpc": f"a:80{number}1", "http": f"http://a:80{number}0", "metrics": f"http://a:80{number}2/metrics"}
    return page | {"weights": {"llm": f"bfloat16, {number} MiB"}, "stages": {"llm": stage}}


def ask(url: str, path: str, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=5)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body) if body else None


def test_the_page_follows_the_state() -> None:
    page = page_of(1, "starting")
    with health_port(lambda: page, "127.0.0.1", 0) as url, socket.create_connection(url.split("/")[2].split(":")):  # type: ignore[arg-type]
        for state in ("starting", "restarting", "failed", "stopping", "ready"):
            page["state"] = state
            status = 200 if state == "ready" else 503
            assert ask(url, "/healthz?verbose") == (status, page) and ask(url, "/healthz", "HEAD") == (status, None)
            assert ask(url, "/livez") == (200, {"live": True})  # though another client says nothing
        assert ask(url, "/")[0] == 404
        seen = client_side.ask(url)
    assert seen is not None and seen.ready and seen.serves("8010") and not seen.serves("8012")
    assert seen.stages == (client_side.StageHealth("llm", **page["stages"]["llm"]),)
    assert client_side.ask(url) is None  # nobody there any more


def test_several_servers_are_ready_when_each_is_and_the_page_names_the_one_that_is_not() -> None:
    assert service_page({"": page_of(1)}) == page_of(1)
    ready = service_page({"gpu0": page_of(0), "gpu1": page_of(1)})
    assert (ready["state"], ready["reason"], ready["since"]) == ("ready", "", "2026-01-01")
    died = {"restarts": 1, "reason": "llm died"}
    page = service_page({"gpu0": page_of(0), "gpu1": page_of(1, "restarting", **died)})
    own = {name: page["servers"][name] for name in ("gpu0", "gpu1")}
    assert page == {
        "state": "restarting",
        "since": "2026-01-01",
        "restarts": 1,
        "reason": "gpu1: llm died",
        "grpc": "a:8001,a:8011",
        "http": "http://a:8000,http://a:8010",
        "metrics": "http://a:8002/metrics,http://a:8012/metrics",
        "weights": {"gpu0/llm": "bfloat16, 0 MiB", "gpu1/llm": "bfloat16, 1 MiB"},
        "stages": {f"gpu{number}/llm": page_of(number)["stages"]["llm"] for number in range(2)},
        "servers": own,
    }
    assert [each["state"] for each in own.values()] == ["ready", "restarting"] and "stages" not in own["gpu0"]
    worse = service_page({"gpu0": page_of(0, "failed", "llm died too often"), "gpu1": page_of(1, "restarting", **died)})
    assert worse["reason"] == "gpu0: llm died too often"
    told = {"cascade_audits": 4, "cascade_disagreements": 1}
    watched = {"gpu0": page_of(0) | {"cascade_audits": 3}, "gpu1": page_of(1) | told | {"alarm": "answers escalated"}}
    with health_port(lambda: service_page(watched), "127.0.0.1", 0) as url:
        alarmed = client_side.ask(url)
    assert alarmed is not None and alarmed.alarm == "gpu1: answers escalated" and alarmed.state == "ready"
    assert (alarmed.cascade_audits, alarmed.cascade_disagreements) == (7, 1)
    with health_port(lambda: page, "127.0.0.1", 0) as url:
        seen = client_side.ask(url)
    assert seen is not None and not seen.ready and seen.reason == "gpu1: llm died" and seen.restarts == 1
    assert all(map(seen.serves, ("8000", "8001", "8010", "8011"))) and not seen.serves("8021")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = rf"port {port} on 127.0.0.1 is already in use \(--health-port\)"
        with pytest.raises(ConfigError, match=words), health_port(dict, "127.0.0.1", port):
            pass
