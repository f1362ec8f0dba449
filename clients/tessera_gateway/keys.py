"""Bearer keys: who may ask, how often, and how much beside others.

How many requests are at the servers at a time, and which is next: the keys take turns, by their shares.

The servers answer in the order of arrival. So that a flood of one key does not stand there before everybody else's
requests, no more are sent than the servers work at, and the others wait here, in the order of start-time fair queueing:
each key's requests stand on a line of time as far apart as its share is small, and the earliest goes next.

That alone leaves a key that asks little behind what a flood has at the servers already. So a request whose key has much
less there than another one, by their shares, is sent at the next better priority, and passes what the other has there.

It still shares the steps with what the flood has there: on an H200, with the shape of InternVL3-8B, a flood that had up
to 128 there slowed 8, 64 and 1 askers of another key to 2.13, 2.03 and 1.98 times of alone, and one that had up to 96
slowed 64 to 1.76 to 2.2 times. So while several keys ask, a key takes no more than half of its share of the places (64
of 256 where two are equal), and the rest stays free. What is under way is not interrupted, and a key that asks alone
has all places.
"""

import asyncio
import hashlib
import hmac
import math
import re
import secrets
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera_gateway.errors import RETRY_AFTER, ApiError
from tessera_gateway.metrics import TURN, Counters, of_key
from tessera_gateway.request import Middleware

GUARDED = ("/v1/", "/tessera/", "/metrics")
"""What begins with these needs a key. The page itself and /health do not; what the page asks for does."""
KEY = "tessera.key"
"""Key of a request's scope: its :class:`Key`."""
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
BURST_S = 10.0  # of a key's rate may be asked at once

_NAMES = secrets.token_bytes(16)


@dataclass(frozen=True)
class Key:
    """``rate``: requests a minute, None for any; ``share``: its part of busy servers beside the others' shares."""

    secret: bytes
    name: str
    rate: float | None = None
    share: float = 1.0

    @property
    def pool(self) -> str | None:
        """What the servers know this key by, whose answers may be drafts of one another: nobody else has that name,
        and it tells nothing, not even which key it is of. None where all are one."""
        return hashlib.blake2b(self.secret, digest_size=16, key=_NAMES).hexdigest() if self.secret else None


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
        fields[name] = value if name == "name" else _number(value)
        if name == "name" and not NAME.fullmatch(value):
            raise ValueError(f"name has 1 to 64 of A-Za-z0-9_.@-, not {value!r:.80}")
        if name != "name" and not 0 < fields[name] < math.inf:
            raise ValueError(f"{name} must be a number above 0, not {value!r:.20}")
    return fields


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return math.nan


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


class RequireKey(Middleware):
    """Answers 401 to a request for a guarded path without one of the keys, and 429 where one has asked
    more than its rate. What only looks (GET) costs none of that."""

    def __init__(self, app: ASGIApp, keys: list[Key], counters: Counters) -> None:
        super().__init__(app)
        self._keys, self._rates = keys, Rates(counters, keys)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(GUARDED):
            return await self._app(scope, receive, send)
        key = self._key(scope)
        if key is None:
            words = "no valid key: send the header `Authorization: Bearer KEY`"
            refusal = ApiError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        elif scope["method"] == "POST" and (wait := self._rates.wait_s(key)):
            words = f"the key {key.name} may ask {key.rate:g} requests a minute"
            refusal = ApiError(429, words, code="rate_limit_exceeded", headers={"Retry-After": str(math.ceil(wait))})
        else:
            scope[KEY] = key
            return await self._app(scope, receive, send)
        return await refusal.response()(scope, receive, send)

    def _key(self, scope: Scope) -> Key | None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        secret = given.strip().encode("latin-1")  # as headers are decoded
        # Every key is compared, so that the time it takes says nothing.
        found = [key for key in self._keys if hmac.compare_digest(secret, key.secret)]
        return found[0] if found and scheme.lower() == "bearer" else None


MOST_WAITING = 2048  # requests, at each worker
MUCH_LESS = 2  # times, by the shares
MOST_OF_SHARE = 0.5
ASKS_FOR_S = 1.0  # after its last request; until then a key counts as one that asks


class Waiter(NamedTuple):
    """A request that waits. ``order``: its priority, its place on the line of time, and, of several keys there, who
    came last, for it has waited least often."""

    order: tuple[int, float, int]
    key: Key
    cost: int
    turn: asyncio.Future[None]


class Turns:
    """Of one worker, which has ``places`` at the servers; a request waits for ``seconds`` at most."""

    def __init__(self, places: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = self._free = places
        self._seconds = seconds
        self._clock = clock
        self._waiting: dict[Key, list[Waiter]] = defaultdict(list)  # in their order
        self._now: dict[int, float] = {}  # where on the line of time the last one stood that went, by priority
        self._next: dict[tuple[int, Key], float] = {}  # where the next request of a key will stand
        self._arrivals = count()
        self._held: dict[int, Counter[Key]] = defaultdict(Counter)  # places that keys have, by priority
        self._asked: dict[Key, float] = {}  # when each that asks had its last request
        self._later: asyncio.TimerHandle | None = None

    async def take(self, scope: Scope, priority: int, answers: int) -> int:
        """Waits for a request's turn, and returns the priority to send it at; ``scope[TURN]()`` gives its place back.

        ``priority``: the lowest number goes first, whatever its key. ``answers``: places that it takes. Raises ApiError
        where too many wait already, most of them its own key's, and where it waits too long.
        """
        key, cost = scope.get(KEY, ANYBODY), min(answers, self._places)
        self._asked[key] = self._clock()
        if not self._waiting and cost <= self._free and self._may_take(key, self._shares()):
            self._take(priority, key, cost)
        else:
            await self._wait(priority, key, cost)
        scope[TURN] = partial(self._give_back, priority, key, cost)
        held = self._held[priority]
        most = max(places / each.share for each, places in held.items())
        return priority - (MUCH_LESS * held[key] / key.share <= most)

    async def _wait(self, priority: int, key: Key, cost: int) -> None:
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            most = max(self._waiting.values(), key=len)
            if len(self._waiting.get(key, ())) >= len(most):
                raise _full()
            self._refuse(most[-1], _full())
        start = max(self._now.get(priority, 0.0), self._next.get((priority, key), 0.0))
        self._next[priority, key] = start + cost / key.share
        loop = asyncio.get_running_loop()
        waiter = Waiter((priority, start, -next(self._arrivals)), key, cost, loop.create_future())
        insort(self._waiting[key], waiter)
        self._go_on()  # it may where others may not
        slow = ApiError(504, "the time given to the request ran out before its turn", code="deadline_exceeded")
        timer = loop.call_later(self._seconds, self._refuse, waiter, slow)
        try:
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._give_back(priority, key, cost)  # its turn had come when it was cancelled
            else:
                self._leave(waiter)
                self._go_on()
            raise
        finally:
            timer.cancel()

    def _refuse(self, waiter: Waiter, error: ApiError) -> None:
        if not waiter.turn.done():
            waiter.turn.set_exception(error)
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        line = self._waiting.get(waiter.key, [])
        if waiter in line:
            line.remove(waiter)
            if not line:
                del self._waiting[waiter.key]

    def _take(self, priority: int, key: Key, cost: int) -> None:
        self._free -= cost
        self._held[priority][key] += cost

    def _give_back(self, priority: int, key: Key, cost: int) -> None:
        self._asked[key] = self._clock()
        self._free += cost
        held = self._held[priority]
        held[key] -= cost
        if not held[key]:
            del held[key]
        if not held:
            del self._held[priority]
        self._go_on()

    def _taken(self, key: Key) -> int:
        return sum(held[key] for held in self._held.values())

    def _shares(self) -> float:
        """Of all keys that ask, together."""
        now = self._clock()
        for key, asked in list(self._asked.items()):
            if asked + ASKS_FOR_S <= now and not self._taken(key) and key not in self._waiting:
                del self._asked[key]
        return sum(key.share for key in self._asked)

    def _may_take(self, key: Key, shares: float) -> bool:
        return len(self._asked) <= 1 or self._taken(key) < MOST_OF_SHARE * self._places * key.share / shares

    def _go_on(self) -> None:
        shares = self._shares()
        while self._waiting:
            heads = (line[0] for key, line in self._waiting.items() if self._may_take(key, shares))
            waiter = min(heads, default=None)
            if waiter is None or waiter.cost > self._free:
                break
            self._leave(waiter)
            if not waiter.turn.done():  # else it was cancelled, and does not know yet
                priority, self._now[priority], _ = waiter.order
                self._take(priority, waiter.key, waiter.cost)
                waiter.turn.set_result(None)
        if not self._waiting:
            self._now.clear()
            self._next.clear()
        elif waiter is None and self._later is None:  # until another key asks no more, or some request ends
            self._later = asyncio.get_running_loop().call_later(ASKS_FOR_S, self._look_again)

    def _look_again(self) -> None:
        self._later = None
        self._go_on()


def _full() -> ApiError:
    words = "too many requests wait at the gateway; try again later"
    return ApiError(429, words, code="overloaded", headers=RETRY_AFTER)
