"""How the soak judges: its arithmetic, its books, and that each kind of bad end is noticed. No server here."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import soak

from tessera_client import DeadlineExceeded


@pytest.mark.parametrize(
    ("values", "growth"),
    [
        ([*map(float, range(100)), *[100.0] * 200], 0.0),  # the first third is warm-up
        ([50.0] * 100 + [100.0] * 100 + [110.0] * 100, 10.0),
        ([100.0] * 200 + [90.0] * 100, -10.0),
        ([0.0] * 30, 0.0),
        ([1000.0 + n * 0.5 for n in range(600)], 13.34),  # a slow leak, no jump anywhere
    ],
)
def test_growth_is_measured_after_the_warm_up(values, growth):
    assert soak.growth_pct(values) == pytest.approx(growth, abs=0.01)


def test_a_watch_sees_its_processes_and_says_when_one_is_gone(monkeypatch, tmp_path):
    (tmp_path / "tessera-abc-1").write_bytes(b"x" * 100_000)
    (tmp_path / "another").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(soak, "SHARED_MEMORY", tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    server = SimpleNamespace(
        pid=os.getpid(),
        shm_prefix="tessera-abc-",
        stub_pids=lambda: {"stage_0_0": child.pid},
        failure=lambda: "it died",
    )
    watch = soak.Watch(server, SimpleNamespace(processes={os.getppid(): "gateway"}), interval=0.01)
    watch.look()
    assert set(watch.rss) == {"tritonserver", "stage_0_0", "gateway"}
    assert all(values[0] > 0 for table in (watch.rss, watch.pss, watch.descriptors) for values in table.values())
    assert 100_000 <= watch.shared[0] < 200_000
    child.kill()
    child.wait()
    watch.start()
    watch._thread.join(10)
    assert watch.lost == "it died"


@pytest.fixture
def traffic(monkeypatch):
    """Traffic whose requests go nowhere; a test replaces the kinds it needs."""
    monkeypatch.setattr(soak, "Client", lambda *args, **options: SimpleNamespace(close=lambda: None))
    server = SimpleNamespace(grpc_url="127.0.0.1:1", http_url="http://127.0.0.1:1")
    return soak.Traffic(server, SimpleNamespace(), seed=1)


def fail():
    raise DeadlineExceeded("no complete answer within 120 s")


@pytest.mark.parametrize(
    ("kind", "ask", "counted"),
    [
        ("short", lambda: "stop", (1, 0, 1)),
        ("cancelled", lambda: None, (1, 0, 1)),
        ("malformed", lambda: None, (1, 0, 0)),
        ("short", lambda: "error", (1, 1, 0)),
        ("short", fail, (1, 1, 0)),
    ],
)
def test_ends_are_counted(traffic, monkeypatch, kind, ask, counted):
    def work(dice, client):
        traffic._stop.set()
        return ask()

    monkeypatch.setattr(soak, "MIX", {kind: 1})
    monkeypatch.setattr(traffic, f"_{kind}", work)
    traffic.start(1)
    traffic.stop()
    assert (traffic.requests, traffic.unanswered, traffic.accepted) == counted
    assert bool(traffic.faults) == bool(counted[1]) and (ask is not fail or "DeadlineExceeded" in str(traffic.faults))


def test_the_mix_adds_up_and_every_kind_is_there(traffic):
    assert sum(soak.MIX.values()) == 100 and set(soak.ENDS) == set(soak.MIX)
    assert all(callable(getattr(traffic, f"_{kind.replace(' ', '_')}")) for kind in soak.MIX)
