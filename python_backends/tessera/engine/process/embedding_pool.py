"""Rows of pictures on their way through the engine: in a slab on the device, or beside it when that is full."""

import threading
from bisect import bisect_left, insort

import torch

from tessera.engine.process.messages import Rows

_ALIGNMENT = 512


class EmbeddingPool:
    """Takes over the rows of requests as they arrive, until their requests end.

    ``capacity_bytes``: the slab on the device, allocated at once; rows that find no room in it travel to the engine's
    process and wait in pinned memory there, which the step that needs them reads. May be used from several threads. On
    the CPU there is no slab.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self.spilled_bytes = 0  # beside the slab now
        self.arrived_on_cpu = 0  # requests whose rows came over the CPU though the engine runs on a GPU
        self.slab: torch.Tensor | None = None  # uint8 [capacity_bytes]
        self.places = Places(capacity_bytes)  # of the slab
        self._lock = threading.Lock()
        if device.type == "cuda":
            self.slab = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
            # Before the engine's steps: the copy is short, and the next request waits for it.
            self._stream = torch.cuda.Stream(device, priority=-1)

    def take(self, rows: torch.Tensor) -> Rows:
        """A copy of ``rows`` [n, hidden], which are complete, as this copy is when it returns: their owner may reuse
        them."""
        if self.slab is None:
            return Rows(None, _bytes_of(rows), rows.dtype, tuple(rows.shape))
        with self._lock:
            place = self.places.take(rows.nbytes)
            self.spilled_bytes += rows.nbytes if place is None else 0
            self.arrived_on_cpu += not rows.is_cuda
        kept = Rows(place, b"", rows.dtype, tuple(rows.shape))
        try:
            with torch.cuda.stream(self._stream):
                if place is None:
                    return kept._replace(data=_bytes_of(rows))
                kept.within(self.slab).copy_(rows, non_blocking=True)
                self._stream.synchronize()
        except BaseException:
            self.give_back(kept)
            raise
        return kept

    def give_back(self, rows: Rows) -> None:
        """No step that was launched needs the rows any more that :meth:`take` returned."""
        if self.slab is None:
            return
        with self._lock:
            if rows.place is None:
                self.spilled_bytes -= rows.nbytes
            else:
                self.places.give_back(rows.place)


def _bytes_of(rows: torch.Tensor) -> bytes:
    return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()


class Places:
    """Which stretches of ``capacity`` bytes are taken; the first gap that is large enough is used.

    ``used`` bytes are taken now; ``most_used`` is the most that were.
    """

    def __init__(self, capacity: int) -> None:
        self.used = 0
        self.most_used = 0
        self._capacity = capacity
        self._taken: list[tuple[int, int]] = []  # first byte, first byte behind; ascending

    def take(self, size: int) -> int | None:
        """The first of ``size`` bytes that are now taken; None if no gap holds them."""
        size = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        start = 0
        for first, behind in self._taken:
            if first - start >= size:
                break
            start = behind
        if start + size > self._capacity:
            return None
        insort(self._taken, (start, start + size))
        self.used += size
        self.most_used = max(self.most_used, self.used)
        return start

    def give_back(self, start: int) -> None:
        index = bisect_left(self._taken, (start,))
        if index == len(self._taken) or self._taken[index][0] != start:
            raise AssertionError(f"no rows were kept at byte {start}")
        self.used -= self._taken.pop(index)[1] - start
