"""How many requests are at the servers at a time, and who goes next: the keys take turns, by their shares.

The servers answer in the order of arrival. So that a flood of one key does not stand there before everybody else's
requests, no more are sent than the servers work at, and the others wait here, in the order of start-time fair queueing:
each key's requests stand on a line of time as far apart as its share is small, and the earliest goes next.

That alone leaves a key that asks little behind what a flood has at the servers already. So a request whose key has much
less there than another one, by their shares, is sent at the next better priority, and passes what the other has there.
"""

from __future__ import annotations

import asyncio
import heapq
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

    def __init__(self, places: int, seconds: float) -> None:
        self._places = self._free = places
        self._seconds = seconds
        self._heap: list[Waiter] = []
        self._waiting: dict[Key, deque[Waiter]] = defaultdict(deque)  # the same, as they came
        self._count = 0  # of those that wait
        self._now: dict[int, float] = {}  # where on the line of time the last one stood that went, by priority
        self._next: dict[tuple[int, Key], float] = {}  # where the next request of a key will stand
        self._arrivals = count()
        self._held: dict[int, Counter[Key]] = defaultdict(Counter)  # places that keys have, by priority

    async def take(self, scope: Scope, priority: int, answers: int) -> int:
        """Waits for a request's turn, whose place is given back at its end (:class:`EndTurn`), and returns the priority
        to send it at.

        ``priority``: the lowest number goes first, whatever its key. ``answers``: places that it takes. Raises ApiError
        where too many wait already, most of them its own key's, and where it waits too long.
        """
        key, cost = scope.get(KEY, ANYBODY), min(answers, self._places)
        if not self._count and cost <= self._free:
            self._free -= cost
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
        heapq.heappush(self._heap, waiter)
        self._waiting[key].append(waiter)
        self._count += 1
        slow = ApiError(504, "the time given to the request ran out before its turn", code="deadline_exceeded")
        timer = waiter.turn.get_loop().call_later(self._seconds, self._refuse, waiter, slow)
        try:
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._give_back(cost)  # its turn had come when it was cancelled
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
            if len(self._heap) > 2 * self._count + self._places:  # most of them have left
                self._heap = [each for each in self._heap if not each.turn.done()]
                heapq.heapify(self._heap)
            self._go_on()

    def _end(self, priority: int, key: Key, cost: int) -> None:
        held = self._held[priority]
        held[key] -= cost
        if not held[key]:
            del held[key]
        if not held:
            del self._held[priority]
        self._give_back(cost)

    def _give_back(self, cost: int) -> None:
        self._free += cost
        self._go_on()

    def _go_on(self) -> None:
        while self._heap and (self._heap[0].turn.done() or self._heap[0].cost <= self._free):
            waiter = heapq.heappop(self._heap)
            if waiter.turn.done():  # it gave up
                continue
            self._waiting[waiter.key].remove(waiter)
            self._count -= 1
            self._free -= waiter.cost
            self._now[waiter.order[0]] = waiter.order[1]
            waiter.turn.set_result(None)
        if not self._count:  # nobody has waited for anybody
            self._heap.clear()
            self._waiting.clear()
            self._now.clear()
            self._next.clear()


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
