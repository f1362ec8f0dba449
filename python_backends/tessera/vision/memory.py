"""What the vision stage holds, known before it is held, so that nothing it takes in can run out of memory.

``memory_bytes`` is the stage's share of its device and covers, in this order: weights (and what else a runner keeps, as
recorded graphs), the activations and the pixels of one forward, the cache of rows at its full size, and with all that
is left the rows of requests that are not answered yet. Not in it are CUDA's context and libraries, as with any process.

Embeddings of pictures seen before, by content key, least recently used out first.

The order of work on the device: forwards on a stream of their own, one at a time; beside it, where somebody waits, a
short one on a second stream.

Handing rows to tritonserver waits for them. It must not wait for the forward after them as well, so each piece of work
can be waited for by itself. torch's streams do not order themselves with the default stream, on which tritonserver's
Python backend copies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from tessera.errors import ConfigError, InvalidRequest

# A request's rows exist twice for a moment: as its forwards gave them, and joined.
COPIES_OF_ROWS = 2


class RowBudget:
    """Bytes of rows between a forward and the end of their sending. One thread reserves, any other gives back.

    Args:
        bytes_per_unit: of the rows of one unit of cost, all copies.
        capacity: in bytes; None is without limit.
        unit: what cost counts, for messages.
    """

    def __init__(self, bytes_per_unit: int, capacity: int | None = None, unit: str = "tiles") -> None:
        self.bytes_per_unit, self.capacity, self.unit = bytes_per_unit, capacity, unit
        self.used_bytes = 0
        self._changed = threading.Condition()

    @classmethod
    def beside(
        cls, parts: Mapping[str, int], memory_bytes: int, bytes_per_unit: int, largest: int, unit: str, remedy: str
    ) -> RowBudget:
        """What ``memory_bytes`` (0: no limit) leaves for rows beside the stage's other ``parts`` (name -> bytes).

        Raises ConfigError if that is less than the rows of the ``largest`` forward; it ends with ``remedy``.
        """
        if not memory_bytes:
            return cls(bytes_per_unit, unit=unit)
        parts = {**parts, "rows": largest * bytes_per_unit}
        left = memory_bytes - sum(parts.values())
        if left < 0:
            named = ", ".join(f"{name} {_megabytes(size)}" for name, size in parts.items())
            raise ConfigError(
                f"vision_encoder: its share is {_megabytes(memory_bytes)}; a forward of {largest} {unit} needs "
                f"{_megabytes(memory_bytes - left)} ({named}); raise gpu_memory, or lower visual_infer_batch_size "
                f"or cache_bytes{remedy}"
            )
        return cls(bytes_per_unit, left + parts["rows"], unit)

    def check(self, cost: int) -> None:
        """Raises InvalidRequest if a request of that cost could never be taken in."""
        if not self._fits(cost) and self.capacity is not None:
            raise InvalidRequest(
                f"this request's {cost} {self.unit} need {_megabytes(cost * self.bytes_per_unit)} for their rows and "
                f"the vision stage has {_megabytes(self.capacity)}, which is {self.capacity // self.bytes_per_unit} "
                f"{self.unit}; send fewer or smaller pictures, ask for fewer {self.unit} (tile_policy), or raise "
                "gpu_memory"
            )

    def waves(self, costs: Sequence[int]) -> Iterator[range]:
        """Cuts requests of such costs into runs of neighbours, each as long as its rows fit together."""
        first, total = 0, 0
        for place, cost in enumerate(costs):
            if place > first and not self._fits(total + cost):
                yield range(first, place)
                first, total = place, 0
            total += cost
        if first < len(costs):
            yield range(first, len(costs))

    def reserve(self, cost: int) -> None:
        """Waits until the rows of so much fit beside what is held, and counts them."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room(cost))
            self.used_bytes += cost * self.bytes_per_unit

    def has_room(self, cost: int) -> bool:
        """Whether :meth:`reserve` would not wait."""
        return self._fits(cost, self.used_bytes)

    def give_back(self, cost: int) -> None:
        with self._changed:
            self.used_bytes -= cost * self.bytes_per_unit
            self._changed.notify_all()

    def _fits(self, cost: int, beside: int = 0) -> bool:
        return self.capacity is None or beside + cost * self.bytes_per_unit <= self.capacity


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class EmbeddingCache:
    """Copies of rows in one slab that is allocated at once.

    Any rows of the slab that are free will do for a picture: pictures of different sizes come and go without leaving
    gaps, so the cache never takes more memory than the slab, and what is counted is what is held. The books of free
    rows are on the device as well, so that nothing here waits for it; all calls belong on one stream.

    Args:
        capacity_bytes: of the slab. A picture larger than that is not kept, and 0 keeps nothing.
        hidden: values of a row.
        dtype: of the rows.
        device: where the slab and all rows are.
    """

    def __init__(
        self, capacity_bytes: int = 0, hidden: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self._slab = torch.empty(capacity_bytes // (hidden * dtype.itemsize), hidden, dtype=dtype, device=device)
        # A stack of row numbers, the first _left of them free. Made on the host: once copied it is there on any stream.
        self._free = torch.arange(len(self._slab)).flip(0).to(device)
        self._left = len(self._free)
        self._places: OrderedDict[Hashable, torch.Tensor] = OrderedDict()  # the rows of the slab that a picture has

    @property
    def used_bytes(self) -> int:
        return (len(self._free) - self._left) * self._slab.shape[1] * self._slab.itemsize

    def __contains__(self, key: Hashable) -> bool:
        """Whether :meth:`get` has rows; asks only the host."""
        return key in self._places

    def get(self, key: Hashable) -> torch.Tensor | None:
        """A copy [n, hidden] of the rows stored under ``key``, or None."""
        place = self._places.get(key)
        if place is None:
            return None
        self._places.move_to_end(key)
        return self._slab.index_select(0, place)

    def put(self, key: Hashable, rows: torch.Tensor) -> None:
        """Keeps a copy of ``rows`` [n, hidden], unless the whole slab is too small for them."""
        if len(rows) > len(self._free) or key in self._places:
            return
        # The books change after what may fail, as a device without memory makes it: so no row is ever lost.
        while self._left < len(rows):
            oldest, place = next(iter(self._places.items()))
            self._free[self._left : self._left + len(place)] = place
            self._left += len(place)
            del self._places[oldest]
        left = self._left - len(rows)
        place = self._free[left : self._left].clone()
        self._slab.index_copy_(0, place, rows)
        self._left = left
        self._places[key] = place


Result = TypeVar("Result")


class LaunchedWork:
    """Something put on the device. On the CPU it is done when this is made."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, *rows: torch.Tensor) -> None:
        """Returns when it is done; ``rows`` may then be read on the default stream."""
        if self._event is None:
            return
        self._event.synchronize()
        for tensor in rows:  # a copy on that stream may still run when their owner drops them
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


class DeviceStreams:
    """Launches work on ``device``. One thread launches; any may wait for what was launched."""

    def __init__(self, device: str = "cpu") -> None:
        self.on_gpu = device != "cpu"
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None
        # Its copies go first like its kernels, and no hardware queue is shared with the other stream: streams of one
        # priority may share one, and what is launched second then waits for the first.
        self._second = torch.cuda.Stream(device, priority=-1) if self.on_gpu else None
        self._forward = self._beside = LaunchedWork()

    @property
    def free(self) -> bool:
        """Whether no forward is under way."""
        return self._forward.done and self._beside.done

    def wait_idle(self) -> None:
        """Waits until no forward is under way."""
        self._forward.wait()
        self._beside.wait()

    def forward(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """Runs ``work``, which launches a forward, once no other is under way.

        One launched ahead would keep the GPU busier beside the language model's steps, but the two then cost each other
        more than that is worth, and what comes meanwhile could not pass it.
        """
        self.wait_idle()
        result, self._forward = self.launch(work)
        return result, self._forward

    def beside(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """Runs ``work``, which launches a forward, beside the one under way, once no other is beside that.

        The two must share no memory that either writes; nothing orders them. The next :meth:`forward` begins when both
        have ended.
        """
        self._beside.wait()
        result, self._beside = self._launched(work, self._second)
        return result, self._beside

    def launch(self, work: Callable[[], Result]) -> tuple[Result, LaunchedWork]:
        """What ``work`` returns, and that which it put on the device, in the order of the forwards."""
        return self._launched(work, self._stream)

    def in_order(self, work: Callable[[], object], *rows: torch.Tensor) -> None:
        """Within a forward: runs ``work``, which reads ``rows`` of this forward, in the order of those that are one at
        a time. Beside them that is when the one under way and this one have ended; the host does not wait."""
        stream = self._stream
        if stream is None or stream == (current := torch.cuda.current_stream(stream.device)):
            work()
            return
        stream.wait_stream(current)
        for tensor in rows:  # their owner may drop them while the work still waits
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            work()

    def _launched(self, work: Callable[[], Result], stream: torch.cuda.Stream | None) -> tuple[Result, LaunchedWork]:
        if stream is None:
            return work(), LaunchedWork()
        with torch.cuda.stream(stream):
            try:
                result = work()
            except Exception:
                stream.synchronize()  # no event tells when that ends which it did launch
                raise
            event = torch.cuda.Event(blocking=True)
            event.record()
        return result, LaunchedWork(event)
