"""What the vision stage holds, known before it is held, so that nothing it takes in can run out of memory.

``memory_bytes`` is the stage's share of its device and covers, in this order: weights (and what else a runner keeps, as
recorded graphs), the activations and the pixels of one forward, the cache of rows at its full size, and with all that
is left the rows of requests that are not answered yet. Not in it are CUDA's context and libraries, as with any process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

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
        self.bytes_per_unit = bytes_per_unit
        self.capacity = capacity
        self.unit = unit
        self.used_bytes = 0
        self._changed = threading.Condition()

    def check(self, cost: int) -> None:
        """Raises InvalidRequest if a request of that cost could never be taken in."""
        if self.capacity is not None and cost * self.bytes_per_unit > self.capacity:
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
            self._changed.wait_for(lambda: self._fits(cost, self.used_bytes))
            self._add(cost)

    def has_room(self, cost: int) -> bool:
        """Whether :meth:`reserve` would not wait."""
        with self._changed:
            return self._fits(cost, self.used_bytes)

    def give_back(self, cost: int) -> None:
        with self._changed:
            self._add(-cost)
            self._changed.notify_all()

    def _add(self, cost: int) -> None:
        """Call it under the lock."""
        self.used_bytes += cost * self.bytes_per_unit

    def _fits(self, cost: int, beside: int = 0) -> bool:
        return self.capacity is None or beside + cost * self.bytes_per_unit <= self.capacity


def row_budget(
    memory_bytes: int,
    parts: Mapping[str, int],
    bytes_per_unit: int,
    largest: int,
    unit: str = "tiles",
    remedy: str = "",
) -> RowBudget:
    """What ``memory_bytes`` (0: no limit) leaves for rows beside the stage's other ``parts`` (name -> bytes).

    Raises ConfigError if that is less than the rows of the ``largest`` forward; it ends with ``remedy``.
    """
    if not memory_bytes:
        return RowBudget(bytes_per_unit, unit=unit)
    rows = largest * bytes_per_unit
    left = memory_bytes - sum(parts.values())
    if left < rows:
        named = ", ".join(f"{name} {_megabytes(size)}" for name, size in {**parts, "rows": rows}.items())
        raise ConfigError(
            f"vision_encoder: its share is {_megabytes(memory_bytes)}; a forward of {largest} {unit} needs "
            f"{_megabytes(sum(parts.values()) + rows)} ({named}); raise gpu_memory, or lower visual_infer_batch_size "
            f"or cache_bytes{remedy}"
        )
    return RowBudget(bytes_per_unit, left, unit)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
