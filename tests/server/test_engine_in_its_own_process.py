"""The real ensemble with its engine in a process of its own: the same answers, and a death that is noticed."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import server_metrics
from toy_servers import Launched, all_gone, command_line, descendants, wait_until

from tessera_client import Client, InvalidRequest, Retry

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "answers.jpg"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("process")
    running = Launched(ROOT / "model_repository", folder / "log", "--ping-interval", "0.2")
    yield running
    running.process.kill()
    running.process.communicate()


def engines(service: Launched) -> list[int]:
    """Process ids of the engines."""
    return [pid for pid in descendants(service.process.pid) if "tessera.engine.process.main" in command_line(pid)]


def state(service: Launched) -> str:
    try:
        with urllib.request.urlopen(f"http://{service.url('health')}/healthz", timeout=5) as page:
            return json.load(page)["state"]
    except urllib.error.HTTPError as error:
        return json.load(error)["state"]


def test_it_answers_streams_refuses_and_counts(service: Launched) -> None:
    with Client(service.url("grpc")) as client:
        answer = client.ask(PICTURE, "Is there a door?", max_tokens=5)
        assert answer.text in ("yes", "no") and answer.finish_reason == "stop"
        with client.stream(PICTURE, "Describe the room.", max_tokens=12, ignore_eos=True) as stream:
            deltas = [delta.text for delta in stream]
        assert len(deltas) > 1 and stream.answer().usage.completion_tokens == 12
        scored = client.ask(PICTURE, "Is there a door?", choices=["yes", "no"])
        assert scored.text == answer.text and scored.choices is not None
        with pytest.raises(InvalidRequest, match="context"):
            client.ask(PICTURE, "Is there a door?", max_tokens=10**6)
        counted = f"http://{service.url('metrics')}/metrics"
        assert wait_until(lambda: server_metrics.total(server_metrics.read(counted), "tessera_requests_total") >= 3)


def test_a_dead_engine_takes_its_stage_along_and_comes_back(service: Launched) -> None:
    (engine,) = engines(service)
    with Client(service.url("grpc"), retry=Retry(attempts=1000, max_delay=0.2), timeout=60) as client:
        client.ask(PICTURE, "Is there a door?", max_tokens=1)
        os.kill(engine, signal.SIGKILL)
        assert wait_until(lambda: state(service) != "ready")
        assert client.ask(PICTURE, "Back?", max_tokens=1).finish_reason
    assert wait_until(lambda: state(service) == "ready", 30)
    (after,) = engines(service)
    assert after != engine


def test_it_ends_with_the_server(service: Launched) -> None:
    left = engines(service)
    service.process.terminate()
    service.process.communicate(timeout=15)
    assert service.process.returncode == 0 and wait_until(lambda: all_gone(left))
