"""A question being answered: :class:`Stream` and its asyncio twin.

Both live through the same life: *attempts* until the first token is out (a failed one is repeated as
:class:`~tessera_client.retry.Retry` says, afterwards never), deltas, an answer. Whichever way the ``with`` block is
left before the answer is complete, the request is cancelled on the server too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable
from typing import Any

from tessera_client.messages import Answer, Delta, Request
from tessera_client.retry import Deadline, Retry
from tessera_client.transports.base import Deliver, Item, Transport
from tessera_wire.errors import Cancelled, DeadlineExceeded, ProtocolError, ServerError, TesseraClientError


class Progress:
    """What both twins know of their request: ids, attempts, what has come so far."""

    def __init__(self, transport: Transport, request: Request, timeout: float | None, retry: Retry) -> None:
        self.transport = transport
        self.request = request
        self.retry = retry
        self.deadline = Deadline(timeout)
        self.attempts = 0
        self.closed = False
        self.last: Delta | None = None
        self._id = uuid.uuid4().hex[:16]
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._stop: Callable[[], None] | None = None

    def begin(self, deliver: Deliver) -> None:
        """Starts an attempt, unless one is under way. ``deliver`` must not hold the stream alive."""
        if self.closed:
            raise Cancelled("the stream was closed")
        if self._stop is None:
            remaining = self.deadline.remaining()
            self.attempts += 1
            self._stop = self.transport.send(self.request, self.request_id, remaining, deliver)

    def stop(self) -> bool:
        """Breaks the attempt off on this side; False if none was under way."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
        return stop is not None

    def cancel(self) -> None:
        """Tells the server too."""
        with contextlib.suppress(TesseraClientError):
            self.transport.cancel(self.request_id)

    def take(self, item: Item) -> Delta:
        """What a delivered item is to the reader; raises what it is not to see as one."""
        if isinstance(item, TesseraClientError):
            raise item
        if item is None:
            raise ProtocolError(
                "the server ended the stream without a finish reason",
                "a stage gave no output; the server's log may say why",
            )
        self.add(item)
        return item

    @property
    def request_id(self) -> str:
        """The id of the current attempt; each has its own, so that a control request hits no other."""
        return f"{self._id}-{self.attempts}"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def complete(self) -> bool:
        return self.last is not None and self.last.finish_reason != ""

    def add(self, delta: Delta) -> None:
        if delta.finish_reason == "error":
            raise ServerError("the language model failed on this request", "the server's log says why")
        self._texts.append(delta.text)
        if isinstance(delta.logprobs, list):
            self._logprobs.extend(delta.logprobs)
        elif delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)
        self.last = delta

    def wait_before_retry(self, error: TesseraClientError) -> float:
        """Seconds to wait before the next attempt; raises what the caller is to see if there is none."""
        if self.closed:
            raise Cancelled("the stream was closed") from error
        if isinstance(error, DeadlineExceeded) and not self.deadline.allows(0.05):
            raise self.deadline.exceeded() from error  # ours; otherwise the server's own, shorter limit
        wait = None if self.last is not None else self.retry.delay(self.attempts, error)
        if wait is None or not self.deadline.allows(wait):
            raise error
        return wait

    def answer(self) -> Answer:
        assert self.last is not None
        return Answer(
            text=self.text,
            finish_reason=self.last.finish_reason,
            usage=self.last.usage,
            timings=self.last.timings,
            logprobs=self._logprobs or None,
            request_id=self.request_id,
            seconds=self.deadline.elapsed(),
            attempts=self.attempts,
            choices=self.last.choices,
        )


class _Stream:
    """What the twins share."""

    _progress: Progress

    @property
    def text(self) -> str:
        """The text so far."""
        return self._progress.text

    def __del__(self) -> None:
        if progress := getattr(self, "_progress", None):  # none where the arguments were refused
            progress.stop()


class Stream(_Stream):
    """The deltas of one answer, as they come; made by :meth:`Client.stream`.

    ::

        with client.stream("room.jpg", "Describe this room.") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.answer().usage)

    Leaving the block early cancels the request; without a block, a stream that nobody holds any more stops listening.
    ``close`` may be called from another thread; the iteration then ends with :class:`Cancelled`.
    """

    def __init__(self, transport: Transport, request: Request, timeout: float | None, retry: Retry) -> None:
        self._progress = Progress(transport, request, timeout, retry)
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._wake = threading.Event()  # ends the wait between attempts

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        progress = self._progress
        while True:
            if progress.complete:
                raise StopIteration
            try:
                return self._receive()
            except TesseraClientError as error:
                self._abandon(tell_server=isinstance(error, (DeadlineExceeded, Cancelled)))
                wait = progress.wait_before_retry(error)
            except BaseException:  # Ctrl-C while waiting
                self._abandon(tell_server=True)
                raise
            self._inbox = queue.SimpleQueue()  # what the failed attempt still sends goes nowhere
            self._wake.wait(wait)

    def answer(self) -> Answer:
        """Reads on to the end and returns the whole answer."""
        for _ in self:
            pass
        return self._progress.answer()

    def close(self) -> None:
        """Ends the request: a complete one quietly, any other by cancelling it here and on the server."""
        if self._progress.closed:
            return
        self._progress.closed = True
        self._wake.set()
        if not self._progress.complete:
            self._abandon(tell_server=True)
            self._inbox.put(Cancelled("the stream was closed"))

    def _receive(self) -> Delta:
        self._progress.begin(self._inbox.put)
        delta = self._progress.take(self._next())
        if self._progress.complete:
            with contextlib.suppress(TesseraClientError):
                while isinstance(self._next(), Delta):  # the end of the call, so that the connection is left tidy
                    pass
            self._progress.stop()
        return delta

    def _next(self) -> Item:
        try:
            return self._inbox.get(timeout=self._progress.deadline.remaining())
        except queue.Empty:
            raise self._progress.deadline.exceeded() from None

    def _abandon(self, tell_server: bool) -> None:
        if self._progress.stop() and tell_server:
            self._progress.cancel()


class AsyncStream(_Stream):
    """The asyncio twin of :class:`Stream`: ``async with``, ``async for``, ``await stream.answer()``."""

    def __init__(self, transport: Transport, request: Request, timeout: float | None, retry: Retry) -> None:
        self._progress = Progress(transport, request, timeout, retry)
        self._inbox: Any = None  # an asyncio.Queue for each attempt

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        import asyncio

        progress = self._progress
        while True:
            if progress.complete:
                raise StopAsyncIteration
            try:
                return await self._receive()
            except TesseraClientError as error:
                await self._abandon(tell_server=isinstance(error, (DeadlineExceeded, Cancelled)))
                wait = progress.wait_before_retry(error)
            except asyncio.CancelledError:
                await asyncio.shield(self._abandon(tell_server=True))
                raise
            self._inbox = None
            await asyncio.sleep(wait)

    async def answer(self) -> Answer:
        """Reads on to the end and returns the whole answer."""
        async for _ in self:
            pass
        return self._progress.answer()

    async def close(self) -> None:
        """As :meth:`Stream.close`."""
        if self._progress.closed:
            return
        self._progress.closed = True
        if not self._progress.complete:
            await self._abandon(tell_server=True)
            if self._inbox is not None:
                self._inbox.put_nowait(Cancelled("the stream was closed"))

    async def _receive(self) -> Delta:
        import asyncio

        if self._inbox is None:
            self._inbox = asyncio.Queue()
        self._progress.begin(_from_thread(asyncio.get_running_loop(), self._inbox))
        delta = self._progress.take(await self._next())
        if self._progress.complete:
            with contextlib.suppress(TesseraClientError):
                while isinstance(await self._next(), Delta):
                    pass
            self._progress.stop()
        return delta

    async def _next(self) -> Item:
        import asyncio

        try:
            return await asyncio.wait_for(self._inbox.get(), self._progress.deadline.remaining())
        except asyncio.TimeoutError:
            raise self._progress.deadline.exceeded() from None

    async def _abandon(self, tell_server: bool) -> None:
        import asyncio

        if self._progress.stop() and tell_server:
            await asyncio.to_thread(self._progress.cancel)


def _from_thread(loop: Any, inbox: Any) -> Deliver:
    """Puts items into an asyncio.Queue from another thread, as long as its loop runs."""

    def deliver(item: Item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(inbox.put_nowait, item)

    return deliver
