"""What a connection may take of a worker before its request is looked at, and while it is read.

uvicorn reads a header of any length for as long as it takes to come, and holds as many bodies as are sent. Its parser
joins the pieces of a field one by one, so that a single endless header stops the whole worker. :class:`Connection` is
uvicorn's protocol, which counts and times what comes before the parser sees it; :class:`ConnectionLimits` is what the
connections of a worker share.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections import Counter
from functools import partial
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tessera_gateway.errors import RETRY_AFTER, ApiError
from tessera_gateway.metrics import STATUS, Counters
from tessera_gateway.request import end_all, id_of
from tessera_gateway.settings import Settings

HEAD_BYTES = 16 << 10  # of a request line and its header fields
HEAD_FIELDS = 100
HEAD_S = 10.0  # from a request's first byte to the end of its header
PART_S = 30.0  # between two parts of a body
LINGER_S = 2.0  # that a client which was refused in the middle of what it sends may take to notice
LINGER_BYTES = 1 << 20  # that are read meanwhile of one that sends what is no request, and passed over
SWEEP_S = 0.5  # between two looks at the clock
HEAD_SLICE = 2 << 10  # bytes of a header that the parser gets at a time: with its end comes what no limit has looked at
SLICES = (4 << 10, 16 << 10)  # bytes of a chunked body that the parser gets at a time: more where its chunks are large
FRAME_BYTES = 4 << 10  # of a chunked body's frames and trailers, which may have a fourth of its size besides:
FRAME_SHARE = 4  # each chunk costs a call, however small it is
PIPELINED = 8  # requests that may wait for the answer to an earlier one of their connection
LAST_WORDS_S = 1.0  # that a client may take for the end of an answer which the stop of the gateway has cut short
MOST_FILES = 1 << 16  # descriptors that a worker asks the system for, up to its hard limit
KEPT_FILES = 256  # descriptors that are not for connections: servers, databases, pages that are fetched
LONG_HEAD = ApiError(
    431, f"the request line and header may have {HEAD_BYTES} bytes and {HEAD_FIELDS} fields", code="header_too_large"
)
BODY = "tessera.body"
"""Key of a request's scope: its :class:`Body`."""


class Body:
    """The bytes of one request's body that this worker holds."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self.connection, self.cycle, self.held = connection, cycle, 0
        self.arriving = True

    def release(self, size: int) -> None:
        """``size`` bytes of it are no longer needed: they are on the disk."""
        self.connection.door.hold(self, -min(size, self.held))  # nothing of one that was refused meanwhile


class ConnectionLimits:
    """What the connections of a worker share."""

    def __init__(self, counters: Counters, settings: Settings) -> None:
        self.counters, self._settings, self._stopping = counters, settings, False
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(files - KEPT_FILES, files // 2) if files != resource.RLIM_INFINITY else MOST_FILES
        self._held = 0
        self._peers = Counter[str]()  # of IPv6, networks of 64 bits
        self._connections: set[Connection] = set()

    def enter(self, connection: Connection) -> None:
        """Counts a new connection, and refuses one too many."""
        self._connections.add(connection)
        self._peers[connection.peer] += 1
        self.counters.add("connections")
        if len(self._connections) == 1:
            connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)
        a_peer = self._settings.max_connections_per_peer
        if len(self._connections) > self._most:  # no descriptor is left for one that lingers
            connection.transport.abort()
        elif connection.peer and self._peers[connection.peer] > a_peer:
            words = f"this address has {a_peer} connections here already (--max-connections-per-peer)"
            connection.refuse(ApiError(503, words, code="too_many_connections", headers=RETRY_AFTER))

    def leave(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]
        self.counters.add("connections", -1)

    def hold(self, body: Body, size: int) -> None:
        """Counts more bytes of a body, or less. Where they are too many, the largest that is on its way is refused:
        small requests go on."""
        body.held += size
        self._held += size
        self.counters.add("body_bytes_held", size)
        while size > 0 and self._held > self._settings.bodies_bytes and body.arriving:
            arriving = (each for line in self._connections for each in line.bodies if each.arriving)
            largest = max(arriving, key=lambda each: each.held)
            words = "the gateway holds as many bytes of requests as it can (--max-bodies-mib)"
            largest.connection.refuse(ApiError(503, words, code="overloaded", headers=RETRY_AFTER))

    def stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets answers under way end for a while, then ends them with an error, then their connections."""
        if not self._stopping:
            self._stopping = True
            loop.call_later(self._settings.drain_s, end_all)
            loop.call_later(self._settings.drain_s + LAST_WORDS_S, self._abort)

    def _abort(self) -> None:
        for connection in tuple(self._connections):
            connection.transport.abort()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in tuple(self._connections):
            connection.check(now)
        if self._connections:
            loop.call_later(SWEEP_S, self._sweep, loop)


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits. The application's lifespan gives the limits, as ``door`` of its state."""

    scope: Any  # of the request that is read: uvicorn's type has no keys of ours

    _body: Body | None = None  # of the request that is read
    _in_head, _begun = True, False
    _head_bytes = _fields = 0
    _rest: int | None = 0  # of a body: bytes that are still to come; None: chunks of a length unknown
    _frames = 0  # of a chunked body: bytes that are not the body itself, less their share of it
    _fault: ApiError | None = None
    _refused, _passed_over = False, math.inf  # bytes that may still be read and passed over

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = _network(self.client[0]) if self.client else ""
        self.bodies: set[Body] = set()
        """Those of requests that are not answered yet."""
        self._chunks: list[bytes] = []  # of the body that is read: what is not passed on yet
        self._deadline: float | None = self.loop.time() + HEAD_S  # for what is awaited of the client
        self.door: ConnectionLimits = self.app_state["door"]
        self.door.enter(self)

    def shutdown(self) -> None:
        self.door.stop(self.loop)
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_all()
        self._refused, self._deadline = True, None
        self.door.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._passed_over -= len(data)
            if self._passed_over < 0:
                self.transport.abort()
            return
        if self._in_head and not self._begun:
            data = data.lstrip(b"\r\n")  # as the parser does; some clients end a body so
            if not data:
                return
        self._unset_keepalive_if_required()
        now = self.loop.time()
        if not self._in_head:
            self._deadline = now + PART_S
        elif self._deadline is None or not self._begun:
            self._deadline = now + HEAD_S
        rest = memoryview(data)
        while rest and not self._refused and not self.transport.is_closing():
            if self._in_head:
                size = min(HEAD_SLICE, HEAD_BYTES - self._head_bytes)
            else:
                size = SLICES[not self._frames] if self._rest is None else max(1, self._rest)
            self._parse(rest[:size])
            rest = rest[size:]

    def _parse(self, piece: memoryview) -> None:
        in_head, self._body_bytes, self._heads, fault = self._in_head, 0, 0, False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # to nothing that is served; it has been answered as if it had not asked
            self.cycle.keep_alive = False
            self._refused = True
        except httptools.HttpParserError:
            fault = True
        self._pass_on()
        if fault:
            self.refuse(self._fault or ApiError(400, "what was sent is no HTTP request", code="invalid_http"))
        if in_head and self._in_head and not self._heads:
            self._head_bytes += len(piece)
            if self._head_bytes >= HEAD_BYTES:
                self.refuse(LONG_HEAD)
        elif not in_head and self._rest is None:
            self._frames = max(0, self._frames + len(piece) - self._body_bytes - self._body_bytes // FRAME_SHARE)
            if self._frames > FRAME_BYTES:
                self.refuse(ApiError(400, "the body's chunks are too small for their frames", code="invalid_http"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._fields, self._head_bytes = True, 0, 0
        self._rest = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > HEAD_FIELDS:
            self._stop(LONG_HEAD)
        if not self._in_head:  # a trailer: what came behind the body is not part of what was checked before
            return
        super().on_header(name, value)
        if name.lower() == b"content-length":  # the parser takes digits alone, and one such field
            self._rest = int(value)
        elif name.lower() == b"transfer-encoding":
            self._rest = None

    def on_headers_complete(self) -> None:
        if self._refused or len(self.pipeline) >= PIPELINED:
            words = f"more than {PIPELINED} requests wait on this connection"
            self._stop(ApiError(429, words, code="too_many_requests", headers=RETRY_AFTER))
        before, paused = self.cycle, self.flow.read_paused
        super().on_headers_complete()
        if not paused:  # as it is for a request that has to wait: then nobody would notice that the client has left
            self.flow.resume_reading()
        self._in_head, self._heads, self._frames = False, 1, 1
        self._deadline = self.loop.time() + PART_S
        if self.cycle is not before:
            body = self._body = Body(self, self.cycle)
            self.bodies.add(body)
            self.scope[BODY] = body
            self.cycle.on_response = partial(self._answered, body)
            own = SimpleNamespace(
                write=self.transport.write, is_closing=self.transport.is_closing, close=self._end_answered
            )
            self.cycle.transport = cast(asyncio.Transport, own)

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def _pass_on(self) -> None:
        """What came of a body, at once: a call for each chunk would cost the others more than it costs who sends it."""
        if not self._chunks:
            return
        body = b"".join(self._chunks)
        self._chunks.clear()
        self._body_bytes += len(body)
        if self._rest is not None:
            self._rest -= len(body)
        if self._refused or self._body is None or self._body.cycle.response_complete:
            return
        super().on_body(body)
        self.door.hold(self._body, len(body))

    def on_message_complete(self) -> None:
        self._pass_on()
        super().on_message_complete()
        self._in_head, self._begun, self._deadline = True, False, None
        if self._body is not None:
            self._body.arriving = False

    def _stop(self, fault: ApiError) -> None:
        """Leaves the parser, which passes no exception on."""
        self._fault = fault
        raise ValueError(fault.message)

    def _answered(self, body: Body) -> None:
        self._let_go(body)
        self.on_response_complete()

    def _end_answered(self) -> None:
        """The end of a connection as a request has it waits for a client that still sends."""
        if self._in_head:
            self.transport.close()
        else:
            self._linger()

    def _end_all(self) -> None:
        """Tells all requests that the client is gone; uvicorn tells the last one alone."""
        for body in tuple(self.bodies):
            body.cycle.disconnected = True
            body.cycle.message_event.set()
            self._let_go(body)

    def _let_go(self, body: Body) -> None:
        self.bodies.discard(body)
        body.arriving = False
        self.door.hold(body, -body.held)

    def check(self, now: float) -> None:
        """Ends what takes too long."""
        if self._deadline is None or now < self._deadline:
            return
        if self._refused:
            self.transport.abort()
        elif self.flow.read_paused:  # it is we who do not read
            self._deadline = now + PART_S
        elif not self._in_head:
            self.refuse(ApiError(408, f"the next part of the body did not arrive within {PART_S:g} s",
                                 code="slow_body"))  # fmt: skip
        elif self.bodies:  # the client waits for an answer; another request may take its time
            self._deadline = now + HEAD_S
        elif self._begun:
            self.refuse(ApiError(408, f"the header did not arrive within {HEAD_S:g} s", code="slow_header"))
        else:
            self.transport.close()

    def refuse(self, fault: ApiError) -> None:
        """Answers by an error what is being read, where that is possible still, and ends the connection."""
        if self._refused:
            return
        if self._in_head:  # of a request that no middleware counts
            answered = bool(self.bodies)
            self.door.counters.ended(fault.status)
        else:
            answered = self.bodies != {self._body} or self.cycle.response_started
            if not answered:
                self.scope[STATUS] = fault.status
        self._end_all()
        if answered:
            self._refused = True
            self.transport.close()
            return
        answer, scope = fault.response(), self.scope if self._begun else {"headers": []}  # with what came of its header
        answer.headers.update({"x-request-id": id_of(scope), "Connection": "close"})
        lines = b"".join(b"%s: %s\r\n" % field for field in answer.raw_headers)
        self.transport.write(STATUS_LINE[fault.status] + lines + b"\r\n" + answer.body)
        self._linger(LINGER_BYTES if fault.status < 500 else math.inf)

    def _linger(self, passed_over: float = math.inf) -> None:
        """Ends the connection when its client has noticed, which may be sending still: closed at once, the system
        would throw away what it was told."""
        self._refused, self._passed_over, self._deadline = True, passed_over, self.loop.time() + LINGER_S
        self.pipeline.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def raise_file_limit() -> None:
    """Each connection is an open file, and what a process may usually open are 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _network(address: str) -> str:
    return str(ip_network(f"{address}/64", strict=False)) if ":" in address else address
