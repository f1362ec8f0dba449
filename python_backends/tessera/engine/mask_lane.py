"""Where masks are made that take long: beside the thread that steps, for a few answers at a time.

There quick masks are made too where a step needs many, for any number of answers, on another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_OUTSIDE = 64


class MaskLane:
    """One thread, and ``places`` for answers whose masks it makes; further ones stand outside until a place is free.

    Answers are any objects, known by identity. Any thread may call.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._inside: dict[object, None] = {}
        self._outside: dict[object, None] = {}  # the first that came first
        self._thread = ThreadPoolExecutor(1, "masks")
        self._collected: list[Callable[[], None]] = []
        self._quick = ThreadPoolExecutor(1, "quick masks")
        self._last: Future[None] | None = None  # of what this one was given
        self._news = threading.Event()

    def __bool__(self) -> bool:
        """Whether there is anything to :meth:`wait` for."""
        return bool(self._inside) or not (self._last is None or self._last.done())

    @property
    def full(self) -> bool:
        """Whether there should come no more."""
        return len(self._outside) >= MOST_OUTSIDE

    def holds(self, answer: object) -> bool:
        """Whether it has a place. It takes one, or its place outside, when it is first asked for."""
        with self._lock:
            if answer not in self._inside and answer not in self._outside:
                self._outside[answer] = None
                self._move_up()
            return answer in self._inside

    def leave(self, answer: object) -> None:
        with self._lock:
            self._inside.pop(answer, None)
            self._outside.pop(answer, None)
            self._move_up()

    def run(self, work: Callable[[], None]) -> None:
        """Runs ``work`` after all that was given before."""
        self._thread.submit(self._run, [work])

    def collect(self, work: Callable[[], None]) -> None:
        """Keeps ``work``, which must not raise, for :meth:`begin`. For the thread that steps."""
        self._collected.append(work)

    def begin(self) -> None:
        """Runs what was collected in turn, beside what :meth:`run` was given."""
        if self._collected:
            collected, self._collected = self._collected, []
            self._last = self._quick.submit(self._run, collected)

    def wake(self) -> None:
        """Ends a :meth:`wait`, the one under way or the next."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Until some work is done that this has not told of yet, but no longer than this."""
        self._news.wait(seconds)
        self._news.clear()

    def _run(self, works: list[Callable[[], None]]) -> None:
        try:
            for work in works:
                work()
        finally:
            self._news.set()

    def _move_up(self) -> None:
        while self._outside and len(self._inside) < self._places:
            answer = next(iter(self._outside))
            del self._outside[answer]
            self._inside[answer] = None
