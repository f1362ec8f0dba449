"""Reading a request's body, and noticing that its client went away.

What is done by a request's head alone: its id, whether its host is served here, and HEAD.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, MutableMapping, Sequence
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera_gateway.errors import REQUEST_ID, RETRY_AFTER, ApiError
from tessera_gateway.metrics import Counters

T = TypeVar("T")
STOPPING = ApiError(503, "the gateway is stopping", code="server_unavailable", headers=RETRY_AFTER)
_leaving: set[asyncio.Future[None]] = set()  # what waits for clients to go away


class LimitBody:
    """Middleware: a body of more than ``limit`` bytes is refused at its header, or as soon as more has come.

    ``file_limit``: of an upload, which is no request.
    """

    def __init__(self, app: ASGIApp, limit: int, file_limit: int, counters: Counters) -> None:
        self._app, self._limit, self._file_limit, self._counters = app, limit, file_limit, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        upload, size = scope["path"] == "/v1/files", 0
        limit = self._file_limit if upload else self._limit
        refusal = _too_large(limit, "--max-file-mib" if upload else "--max-body-mib")

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            part = len(message.get("body", b""))
            size += part
            self._counters.add("body_bytes_total", part)
            if size > limit:
                raise refusal
            return message

        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            return await refusal.response()(scope, receive, send)
        return await self._app(scope, counted, send)


def _too_large(limit: int, option: str) -> ApiError:
    words = f"the body is larger than {limit >> 20} MiB ({option})"
    return ApiError(413, words, code="body_too_large", headers={"Connection": "close"})


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


SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def id_of(scope: MutableMapping[str, Any]) -> str:
    """The id of a request: its own ``x-request-id`` where that is a sane one, else a new one; kept in its scope."""
    if REQUEST_ID not in scope:
        given = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    return str(scope[REQUEST_ID])


class RequestIds:
    """Middleware: every answer has its request's id as ``x-request-id``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = id_of(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        return await self._app(scope, receive, named)


class AllowedHosts:
    """Middleware: refuses a request for a host that is not served here.

    A page of another site can have its name point to this machine (DNS rebinding), and then reads what a browser here
    is answered; but the browser still says that name. Addresses cannot be pointed anywhere, and are always served.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._serves(host := Headers(scope=scope).get("host", "")):
            words = f"the host {host!r:.80} is not served here; name it by --allowed-hosts"
            return await ApiError(403, words, code="host_not_allowed").response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _serves(self, host: str) -> bool:
        """No browser leaves it out."""
        name = re.sub(r":\d*$", "", host).lower().rstrip(".")
        if not host or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


class Heads:
    """Middleware: HEAD is answered as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def bodiless(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        return await self._app({**scope, "method": "GET"}, receive, bodiless)
