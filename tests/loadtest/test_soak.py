"""How the soak judges: its arithmetic, its books, and that each kind of bad end is noticed. No server here."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import soak

from tessera_client import DeadlineExceeded


def test_growth_is_measured_after_the_warm_up():
    warming, flat = [float(n) for n in range(100)], [100.0] * 200
    assert soak.growth_pct(warming + flat) == 0.0
    assert soak.growth_pct([50.0] * 100 + [100.0] * 100 + [110.0] * 100) == pytest.approx(10.0)
    assert soak.growth_pct([100.0] * 200 + [90.0] * 100) == pytest.approx(-10.0)
    assert soak.growth_pct([0.0] * 30) == 0.0


def test_a_slow_leak_is_seen():
    leak = [1000.0 + n * 0.5 for n in range(600)]  # 1000 -> 1300, no jump anywhere
    assert soak.growth_pct(leak) > soak.ALLOWED_PCT


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="too few"):
        soak.growth_pct([1.0, 2.0, 3.0])


def test_a_watch_sees_its_processes_and_says_when_one_is_gone(monkeypatch, tmp_path):
    (tmp_path / "tessera-abc-1").write_bytes(b"x" * 100_000)
    (tmp_path / "another").write_bytes(b"x" * 100_000)
    monkeypatch.setattr(soak, "SHARED_MEMORY", tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    server = SimpleNamespace(
        pid=os.getpid(),
        shm_prefix="tessera-abc-",
        stub_pids=lambda: {child.pid: "stage_0_0"},
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


def run_once(traffic, monkeypatch, kind, ask):
    """One request of a kind whose work is `ask`; then the traffic stops."""
    monkeypatch.setattr(soak, "MIX", {kind: 1})

    def work(dice, client):
        traffic._stop.set()
        return ask()

    monkeypatch.setattr(traffic, f"_{kind}", work)
    traffic.start(1)
    traffic.stop()


@pytest.mark.parametrize(("end", "accepted"), [("answered", 1), ("left", 1), ("refused", 0)])
def test_proper_ends_are_counted(traffic, monkeypatch, end, accepted):
    run_once(traffic, monkeypatch, "short", lambda: end)
    assert (traffic.requests, traffic.unanswered, traffic.accepted) == (1, 0, accepted)


def test_a_request_that_fails_counts_as_unanswered_and_is_named(traffic, monkeypatch):
    def fail():
        raise DeadlineExceeded("no complete answer within 120 s")

    run_once(traffic, monkeypatch, "short", fail)
    assert (traffic.requests, traffic.unanswered, traffic.accepted) == (1, 1, 0)
    assert "DeadlineExceeded" in next(iter(traffic.faults))


def test_a_request_still_under_way_is_unanswered(traffic):
    traffic.sent["long"] += 1
    assert traffic.unanswered == 1


def test_the_mix_adds_up_and_every_kind_is_there(traffic):
    assert sum(soak.MIX.values()) == 100
    for kind in soak.MIX:
        assert callable(getattr(traffic, f"_{kind.replace(' ', '_')}"))
