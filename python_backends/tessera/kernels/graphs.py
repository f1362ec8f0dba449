"""The same work recorded for several sizes as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class GraphPool(Generic[Result]):
    """``run(size)`` for the smallest of some ``sizes`` that holds a count: a graph's replay, on the CPU ``run`` itself.

    ``run`` reads static inputs, which are the caller's to fill; what of a size lies behind the count must do no harm,
    and its rows are not read. What it returns lies in memory that the graphs share: the next replay of any of them
    overwrites it.
    ``what``, for the log: "decode graphs", and so on. Kernels of sizes up to ``urgent_up_to`` start before all others
    that wait for a multiprocessor, of other processes too under MPS; these graphs have memory of their own.
    ``beside``: recorded graphs that never run at the same time, with which these share it too.
    """

    def __init__(
        self,
        what: str,
        sizes: Iterable[int],
        run: Callable[[int], Result],
        device: torch.device,
        urgent_up_to: int = 0,
        beside: GraphPool[Result] | None = None,
    ) -> None:
        self.sizes = sorted(sizes)
        self._what, self._run, self._device, self._urgent_up_to = what, run, device, urgent_up_to
        self._memory: Any = None if beside is None else beside._memory
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._results: dict[int, Result] = {}

    def record(self, prepare: Callable[[int], object]) -> None:
        """``prepare(size)`` is called once before each size is recorded; it fills the static inputs with dummies.

        The largest is recorded first, so that the smaller ones live in its memory.
        """
        started, before = time.perf_counter(), self._reserved()
        on_gpu = self._device.type == "cuda"
        gc.collect()  # a graph of an engine that is gone must not be destroyed while one is recorded
        ahead = torch.cuda.Stream(self._device, priority=-1) if self._urgent_up_to and on_gpu else None
        for size in reversed(self.sizes):
            prepare(size)
            self._run(size)  # compiles kernels and makes workspaces, which must not happen while recording
            if not on_gpu:
                continue
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            stream = ahead if size <= self._urgent_up_to else None
            # What other threads ask of the GPU meanwhile is no part of the graph, and must not spoil it.
            with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
                self._results[size] = self._run(size)
            self._memory = graph.pool()
            self._graphs[size] = graph
        spent, kept = time.perf_counter() - started, (self._reserved() - before) / 2**20
        _LOG.info("%s: %d sizes up to %d in %.1f s, %.0f MiB", self._what, len(self.sizes), self.sizes[-1], spent, kept)

    def size_for(self, count: int) -> int:
        """The smallest size that holds ``count``, which the largest does."""
        return next(size for size in self.sizes if size >= count)

    def replay(self, size: int) -> Result:
        if size not in self._graphs:
            return self._run(size)
        self._graphs[size].replay()
        return self._results[size]

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
