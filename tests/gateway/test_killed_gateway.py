"""A gateway killed by SIGKILL leaves no work behind on the server."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, closing

import pytest
from gateway_doubles import started, until
from server.http_door import read, total
from test_connections import Line, question

from tessera.launcher.guard import descendants
from tessera.launcher.process import Server, command_line
from tessera_client import Client

pytestmark = [pytest.mark.server, pytest.mark.faults]

LONG_ANSWERS = 40


def wait_for(server: Server, in_flight: int, seconds: float) -> None:
    until(lambda: total(read(server.metrics_url), "tessera_requests_in_flight") == in_flight, seconds)


@pytest.mark.parametrize("victim", ["one process", "parent of two workers", "workers"])
def test_its_work_ends_with_it(server: Server, victim: str) -> None:
    wait_for(server, 0, 60)
    workers = "1" if victim == "one process" else "2"
    with ExitStack() as lines, started("--workers", workers, server=server.grpc_url) as (process, url):
        for number in range(LONG_ANSWERS):
            line = lines.enter_context(closing(Line(url)))  # which reads nothing of its answer
            line.send(question(max_tokens=7000, ignore_eos=True, stream=number % 2 == 0))
        wait_for(server, LONG_ANSWERS, 60)
        victims = [process.pid]
        if victim == "workers":
            victims = [pid for pid in descendants(process.pid) if "spawn_main" in " ".join(command_line(pid))]
            assert len(victims) == 2
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_for(server, 0, 5)
    with Client(server.grpc_url) as client:
        assert client.ask(None, "Hello", max_tokens=2, timeout=20).attempts == 1
