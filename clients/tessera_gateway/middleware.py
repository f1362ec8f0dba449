"""What stands around the application."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, MutableMapping
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera_gateway.body import declared_size, too_large
from tessera_gateway.errors import REQUEST_ID, ApiError
from tessera_gateway.metrics import COMPLETIONS, RESPONSES, STATUS, TURN, USAGE, Counters
from tessera_gateway.settings import Settings

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
