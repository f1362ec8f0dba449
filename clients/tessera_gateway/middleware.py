"""What stands around the application: what is done by a request's head alone, and what is counted of every request.

Its id, whether its host is served here, HEAD, how long its body may be.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera_gateway.errors import REQUEST_ID, ApiError
from tessera_gateway.metrics import COMPLETIONS, RESPONSES, STATUS, USAGE, Counters

SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


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


class RequestIds(Middleware):
    """Every answer has its request's id as ``x-request-id``."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = id_of(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        await self._app(scope, receive, named)


class AllowedHosts(Middleware):
    """Refuses a request for a host that is not served here.

    A page of another site can have its name point to this machine (DNS rebinding), and then reads what a browser here
    is answered; but the browser still says that name. Addresses cannot be pointed anywhere, and are always served.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        super().__init__(app)
        self._hosts = {host.lower() for host in hosts} | {"localhost"}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._serves(host := Headers(scope=scope).get("host", "")):
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


class Heads(Middleware):
    """HEAD is answered as GET, without the body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def bodiless(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        return await self._app({**scope, "method": "GET"}, receive, bodiless)


class LimitBody(Middleware):
    """A body of more than ``limit`` bytes is refused at its header, or as soon as more has come.

    ``file_limit``: of an upload, which is no request.
    """

    def __init__(self, app: ASGIApp, limit: int, file_limit: int, counters: Counters) -> None:
        super().__init__(app)
        self._limit, self._file_limit, self._counters = limit, file_limit, counters

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
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


class CountRequests(Middleware):
    """Counts what is answered."""

    def __init__(self, app: ASGIApp, counters: Counters) -> None:
        super().__init__(app)
        self._counters = counters

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # where no answer is begun
        began = time.perf_counter()

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._counters.add("requests_under_way")
        try:
            await self._app(scope, receive, note)
        except Exception:
            status = 500
            raise
        finally:
            status = scope[STATUS] = scope.get(STATUS, status)
            self._counters.add("requests_under_way", -1)
            self._counters.ended(status)
            if scope["path"] in (COMPLETIONS, RESPONSES) and status == 200:
                self._counters.completed(time.perf_counter() - began, scope.get(USAGE))
