"""How the soak judges: its arithmetic, its books, and that each bad end is noticed. The server is a stand-in."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import openai
import pytest
import soak
import soak_traffic
from clients.fake_transport import FakeTransport, Hang, final
from gateway.gateway_doubles import served

from tessera_client import DeadlineExceeded, Delta, InvalidRequest


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
    child, gateway = (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2))
    stubs = {"stage_0_0": child.pid}
    server = SimpleNamespace(
        pid=os.getpid(), shm_prefix="tessera-abc-", stub_pids=lambda: stubs, failure=lambda: "it died"
    )
    watch = soak.Watch(server, gateway.pid)
    assert watch.look() == "" and set(watch.rss) == {"tritonserver", "stage_0_0", "gateway"}
    assert all(values[0] > 0 for table in (watch.rss, watch.descriptors) for values in table.values())
    assert 100_000 <= watch.shared[0] < 200_000
    for process in (child, gateway):
        process.kill()
        process.wait()
    assert watch.look() == "it died"


@pytest.fixture
def traffic(monkeypatch):
    """Traffic whose requests go nowhere; a test replaces the kinds it needs."""
    monkeypatch.setattr(soak_traffic, "Client", lambda *args, **options: SimpleNamespace(close=lambda: None))
    server = SimpleNamespace(grpc_url="127.0.0.1:1", http_url="http://127.0.0.1:1")
    return soak_traffic.Traffic(server, "127.0.0.1:1", seed=1)


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

    monkeypatch.setattr(soak_traffic, "MIX", {kind: 1})
    monkeypatch.setattr(traffic, f"_{kind}", work)
    traffic.start(1)
    traffic.stop()
    assert (traffic.requests, traffic.unanswered, traffic.accepted) == counted
    assert bool(traffic.faults) == bool(counted[1]) and (ask is not fail or "DeadlineExceeded" in str(traffic.faults))


def test_the_mix_adds_up_and_every_kind_is_there(traffic):
    assert sum(soak_traffic.MIX.values()) == 100 and set(soak_traffic.ENDS) == set(soak_traffic.MIX)
    assert all(callable(getattr(traffic, f"_{kind.replace(' ', '_')}")) for kind in soak_traffic.MIX)


def test_what_is_asked_of_a_gateway_ends_as_it_should_or_that_is_noticed(traffic):
    fake, dice, anyone = FakeTransport(), random.Random(1), None
    with served(fake=fake) as (_, address):
        traffic._openai.base_url = f"{address}/v1"
        fake.script = [[final("yes")], [Delta("a"), final("b", "length")], [Delta("a"), Hang()]]
        assert [traffic._gateway(dice, anyone), traffic._gateway_stream(dice, anyone)] == ["stop", "length"]
        traffic._gateway_left(dice, anyone)
        fake.script = [[Delta("a"), InvalidRequest("no")], [final()]]
        with pytest.raises(openai.APIError):
            traffic._gateway_stream(dice, anyone)
        with pytest.raises(AssertionError, match="no words"):
            traffic._gateway_left(dice, anyone)
        for _ in range(12):
            fake.script = [[InvalidRequest("no picture")]]
            traffic._gateway_refused(dice, anyone)
        with pytest.raises(AssertionError, match="was answered"):
            for _ in range(20):
                fake.script = [[final("yes")]]
                traffic._gateway_refused(dice, anyone)
