"""Which server gets a request: fewest under way, in turn, past those that failed; and the transports over it."""

import gc
from typing import Any

import pytest
from fake_transport import READY, FakeTransport, Hang, final
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_client import (
    Client,
    ConnectionFailed,
    Delta,
    InvalidRequest,
    ModelStatus,
    Retry,
    ServedModel,
    ServerStatus,
    TesseraClientError,
    Unavailable,
)
from tessera_client.messages import Request
from tessera_client.transports import pool
from tessera_client.transports.pool import PooledTransport, ServerPool, merged

REFUSED = ConnectionFailed("refused")
QUICK = Retry(attempts=3, first_delay=0.001, max_delay=0.002)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def picked(servers: ServerPool, times: int) -> list[int]:
    return [servers.pick() for _ in range(times)]


def test_those_together_go_where_the_first_went_while_it_takes_them() -> None:
    first, second = FakeTransport(), FakeTransport([[Unavailable("full")]])
    pooled = PooledTransport({"a": first, "b": second})
    client = Client(transport=pooled, retry=QUICK)
    client.ask(None, "?")
    together = client.together()
    for _ in range(3):  # the first of them at b, which refuses it once
        together.ask(None, "?")
    assert (len(first.requests), len(second.requests)) == (4, 1)
    for _ in range(4):  # b rests
        client.ask(None, "?")
    assert len(second.requests) == 1


def test_a_server_that_failed_rests_then_gets_one_request_until_it_answers() -> None:
    clock = Clock()
    servers = ServerPool(2, clock)
    assert servers.pick() == 0
    servers.end(0, REFUSED)
    assert set(picked(servers, 5)) == {1}
    clock.now = pool.REST_SECONDS
    assert picked(servers, 3) == [0, 1, 1]  # one to try, the rest elsewhere
    servers.end(0, REFUSED)
    assert servers.pick() == 1
    clock.now *= 2
    servers.answered(1)
    assert servers.pick() == 0
    servers.answered(0)
    assert picked(servers, 3) == [0, 0, 0]
    servers.end(0, Unavailable("the queue is full"))
    servers.answered(0)  # an older request: it is as full as before
    assert picked(servers, 2) == [1, 1]
    clock.now += pool.REST_SECONDS
    servers.answered(0)
    assert servers.pick() == 0


def test_where_all_failed_the_one_that_failed_first_is_next_and_one_server_is_always_it() -> None:
    clock = Clock()
    servers = ServerPool(3, clock)
    assert picked(servers, 3) == [0, 1, 2]
    for now, server in enumerate((1, 2, 0)):
        clock.now = now / 100
        servers.end(server, REFUSED)
    assert servers.pick() == 1


STEP = st.tuples(st.sampled_from(["pick", "end", "refuse", "fail", "answer", "wait"]), st.integers(0, 7))


@given(servers=st.integers(1, 4), steps=st.lists(STEP, max_size=40))
@settings(max_examples=50)
def test_counts_are_exact_and_no_server_in_order_with_fewer_is_passed_over(
    servers: int, steps: list[tuple[str, int]]
) -> None:
    clock = Clock()
    chosen = ServerPool(servers, clock)
    under_way: list[int] = []  # the servers of the requests
    failed: set[int] = set()
    for step, which in steps:
        request = which % len(under_way) if under_way else None
        if step == "pick":
            before = list(chosen.under_way)
            server = chosen.pick()
            assert all(before[server] <= before[i] for i in range(servers) if i not in failed)
            under_way.append(server)
        elif step == "wait":
            clock.now += which / 4
        elif request is not None and step == "answer":
            chosen.answered(under_way[request])
        elif request is not None:
            server = under_way.pop(request)
            chosen.end(server, {"refuse": REFUSED, "fail": InvalidRequest("its own fault")}.get(step))
            if step == "refuse":
                failed.add(server)
        assert chosen.under_way == [under_way.count(i) for i in range(servers)]


def test_a_request_left_or_failed_at_once_is_under_way_no_longer() -> None:
    class Closed(FakeTransport):
        def send(self, *_: Any) -> Any:
            raise TesseraClientError("closed")

    fake = FakeTransport([[Delta("a"), Hang()]])
    transport = PooledTransport({"a": fake, "b": Closed()})
    asker = Client(transport=transport)
    with asker.stream(None, "q") as stream:
        next(stream)
        with pytest.raises(TesseraClientError, match="closed"):
            asker.ask(None, "r")
        assert transport._pool.under_way == [1, 0]
    assert transport._pool.under_way == [0, 0]
    asker.close()
    assert fake.closed
    assert len(fake.cancelled) == 1


def test_a_request_ends_once() -> None:
    """Its end has come already when the listening to it stops, and its server may have others under way."""
    fake = FakeTransport([[final()], [Hang()]])
    transport = PooledTransport({"a": fake})
    sent = [transport.send(Request(text="q"), name, None, lambda item: None) for name in "ab"]
    assert transport._pool.under_way == [1]
    sent[0].stop()
    assert transport._pool.under_way == [1]
    sent[1].stop()
    sent[1].stop()
    assert transport._pool.under_way == [0]


def test_a_status_of_several_names_the_server_where_a_model_is_not_ready() -> None:
    broken = ServerStatus(True, "2.51.0", (ModelStatus("vlm", "1", "UNAVAILABLE", "no weights"),))
    status = merged({"a:1": READY, "b:2": broken})
    assert status.ready and status.version == "2.51.0"
    assert status.models == (ModelStatus("vlm", "1", "UNAVAILABLE", "b:2: no weights"),)
    assert merged({"a:1": READY, "b:2": ServerStatus(False, "2.52.0", ())}) == ServerStatus(
        False, "2.51.0, 2.52.0", (ModelStatus("vlm", "", "", "b:2: not in this server's repository"),)
    )
    assert merged({"a:1": READY}) is READY
    fakes = {"a": FakeTransport(), "b": FakeTransport(status=REFUSED)}
    assert not Client(transport=PooledTransport(fakes)).ready()


def test_a_stream_that_is_dropped_is_under_way_no_longer() -> None:
    fake = FakeTransport([[Delta("a"), Hang()]])
    transport = PooledTransport({"a": fake})
    stream = Client(transport=transport).stream(None, "q")
    assert next(stream).text == "a" and transport._pool.under_way == [1]
    del stream
    gc.collect()
    assert transport._pool.under_way == [0]


def test_an_answer_says_which_server_gave_it_and_servers_have_one_model() -> None:
    one, two = FakeTransport(), FakeTransport()
    with Client(transport=PooledTransport({"a:1": one, "b:1": two})) as client:
        assert [client.ask(None, "?").server for _ in range(4)] == ["a:1", "b:1"] * 2
        assert client.served() == one.model
        two.model = ServedModel("f" * 32, "internvl")
        with pytest.raises(InvalidRequest, match="a:1 and b:1 serve different checkpoints"):
            client.served()
