"""Requests that wait for the encoder, by rank (ranking.py).

They wait here and not in tritonserver, whose queue nobody could look into between two forwards.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from tessera.prompt.sampling import Expected, rank
from tessera.vision.pictures import VisionItem

# Requests worked off together. More would hold up whoever comes with no better priority but a small picture.
MOST = 64
_FIRST = float("-inf")
# Who waits for what the queue does not see looks again after so long, if nobody wakes it.
_SLICE_S = 0.001


class Job(Protocol):
    """One request, which is answered exactly once, by any thread."""

    item: VisionItem

    @property
    def deadline_ns(self) -> int:
        """On time.monotonic_ns's clock; 0 is none."""
        ...

    @property
    def priority(self) -> int:
        """Lower goes first."""
        ...

    def begin(self) -> None:
        """It waits no longer."""
        ...

    def answer(self, rows: torch.Tensor | None) -> None:
        """Sends rows [tokens, hidden]; they may be dropped when it returns."""
        ...

    def fail(self, error: BaseException) -> None:
        """Sends the error (TimeoutError: its deadline has passed) unless the request was answered. Never raises."""
        ...


class Entry(NamedTuple):
    """A job in the queue; of two with one rank the first that was put in goes first."""

    rank: float
    number: int
    job: Job

    @property
    def is_ping(self) -> bool:
        return self.rank == _FIRST


class JobQueue:
    """Any thread puts jobs in; one takes them out."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []  # a heap
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._expected = Expected()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, jobs: Iterable[Job]) -> None:
        """Adds requests, all at once."""
        now = time.monotonic_ns()
        with self._changed:
            for job in jobs:
                self._expected.saw(job.priority, now)
                heapq.heappush(self._entries, Entry(rank(job.priority, now), next(self._numbers), job))
            self._changed.notify_all()

    def put_first(self, job: Job) -> None:
        """Adds a ping, which goes before every request."""
        with self._changed:
            heapq.heappush(self._entries, Entry(_FIRST, next(self._numbers), job))
            self._changed.notify_all()

    def put_back(self, entries: Iterable[Entry]) -> None:
        """As if they had not been taken."""
        with self._changed:
            for entry in entries:
                heapq.heappush(self._entries, entry)
            self._changed.notify_all()

    def expects_before(self, priority: int) -> bool:
        """Whether one of a better priority may come at any time."""
        return self._expected.above(priority)

    def take(self) -> list[Entry]:
        """Waits for jobs; up to MOST of one priority, the first first. None are left once it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._closed)
            return self._taken()

    def take_before(self, entry: Entry, until: Callable[[], bool] = lambda: True) -> list[Entry]:
        """Those of a better priority that go before this one; waits for some, but no longer than ``until`` says."""
        with self._changed:
            while not (taken := self._taken(entry.rank)) and not until():
                self._changed.wait(_SLICE_S)
            return taken

    def wake(self) -> None:
        """Has :meth:`take_before` ask at once whether it still is to wait."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """No more jobs come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _taken(self, before: float = float("inf")) -> list[Entry]:
        taken: list[Entry] = []
        while self._entries and len(taken) < MOST:
            first = self._entries[0]
            if first.rank >= before or (taken and first.job.priority != taken[0].job.priority):
                break
            taken.append(heapq.heappop(self._entries))
        return taken
