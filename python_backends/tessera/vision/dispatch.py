"""From requests to the encoder and from its groups to the responses, which a thread of its own sends.

A send is a handshake with the server and waits for the rows. While it lasts the encoder goes on, with this batch and
with the next; the rows' budget and the lane bound how far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tessera.lost_device import end_process_if_lost
from tessera.tritonserver.outbox import Channel, Outbox
from tessera.vision.encoding.encoder import PendingRows, VisionEncoder
from tessera.vision.encoding.pictures import VisionItem


class Job(Protocol):
    """One request, which is answered exactly once, by any thread."""

    item: VisionItem

    @property
    def deadline_ns(self) -> int:
        """On time.monotonic_ns's clock; 0 is none."""
        ...

    def answer(self, rows: torch.Tensor | None) -> None:
        """Sends rows [tokens, hidden]; they may be dropped when it returns."""
        ...

    def fail(self, error: BaseException) -> None:
        """Sends the error (TimeoutError: its deadline has passed) unless the request was answered. Never raises."""
        ...


class LocalDispatcher:
    """Jobs through an encoder of this process; remote.py has those of another.

    Args:
        encoder: used by the thread that calls :meth:`encode` only.
        send_batch_size: pictures whose rows are held to go out together.
    """

    def __init__(self, encoder: VisionEncoder, send_batch_size: int) -> None:
        self._encoder = encoder
        self._send_batch_size = send_batch_size
        self._outbox = Outbox("vision_encoder", threads=1)
        self._channel: Channel[list[tuple[Job, PendingRows]]] = Channel(self._send)

    def check(self, item: VisionItem) -> None:
        """Raises InvalidRequest for what can never be done."""
        self._encoder.pictures(item)

    def encode(self, jobs: Sequence[Job]) -> None:
        """Sees to it that every job is answered, now or later. Their items are read before it returns."""
        waiting = dict(enumerate(jobs))
        try:
            for group in self._encoder.encode_in_groups([job.item for job in jobs], self._send_batch_size):
                self._outbox.post(self._channel, [(waiting.pop(pending.index), pending) for pending in group])
                del group  # its rows end with their sending
        except Exception as error:
            end_process_if_lost()
            for job in waiting.values():
                job.fail(error)

    def close(self) -> None:
        """Returns when all jobs are answered."""
        self._outbox.close()

    def _send(self, groups: list[list[tuple[Job, PendingRows]]]) -> None:
        for group in groups:
            while group:  # what is sent is let go of at once
                _answer(*group.pop(0))


def _answer(job: Job, pending: PendingRows) -> None:
    try:
        with pending.rows() as rows:
            job.answer(rows)
    except Exception as error:
        end_process_if_lost()
        job.fail(error)
