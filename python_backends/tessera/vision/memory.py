"""What the vision stage holds, known before it is held, so that nothing it takes in can run out of memory.

``memory_bytes`` is the stage's share of its device and covers, in this order: weights (and what else a runner keeps, as
recorded graphs), the activations of one forward, the pixels of the forwards under way, the cache of rows at its full
size, and with all that is left the rows of requests that are not answered yet. Not in it are CUDA's context and
libraries, as with any process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from tessera.errors import ConfigError, InvalidRequest

# A request's rows exist twice for a moment: as its forwards gave them, and joined.
COPIES_OF_ROWS = 2


class RowBudget:
    """Bytes of rows between a forward and the end of their sending. One thread reserves, any other gives back.

    Args:
        bytes_per_tile: of one tile's rows, all copies.
        capacity: in bytes; None is without limit.
    """

    def __init__(self, bytes_per_tile: int, capacity: int | None = None) -> None:
        self.bytes_per_tile = bytes_per_tile
        self.capacity = capacity
        self.used_bytes = 0
        self.show_bytes: Callable[[int], None] = lambda size: None  # told whenever they change, in that order
        self._changed = threading.Condition()

    def check(self, tiles: int) -> None:
        """Raises InvalidRequest if a request of so many tiles could never be taken in."""
        if not self._fits(tiles):
            assert self.capacity is not None
            raise InvalidRequest(
                f"this request's {tiles} tiles need {_megabytes(tiles * self.bytes_per_tile)} for their rows and the "
                f"vision stage has {_megabytes(self.capacity)}, which is {self.capacity // self.bytes_per_tile} tiles; "
                "send fewer pictures or ask for fewer tiles (max_tiles), or raise vision_encoder.memory_bytes"
            )

    def waves(self, tiles: Sequence[int]) -> Iterator[range]:
        """Cuts requests of so many tiles into runs of neighbours, each as long as its rows fit together."""
        first, total = 0, 0
        for place, count in enumerate(tiles):
            if place > first and not self._fits(total + count):
                yield range(first, place)
                first, total = place, 0
            total += count
        if first < len(tiles):
            yield range(first, len(tiles))

    def reserve(self, tiles: int) -> None:
        """Waits until the rows of so many tiles fit beside what is held, and counts them."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(tiles, self.used_bytes))
            self._add(tiles)

    def give_back(self, tiles: int) -> None:
        with self._changed:
            self._add(-tiles)
            self._changed.notify_all()

    def _add(self, tiles: int) -> None:
        """Call it under the lock."""
        self.used_bytes += tiles * self.bytes_per_tile
        self.show_bytes(self.used_bytes)

    def _fits(self, tiles: int, beside: int = 0) -> bool:
        return self.capacity is None or beside + tiles * self.bytes_per_tile <= self.capacity


def row_budget(memory_bytes: int, parts: Mapping[str, int], bytes_per_tile: int, forward_tiles: int) -> RowBudget:
    """What ``memory_bytes`` (0: no limit) leaves for rows beside the stage's other ``parts`` (name -> bytes).

    Raises ConfigError if that is less than the rows of one forward of ``forward_tiles``.
    """
    if not memory_bytes:
        return RowBudget(bytes_per_tile)
    left = memory_bytes - sum(parts.values())
    if left < forward_tiles * bytes_per_tile:
        named = ", ".join(f"{name} {_megabytes(size)}" for name, size in parts.items())
        raise ConfigError(
            f"vision_encoder: memory_bytes is {_megabytes(memory_bytes)}; a forward of {forward_tiles} tiles needs "
            f"{_megabytes(sum(parts.values()) + forward_tiles * bytes_per_tile)} ({named}, rows "
            f"{_megabytes(forward_tiles * bytes_per_tile)}); raise it, or lower visual_infer_batch_size or cache_bytes"
        )
    return RowBudget(bytes_per_tile, left)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
