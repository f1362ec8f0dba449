"""From requests to the encoder and from its groups to the responses, which a thread of its own sends.

A send is a handshake with the server and waits for the rows. While it lasts the encoder goes on, with this batch and
with the next; the rows' budget and the lane bound how far. Those of a better priority pass: a few tiles
beside the forward that is under way, where the runner can, and all others before the next one of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from tessera.errors import end_process_if_lost
from tessera.tritonserver.failures import is_over
from tessera.tritonserver.responder import Channel, Outbox
from tessera.vision.encoder import PendingRows, VisionEncoder
from tessera.vision.pictures import VisionItem
from tessera.vision.scheduler import Entry, Job, JobQueue


class LocalDispatcher:
    """Jobs through an encoder of this process; remote.py has those of another.

    Args:
        encoder: used by a thread of this dispatcher only, but for :meth:`check`.
        send_batch_size: pictures whose rows are held to go out together.
    """

    def __init__(self, encoder: VisionEncoder, send_batch_size: int) -> None:
        self._encoder = encoder
        self._send_batch_size = send_batch_size
        # A channel and a thread more for those that pass: their rows are there before some that were posted earlier.
        self._outbox = Outbox("vision_encoder", threads=2)
        self._channel: Channel[list[tuple[Job, PendingRows]]] = Channel(self._send)
        self._passing: Channel[list[tuple[Job, PendingRows]]] = Channel(self._send)
        self._priority = 0  # of the last forward that was not beside another
        self.queue = JobQueue()
        self._thread = threading.Thread(target=self._run, name="vision_encoder-encode", daemon=True)
        self._thread.start()

    @property
    def used_bytes(self) -> int:
        """Of rows reserved, or not sent yet."""
        return self._encoder.budget.used_bytes

    @property
    def computed(self) -> int:
        """Pictures, but for those whose rows were known."""
        return self._encoder.computed

    def check(self, item: VisionItem) -> None:
        """Raises InvalidRequest for what can never be done."""
        self._encoder.pictures(item)

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
        self._outbox.close()

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
        if entries[0].job.priority >= self._priority:
            return 0
        return self._encoder.fit_beside(_items(entries))

    def _encode(self, entries: Iterable[Entry], passing: bool = False, beside: bool = False) -> None:
        """Works off jobs of one priority; those of a better one pass, unless these are ``passing`` others themselves.

        ``beside``: they are as many as :meth:`_fit_beside`.
        """
        waiting = dict(enumerate(_in_time(entries)))
        if not waiting:
            return
        # A ping shows that the thread is alive which most answers need.
        channel = self._passing if passing and not waiting[0].is_ping else self._channel
        before = partial(self._before_forward, waiting, passing, beside)
        try:
            items = _items(waiting.values())
            for group in self._encoder.encode_in_groups(items, self._send_batch_size, before, beside):
                self._outbox.post(channel, [(waiting.pop(pending.index).job, pending) for pending in group])
                del group  # its rows end with their sending
        except Exception as error:
            end_process_if_lost()
            for entry in waiting.values():
                entry.job.fail(error)

    def _before_forward(self, waiting: dict[int, Entry], passing: bool, beside: bool) -> None:
        first = next(iter(waiting.values()))
        if not passing:
            self._let_pass(first)
        if not beside:
            self._priority = first.job.priority

    def _let_pass(self, entry: Entry) -> None:
        """Until the lane is free: works off those that go before ``entry``, and whose rows fit beside its batch's.

        Those that cannot run beside the forward under way are worked off when it has ended.
        """
        lane = self._encoder.lane
        if not (self._encoder.runner.beside and self.queue.expects_before(entry.job.priority)):
            lane.make_room()  # which learns of its end at once
        while better := self.queue.take_before(entry, lambda: lane.free):
            free = lane.free
            count = len(better) if free else self._fit_beside(better)
            if not self._encoder.has_room(_items(better[:count])):
                count = 0
            self.queue.put_back(better[count:])
            if count:
                self._encode(better[:count], passing=True, beside=not free)
            elif free:
                return
            else:
                lane.make_room()

    def _send(self, groups: list[list[tuple[Job, PendingRows]]]) -> None:
        for group in groups:
            while group:  # what is sent is let go of at once
                self._answer(*group.pop(0))

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
        if is_over(entry.job.deadline_ns):
            entry.job.fail(TimeoutError())
        else:
            entry.job.begin()
            found.append(entry)
    return found
