"""Bearer keys: who may ask."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera_gateway.errors import ApiError

GUARDED = ("/v1/", "/tessera/", "/metrics")
"""What begins with these needs a key. The page itself and /health do not; what the page asks for does."""


def read_keys(path: Path) -> list[bytes]:
    """The keys of a file, one a line; empty lines and those that begin with # do not count.

    Raises ValueError for a file without a key, OSError for one that cannot be read.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    keys = [line.encode() for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no key: write one a line")
    return keys


class RequireKey:
    """Middleware that answers 401 to a request for a guarded path without one of the keys."""

    def __init__(self, app: ASGIApp, keys: list[bytes]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED) and not self._knows(scope):
            words = "no valid key: send the header `Authorization: Bearer KEY`"
            refusal = ApiError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as headers are decoded
        # Every key is compared, so that the time it takes says nothing.
        return any([hmac.compare_digest(given, known) for known in self._keys]) and scheme.lower() == "bearer"
