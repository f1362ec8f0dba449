"""A question being answered: :class:`Stream`, and what its asyncio twin shares with it.

Both live through the same life: *attempts* until the first token is out (a failed one is repeated as
:class:`~tessera_client.retry.Retry` says, afterwards never), deltas, an answer. Whichever way the ``with`` block is
left before the answer is complete, the request is cancelled on the server too.

That life is written once, in coroutines. What :class:`Stream` lets them await blocks its thread, so that they never
suspend and :func:`_outcome` has their result at once.
"""

from __future__ import annotations

import contextlib
import queue
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tessera_client.messages import Answer, Delta, Request
from tessera_client.retry import ON_THE_WAY_S, Deadline, Retry
from tessera_client.transports import Item, Sent, Transport
from tessera_wire.errors import Cancelled, DeadlineExceeded, ProtocolError, ServerError, TesseraClientError

if TYPE_CHECKING:
    from tessera_client.tracing import Trace

T = TypeVar("T")


class Inbox(Protocol):
    """Where an attempt's items wait for the reader. It must not hold the stream alive: the transport holds it."""

    def put(self, item: Item) -> None:
        """Called by any thread."""

    async def take(self, seconds: float | None) -> Item:
        """The next item; raises TimeoutError after ``seconds``."""


class BaseStream(ABC):
    """The life of both twins."""

    def __init__(
        self,
        transport: Transport,
        request: Request,
        timeout: float | None,
        retry: Retry,
        begin_trace: Callable[[Request], Trace | None] = lambda request: None,
        name: str = "",
    ) -> None:
        self._transport = transport
        self._request = request
        self._retry = retry
        self._deadline = Deadline(timeout)
        self._attempts = 0
        self._closed = False
        self._last: Delta | None = None
        self._trace = begin_trace(request)
        unique = uuid.uuid4().hex[:16]
        unique = f"{name}-{unique}" if name else unique
        self._id = unique if self._trace is None else self._trace.id_of(unique)
        self._server = ""  # of the last attempt
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._sent: Sent | None = None  # while an attempt is under way
        self._inbox: Inbox | None = None  # another for each attempt

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def __del__(self) -> None:
        if getattr(self, "_sent", None):  # none where the arguments were refused
            self._stop_listening()
            self._end_trace(Cancelled("nobody holds the stream"))

    @abstractmethod
    def _open_inbox(self) -> Inbox: ...

    @abstractmethod
    async def _tell_server(self, sent: Sent) -> None:
        """Cancels the request on the server, which may take a while."""

    @property
    def _request_id(self) -> str:
        """The id of the current attempt; each has its own, so that a control request hits no other."""
        return f"{self._id}-{self._attempts}"

    @property
    def _complete(self) -> bool:
        return self._last is not None and self._last.finish_reason != ""

    async def _advance(self) -> Delta | None:
        """The next delta; None after the last."""
        try:
            return await self._next_delta()
        except BaseException as error:
            self._end_trace(error)
            raise

    async def _next_delta(self) -> Delta | None:
        while not self._complete:
            try:
                return await self._receive()
            except TesseraClientError as error:
                await self._abandon(tell_server=isinstance(error, (DeadlineExceeded, Cancelled)))
                self._inbox = self._open_inbox()  # what the failed attempt still sends goes nowhere
                wait = self._wait_before_retry(error)
            except GeneratorExit:  # the coroutine was dropped: it can await nothing any more
                raise
            except BaseException:  # Ctrl-C or a cancelled task, while waiting
                await self._abandon(tell_server=True)
                raise
            with contextlib.suppress(TimeoutError):
                await self._inbox.take(wait)  # nothing comes but the word that the stream was closed
        return None

    async def _receive(self) -> Delta:
        if self._closed:
            raise Cancelled("the stream was closed")
        self._inbox = self._inbox or self._open_inbox()
        if self._sent is None:
            limit = self._deadline.for_server()
            self._attempts += 1
            deliver = self._inbox.put if self._trace is None else self._trace.noting(self._inbox.put)
            self._sent = self._transport.send(self._request, self._request_id, limit, deliver)
            self._server = self._sent.server
            if self._closed:  # meanwhile, by another thread
                raise Cancelled("the stream was closed")
        item = await self._next(self._inbox)
        if isinstance(item, TesseraClientError):
            raise item
        if item is None:
            raise ProtocolError(
                "the server ended the stream without a finish reason",
                "a stage gave no output; the server's log may say why",
            )
        self._add(item)
        if self._complete:
            self._end_trace(item)
            with contextlib.suppress(TesseraClientError):
                while isinstance(await self._next(self._inbox), Delta):  # the end, so that the connection is left tidy
                    pass
            self._stop_listening()
        return item

    async def _next(self, inbox: Inbox) -> Item:
        try:
            return await inbox.take(self._deadline.remaining())
        except TimeoutError:
            raise self._deadline.exceeded() from None

    def _add(self, delta: Delta) -> None:
        if delta.finish_reason == "error":
            raise ServerError("the language model failed on this request", "the server's log says why")
        self._texts.append(delta.text)
        if isinstance(delta.logprobs, list):
            self._logprobs.extend(delta.logprobs)
        elif delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)
        self._last = delta

    def _wait_before_retry(self, error: TesseraClientError) -> float:
        """Seconds to wait before the next attempt; raises what the caller is to see if there is none."""
        if self._closed:
            raise Cancelled("the stream was closed") from error
        if isinstance(error, DeadlineExceeded) and not self._deadline.allows(ON_THE_WAY_S + 0.05):
            raise self._deadline.exceeded() from error  # ours; otherwise the server's own, shorter limit
        wait = None if self._last is not None else self._retry.delay(self._attempts, error)
        if wait is None or not self._deadline.allows(wait):
            raise error
        return wait

    async def _end(self) -> None:
        """Ends the request: a complete one quietly, any other by cancelling it here and on the server."""
        if self._closed:
            return
        self._closed = True
        if not self._complete:
            self._end_trace(Cancelled("the stream was closed"))
            await self._abandon(tell_server=True)
            if self._inbox is not None:
                self._inbox.put(Cancelled("the stream was closed"))

    async def _abandon(self, tell_server: bool) -> None:
        sent = self._stop_listening()
        if sent and tell_server:
            with contextlib.suppress(TesseraClientError):
                await self._tell_server(sent)

    def _stop_listening(self) -> Sent | None:
        """Breaks the attempt off on this side; None if none was under way."""
        sent, self._sent = self._sent, None
        if sent:
            sent.stop()
        return sent

    def _end_trace(self, outcome: Delta | BaseException) -> None:
        if self._trace is not None:
            self._trace.end(outcome, self._request_id, self._attempts)

    async def _whole(self) -> Answer:
        """Reads on to the end."""
        while await self._advance():
            pass
        assert self._last is not None
        return Answer(
            text=self.text,
            finish_reason=self._last.finish_reason,
            usage=self._last.usage,
            timings=self._last.timings,
            logprobs=self._logprobs or None,
            request_id=self._request_id,
            seconds=self._deadline.elapsed(),
            attempts=self._attempts,
            choices=self._last.choices,
            cascade=self._last.cascade,
            fingerprint=self._last.fingerprint,
            server=self._server,
        )


class Stream(BaseStream):
    """The deltas of one answer, as they come; made by :meth:`Client.stream`.

    ::

        with client.stream("room.jpg", "Describe this room.") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.answer().usage)

    Leaving the block early cancels the request; without a block, a stream without references stops listening.
    ``close`` may be called from another thread; the iteration then ends with :class:`Cancelled`.
    """

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        delta = _outcome(self._advance())
        if delta is None:
            raise StopIteration
        return delta

    def answer(self) -> Answer:
        """Reads on to the end and returns the whole answer."""
        return _outcome(self._whole())

    def close(self) -> None:
        """Ends the request: a complete one quietly, any other by cancelling it here and on the server."""
        _outcome(self._end())

    def _open_inbox(self) -> Inbox:
        return _BlockingInbox()

    async def _tell_server(self, sent: Sent) -> None:
        sent.cancel()


class _BlockingInbox(queue.SimpleQueue[Item]):
    async def take(self, seconds: float | None) -> Item:
        try:
            return self.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None


def _outcome(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine that never suspends returns or raises."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a coroutine of Stream's was suspended")
