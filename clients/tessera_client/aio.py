"""The client for asyncio: :class:`AsyncClient`, the same surface as :class:`~tessera_client.client.Client`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Literal

from tessera_client.client import CLIENTS_TIMEOUT, BaseClient, Images, Seconds, given_out
from tessera_client.messages import (
    Answer,
    Delta,
    PicturePlan,
    Request,
    ServedModel,
    ServerStatus,
    check_job,
    item_request,
)
from tessera_client.retry import Retry
from tessera_client.streaming import BaseStream, Inbox
from tessera_client.transports import Item, Sent
from tessera_wire.errors import TesseraClientError


class AsyncStream(BaseStream):
    """The asyncio twin of :class:`~tessera_client.streaming.Stream`: ``async with``, ``async for``,
    ``await stream.answer()``."""

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._advance()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def answer(self) -> Answer:
        """Reads on to the end and returns the whole answer."""
        return await self._whole()

    async def close(self) -> None:
        """As :meth:`Stream.close`."""
        await self._end()

    def _open_inbox(self) -> Inbox:
        return _LoopInbox()

    async def _tell_server(self, sent: Sent) -> None:
        await asyncio.shield(asyncio.to_thread(sent.cancel))


class _LoopInbox:
    """One task takes from it at a time. A future and a timer, where a queue would need a task for each item."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._awaited: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits any more
            self._loop.call_soon_threadsafe(self._arrive, item)

    async def take(self, seconds: float | None) -> Item:
        if not self._items:
            self._awaited = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, self._wake)
            try:
                await self._awaited
            finally:
                if timer is not None:
                    timer.cancel()
            if not self._items:
                raise TimeoutError
        return self._items.popleft()

    def _arrive(self, item: Item) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


class AsyncClient(BaseClient[Coroutine[Any, Any, Answer], AsyncStream]):
    """Asks a Tessera server questions about pictures, from one event loop.

    ::

        async with AsyncClient("localhost:8001") as client:
            answer = await client.ask("room.jpg", "How many sockets are there?")
            async with client.stream("room.jpg", "Describe this room.") as stream:
                async for delta in stream:
                    print(delta.text, end="", flush=True)

    Arguments, results and errors are those of :class:`~tessera_client.client.Client`. A server's
    connections are one thread's work, however many requests are under way.
    """

    _new_stream = AsyncStream

    async def ask_many(
        self,
        items: Iterable[tuple[Images, str]],
        *,
        concurrency: int = 16,
        progress: Callable[[int], None] | None = None,
        errors: Literal["raise", "return"] = "raise",
        retry: Retry | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """As :meth:`Client.ask_many`, for ``async for``."""
        check_job(items, concurrency, errors)
        retry = retry or Retry.patient()
        timeout = options.pop("timeout", CLIENTS_TIMEOUT)
        slots = asyncio.Semaphore(concurrency)
        ended = 0

        async def work(item: Any) -> Answer | TesseraClientError:
            nonlocal ended
            try:
                async with slots:
                    return await self._answer(partial(item_request, item, options), timeout, retry)
            except TesseraClientError as error:
                return error
            finally:
                ended += 1
                if progress is not None:
                    progress(ended)

        waiting: deque[asyncio.Task[Answer | TesseraClientError]] = deque()
        try:
            for item in items:
                waiting.append(asyncio.ensure_future(work(item)))
                while len(waiting) >= 4 * concurrency or (waiting and waiting[0].done()):
                    yield given_out(await waiting.popleft(), errors)
            while waiting:
                yield given_out(await waiting.popleft(), errors)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def plan(self, image: Images, *, timeout: Seconds = CLIENTS_TIMEOUT, **tiles: Any) -> tuple[PicturePlan, ...]:
        """As :meth:`Client.plan`."""
        request = self._plan_request(image, tiles)
        return await asyncio.to_thread(self._transport.plan, request, self._seconds(timeout))

    async def ready(self) -> bool:
        """As :meth:`Client.ready`."""
        try:
            return self._is_ready(await self.status())
        except TesseraClientError:
            return False

    async def status(self) -> ServerStatus:
        """As :meth:`Client.status`."""
        return await asyncio.to_thread(self._transport.status)

    async def served(self) -> ServedModel:
        """As :meth:`Client.served`."""
        return await asyncio.to_thread(self._transport.served)

    async def close(self) -> None:
        """Closes the connection. Streams still open break."""
        await asyncio.to_thread(self._transport.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _answer(self, request: Callable[[], Request], timeout: Seconds, retry: Retry | None = None) -> Answer:
        async with self._stream(request(), timeout, retry) as stream:
            return await stream.answer()
