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

from tessera.lost_device import end_process_if_lost
from tessera.tritonserver.deadline import is_over
from tessera.tritonserver.outbox import Channel, Outbox
from tessera.vision.encoding.encoder import PendingRows, VisionEncoder
from tessera.vision.encoding.pictures import VisionItem
from tessera.vision.job_queue import Entry, Job, JobQueue


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
        self._priority = 0  # of the last batch that passed nobody: of the forward under way, or better
        self.queue = JobQueue()
        self._thread = threading.Thread(target=self._run, name="vision_encoder-encode", daemon=True)
        self._thread.start()

    @property
    def used_bytes(self) -> int:
        """Of rows reserved, or not sent yet."""
        return self._encoder.budget.used_bytes

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
            self._encode(entries)
            del entries  # and their pixels

    def _encode(self, entries: Iterable[Entry], passing: bool = False) -> None:
        """Works off jobs of one priority; those of a better one pass, unless these pass others themselves."""
        waiting = dict(enumerate(_in_time(entries)))
        if not waiting:
            return
        try:
            items, priority = _items(waiting.values()), waiting[0].job.priority
            beside = priority < self._priority and self._encoder.fit_beside(items) == len(items)
            passing = passing or beside
            if not passing:
                self._priority = priority
            channel = self._passing if passing else self._channel
            before = partial(self._let_pass, {} if passing else waiting)
            for group in self._encoder.encode_in_groups(items, self._send_batch_size, before, beside):
                self._outbox.post(channel, [(waiting.pop(pending.index).job, pending) for pending in group])
                del group  # its rows end with their sending
        except Exception as error:
            end_process_if_lost()
            for entry in waiting.values():
                entry.job.fail(error)

    def _let_pass(self, waiting: dict[int, Entry]) -> None:
        """Until the lane is free: works off those that go before all of ``waiting``, and whose rows fit beside theirs.

        Those that cannot run beside the forward under way are worked off when it has ended.
        """
        lane = self._encoder.lane
        while waiting and (better := self.queue.take_before(next(iter(waiting.values())), lambda: lane.free)):
            items, free = _items(better), lane.free
            count = len(items) if free else self._encoder.fit_beside(items)
            if not self._encoder.has_room(items[:count]):
                count = 0
            self.queue.put_back(better[count:])
            if count:
                self._encode(better[:count], passing=True)
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
