"""The health port over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.launcher.health import Health, HealthPort, ServiceHealth
from tessera_command import terminal as client_side


def ask(health: ServiceHealth, path: str, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(health.url.split("/")[2], timeout=5)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body) if body else None


def test_the_page_follows_the_state() -> None:
    health = Health()
    service = ServiceHealth({"": health})
    with HealthPort(service, "127.0.0.1", 0):
        assert ask(service, "/healthz")[0] == 503
        assert ask(service, "/livez") == (200, {"live": True})
        health.enter("ready")
        status, page = ask(service, "/healthz?verbose")
        assert (status, page["state"], page["restarts"], page["reason"]) == (200, "ready", 0, "")
        assert ask(service, "/healthz", "HEAD") == (200, None)
        health.restarted()
        health.enter("restarting", "it died")
        since = ask(service, "/healthz")[1]["since"]
        assert since >= page["since"]
        assert ask(service, "/healthz")[0] == ask(service, "/healthz", "HEAD")[0] == 503
        health.enter("ready")
        assert ask(service, "/healthz")[1]["reason"] == "it died"  # why it was restarted, until there is another reason
        for state in ("failed", "stopping"):
            health.enter(state)
            assert ask(service, "/healthz")[0] == 503
        health.enter("ready")  # what ends stays so, whatever its supervisor was about to say
        assert ask(service, "/healthz")[1]["state"] == "stopping"
        assert ask(service, "/livez")[0] == 200
        assert ask(service, "/")[0] == 404
        with pytest.raises(ValueError, match="asleep"):
            health.enter("asleep")


def test_the_client_reads_what_the_launcher_writes() -> None:
    health = Health()
    stage = {"alive": True, "pid": 3, "last_ping_ms": 0.5, "last_ping_age_s": 1.0}
    health.details = lambda: {"grpc": "127.0.0.1:1", "http": "http://127.0.0.1:2", "stages": {"llm_0_0": stage}}
    service = ServiceHealth({"": health})
    with HealthPort(service, "127.0.0.1", 0):
        health.enter("ready")
        page = client_side.ask(service.url)
    assert page is not None and page.ready and page.serves("2") and not page.serves("3")
    assert page.stages == (client_side.StageHealth("llm_0_0", **stage),)
    assert client_side.ask(service.url) is None  # nobody there any more


def test_several_servers_are_ready_when_each_is_and_the_page_names_the_one_that_is_not() -> None:
    servers = {"gpu0": Health(), "gpu1": Health()}
    for number, health in enumerate(servers.values()):
        stage = {"alive": True, "pid": number, "last_ping_ms": None, "last_ping_age_s": None}
        about = {"grpc": f"a:80{number}1", "http": f"http://a:80{number}0", "stages": {"llm": stage}}
        health.details = about.copy
    service = ServiceHealth(servers)
    servers["gpu0"].enter("ready")
    assert service.report()[0] is False and service.report()[1]["state"] == "starting"
    servers["gpu1"].enter("ready")
    ready, page = service.report()
    assert ready and (page["state"], page["reason"], page["restarts"]) == ("ready", "", 0)
    servers["gpu1"].restarted()
    servers["gpu1"].enter("restarting", "llm died")
    with HealthPort(service, "127.0.0.1", 0):
        seen = client_side.ask(service.url)
        status, page = ask(service, "/healthz")
    assert seen is not None and not seen.ready and seen.reason == "gpu1: llm died" and seen.restarts == 1
    assert [stage.name for stage in seen.stages] == ["gpu0/llm", "gpu1/llm"] and [s.pid for s in seen.stages] == [0, 1]
    assert seen.grpc == "a:8001,a:8011" and not seen.serves("8021")
    assert all(map(seen.serves, ("8000", "8001", "8010", "8011")))
    assert status == 503 and {name: each["state"] for name, each in page["servers"].items()} == {
        "gpu0": "ready",
        "gpu1": "restarting",
    }
    servers["gpu0"].enter("failed", "llm died too often")
    assert service.report()[1]["reason"] == "gpu0: llm died too often"


def test_a_silent_client_keeps_nobody_waiting() -> None:
    health = ServiceHealth({"": Health()})
    with HealthPort(health, "127.0.0.1", 0), socket.create_connection(health.url.split("/")[2].split(":")):  # type: ignore[arg-type]
        assert ask(health, "/livez")[0] == 200


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is already in use \(--health-port\)"):
            HealthPort(ServiceHealth({"": Health()}), "127.0.0.1", port)
