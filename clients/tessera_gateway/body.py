"""Reading a request's body, and noticing that its client went away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from tessera_gateway.errors import RETRY_AFTER, ApiError

T = TypeVar("T")
STOPPING = ApiError(503, "the gateway is stopping", code="server_unavailable", headers=RETRY_AFTER)
_leaving: set[asyncio.Future[None]] = set()  # what waits for clients to go away


def require_json(request: Request) -> None:
    """Raises ApiError for a body that is not called JSON.

    Also so that no other site's page can ask from a browser here: with this type, browsers want our leave first.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        words = "the body must be JSON, and its Content-Type application/json"
        raise ApiError(415, words, code="unsupported_media_type")


async def read(request: Request, seconds: float) -> bytes:
    """The body. Raises ApiError where it takes longer than ``seconds``, or its client goes away."""
    return await _arriving(_whole(request), seconds, "the body")


async def _whole(request: Request) -> bytes:
    pieces = list[bytes]()
    try:
        async for piece in request.stream():
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        pieces.clear()  # an error's traceback would hold them until the next full collection of garbage


async def pieces(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """The body as it comes. Raises as :func:`read`, where a piece takes longer than ``seconds``."""
    stream = request.stream()
    while piece := await _arriving(anext(stream, b""), seconds, "the next piece of the body"):
        yield piece


async def _arriving(coming: Awaitable[bytes], seconds: float, what: str) -> bytes:
    try:
        return await asyncio.wait_for(coming, seconds)
    except asyncio.TimeoutError:
        words, close = f"{what} did not arrive within {seconds:g} s", {"Connection": "close"}
        raise ApiError(408, words, code="slow_body", headers=close) from None
    except ClientDisconnect:
        raise ApiError(499, "the client went away", code="cancelled") from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises. It is cancelled, and ApiError raised, when the client goes away before, or the
    gateway itself (:func:`end_all`).

    The body must have been read: what is received from then on is the word that the client is gone.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    _leaving.add(leaving)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise STOPPING if leaving.cancelled() else ApiError(499, "the client went away", code="cancelled")
        return working.result()
    finally:
        _leaving.discard(leaving)
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})  # work that was cancelled tells the server


def end_all() -> None:
    """Ends all that this process works at."""
    for leaving in tuple(_leaving):
        leaving.cancel()


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, side by side. The first that raises, and being cancelled, ends the others."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
