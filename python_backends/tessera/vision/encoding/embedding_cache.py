"""Embeddings of pictures seen before, by content key, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch


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
