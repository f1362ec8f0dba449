"""What a connection may send, how much of it and how slowly; and its end, when the gateway is told to stop."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import parse_headers
from typing import Any

import gateway_doubles
import httpx
import pytest
import uvicorn
from clients.fake_transport import FakeTransport, Hang, final
from gateway_doubles import ASKED, Asked, gateway, is_there, listening, started, stoppable, until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tessera_client import Delta
from tessera_client.transports import Sent
from tessera_gateway import cli, connections
from tessera_gateway.settings import Settings

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(ASKED).encode()
SIZED = POST + b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def question(**fields: Any) -> bytes:
    """A whole request for a completion."""
    body = json.dumps({**ASKED, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Line:
    """A connection, to the last byte of which it is known what came back."""

    def __init__(self, address: str, source: str = "127.0.0.1") -> None:
        url = httpx.URL(address)
        self.socket = socket.create_connection((url.host, url.port), 20, (source, 0))
        self._came = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.socket.sendall(part)

    def answer(self) -> tuple[int, Any, Any]:
        """Status, header and body of the next answer."""
        first = self._came.readline()
        assert first, "the connection ended"
        fields = parse_headers(self._came)
        body = self._came.read(int(fields.get("content-length", 0)))
        return int(first.split()[1]), fields, json.loads(body) if body else None

    def refusal(self) -> tuple[int, str]:
        """Status and code of the next answer, which is an error and the last."""
        status, fields, body = self.answer()
        assert fields["connection"] == "close" and fields["x-request-id"] and self.ended()
        return status, body["error"]["code"]

    def ended(self) -> bool:
        """Whether nothing comes any more."""
        try:
            return self._came.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._came.close()
        self.socket.close()


class Served:
    """A gateway behind a port."""

    def __init__(self, asked: Asked, address: str) -> None:
        self.asked, self.address, self.counted = asked, address, asked.app.state.counters.total
        self.lines: list[Line] = []

    def line(self, source: str = "127.0.0.1") -> Line:
        self.lines.append(Line(self.address, source))
        return self.lines[-1]

    def settles(self, name: str, value: float) -> bool:
        until(lambda: self.counted(name) == value)
        return True


@contextmanager
def serving(*script: Any, **settings: Any) -> Iterator[Served]:
    with gateway_doubles.served(*script, **settings) as door:
        served = Served(*door)
        yield served
        for line in served.lines:
            line.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as door:
        yield door


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All waits are short."""
    for name in ("HEAD_S", "PART_S", "LINGER_S"):
        monkeypatch.setattr(connections, name, 0.2)
    monkeypatch.setattr(connections, "SWEEP_S", 0.02)


def test_a_long_header_behind_a_body_in_one_breath(served: Served) -> None:
    line = served.line()
    line.send(SIZED + BODY + GET + b"X: " + b"a" * 2 * connections.HEAD_BYTES)
    assert line.ended() and served.settles("requests_under_way", 0)


def test_an_endless_header_ends(served: Served) -> None:
    line = served.line()
    line.send(GET, b"X: ", b"a" * (1 << 19))
    assert line.refusal() == (431, "header_too_large")
    with pytest.raises(OSError):
        for _ in range(64):
            line.send(b"a" * (1 << 20))
    assert served.settles("connections", 0)


def test_a_header_that_is_just_short_enough(served: Served) -> None:
    line = served.line()
    fields = b"X: a\r\n" * (connections.HEAD_FIELDS - 2)
    rest = connections.HEAD_BYTES - len(GET + fields + b"Y: \r\n\r\n")
    for _ in range(2):
        line.send(GET + fields + b"Y: " + b"a" * rest + b"\r\n\r\n")
        assert line.answer()[0] == 200


def test_a_header_has_its_time(hurried: None, served: Served) -> None:
    slow, silent, between, waiting = (served.line() for _ in range(4))
    slow.send(GET)
    between.send(GET + b"\r\n")
    assert between.answer()[0] == 200  # its next request may take its time
    waiting.send(GET + b"\r\n\r\n")
    assert waiting.answer()[0] == 200
    assert slow.refusal() == (408, "slow_header") and silent.ended()
    between.send(GET, b"\r\n")
    waiting.send(GET, b"\r\n")
    assert between.answer()[0] == waiting.answer()[0] == 200


def test_each_part_of_a_body_has_its_time(hurried: None, served: Served) -> None:
    parts, slow, chunked, unread = (served.line() for _ in range(4))
    slow.send(SIZED, BODY[:9])
    chunked.send(CHUNKED, b"7")
    unread.send(GET + b"Content-Length: 9\r\n\r\n")
    parts.send(SIZED)
    for place in range(4):
        time.sleep(0.1)
        parts.send(BODY[place : place + 1])
    parts.send(BODY[4:])
    assert parts.answer()[0] == 200
    assert slow.refusal() == chunked.refusal() == (408, "slow_body")
    assert unread.answer()[0] == 200 and unread.ended()
    assert served.settles('requests_total{status="408"}', 2) and served.counted("requests_under_way") == 0
    assert served.counted("body_bytes_held") == 0


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(timeout_s=0.05) as served:
        line = served.line()
        line.send(SIZED, BODY[:9])
        status, fields, body = line.answer()
        assert (status, fields["connection"], body["error"]["code"]) == (408, "close", "slow_body")
        assert body["error"]["message"] == "the body did not arrive within 0.05 s"


def test_a_client_that_leaves_within_its_body_is_no_fault(served: Served) -> None:
    line = served.line()
    line.send(SIZED, BODY[:9])
    line.close()
    assert served.settles('requests_total{status="499"}', 1)


def test_an_answer_may_take_longer_than_what_is_awaited_of_the_client(hurried: None) -> None:
    with serving([Hang()], timeout_s=1) as served:
        line = served.line()
        line.send(SIZED, BODY, b"\r\n", GET)  # a line end too many, and half of another request
        assert line.answer()[0] == 504
        line.send(b"\r\n")
        assert line.answer()[0] == 200


NAMED = b"X-Request-Id: mine\r\n"
LONG = b"X: " + b"a" * connections.HEAD_BYTES
CUT = SIZED[:-2] + NAMED + b"\r\n" + BODY[:9]
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "a long value": (GET + NAMED + LONG, 431, "header_too_large"),
    "a long value before the id": (GET + LONG + NAMED, 431, "header_too_large"),
    "a long name": (GET + NAMED + b"a" * connections.HEAD_BYTES, 431, "header_too_large"),
    "a long address": (b"GET /" + b"a" * connections.HEAD_BYTES, 431, "header_too_large"),
    "many fields": (GET + NAMED + b"X: a\r\n" * connections.HEAD_FIELDS + b"\r\n", 431, "header_too_large"),
    "half a header": (GET + NAMED + b"X: a", 408, "slow_header"),
    "half a body": (CUT, 408, "slow_body"),
    "no field": (GET + NAMED + b"X: a\r\nno field\r\n", 400, "invalid_http"),
    "no chunk": (CHUNKED[:-2] + NAMED + b"\r\nno size\r\n", 400, "invalid_http"),
    "small chunks": (CHUNKED + b"1\r\na\r\n" * 200_000, 400, "invalid_http"),
    "extensions": (CHUNKED + (b"1;" + b"x" * 2000 + b"\r\na\r\n") * 500, 400, "invalid_http"),
    "extension": (CHUNKED + b"1;" + b"x" * (1 << 20), 400, "invalid_http"),
    "trailer": (CHUNKED + b"0\r\nX: " + b"x" * (1 << 20), 400, "invalid_http"),
    "trailers": (CHUNKED + b"0\r\n" + b"X: x\r\n" * 200_000, 431, "header_too_large"),
    "the middle of a body": (POST + b"Content-Length: 99000000\r\n\r\n" + b" " * 9_000_000, 413, "body_too_large"),
    "TLS": (b"\x16\x03\x01\x02\x00", 400, "invalid_http"),
    "another version": (b"GET / HTTP/9\r\n\r\n", 400, "invalid_http"),
    "two lengths": (POST + NAMED + b"Content-Length: 9\r\nContent-Length: 8\r\n", 400, "invalid_http"),
}


@pytest.mark.parametrize(("sent", "status", "code"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("before", [b"", SIZED[:-2] + b"X-Request-Id: past\r\n\r\n" + BODY], ids=["first", "second"])
def test_what_is_refused_before_it_has_come(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, code: str, before: bytes
) -> None:
    """At once or in pieces, with the id of the request, as far as that has come, and not of the one before."""
    if status == 408:
        request.getfixturevalue("hurried")
    with serving() as served:
        line = served.line()
        if before:
            line.send(before)
            assert line.answer()[1]["x-request-id"] == "past"
        line.send(
            *(sent[start : start + 1000] for start in range(0, len(sent), 1000)) if len(sent) < 20_000 else [sent]
        )
        refusal, fields, body = line.answer()
        assert (refusal, body["error"]["code"], fields["connection"]) == (status, code, "close") and line.ended()
        assert (fields["x-request-id"] == "mine") is (NAMED in sent.partition(LONG)[0])
        assert served.settles(f'requests_total{{status="{status}"}}', 1) and served.settles("requests_under_way", 0)
        assert served.counted("body_bytes_held") == 0
    assert not caplog.records  # or strangers would fill the log


def test_a_chunked_body_with_extensions_and_trailers(served: Served) -> None:
    """Which are passed over: what comes behind a body has not been looked at with the header."""
    line = served.line()
    for _ in range(2):
        cut = b"".join(b"20;a=b\r\n%s\r\n" % BODY[start : start + 32] for start in range(0, len(BODY) - 32, 32))
        rest = BODY[(len(BODY) - 1) // 32 * 32 :]
        line.send(CHUNKED, cut, b"%x\r\n%s\r\n" % (len(rest), rest), b"0\r\nX-Late: 1\r\n\r\n")
        assert line.answer()[0] == 200


def test_small_chunks_cost_few_calls_and_are_soon_too_many(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come in one breath with their header."""
    passed_on, pass_on = [], HttpToolsProtocol.on_body
    monkeypatch.setattr(HttpToolsProtocol, "on_body", lambda *given: passed_on.append(len(given[1])) or pass_on(*given))
    line = served.line()
    line.send(CHUNKED + b"1\r\na\r\n" * 10_000)
    assert line.refusal() == (400, "invalid_http")
    assert len(passed_on) <= 3 and 6 * sum(passed_on) <= connections.HEAD_SLICE + 2 * connections.SLICES[0]
    assert served.settles("body_bytes_held", 0)


def test_requests_that_do_not_wait_for_their_answers(served: Served) -> None:
    line = served.line()
    line.send((GET + b"\r\n") * connections.PIPELINED + SIZED + BODY)
    assert [line.answer()[0] for _ in range(connections.PIPELINED + 1)] == [200] * (connections.PIPELINED + 1)
    line.send((GET + b"\r\n") * 1000)
    assert line.ended() and served.settles("requests_under_way", 0) and served.counted("connections") == 0


def test_a_client_that_leaves_takes_all_its_requests_along() -> None:
    with serving([Hang()], [Hang()]) as served:
        line = served.line()
        line.send(SIZED, BODY, SIZED, BODY)
        assert served.settles("requests_under_way", 1)
        line.close()
        assert served.settles("requests_under_way", 0)


def test_a_client_that_leaves_is_missed_though_another_request_of_it_waits() -> None:
    """One that came when the first had been heard whole, and its client was listened to alone."""
    with serving([Hang()], [Hang()]) as served:
        line = served.line()
        line.send(SIZED, BODY)
        until(lambda: served.asked.fake.requests)
        held = served.counted("body_bytes_held")
        line.send(SIZED, BODY)
        assert served.settles("body_bytes_held", held + len(BODY))
        line.close()
        assert served.settles("requests_under_way", 0)


def left(door: Asked, stream: bool, after: bytes, **fields: Any) -> None:
    """Asks, and goes away when the servers were asked and this much of the answer has come."""
    with listening(door.app) as address:
        line, came = Line(address), b""
        line.send(question(stream=stream, **fields))
        until(lambda: door.fake.requests)
        while after not in came:
            came += line.socket.recv(1 << 16)
        line.close()
        until(lambda: door.app.state.counters.total('requests_total{status="499"}'))


@pytest.mark.parametrize(("stream", "after"), [(False, b""), (True, b""), (True, b'"b"')])
@pytest.mark.parametrize("answers", [1, 3])
def test_all_that_was_asked_goes_along(stream: bool, after: bytes, answers: int) -> None:
    door = gateway(*[[Delta("a"), Delta("b"), Hang()] if after else [Hang()]] * answers)
    left(door, stream, after, n=answers)
    assert sorted(door.fake.cancelled) == sorted(name for _, name, _ in door.fake.requests)
    assert len(door.fake.cancelled) in ((answers,) if after else range(1, answers + 1))  # some may not be sent yet
    assert door.app.state.counters.total("requests_under_way") == 0


def test_one_that_stops_reading_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "STALLED_MS", 250)
    door = gateway([*[Delta("a" * 1_000_000)] * 20, Hang()])  # more than the system's buffers take
    with listening(door.app) as address:
        line = Line(address)
        line.send(question(stream=True))
        until(lambda: door.fake.cancelled)
        line.close()
    assert door.fake.cancelled == [door.fake.requests[0][1]]
    assert door.app.state.counters.total('requests_total{status="499"}') == 1


def test_a_client_that_asks_whether_to_send_its_body(served: Served) -> None:
    line, large = served.line(), served.line()
    line.send(SIZED[:-2] + b"Expect: 100-continue\r\n\r\n")
    assert line.answer()[0] == 100
    line.send(BODY)
    assert line.answer()[0] == 200
    large.send(POST + b"Content-Length: 999999999\r\nExpect: 100-continue\r\n\r\n")
    assert large.refusal() == (413, "body_too_large")


@pytest.mark.parametrize("to", [b"websocket", b"h2c"])
def test_no_other_protocol_is_spoken(served: Served, to: bytes, caplog: pytest.LogCaptureFixture) -> None:
    line = served.line()
    line.send(GET + b"Connection: Upgrade\r\nUpgrade: %s\r\n\r\n" % to, GET + b"\r\n")
    status, fields, _ = line.answer()
    assert (status, fields["connection"]) == (200, "close") and line.ended() and not caplog.records


def test_the_largest_body_on_its_way_goes_where_they_are_too_many() -> None:
    with serving(max_body_mib=1, max_bodies_mib=2) as served:
        small, *large = lines = [served.line() for _ in range(3)]
        small.send(SIZED, BODY[:9])
        for line, size in zip(large, (900_000, 1_000_000)):
            line.send(POST + b"Content-Length: 1040000\r\n\r\n", b" " * size)
        held = 1_900_009
        assert served.settles("body_bytes_held", held)
        another = served.line()
        lines.append(another)
        another.send(POST + b"Content-Length: 400000\r\n\r\n", b" " * 300_000)
        status, fields, body = large[1].answer()
        assert (status, body["error"]["code"], fields["retry-after"]) == (503, "overloaded", "1")
        assert served.settles("body_bytes_held", held - 1_000_000 + 300_000)
        small.send(BODY[9:])
        assert small.answer()[0] == 200
        assert served.counted('requests_total{status="503"}') == 1
    assert served.counted("body_bytes_held") == 0 and served.counted("connections") == 0


def test_bodies_that_are_worked_on_count_too() -> None:
    with serving([Hang()], [Hang()], max_body_mib=1, max_bodies_mib=2, timeout_s=5) as served:
        asked = question(messages=[{"role": "user", "content": "x" * 1_040_000}])
        size = len(asked.partition(b"\r\n\r\n")[2])
        first = [served.line() for _ in range(2)]
        for line in first:
            line.send(asked)
        assert served.settles("body_bytes_held", 2 * size)
        last = served.line()
        last.send(asked)  # to its end: what a client sends yet is read, or it would not see the answer
        assert last.answer()[0] == 503
        first[0].close()
        assert served.settles("body_bytes_held", size)


def test_one_address_does_not_take_all_connections() -> None:
    with serving(max_connections_per_peer=3) as served:
        lines = [served.line() for _ in range(3)]
        refused = served.line()
        status, fields, body = refused.answer()
        assert (status, fields["retry-after"], body["error"]["code"]) == (503, "1", "too_many_connections")
        assert fields["x-request-id"].startswith("req_")
        other = served.line("127.0.0.2")
        for line in (*lines, other):
            line.send(GET, b"\r\n")
            assert line.answer()[0] == 200
        for line in (*lines, refused):
            line.close()
        assert served.settles("connections", 1)
        again = served.line()
        again.send(GET, b"\r\n")
        assert again.answer()[0] == 200


def test_a_network_of_ipv6_is_one_peer() -> None:
    assert connections._network("2001:db8::1") == connections._network("2001:db8::ffff:1")
    assert connections._network("2001:db8::1") != connections._network("2001:db8:0:1::1")
    assert connections._network("10.0.0.1") != connections._network("10.0.0.2")


LITTLE_ROOM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
from tessera_gateway.cli import gateway_main
raise SystemExit(gateway_main(sys.argv[1:]))
"""


def test_without_room_for_another_connection_the_others_go_on() -> None:
    with started("--workers", "1", program=("-c", LITTLE_ROOM)) as (_, url):
        lines = [Line(url) for _ in range(150)]
        lines[0].send(GET, b"\r\n")
        assert lines[0].answer()[0] == 200 and lines[-1].ended()
        for line in lines:
            line.close()
        until(lambda: is_there(url))


@contextmanager
def draining(fake: FakeTransport, drain_s: float) -> Iterator[tuple[Asked, uvicorn.Server, httpx.Client]]:
    asked = Asked(fake, Settings(drain_s=drain_s))
    with stoppable(asked.app, "info", 60) as (server, url), httpx.Client(base_url=url, trust_env=False) as http:
        yield asked, server, http


def test_a_stream_ends_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTransport([[Delta("The "), Hang()], [Hang()]])
    with draining(fake, 0.05) as (asked, server, http), ThreadPoolExecutor() as threads:
        with http.stream("POST", "/v1/chat/completions", json={**ASKED, "stream": True}) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            assert json.loads(next(lines))["choices"][0]["delta"]["role"] == "assistant"
            whole = threads.submit(http.post, "/v1/chat/completions", json=ASKED)
            until(lambda: len(fake.requests) == 2)
            server.should_exit = True
            *_, event, done = lines
        assert json.loads(event)["error"] == {
            "message": "the gateway is stopping", "type": "server_error", "param": None, "code": "server_unavailable",
        }  # fmt: skip
        assert done == "[DONE]"
        assert (whole.result().status_code, whole.result().headers["retry-after"]) == (503, "1")
    assert asked.app.state.counters.total('requests_total{status="503"}') == 2
    assert len(fake.cancelled) == 2  # the servers know
    assert not [record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()]


def test_an_answer_under_way_may_end() -> None:
    go_on = threading.Event()

    class Slow(FakeTransport):
        def send(self, request: Any, request_id: str, timeout: Any, deliver: Any) -> Sent:
            deliver(Delta("It is "))
            threading.Thread(target=lambda: go_on.wait(30) and (deliver(final("done")), deliver(None))).start()
            return Sent(lambda: None, lambda: None)

    asked = {**ASKED, "stream": True}
    with draining(Slow(), 30) as (_, server, http), http.stream("POST", "/v1/chat/completions", json=asked) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        next(lines)
        server.should_exit = True
        until(lambda: not is_there(str(http.base_url)))  # it listens no more
        go_on.set()
        assert list(lines)[-1] == "[DONE]"
