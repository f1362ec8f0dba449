"""How kernels of flash attention are cut into programs, for vision and engine; needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionPlan:
    """``rows`` (queries, times the heads that share a key head) and ``tokens`` (keys) of a tile, powers of two of at
    least 16; ``warps``, a power of two; ``stages`` of the pipeline of loads.
    """

    rows: int
    tokens: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return "/".join(str(number) for number in vars(self).values())

    @property
    def launch(self) -> dict[str, int]:
        """What triton's launch takes of it."""
        return {"ROWS": self.rows, "TOKENS": self.tokens, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class HopperPlan:
    """``rows`` (queries) of a tile, of which each of two groups of ``warps`` takes half, a power of two and 16 for each
    warp at least; ``tokens`` (keys) of a tile, a power of two; ``stages`` of keys and values in the shared memory.
    ``programs`` share the tiles of queries and the heads evenly: one for each multiprocessor.

    The numbers are those that were the fastest on an H200 (docs/gpu.md).
    """

    programs: int
    rows: int = 128
    tokens: int = 128
    warps: int = 4
    stages: int = 4

    def __str__(self) -> str:
        return f"{self.rows}/{self.tokens}/{self.warps}/{self.stages}"


def query_tiles(lengths: Sequence[int], rows: int) -> np.ndarray:
    """Cuts pictures that lie one after the other into tiles of ``rows`` queries: int32 [tiles, 3] of (the tile's first
    patch, its picture's first, its picture's end). The longest pictures come first, so that none starts at the end."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    number = -(-np.asarray(lengths) // rows)
    order = np.argsort(-number, kind="stable")
    picture = np.repeat(order, number[order])
    within = np.arange(len(picture)) - np.repeat(np.cumsum(number[order]) - number[order], number[order])
    return np.stack((begins[picture] + rows * within, begins[picture], ends[picture]), axis=1).astype(np.int32)
