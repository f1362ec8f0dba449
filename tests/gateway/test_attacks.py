"""A gateway under attack: somebody else's questions are answered meanwhile; how late, a table says.

A benchmark in all but its bounds, which are wide: what is asserted is that every question is answered, that the
stranger's requests end as they should, and that the worker's memory stays in bounds.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attacks import question
from gateway_doubles import started
from standin_server import standin

from tessera.launcher.process import Server

pytestmark = pytest.mark.clients

ATTACKS = Path(__file__).parent / "attacks.py"
ROOT = ATTACKS.parents[2]
QUIET_S = 4.0
PAUSE_S = 0.02
LONGEST_S = 30.0  # that a bystander may wait

# attack -> statuses by which its requests may end; 0: a connection that ends without an answer
EXPECTED = {
    "headers": {431, 0},
    "chunks": {400, 0},
    "held bodies": {0, 503},
    "values": {413},
    "2,000 at once": {0, 200, 429, 503},
}


@contextmanager
def gateway(server: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of a gateway of one worker before a server."""
    with started("--workers", "1", server=server) as (process, url):
        yield int(url.rpartition(":")[2]), process.pid


@pytest.fixture(scope="module")
def port() -> Iterator[tuple[int, int]]:
    with standin() as server, gateway(server) as found:
        yield found


def ask(port: int) -> float:
    """The milliseconds of one question on a connection of its own."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
    try:
        connection.request("POST", "/v1/chat/completions", question(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    finally:
        connection.close()
    return 1e3 * (time.perf_counter() - began)


def bystander(port: int, attack: subprocess.Popen[str] | None) -> list[float]:
    """Milliseconds of questions one after another, while the attack goes on; without one, for QUIET_S."""
    end, found = time.monotonic() + QUIET_S, []
    while attack.poll() is None if attack else time.monotonic() < end:
        found.append(ask(port))
        time.sleep(PAUSE_S)
    return found


def said(milliseconds: list[float]) -> str:
    p99 = sorted(milliseconds)[int(0.99 * len(milliseconds))]
    return f"p50 {statistics.median(milliseconds):7.1f} ms, p99 {p99:7.1f} ms"


def attacked(name: str, port: int, pid: int, capsys: pytest.CaptureFixture[str]) -> dict[int, int]:
    """How the attack's requests ended; prints how a bystander fared."""
    quiet = bystander(port, None)
    with subprocess.Popen([sys.executable, ATTACKS, name, str(port)], stdout=subprocess.PIPE, text=True) as attack:
        meanwhile = bystander(port, attack)
        assert attack.stdout is not None
        ended = {int(status): count for status, count in json.loads(attack.stdout.read()).items()}
    with capsys.disabled():
        print(f"\n{name:18} quiet: {said(quiet)}; attacked: {said(meanwhile)}; worker's peak {peak(pid)} MiB; {ended}")
    return ended


def peak(pid: int) -> int:
    """The most memory a process had so far, in MiB."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) >> 10


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bystander_is_answered(name: str, port: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    ended = attacked(name, *port, capsys)
    assert ended.keys() <= EXPECTED[name]
    assert peak(port[1]) < 1000  # 16 x 60 MiB held 1.7 GiB


@pytest.mark.server
def test_a_bystander_of_grammars(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Large ones, each another: of a stranger who asks as anybody may."""
    with gateway(server.grpc_url) as (port, pid):
        attacked("grammars", port, pid, capsys)
