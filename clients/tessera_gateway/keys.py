"""Bearer keys: who may ask, how often, and how much beside others."""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera_gateway.errors import ApiError
from tessera_gateway.metrics import Counters, of_key

GUARDED = ("/v1/", "/tessera/", "/metrics")
"""What begins with these needs a key. The page itself and /health do not; what the page asks for does."""
KEY = "tessera.key"
"""Key of a request's scope: its :class:`Key`."""
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
BURST_S = 10.0  # of a key's rate may be asked at once


@dataclass(frozen=True)
class Key:
    """``rate``: requests a minute, None for any; ``share``: its part of busy servers beside the others' shares."""

    secret: bytes
    name: str
    rate: float | None = None
    share: float = 1.0


ANYBODY = Key(b"", "")


def read_keys(path: Path) -> list[Key]:
    """The keys of a file, one a line; empty lines and those that begin with # do not count.

    Behind a key may stand ``name=N``, ``rate=N`` (requests a minute) and ``share=N`` (1 without). Raises ValueError for
    a file without a key or with a line that is not understood, OSError for one that cannot be read.
    """
    keys: list[Key] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = Key(words[0].encode(), **{"name": f"key{len(keys) + 1}", **_fields(words[1:])})
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if any(key.name == other.name or key.secret == other.secret for other in keys):
            raise ValueError(f"{path}, line {number}: another line has this key or its name, {key.name}")
        keys.append(key)
    if not keys:
        raise ValueError(f"{path} holds no key: write one a line")
    return keys


def _fields(words: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("name", "rate", "share") or name in fields:
            raise ValueError("behind a key may stand name=, rate= and share=, each once")  # it may be a part of a key
        if name == "name":
            if not NAME.fullmatch(value):
                raise ValueError(f"name has 1 to 64 of A-Za-z0-9_.@-, not {value!r:.80}")
            fields[name] = value
        else:
            fields[name] = _positive(name, value)
    return fields


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, not {text!r:.20}")
    return value


class Rates:
    """Counts the requests of keys, and says when one has asked too much, by what all workers count together."""

    def __init__(self, counters: Counters, keys: Iterable[Key]) -> None:
        self._counters = counters
        now = time.monotonic()
        self._levels = {key.name: (0.0, counters.total(of_key(key.name)), now) for key in keys}
        """By name: requests that are still to be worn off, how many there had been in all, and when."""

    def wait_s(self, key: Key) -> float:
        """Counts a request and returns 0, or the seconds until there may be one."""
        total, now = self._counters.total(of_key(key.name)), time.monotonic()
        if key.rate is not None:
            level, before, then = self._levels[key.name]
            a_second = key.rate / 60
            level = max(0.0, level + total - before - a_second * (now - then))
            self._levels[key.name] = level, total, now
            over = level + 1 - max(1.0, a_second * BURST_S)
            if over > 0:
                return over / a_second
        self._counters.add(of_key(key.name))
        return 0.0


class RequireKey:
    """Middleware that answers 401 to a request for a guarded path without one of the keys, and 429 where one has asked
    more than its rate. What only looks (GET) costs none of that."""

    def __init__(self, app: ASGIApp, keys: list[Key], counters: Counters) -> None:
        self._app, self._keys, self._rates = app, keys, Rates(counters, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            return await self._app(scope, receive, send)
        key = self._key(scope)
        if key is None:
            words = "no valid key: send the header `Authorization: Bearer KEY`"
            refusal = ApiError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return await refusal.response()(scope, receive, send)
        if scope["method"] == "POST" and (wait := self._rates.wait_s(key)):
            words = f"the key {key.name} may ask {key.rate:g} requests a minute"
            headers = {"Retry-After": str(math.ceil(wait))}
            return await ApiError(429, words, code="rate_limit_exceeded", headers=headers).response()(
                scope, receive, send
            )
        scope[KEY] = key
        return await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> Key | None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        secret = given.strip().encode("latin-1")  # as headers are decoded
        # Every key is compared, so that the time it takes says nothing.
        found = [key for key in self._keys if hmac.compare_digest(secret, key.secret)]
        return found[0] if found and scheme.lower() == "bearer" else None
