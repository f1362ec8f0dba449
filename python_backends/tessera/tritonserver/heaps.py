"""How many heaps the C library keeps for this process."""

from __future__ import annotations

import ctypes
import os

M_ARENA_MAX = -8  # malloc.h of glibc


def one_per_core() -> None:
    """From now on threads share heaps. Left alone, glibc keeps up to eight a core, each with gaps of its own, so that a
    process of many threads creeps up by what its requests leave behind. Call it before the threads start; where the C
    library is another, nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, max(2, os.cpu_count() or 1))
