"""Reading a request's body within its limits, and noticing that its client went away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from tessera_gateway.errors import RETRY_AFTER, ApiError
from tessera_gateway.settings import Settings

T = TypeVar("T")
FILES = "/v1/files"
STOPPING = ApiError(503, "the gateway is stopping", code="server_unavailable", headers=RETRY_AFTER)
_leaving: set[asyncio.Future[None]] = set()  # what waits for clients to go away


def require_json(request: Request) -> None:
    """Raises ApiError for a body that is not called JSON.

    Also so that no other site's page can ask from a browser here: with this type, browsers want our leave first.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        words = "the body must be JSON, and its Content-Type application/json"
        raise ApiError(415, words, code="unsupported_media_type")


def declared_size(headers: Mapping[str, str]) -> int:
    """The bytes of the body by its header, 0 if that does not tell."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def too_large(path: str, size: int, settings: Settings) -> ApiError | None:
    """The refusal of a body of so many bytes, if that is more than ``path`` takes."""
    mib, option = settings.max_body_mib, "--max-body-mib"
    if path == FILES:
        mib, option = settings.max_file_mib, "--max-file-mib"
    if size <= mib << 20:
        return None
    words = f"the body is larger than {mib} MiB ({option})"
    return ApiError(413, words, code="body_too_large", headers={"Connection": "close"})


async def read(request: Request) -> bytes:
    """The body. Raises ApiError where it is too long, takes too long, or its client goes away."""
    return await _arriving(_whole(request), request.app.state.settings.timeout_s, "the body")


async def _whole(request: Request) -> bytes:
    parts = list[bytes]()
    try:
        async for part in _limited(request):
            parts.append(part)
        return b"".join(parts)
    finally:
        parts.clear()  # an error's traceback would hold them until the next full collection of garbage


async def pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises as :func:`read`, where a piece takes too long."""
    stream, seconds = _limited(request), request.app.state.settings.timeout_s
    while piece := await _arriving(anext(stream, b""), seconds, "the next piece of the body"):
        yield piece


async def _limited(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes, refused as soon as it is too long; one whose header says so was refused before."""
    size, state = 0, request.app.state
    async for part in request.stream():
        size += len(part)
        state.counters.add("body_bytes_total", len(part))
        if refusal := too_large(request.url.path, size, state.settings):
            raise refusal
        yield part


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
