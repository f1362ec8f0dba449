"""A request before anything is made of it: its head, its body within its limits, and that its client went away."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, MutableMapping, Sequence
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera_gateway.errors import REQUEST_ID, RETRY_AFTER, ApiError
from tessera_gateway.metrics import COMPLETIONS, RESPONSES, STATUS, TURN, USAGE, Counters
from tessera_gateway.settings import Settings

T = TypeVar("T")
FILES = "/v1/files"
STOPPING = ApiError(503, "the gateway is stopping", code="server_unavailable", headers=RETRY_AFTER)
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
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
    """The refusal of a body of that size, if that is more than ``path`` takes."""
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


class Middleware:
    """Around an application: what is no HTTP request passes it by, the others are its :meth:`handle`'s."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self.handle if scope["type"] == "http" else self._app)(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


def id_of(scope: MutableMapping[str, Any]) -> str:
    """The id of a request: its own ``x-request-id`` where that is a sane one, else a new one; kept in its scope."""
    if REQUEST_ID not in scope:
        given = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    return str(scope[REQUEST_ID])


class RequestHeads(Middleware):
    """What is done by a request's head alone, and what is counted of every request.

    Every answer has its request's id as ``x-request-id``. HEAD is answered as GET, without the body. Hosts beside those
    that are allowed, where any are named, are refused: a page of another site can have its name point to this machine
    (DNS rebinding), and then reads what a browser here is answered; but the browser still says that name. Addresses
    cannot be pointed anywhere, and are always served. A body whose header says that it is too long is refused, whether
    or not its path reads one. At the end the request's place at the servers is given back.
    """

    def __init__(self, app: ASGIApp, settings: Settings, counters: Counters) -> None:
        super().__init__(app)
        hosts = settings.allowed_hosts
        self._hosts = None if hosts is None else {host.lower() for host in hosts} | {"localhost"}
        self._settings, self._counters = settings, counters

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, headers = id_of(scope), Headers(scope=scope)
        host = headers.get("host", "")
        status = 499  # where no answer is begun
        began, is_head, app = time.perf_counter(), scope["method"] == "HEAD", self._app

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        if not self._serves(host):
            words = f"the host {host!r:.80} is not served here; name it by --allowed-hosts"
            app = ApiError(403, words, code="host_not_allowed").response()
        elif refusal := too_large(scope["path"], declared_size(headers), self._settings):
            app = refusal.response()
        self._counters.add("requests_under_way")
        try:
            await app({**scope, "method": "GET"} if is_head else scope, receive, answer)
        except Exception:
            status = 500
            raise
        finally:
            if TURN in scope:
                scope[TURN]()
            status = scope[STATUS] = scope.get(STATUS, status)
            self._counters.add("requests_under_way", -1)
            self._counters.ended(status)
            if scope["path"] in (COMPLETIONS, RESPONSES) and status == 200:
                self._counters.completed(time.perf_counter() - began, scope.get(USAGE))

    def _serves(self, host: str) -> bool:
        """No browser leaves it out."""
        name = re.sub(r":\d*$", "", host).lower().rstrip(".")
        if self._hosts is None or not host or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
