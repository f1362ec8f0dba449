"""Rows of pictures on their way through the engine: on the device while there is room, else in pinned memory."""

from __future__ import annotations

import threading

import torch


class EmbeddingPool:
    """Takes over the rows of requests as they arrive, and counts them until their requests end.

    ``capacity_bytes``: rows held on the device at most; those beyond wait in the host's pinned memory, which the step
    that needs them reads. May be used from several threads.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self.used_bytes = 0
        self.spilled_bytes = 0  # of those in pinned memory now
        self.arrived_on_cpu = 0  # requests whose rows came over the CPU though the engine runs on a GPU
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of ``rows`` [n, hidden], complete when this returns: their owner may reuse them."""
        if self._device.type != "cuda":
            return rows.clone()
        with self._lock:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            fits = self.used_bytes + rows.nbytes <= self._capacity_bytes
            self._count(fits, rows.nbytes)
            self.arrived_on_cpu += not rows.is_cuda
        try:
            with torch.cuda.stream(self._stream):  # beside the engine's steps
                place = {"device": self._device} if fits else {"pin_memory": True}
                kept = torch.empty(rows.shape, dtype=rows.dtype, **place)
                kept.copy_(rows, non_blocking=True)
                self._stream.synchronize()
        except BaseException:
            with self._lock:
                self._count(fits, -rows.nbytes)
            raise
        return kept

    def give_back(self, rows: torch.Tensor) -> None:
        """The request of rows that :meth:`take` returned has ended."""
        if self._device.type != "cuda":
            return
        with self._lock:
            self._count(rows.is_cuda, -rows.nbytes)

    def _count(self, on_device: bool, added: int) -> None:
        """Call it under the lock."""
        if on_device:
            self.used_bytes += added
        else:
            self.spilled_bytes += added
