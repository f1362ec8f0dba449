"""The client for asyncio: :class:`AsyncClient`, the same surface as :class:`~tessera_client.client.Client`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from tessera_client.client import CLIENTS_TIMEOUT, Images, Messages, Seconds, Settings
from tessera_client.messages import (
    Answer,
    Request,
    ServerStatus,
    chat_request,
    check_job,
    item_request,
    question_request,
)
from tessera_client.retry import Retry
from tessera_client.streaming import AsyncStream
from tessera_wire.errors import TesseraClientError


class AsyncClient(Settings):
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

    async def ask(self, image: Images, question: str, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any) -> Answer:
        """As :meth:`Client.ask`."""
        return await self._answer(question_request(image, question, **sampling), timeout)

    def stream(
        self, image: Images, question: str, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any
    ) -> AsyncStream:
        """As :meth:`Client.stream`, for ``async with``."""
        return self._stream(question_request(image, question, **sampling), timeout)

    async def chat(
        self, messages: Messages, images: Images = None, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any
    ) -> Answer:
        """As :meth:`Client.chat`."""
        return await self._answer(chat_request(messages, images, **sampling), timeout)

    def chat_stream(
        self, messages: Messages, images: Images = None, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any
    ) -> AsyncStream:
        """As :meth:`Client.chat_stream`, for ``async with``."""
        return self._stream(chat_request(messages, images, **sampling), timeout)

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
                    return await self._answer(item_request(item, options), timeout, retry)
            except TesseraClientError as error:
                return error
            finally:
                ended += 1
                if progress is not None:
                    progress(ended)

        def result(task: asyncio.Task[Answer | TesseraClientError]) -> Answer | TesseraClientError:
            value = task.result()
            if errors == "raise" and isinstance(value, TesseraClientError):
                raise value
            return value

        waiting: deque[asyncio.Task[Answer | TesseraClientError]] = deque()
        try:
            for item in items:
                waiting.append(asyncio.ensure_future(work(item)))
                while len(waiting) >= 4 * concurrency or (waiting and waiting[0].done()):
                    await asyncio.wait([waiting[0]])
                    yield result(waiting.popleft())
            while waiting:
                await asyncio.wait([waiting[0]])
                yield result(waiting.popleft())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def ready(self) -> bool:
        """As :meth:`Client.ready`."""
        try:
            return self._is_ready(await self.status())
        except TesseraClientError:
            return False

    async def status(self) -> ServerStatus:
        """As :meth:`Client.status`."""
        return await asyncio.to_thread(self._transport.status)

    async def close(self) -> None:
        """Closes the connection. Streams still open break."""
        await asyncio.to_thread(self._transport.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _stream(self, request: Request, timeout: Seconds) -> AsyncStream:
        return AsyncStream(self._transport, replace(request, stream=True), self._seconds(timeout), self._retry)

    async def _answer(self, request: Request, timeout: Seconds, retry: Retry | None = None) -> Answer:
        async with AsyncStream(self._transport, request, self._seconds(timeout), retry or self._retry) as stream:
            return await stream.answer()
