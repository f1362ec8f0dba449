"""The seam between the clients and the network. Here is all that a client needs and knows of it, so that tests can
put a fake in its place; each other file is one way to keep that contract."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tessera_client.messages import Delta, PicturePlan, Request, ServedModel, ServerStatus
from tessera_wire.errors import TesseraClientError

CONTROL_SECONDS = 3.0  # time given to status questions and to the request that cancels another
SERVED_SECONDS = 30.0  # to the question what is served, which stands in line with the pictures of others

Item = Delta | TesseraClientError | None
Deliver = Callable[[Item], None]
"""Takes a request's deltas as they come, then, once, None for the end or an error. Called by a thread of the
transport's, which it must not hold up."""


class Sent(NamedTuple):
    """A request under way."""

    stop: Callable[[], Any]
    """Breaks it off on this side, at any time: what comes then is not delivered."""
    cancel: Callable[[], None]
    """Tells the language model to stop working on it (a running ensemble notices nothing itself)."""
    server: str = ""
    """Its address, where there may be several."""


class Transport(Protocol):
    """Thread-safe. All it raises and delivers is of :mod:`tessera_wire.errors`; deadlines are the caller's to keep."""

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        """Starts a request, which the server is told to end after ``timeout`` seconds."""
        ...

    def plan(self, request: Request, timeout: float | None) -> tuple[PicturePlan, ...]:
        """How the request's pictures would be cut, within ``timeout`` seconds; nothing is answered."""
        ...

    def served(self) -> ServedModel: ...
    def status(self) -> ServerStatus: ...
    def close(self) -> None: ...
