"""The health port over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.launcher.health import Health, HealthPort
from tessera_client import health as client_side


def ask(health: Health, path: str, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(health.url.split("/")[2], timeout=5)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body) if body else None


def test_the_page_follows_the_state() -> None:
    health = Health()
    with HealthPort(health, "127.0.0.1", 0):
        assert ask(health, "/healthz")[0] == 503
        assert ask(health, "/livez") == (200, {"live": True})
        health.enter("ready")
        status, page = ask(health, "/healthz?verbose")
        assert (status, page["state"], page["restarts"], page["reason"]) == (200, "ready", 0, "")
        assert ask(health, "/healthz", "HEAD") == (200, None)
        health.restarted()
        health.enter("restarting", "it died")
        since = ask(health, "/healthz")[1]["since"]
        assert since >= page["since"]
        assert ask(health, "/healthz")[0] == ask(health, "/healthz", "HEAD")[0] == 503
        health.enter("ready")
        assert ask(health, "/healthz")[1]["reason"] == "it died"  # why it was restarted, until there is another reason
        for state in ("failed", "stopping"):
            health.enter(state)
            assert ask(health, "/healthz")[0] == 503
        assert ask(health, "/livez")[0] == 200
        assert ask(health, "/")[0] == 404
        with pytest.raises(ValueError, match="asleep"):
            health.enter("asleep")


def test_the_client_reads_what_the_launcher_writes() -> None:
    health = Health()
    stage = {"alive": True, "pid": 3, "last_ping_ms": 0.5, "last_ping_age_s": 1.0}
    health.details = lambda: {"grpc": "127.0.0.1:1", "http": "http://127.0.0.1:2", "stages": {"llm_0_0": stage}}
    with HealthPort(health, "127.0.0.1", 0):
        health.enter("ready")
        page = client_side.ask(health.url)
    assert page is not None and page.ready and page.serves(2) and not page.serves(3)
    assert page.stages == (client_side.StageHealth("llm_0_0", **stage),)
    assert client_side.ask(health.url) is None  # nobody there any more


def test_a_silent_client_keeps_nobody_waiting() -> None:
    health = Health()
    with HealthPort(health, "127.0.0.1", 0), socket.create_connection(health.url.split("/")[2].split(":")):  # type: ignore[arg-type]
        assert ask(health, "/livez")[0] == 200


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is already in use \(--health-port\)"):
            HealthPort(Health(), "127.0.0.1", port)
