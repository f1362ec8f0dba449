"""The vision stage's scheduler: requests wait here by rank and go through the encoder to their answers.

They wait here and not in tritonserver, whose queue nobody could look into between two forwards.

A send is a handshake with the server and waits for the rows. While it lasts the encoder goes on, with this batch and
with the next; the rows' budget and the lane bound how far. Those of a better priority pass: a few tiles
beside the forward that is under way, where the runner can, and all others before the next one of the batch.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from tessera.errors import end_process_if_lost
from tessera.prompt.sampling import RecentPriority, rank
from tessera.vision.encoder import PendingRows, VisionEncoder
from tessera.vision.pictures import VisionItem

# Requests worked off together. More would hold up a small picture that comes later at the same priority.
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

    @property
    def since_ns(self) -> int:
        """What it ranks by, where it waited before, with another cut; else 0."""
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
        self._expected = RecentPriority()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, jobs: Iterable[Job]) -> None:
        """Adds requests, all at once."""
        now = time.monotonic_ns()
        entries = [Entry(rank(job.priority, job.since_ns or now), next(self._numbers), job) for job in jobs]
        with self._changed:
            for entry in entries:
                self._expected.saw(entry.job.priority, now)
        self.put_back(entries)

    def put_first(self, job: Job) -> None:
        """Adds a ping, which goes before every request."""
        self.put_back([Entry(_FIRST, next(self._numbers), job)])

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
        self.put_back(())

    def close(self) -> None:
        """No more jobs come."""
        self._closed = True
        self.wake()

    def _taken(self, before: float = float("inf")) -> list[Entry]:
        taken: list[Entry] = []
        while self._entries and len(taken) < MOST:
            first = self._entries[0]
            if first.rank >= before or (taken and first.job.priority != taken[0].job.priority):
                break
            taken.append(heapq.heappop(self._entries))
        return taken


class VisionScheduler:
    """Jobs through an encoder of this process; remote.py has those of another.

    Args:
        encoder: used by a thread of this scheduler only, but for :meth:`check`.
    """

    def __init__(self, encoder: VisionEncoder) -> None:
        self.encoder = encoder
        # One sends, another what passes: its rows are there before some that were to be sent earlier.
        self._sender, self._passing = (ThreadPoolExecutor(1, "vision_encoder-send") for _ in range(2))
        self._priority = 0  # of the last forward that was not beside another
        self.queue = JobQueue()
        self._thread = threading.Thread(target=self._run, name="vision_encoder-encode", daemon=True)
        self._thread.start()

    def check(self, item: VisionItem) -> None:
        """Raises InvalidRequest for what can never be done."""
        self.encoder.pictures(item)

    def encode(self, jobs: Sequence[Job]) -> None:
        """Sees to it that every job is answered, now or later. Their items are copied before it returns."""
        for job in jobs:
            job.item = replace(job.item, **{name: values.copy() for name, values in vars(job.item).items()})
        self.queue.put(jobs)

    def ping(self, job: Job) -> None:
        """Answers a job without pictures by way of both threads, as soon as the forwards under way allow."""
        self.queue.put_first(job)

    def close(self) -> None:
        """Returns when all jobs are answered."""
        self.queue.close()
        self._thread.join()
        self._sender.shutdown()
        self._passing.shutdown()

    def _run(self) -> None:
        while entries := self.queue.take():
            if beside := self._fit_beside(entries):
                self.queue.put_back(entries[beside:])
                self._encode(entries[:beside], passing=True, beside=True)
            else:
                self._encode(entries)
            del entries  # and their pixels

    def _fit_beside(self, entries: Sequence[Entry]) -> int:
        """How many of the first can run together beside the forward under way; it must be of a worse priority."""
        worse = entries[0].job.priority < self._priority
        return self.encoder.fit_beside(_items(entries)) if worse else 0

    def _encode(self, entries: Iterable[Entry], passing: bool = False, beside: bool = False) -> None:
        """Works off jobs of one priority; those of a better one pass, unless these are ``passing`` others themselves.

        ``beside``: they are as many as :meth:`_fit_beside`.
        """
        waiting = dict(enumerate(_in_time(entries)))
        if not waiting:
            return
        # A ping shows that the thread is alive which most answers need.
        sender = self._passing if passing and not waiting[0].is_ping else self._sender

        def before_forward() -> None:
            first = next(iter(waiting.values()))
            if not passing:
                self._let_pass(first)
            if not beside:
                self._priority = first.job.priority

        try:
            for pending in self.encoder.launch(_items(waiting.values()), before_forward, beside):
                sender.submit(self._answer, waiting.pop(pending.index).job, pending)
                del pending  # its rows are freed once they are sent
        except Exception as error:
            end_process_if_lost()
            for entry in waiting.values():
                entry.job.fail(error)

    def _let_pass(self, entry: Entry) -> None:
        """Until the lane is free: works off those that go before ``entry``, and whose rows fit beside its batch's.

        Those that cannot run beside the forward under way are worked off when it has ended.
        """
        lane = self.encoder.lane
        if not (self.encoder.runner.beside and self.queue.expects_before(entry.job.priority)):
            lane.wait_idle()  # which learns of its end at once
        while better := self.queue.take_before(entry, lambda: lane.free):
            free = lane.free
            count = len(better) if free else self._fit_beside(better)
            count *= self.encoder.has_room(_items(better[:count]))
            self.queue.put_back(better[count:])
            if count:
                self._encode(better[:count], passing=True, beside=not free)
            elif free:
                return
            else:
                lane.wait_idle()

    def _answer(self, job: Job, pending: PendingRows) -> None:
        try:
            with pending.rows() as rows:
                self.queue.wake()  # a forward has ended, and the encoder's thread may wait for that
                job.answer(rows)
        except Exception as error:
            end_process_if_lost()
            job.fail(error)


def _items(entries: Iterable[Entry]) -> list[VisionItem]:
    return [entry.job.item for entry in entries]


def _in_time(entries: Iterable[Entry]) -> list[Entry]:
    """Those whose time did not run out while they waited; the others fail."""
    found = []
    for entry in entries:
        if 0 < entry.job.deadline_ns <= time.monotonic_ns():
            entry.job.fail(TimeoutError())
        else:
            entry.job.begin()
            found.append(entry)
    return found
