"""What is done by a request's head alone: its id, whether its host is served here, and HEAD."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, MutableMapping
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera_gateway.errors import REQUEST_ID, ApiError

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
