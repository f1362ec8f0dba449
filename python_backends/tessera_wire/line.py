"""Many requests on one long-lived bidirectional call, told apart by their ids: :class:`Line`.

Why not one call per request: tritonserver 2.51 crashes, now and then, when a client that has closed its own direction
cancels a ModelStreamInfer call with a response on its way, and when a call asks for true statuses (header
``triton_grpc_error``) and fails. A line's call is not cancelled while requests are on it: who loses interest stops
listening and sends a control request.

A call that was idle for a moment ends, because the server cannot shut down while one is open; the next request opens
another. With the call ends its lease: a request to the language model that stays open as long as the call, and that
breaks when this process is killed, on which the server ends what the call has asked (tessera/tritonserver/leases.py).
A request's own id is a lease too, so that a control request finds it at any stage: on such a line no id comes again.

tritonserver reports a failed request on such a call by a message without a status, so
:func:`tessera_wire.errors.from_server` goes by the words.
"""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from tessera_wire.connection import Connection
from tessera_wire.errors import Cancelled, ConnectionFailed, TesseraClientError, from_server
from tessera_wire.tensors import Tensor, bytes_tensor

IDLE_SECONDS = 1.0
RELEASE_SECONDS = 3.0
LEASE = "tessera-lease"
"""The request parameter that names leases; servers that know none let it pass, for its hyphen."""
SINCE = "tessera-since"
"""The request parameter in which a server tells itself when a request first came that it asks once more."""

Deliver = Callable[[Any], None]
"""Takes a request's ModelInferResponses as they come, then, once, None for the end or an error. Called by the thread
that reads for all requests, so it must neither wait nor raise."""


class Line:
    """Requests to one server. Thread-safe.

    Args:
        language_model: the model that takes control requests.
        leased: whether the server is to end what was asked here when this process is gone.
    """

    def __init__(self, connection: Connection, language_model: str = "language_model", leased: bool = False) -> None:
        self.connection = connection
        self._language_model = language_model
        self._leased = leased
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._closed = False

    def send(
        self,
        model: str,
        request_id: str,
        tensors: Iterable[Tensor],
        deliver: Deliver,
        timeout: float | None = None,
        priority: int = 0,
        lease: str = "",
        since: int = 0,
    ) -> Callable[[], Any]:
        """Starts a request; the server gives it ``timeout`` seconds.

        ``priority``: lower goes first. ``lease``: what is cancelled with the request, by its name, at every stage; on
        a leased line it is the call's. ``since``: what SINCE says; 0 says nothing.

        Returns what ends the listening to it."""
        message = self.connection.infer_message(model, request_id, tensors, timeout, priority=priority)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        if lease:
            message.parameters[LEASE].string_param = lease
        if since:
            message.parameters[SINCE].string_param = str(since)
        with self._lock:
            if self._closed:
                raise TesseraClientError("this client is closed", "open a new one")
            if self._call is None or not self._call.send(request_id, message, deliver):
                self._call = _Call(self.connection, self._language_model if self._leased else None)
                self._call.send(request_id, message, deliver)
                self._call.reader.start()  # where nobody listens it ends before another could be sent
            return partial(self._call.listeners.pop, request_id, None)

    def cancel(self, name: str, deliver: Deliver = lambda item: None) -> Callable[[], Any]:
        """Tells the language model to stop working on the request of this id, or on those that name this lease (a
        running ensemble notices nothing itself)."""
        return self.send(self._language_model, uuid.uuid4().hex, [_cancelling(name)], deliver)

    def close(self, seconds: float) -> None:
        """Cancels what is under way on the server, then lets the call end in order, for up to ``seconds``."""
        for request_id in list(self._call.listeners) if self._call else ():
            self.cancel(request_id)
        with self._lock:
            self._closed = True
        if self._call is not None:
            self._call.close(seconds)
        self.connection.close()


def _cancelling(name: str) -> Tensor:
    return bytes_tensor("CANCEL", name.encode())


class _Call:
    """One ModelStreamInfer call; ``leases`` is the model that keeps its lease, None for a call without one."""

    def __init__(self, connection: Connection, leases: str | None) -> None:
        self._connection = connection
        self._leases = leases
        self._lease, self._release = uuid.uuid4().hex, uuid.uuid4().hex  # the ids of its begin and its end
        self._released = threading.Event()  # the lease has ended, or was never held
        self._responses: Any = None
        self.listeners: dict[str, Deliver] = {}  # of the requests under way, by their ids
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `_open` and of what may be sent only while it holds
        self._open = True
        self.reader = threading.Thread(target=self._read, name="tessera-line", daemon=True)

    def send(self, request_id: str, message: Any, deliver: Deliver) -> bool:
        """Puts a request on the call; False if it has ended meanwhile."""
        with self._lock:
            if self._open:
                if self._leases is not None:
                    message.parameters[LEASE].string_param = f"{self._lease} {request_id}"
                self.listeners[request_id] = deliver
                self._outgoing.put(message)
            return self._open

    def close(self, seconds: float) -> None:
        """Takes no new request, waits for those on it, then lets the server end it."""
        with self._lock:
            self._open = False
        deadline = time.monotonic() + seconds
        while self.listeners and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self.listeners:  # else the channel's end cancels the call, with our direction still open
            self._outgoing.put(None)
            self.reader.join(seconds)
        self._fail(Cancelled("the client was closed"))

    def _requests(self) -> Iterator[Any]:
        """What grpc sends; its end closes our direction of the call."""
        if self._leases is None:
            yield from self._asked()
            return
        yield self._control(self._lease, bytes_tensor("LEASE", self._lease.encode()))
        yield from self._asked()
        if not self._released.is_set():
            yield self._control(self._release, _cancelling(self._lease))
            if not self._released.wait(RELEASE_SECONDS):
                self._responses.cancel()

    def _control(self, request_id: str, tensor: Tensor) -> Any:
        assert self._leases is not None
        message = self._connection.infer_message(self._leases, request_id, [tensor])
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message

    def _asked(self) -> Iterator[Any]:
        while True:
            try:
                message = self._outgoing.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self.listeners or not self._outgoing.empty():
                        continue
                    self._open = False
                return
            if message is None:
                return
            yield message

    def _read(self) -> None:
        error: TesseraClientError = ConnectionFailed("the server ended the call")
        try:
            self._responses = self._connection.stream(self._requests())
            for response in self._responses:
                self._hand_out(response)
        except Exception as foreign:
            error = self._connection.mapped(foreign)
        with self._lock:
            self._open = False
        self._released.set()
        self._outgoing.put(None)
        self._fail(error)

    def _hand_out(self, response: Any) -> None:
        """Gives a response to the one who waits for it; drops it if nobody does."""
        result = response.infer_response
        failed = bool(response.error_message)
        if result.id == self._lease:
            self._released.set()
            return
        if result.id == self._release and failed:  # by a server that stops, and waits for the lease
            self._responses.cancel()
            return
        deliver = self.listeners.get(result.id)
        if deliver is None:
            return
        if not failed and result.outputs:
            deliver(result)
        if failed or result.parameters["triton_final_response"].bool_param:
            self.listeners.pop(result.id, None)
            deliver(from_server(response.error_message) if failed else None)

    def _fail(self, error: TesseraClientError) -> None:
        """Ends all that wait."""
        for request_id in list(self.listeners):
            if deliver := self.listeners.pop(request_id, None):
                deliver(error)
