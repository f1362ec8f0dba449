"""How many requests are at the servers at a time, and who goes next: the keys take turns, by their shares.

The servers answer in the order of arrival. So that a flood of one key does not stand there before everybody else's
requests, no more are sent than the servers work at, and the others wait here, in the order of start-time fair queueing:
each key's requests stand on a line of time as far apart as its share is small, and the earliest goes next.

That alone leaves a key that asks little behind what a flood has at the servers already. So a request whose key has much
less there than another one, by their shares, is sent at the next better priority, and passes what the other has there.

It still shares the steps with what the flood has there: on an H200, with the shape of InternVL3-8B, a flood that had up
to 128 there slowed 8, 64 and 1 askers of another key to 2.13, 2.03 and 1.98 times of alone. So while several keys ask,
a key takes no more than three quarters of its share of the places (96 of 256 where two are equal), and the rest stays
free. What is under way is not interrupted, and a key that asks alone has all places.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from starlette.types import ASGIApp, Receive, Scope, Send

from tessera_gateway.errors import RETRY_AFTER, ApiError
from tessera_gateway.keys import ANYBODY, KEY, Key

TURN = "tessera.turn"
"""Key of a request's scope: what gives its place back."""
MOST_WAITING = 2048  # requests, at each worker
MUCH_LESS = 2  # times, by the shares
MOST_OF_SHARE = 0.75
ASKS_FOR_S = 1.0  # after its last request; until then a key counts as one that asks


class Waiter:
    """A request that waits. ``order``: its priority, its place on the line of time, and, of several keys there, who
    came last, for it has waited least often."""

    def __init__(self, key: Key, cost: int, order: tuple[int, float, int]) -> None:
        self.key, self.cost, self.order = key, cost, order
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: Waiter) -> bool:
        return self.order < other.order


class Turns:
    """Of one worker, which has ``places`` at the servers; a request waits for ``seconds`` at most."""

    def __init__(self, places: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = self._free = places
        self._seconds = seconds
        self._clock = clock
        self._heaps: dict[Key, list[Waiter]] = defaultdict(list)
        self._waiting: dict[Key, deque[Waiter]] = defaultdict(deque)  # the same, as they came
        self._count = 0  # of those that wait
        self._now: dict[int, float] = {}  # where on the line of time the last one stood that went, by priority
        self._next: dict[tuple[int, Key], float] = {}  # where the next request of a key will stand
        self._arrivals = count()
        self._held: dict[int, Counter[Key]] = defaultdict(Counter)  # places that keys have, by priority
        self._taken: Counter[Key] = Counter()  # the same, of all priorities
        self._asked: dict[Key, float] = {}  # when each that asks had its last request
        self._later: asyncio.TimerHandle | None = None

    async def take(self, scope: Scope, priority: int, answers: int) -> int:
        """Waits for a request's turn, whose place is given back at its end (:class:`EndTurn`), and returns the priority
        to send it at.

        ``priority``: the lowest number goes first, whatever its key. ``answers``: places that it takes. Raises ApiError
        where too many wait already, most of them its own key's, and where it waits too long.
        """
        key, cost = scope.get(KEY, ANYBODY), min(answers, self._places)
        self._asked[key] = self._clock()
        if not self._count and cost <= self._free and self._may_take(key, self._shares()):
            self._take(key, cost)
        else:
            await self._wait(key, priority, cost)
        held = self._held[priority]
        held[key] += cost
        scope[TURN] = partial(self._end, priority, key, cost)
        most = max(count / each.share for each, count in held.items())
        return priority - (MUCH_LESS * held[key] / key.share <= most)

    async def _wait(self, key: Key, priority: int, cost: int) -> None:
        if self._count >= MOST_WAITING:
            most = max(self._waiting, key=lambda each: len(self._waiting[each]))
            if len(self._waiting[key]) >= len(self._waiting[most]):
                raise _full()
            self._refuse(self._waiting[most][-1], _full())
        start = max(self._now.get(priority, 0.0), self._next.get((priority, key), 0.0))
        self._next[priority, key] = start + cost / key.share
        waiter = Waiter(key, cost, (priority, start, -next(self._arrivals)))
        heapq.heappush(self._heaps[key], waiter)
        self._waiting[key].append(waiter)
        self._count += 1
        self._go_on()  # it may where others may not
        slow = ApiError(504, "the time given to the request ran out before its turn", code="deadline_exceeded")
        timer = waiter.turn.get_loop().call_later(self._seconds, self._refuse, waiter, slow)
        try:
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._give_back(key, cost)  # its turn had come when it was cancelled
            else:
                self._leave(waiter)
            raise
        finally:
            timer.cancel()

    def _refuse(self, waiter: Waiter, error: ApiError) -> None:
        if not waiter.turn.done():
            waiter.turn.set_exception(error)
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        if waiter in self._waiting[waiter.key]:
            self._waiting[waiter.key].remove(waiter)
            self._count -= 1
            heap = self._heaps[waiter.key]
            if len(heap) > 2 * len(self._waiting[waiter.key]) + self._places:  # most of them have left
                heap[:] = [each for each in heap if not each.turn.done()]
                heapq.heapify(heap)
            self._go_on()

    def _end(self, priority: int, key: Key, cost: int) -> None:
        held = self._held[priority]
        held[key] -= cost
        if not held[key]:
            del held[key]
        if not held:
            del self._held[priority]
        self._asked[key] = self._clock()
        self._give_back(key, cost)

    def _take(self, key: Key, cost: int) -> None:
        self._free -= cost
        self._taken[key] += cost

    def _give_back(self, key: Key, cost: int) -> None:
        self._free += cost
        self._taken[key] -= cost
        self._go_on()

    def _shares(self) -> float:
        """Of all keys that ask, together."""
        now = self._clock()
        for key, asked in list(self._asked.items()):
            if asked + ASKS_FOR_S <= now and not self._taken[key] and not self._waiting.get(key):
                del self._asked[key], self._taken[key]
        return sum(key.share for key in self._asked)

    def _may_take(self, key: Key, shares: float) -> bool:
        return len(self._asked) <= 1 or self._taken[key] < MOST_OF_SHARE * self._places * key.share / shares

    def _first(self, shares: float) -> Waiter | None:
        """Who goes next, of the keys that may take more."""
        heads = []
        for key, heap in self._heaps.items():
            while heap and heap[0].turn.done():  # it gave up
                heapq.heappop(heap)
            if heap and self._may_take(key, shares):
                heads.append(heap[0])
        return min(heads, default=None)

    def _go_on(self) -> None:
        shares = self._shares()
        while (waiter := self._first(shares)) is not None and waiter.cost <= self._free:
            heapq.heappop(self._heaps[waiter.key])
            self._waiting[waiter.key].remove(waiter)
            self._count -= 1
            self._take(waiter.key, waiter.cost)
            self._now[waiter.order[0]] = waiter.order[1]
            waiter.turn.set_result(None)
        if not self._count:  # nobody has waited for anybody
            self._heaps.clear()
            self._waiting.clear()
            self._now.clear()
            self._next.clear()
        elif waiter is None and self._later is None:  # until another key asks no more, or some request ends
            self._later = asyncio.get_running_loop().call_later(ASKS_FOR_S, self._look_again)

    def _look_again(self) -> None:
        self._later = None
        self._go_on()


class EndTurn:
    """Middleware that gives a request's place back when its answer is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            give_back: Callable[[], None] | None = scope.pop(TURN, None)
            if give_back is not None:
                give_back()


def _full() -> ApiError:
    words = "too many requests wait at the gateway; try again later"
    return ApiError(429, words, code="overloaded", headers=RETRY_AFTER)
