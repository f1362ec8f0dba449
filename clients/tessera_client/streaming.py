"""A question being answered: :class:`Stream` and its asyncio twin.

Both live through the same life: *attempts* until the first token is out (a failed one is repeated as
:class:`~tessera_client.retry.Retry` says, afterwards never), deltas, an answer. Whichever way the ``with`` block is
left before the answer is complete, the request is cancelled on the server too.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import Any

from tessera_client.errors import Cancelled, DeadlineExceeded, ProtocolError, ServerError, TesseraClientError
from tessera_client.messages import Answer, Delta, Request
from tessera_client.retry import Deadline, Retry
from tessera_client.transport import AsyncResponses, AsyncTransport, Responses, Transport


class Progress:
    """What both twins know of their request: ids, attempts, what has come so far."""

    def __init__(self, request: Request, timeout: float | None, retry: Retry) -> None:
        self.request = request
        self.retry = retry
        self.deadline = Deadline(timeout)
        self.attempts = 0
        self.closed = False
        self.last: Delta | None = None
        self._id = uuid.uuid4().hex[:16]
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

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

    def ended_early(self) -> ProtocolError:
        return ProtocolError(
            "the server ended the stream without a finish reason",
            "a stage gave no output; the server's log may say why",
        )

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


class Stream:
    """The deltas of one answer, as they come; made by :meth:`Client.stream`.

    ::

        with client.stream("room.jpg", "Describe this room.") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.answer().usage)

    Leaving the block early cancels the request. ``close`` may be called from another thread; the iteration then
    ends with :class:`~tessera_client.errors.Cancelled`.
    """

    def __init__(self, transport: Transport, request: Request, timeout: float | None, retry: Retry) -> None:
        self._transport = transport
        self._progress = Progress(request, timeout, retry)
        self._responses: Responses | None = None
        self._wake = threading.Event()  # ends the wait between attempts

    @property
    def text(self) -> str:
        """The text so far."""
        return self._progress.text

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
                self._abandon(tell_server=isinstance(error, DeadlineExceeded))
                wait = progress.wait_before_retry(error)
            except BaseException:  # Ctrl-C while waiting
                self._abandon(tell_server=True)
                raise
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

    def _receive(self) -> Delta:
        progress = self._progress
        if progress.closed:
            raise Cancelled("the stream was closed")
        if self._responses is None:
            remaining = progress.deadline.remaining()
            progress.attempts += 1
            self._responses = self._transport.send(progress.request, progress.request_id, remaining)
        try:
            delta = next(self._responses)
        except StopIteration:
            raise progress.ended_early() from None
        progress.add(delta)
        if progress.complete:
            with contextlib.suppress(TesseraClientError):
                for _ in self._responses:  # the end of the call, so that the connection is left tidy
                    pass
            self._responses = None
        return delta

    def _abandon(self, tell_server: bool) -> None:
        responses, self._responses = self._responses, None
        if responses is None:
            return
        responses.cancel()
        if tell_server:
            with contextlib.suppress(TesseraClientError):
                self._transport.cancel(self._progress.request_id)


class AsyncStream:
    """The asyncio twin of :class:`Stream`: ``async with``, ``async for``, ``await stream.answer()``."""

    def __init__(self, transport: AsyncTransport, request: Request, timeout: float | None, retry: Retry) -> None:
        self._transport = transport
        self._progress = Progress(request, timeout, retry)
        self._responses: AsyncResponses | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return self._progress.text

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
                await self._abandon(tell_server=isinstance(error, DeadlineExceeded))
                wait = progress.wait_before_retry(error)
            except asyncio.CancelledError:
                await asyncio.shield(self._abandon(tell_server=True))
                raise
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

    async def _receive(self) -> Delta:
        progress = self._progress
        if progress.closed:
            raise Cancelled("the stream was closed")
        if self._responses is None:
            remaining = progress.deadline.remaining()
            progress.attempts += 1
            self._responses = self._transport.send(progress.request, progress.request_id, remaining)
        try:
            delta = await self._responses.__anext__()
        except StopAsyncIteration:
            raise progress.ended_early() from None
        progress.add(delta)
        if progress.complete:
            with contextlib.suppress(TesseraClientError):
                async for _ in self._responses:
                    pass
            self._responses = None
        return delta

    async def _abandon(self, tell_server: bool) -> None:
        responses, self._responses = self._responses, None
        if responses is None:
            return
        responses.cancel()
        if tell_server:
            with contextlib.suppress(TesseraClientError):
                await self._transport.cancel(self._progress.request_id)
