"""A gateway under attack: somebody else's questions are answered meanwhile; how late, a table says.

A benchmark in all but its bounds, which are wide: what is asserted is that every question is answered, that the
stranger's requests end as they should, and that the worker's memory stays in bounds.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attacks
import pytest
from attacks import question
from gateway_doubles import started
from standin_server import standin

from tessera.launcher.process import Server

pytestmark = pytest.mark.clients

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


@pytest.fixture(scope="module")
def door() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with standin() as server, started("--workers", "1", server=server) as found:
        yield found


def bystander(url: str, attack: subprocess.Popen[str] | None) -> list[float]:
    """Milliseconds of questions one after another, each on a connection of its own, while the attack goes on; without
    one, for QUIET_S."""
    end, found = time.monotonic() + QUIET_S, []
    while attack.poll() is None if attack else time.monotonic() < end:
        began, json_body = time.perf_counter(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", question(), json_body)
        with urllib.request.urlopen(request, timeout=LONGEST_S) as answer:
            answer.read()
        found.append(1e3 * (time.perf_counter() - began))
        time.sleep(PAUSE_S)
    return found


def said(milliseconds: list[float]) -> str:
    p99 = sorted(milliseconds)[int(0.99 * len(milliseconds))]
    return f"p50 {statistics.median(milliseconds):7.1f} ms, p99 {p99:7.1f} ms"


def attacked(name: str, url: str, pid: int, capsys: pytest.CaptureFixture[str]) -> dict[int, int]:
    """How the attack's requests ended; prints how a bystander fared."""
    quiet, command = bystander(url, None), [sys.executable, attacks.__file__, name, url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        meanwhile = bystander(url, attack)
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
def test_a_bystander_is_answered(name: str, door: Any, capsys: pytest.CaptureFixture[str]) -> None:
    process, url = door
    assert attacked(name, url, process.pid, capsys).keys() <= EXPECTED[name]
    assert peak(process.pid) < 1000  # MiB: 16 x 60 MiB held 1.7 GiB


@pytest.mark.server
def test_a_bystander_of_grammars(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Large ones, each another: of a stranger who asks as anybody may."""
    with started("--workers", "1", server=server.grpc_url) as (process, url):
        attacked("grammars", url, process.pid, capsys)
