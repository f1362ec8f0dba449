"""The vision tower as CUDA graphs: one recorded launch a forward instead of hundreds.

A graph is recorded for each of some numbers of tiles; a smaller forward is filled up with whatever the input buffer
held before, whose rows nobody reads. All graphs share one pool of memory, so together they take little more than the
largest, and a forward allocates nothing but the rows that it gives away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError
from tessera.measured_choices import MeasuredChoices, choices_path, graph_milliseconds
from tessera.vision.intern_vit import InternViT, load_vision
from tessera.vision.tower_kernels import PLAIN, TowerKernels
from tessera.vision.tuning import fastest_kernels

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureReport:
    """What recording cost: seconds, and bytes of the device's memory that graphs and buffers keep, weights apart."""

    sizes: list[int]
    seconds: float
    memory_bytes: int


class GraphRunner:
    """Runs a tower on the device and in the dtype its weights have; used by one thread at a time.

    ``kernels_for`` a number of tiles gives the kernels to record. On the CPU nothing is recorded: a replay computes.
    """

    def __init__(
        self, tower: InternViT, sizes: Sequence[int], kernels_for: Callable[[int], TowerKernels] = lambda tiles: PLAIN
    ) -> None:
        self._tower = tower
        self._sizes = sorted(sizes)
        self._device, self._dtype = tower.class_embedding.device, tower.class_embedding.dtype
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}
        started, before = time.perf_counter(), self._held()
        self._pool: Any = None
        self._tiles = torch.zeros((self._sizes[-1], *tower.tile_shape), dtype=torch.uint8, device=self._device)
        for size in reversed(self._sizes):  # the largest first: the smaller ones live in its memory
            self._replays[size] = self._record(size, kernels_for(size))
        self.report = CaptureReport(self._sizes, time.perf_counter() - started, self._held() - before)

    @classmethod
    def from_checkpoint(
        cls, config: CheckpointConfig, dtype: str, device: str, largest: int, random_weights: bool = False
    ) -> GraphRunner:
        """Graphs for up to ``largest`` tiles, with the kernels that are the fastest on this GPU.

        Raises CheckpointError, or ConfigError when the GPU's memory does not hold them.
        """
        tower = load_vision(config, getattr(torch, dtype), random_weights)
        choices = MeasuredChoices(choices_path(), graph_milliseconds)
        try:
            tower.to(device)
            runner = cls(tower, bucket_sizes(largest), lambda tiles: fastest_kernels(tower, tiles, choices))
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"the vision tower with forwards of {largest} tiles does not fit the GPU's free memory: lower "
                f"visual_infer_batch_size or the language model's memory_bytes ({error})"
            ) from error
        report = runner.report
        _LOG.info(
            "recorded graphs for %s tiles in %.1f s; they keep %.0f MiB",
            ", ".join(map(str, report.sizes)),
            report.seconds,
            report.memory_bytes / 2**20,
        )
        return runner

    def activation_bytes(self, tiles: int) -> int:
        """What a forward allocates: its rows. All else was allocated when the graphs were recorded."""
        tokens, width = self._tower.row_shape
        return tiles * tokens * width * self._dtype.itemsize

    @torch.inference_mode()
    def run(self, tiles: np.ndarray | torch.Tensor) -> torch.Tensor:
        """uint8 [n, side, side, 3], n >= 1, on the host or the device -> rows [n, tokens per tile, hidden].

        Returns before the GPU is done. Tiles on the device must be ready on the current stream, and that is the stream
        on which the rows, which are the caller's to keep, become ready.
        """
        largest = self._sizes[-1]
        parts = [self._forward(tiles[start : start + largest]) for start in range(0, len(tiles), largest)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(self, tiles: np.ndarray | torch.Tensor) -> torch.Tensor:
        source = tiles if isinstance(tiles, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(tiles))
        if self._stream is not None and not source.is_cuda:
            source = source.pin_memory()  # torch keeps a pinned block until the copies out of it are done
        count = len(source)
        size = next(size for size in self._sizes if size >= count)
        rows = torch.empty((count, *self._tower.row_shape), dtype=self._dtype, device=self._device)
        with self._own_stream():
            self._tiles[:count].copy_(source, non_blocking=True)
            rows.copy_(self._replays[size]()[:count])
        return rows

    def _record(self, size: int, kernels: TowerKernels) -> Callable[[], torch.Tensor]:
        """What computes the first ``size`` tiles of the buffer; its rows stay until the next graph runs."""
        tiles = self._tiles[:size]

        @torch.inference_mode()
        def compute() -> torch.Tensor:
            return self._tower(tiles, kernels)

        if self._stream is None:
            return compute
        with self._own_stream():
            compute()  # compiles kernels, plans and makes workspaces, which must not happen while recording
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            rows = compute()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return rows

        return replay

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On the runner's stream, after what the current stream was given before; that then waits for it."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _held(self) -> int:
        """Bytes of the device's memory that this process holds and uses; what it merely kept is given back."""
        if self._stream is None:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


def bucket_sizes(largest: int) -> list[int]:
    """Numbers of tiles worth a graph: so close that a filled-up forward wastes less than a third of itself."""
    return sorted({min(size, largest) for size in (1, 2, 4, 6, 8, 12, *range(16, largest + 8, 8))})
