"""The health port over HTTP, and what several servers are together."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.launcher.health import health_port, service_page
from tessera_command import terminal as client_side


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
