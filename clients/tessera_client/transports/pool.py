"""Several servers behind one client: which of them gets a request, and a transport that goes by it.

:class:`ServerPool` decides and knows no network; :class:`PooledTransport` puts it behind the seam. A client of one
server takes the same way, with a pool of one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

from tessera_client.messages import Delta, Models, ModelStatus, PicturePlan, Request, ServedModel, ServerStatus
from tessera_client.transports import Deliver, Item, Sent, Transport
from tessera_wire.errors import ConnectionFailed, InvalidRequest, TesseraClientError, Unavailable
from tessera_wire.tensors import addresses, parse_url

REST_SECONDS = 1.0
NOT_THERE = "not in this server's repository"
NOT_NOW = (Unavailable, ConnectionFailed)  # the errors that say so, which are the retried ones


class ServerPool:
    """Deals requests out to ``servers`` servers, numbered from 0: to the one with the fewest under way, in turn
    where several have as few. Thread-safe.

    A server that refused a request or broke off gets none for REST_SECONDS, and then one at a time until it has
    answered: without that, a dead server, which never has any under way, would draw all of them. Where every server
    is in that state, the one that failed longest ago is next.
    """

    def __init__(self, servers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a stream that is collected while it is held ends its request
        self._rest_ends: list[float | None] = [None] * servers  # None: it is in order
        self._turn = 0
        self.under_way = [0] * servers
        """How many requests each server has under way."""

    def pick(self, rather: int | None = None) -> int:
        """The server for a new request, which counts as under way until its :meth:`end`: ``rather``, if in order."""
        with self._lock:
            server = self._next() if rather is None or not self.in_order(rather) else rather
            self.under_way[server] += 1
            return server

    def in_order(self, server: int) -> bool:
        """Whether it has refused and broken off nothing since its last answer."""
        return self._rest_ends[server] is None

    def answered(self, server: int) -> None:
        """The server has sent something: if it has rested, it is in order again."""
        if self._rest_ends[server] is None:  # nearly always; a lock per token would be waste
            return
        with self._lock:
            rest_ends = self._rest_ends[server]
            if rest_ends is not None and self._clock() >= rest_ends:
                self._rest_ends[server] = None

    def end(self, server: int, error: BaseException | None = None) -> None:
        """A request of the server's is over, by ``error`` if there was one."""
        with self._lock:
            self.under_way[server] -= 1
            if isinstance(error, NOT_NOW):
                self._rest_ends[server] = self._clock() + REST_SECONDS

    def _next(self) -> int:
        now, servers = self._clock(), range(len(self.under_way))
        usable = [i for i in servers if (end := self._rest_ends[i]) is None or (end <= now and not self.under_way[i])]
        if usable:
            server = min(usable, key=lambda i: (self.under_way[i], (i - self._turn) % len(servers)))
        else:
            server = min(servers, key=lambda i: self._rest_ends[i] or 0.0)
        self._turn = server + 1
        return server


def open_transport(url: str | Sequence[str], models: Models) -> PooledTransport:
    """The transport for one or several servers (see :func:`~tessera_wire.tensors.addresses`), each ``host:port`` or
    ``grpc://`` (``grpcs://``: TLS), or ``http://`` / ``https://``."""
    return PooledTransport({each: _open(each, models) for each in addresses(url)})


def _open(url: str, models: Models) -> Transport:
    scheme, address = parse_url(url)
    if scheme.startswith("http"):
        from tessera_client.transports.http import HttpTransport

        return HttpTransport(address, models, tls=scheme == "https")
    from tessera_client.transports.grpc import GrpcTransport

    return GrpcTransport(address, models, tls=scheme == "grpcs")


class PooledTransport:
    """A :class:`~tessera_client.transports.Transport` over those of several servers, by their addresses."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self.addresses = tuple(transports)
        self._transports = tuple(transports.values())
        self._pool = ServerPool(len(transports))
        self._stays = False
        self._server: int | None = None  # where it stays

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        server = self._pool.pick(self._server)
        if self._stays:
            self._server = server
        under_way = [server]  # popped by the first to end it: its last item or a stop

        def end(error: BaseException | None = None) -> None:
            if isinstance(error, TesseraClientError):
                error.server = self.addresses[server]
            with suppress(IndexError):
                self._pool.end(under_way.pop(), error)

        def count(item: Item) -> None:
            if isinstance(item, Delta):
                self._pool.answered(server)
            else:
                end(item)
            deliver(item)

        try:
            sent = self._transports[server].send(request, request_id, timeout, count)
        except BaseException as error:
            end(error)
            raise

        def stop() -> None:
            sent.stop()
            end()

        return sent._replace(stop=stop, server=self.addresses[server])

    def together(self) -> PooledTransport:
        """This one, whose requests go where its first one went, until that server refuses or breaks off."""
        one = copy(self)
        one._stays = True
        return one

    def only(self, address: str) -> PooledTransport:
        """One to one of the servers, whose requests count as under way for no other."""
        return PooledTransport({address: self._transports[self.addresses.index(address)]})

    def plan(self, request: Request, timeout: float | None) -> tuple[PicturePlan, ...]:
        server = self._pool.pick()
        try:
            plans = self._transports[server].plan(request, timeout)
        except BaseException as error:
            self._pool.end(server, error)
            raise
        self._pool.answered(server)
        self._pool.end(server)
        return plans

    def served(self) -> ServedModel:
        """What all of them serve; raises for the first that does not answer, and where they differ."""
        found = {address: t.served() for address, t in zip(self.addresses, self._transports, strict=True)}
        first, *others = found
        for other in others:
            if found[other] != found[first]:
                raise InvalidRequest(f"{first} and {other} serve different checkpoints", "name servers of one")
        return found[first]

    def status(self) -> ServerStatus:
        """What holds of all servers together; raises for the first that does not answer."""
        return merged({a: t.status() for a, t in zip(self.addresses, self._transports, strict=True)})

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def merged(statuses: Mapping[str, ServerStatus]) -> ServerStatus:
    """One status for the servers at these addresses: ready, and a model READY, where that is so on all of them."""
    if len(statuses) == 1:
        return next(iter(statuses.values()))
    found: dict[str, ModelStatus] = {}
    for name in dict.fromkeys(model.name for status in statuses.values() for model in status.models):
        for address, status in statuses.items():
            model = next((each for each in status.models if each.name == name), ModelStatus(name, "", "", NOT_THERE))
            if model.state != "READY":
                found[name] = replace(model, reason=f"{address}: {model.reason}")
                break
            found.setdefault(name, model)
    return ServerStatus(
        ready=all(status.ready for status in statuses.values()),
        version=", ".join(dict.fromkeys(status.version for status in statuses.values())),
        models=tuple(found.values()),
    )
