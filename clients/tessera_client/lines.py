"""Many requests on one long-lived bidirectional call, told apart by their ids: :class:`Line` and its asyncio twin.

Why not one call a request: tritonserver 2.51 crashes, now and then, when a client that has closed its own direction
cancels a ModelStreamInfer call with a response on its way, and when a call asks for true statuses (header
``triton_grpc_error``) and fails. A line is not cancelled while requests are on it: who loses interest stops listening
and sends a control request.

A line that was idle for a moment closes itself, because the server cannot shut down while one is open. This file
knows nothing of the messages beyond "a response has ``infer_response.id``, ``error_message`` and a final flag".
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from tessera_client.errors import Cancelled, ConnectionFailed, TesseraClientError
from tessera_client.retry import Deadline

if TYPE_CHECKING:
    import asyncio

IDLE_SECONDS = 1.0


class _Listeners:
    """Who waits for which id. An inbox receives raw responses, then None for the end, or an error instead."""

    def __init__(self) -> None:
        self.inboxes: dict[str, Callable[[Any], None]] = {}

    def deliver(self, response: Any) -> None:
        """Hands a response to the one who waits for it; drops it if nobody does."""
        result = response.infer_response
        put = self.inboxes.get(result.id)
        if put is None:
            return
        if response.error_message or result.outputs:
            put(response)
        if response.error_message or result.parameters["triton_final_response"].bool_param:
            self.inboxes.pop(result.id, None)
            put(None)

    def fail(self, error: TesseraClientError) -> None:
        """Ends all that wait."""
        while self.inboxes:
            try:
                _, put = self.inboxes.popitem()
            except KeyError:
                return
            put(error)


class Line:
    """One call for threads.

    Args:
        call: starts the call: takes the iterator of requests, returns the iterator of responses.
        mapped: turns what the call raises into an error of ours.
    """

    def __init__(self, call: Callable[[Iterator[Any]], Any], mapped: Callable[[Exception], TesseraClientError]) -> None:
        self._listeners = _Listeners()
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `_open` and of what may be sent only while it holds
        self._open = True
        self._mapped = mapped
        self._call = call(self._requests())
        self._reader = threading.Thread(target=self._read, name="tessera-line", daemon=True)
        self._reader.start()

    def send(self, request_id: str, message: Any, timeout: float | None) -> LineResponses | None:
        """Puts a request on the line; None if the line has closed meanwhile (open another)."""
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            if not self._open:
                return None
            self._listeners.inboxes[request_id] = inbox.put
            self._outgoing.put(message)
        return LineResponses(self._listeners.inboxes, request_id, inbox, timeout)

    def waiting(self) -> list[str]:
        """The ids of the requests under way."""
        return list(self._listeners.inboxes)

    def close(self, seconds: float) -> None:
        """Ends the call in order: takes no new request, waits for those on it, then lets the server end it."""
        with self._lock:
            self._open = False
        deadline = time.monotonic() + seconds
        while self._listeners.inboxes and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._listeners.inboxes:  # else the channel's end cancels the call, with our direction still open
            self._outgoing.put(None)
            self._reader.join(seconds)
        self._listeners.fail(Cancelled("the client was closed"))

    def _shut(self) -> None:
        with self._lock:
            self._open = False
        self._outgoing.put(None)

    def _requests(self) -> Iterator[Any]:
        """What grpc sends; its end closes our direction of the call."""
        while True:
            try:
                message = self._outgoing.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._listeners.inboxes or not self._outgoing.empty():
                        continue
                    self._open = False
                return
            if message is None:
                return
            yield message

    def _read(self) -> None:
        error: TesseraClientError | None = None
        try:
            for response in self._call:
                self._listeners.deliver(response)
        except Exception as foreign:
            error = self._mapped(foreign)
        self._shut()
        self._listeners.fail(error or ConnectionFailed("the server ended the call"))


class LineResponses:
    """The raw responses to one request on a :class:`Line`."""

    def __init__(
        self, inboxes: dict[str, Any], request_id: str, inbox: queue.SimpleQueue[Any], timeout: float | None
    ) -> None:
        self._inboxes = inboxes
        self._id = request_id
        self._inbox = inbox
        self._deadline = Deadline(timeout)

    def next(self) -> Any:
        """The next response, or None at the end; raises DeadlineExceeded, Cancelled, ConnectionFailed."""
        try:
            item = self._inbox.get(timeout=self._deadline.remaining())
        except queue.Empty:
            raise self._deadline.exceeded() from None
        if isinstance(item, TesseraClientError):
            raise item
        return item

    def cancel(self) -> None:
        """Stops listening; a thread in :meth:`next` wakes with Cancelled."""
        self._inboxes.pop(self._id, None)
        self._inbox.put(Cancelled("the request was cancelled by this client"))


class AsyncLine:
    """One call for an event loop; as :class:`Line`."""

    def __init__(
        self, call: Callable[[AsyncIterator[Any]], Any], mapped: Callable[[BaseException], TesseraClientError]
    ) -> None:
        import asyncio

        self._listeners = _Listeners()
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._open = True
        self._mapped = mapped
        self._call = call(self._requests())
        self._reader = asyncio.ensure_future(self._read())

    def send(self, request_id: str, message: Any, timeout: float | None) -> AsyncLineResponses | None:
        import asyncio

        if not self._open:
            return None
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._listeners.inboxes[request_id] = inbox.put_nowait
        self._outgoing.put_nowait(message)
        return AsyncLineResponses(self._listeners.inboxes, request_id, inbox, timeout)

    def waiting(self) -> list[str]:
        return list(self._listeners.inboxes)

    async def close(self, seconds: float) -> None:
        import asyncio

        self._open = False
        deadline = time.monotonic() + seconds
        while self._listeners.inboxes and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if not self._listeners.inboxes:
            self._outgoing.put_nowait(None)
            await asyncio.wait([self._reader], timeout=seconds)
        self._listeners.fail(Cancelled("the client was closed"))

    def _shut(self) -> None:
        self._open = False
        self._outgoing.put_nowait(None)

    async def _requests(self) -> AsyncIterator[Any]:
        import asyncio

        while True:
            try:
                message = await asyncio.wait_for(self._outgoing.get(), IDLE_SECONDS)
            except asyncio.TimeoutError:
                if self._listeners.inboxes or not self._outgoing.empty():
                    continue
                self._open = False
                return
            if message is None:
                return
            yield message

    async def _read(self) -> None:
        import asyncio

        error: TesseraClientError | None = None
        try:
            async for response in self._call:
                self._listeners.deliver(response)
        except (Exception, asyncio.CancelledError) as foreign:
            error = self._mapped(foreign)
        self._shut()
        self._listeners.fail(error or ConnectionFailed("the server ended the call"))


class AsyncLineResponses:
    """The raw responses to one request on an :class:`AsyncLine`."""

    def __init__(
        self, inboxes: dict[str, Any], request_id: str, inbox: asyncio.Queue[Any], timeout: float | None
    ) -> None:
        self._inboxes = inboxes
        self._id = request_id
        self._inbox = inbox
        self._deadline = Deadline(timeout)

    async def next(self) -> Any:
        import asyncio

        try:
            item = await asyncio.wait_for(self._inbox.get(), self._deadline.remaining())
        except asyncio.TimeoutError:
            raise self._deadline.exceeded() from None
        if isinstance(item, TesseraClientError):
            raise item
        return item

    def cancel(self) -> None:
        self._inboxes.pop(self._id, None)
        self._inbox.put_nowait(Cancelled("the request was cancelled by this client"))
