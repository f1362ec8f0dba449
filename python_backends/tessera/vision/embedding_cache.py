"""Embeddings of pictures seen before, by content key, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch


class EmbeddingCache:
    """Holds at most ``capacity_bytes`` of rows; a picture larger than that is not kept, and 0 keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._rows: OrderedDict[Hashable, torch.Tensor] = OrderedDict()

    def get(self, key: Hashable) -> torch.Tensor | None:
        """The rows stored under ``key`` (not to be changed in place), or None."""
        rows = self._rows.get(key)
        if rows is None:
            self.misses += 1
            return None
        self.hits += 1
        self._rows.move_to_end(key)
        return rows

    def put(self, key: Hashable, rows: torch.Tensor) -> None:
        if rows.nbytes > self.capacity_bytes or key in self._rows:
            return
        # A view would keep the whole forward's output alive, so that the bytes counted were not the bytes held.
        self._rows[key] = rows.clone()
        self.used_bytes += rows.nbytes
        while self.used_bytes > self.capacity_bytes:
            self.used_bytes -= self._rows.popitem(last=False)[1].nbytes
