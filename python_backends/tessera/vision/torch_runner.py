"""A vision tower in torch: the readable twin of the exported graph, the way onto other devices, and for towers of which
no graph is recorded the way onto a GPU, with the kernels that are the fastest there.

A vision tower as CUDA graphs: one recorded launch instead of hundreds. For towers whose units are independent.

A graph is recorded for each of some costs (numbers of tiles); a smaller forward is filled up with whatever the input
buffer held before. The graphs share one pool of memory, so together they take little more than
the largest and the few that go first, and a forward allocates nothing but the rows that it gives away. Those few share
nothing with the larger ones that either writes, so that one of them may run beside a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError
from tessera.kernels.fixed_rows import FixedRows
from tessera.kernels.graphs import GraphPool
from tessera.kernels.transfer import to_device, uploadable
from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds
from tessera.models.tower import Forward, Tower, Wires
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower


class TorchRunner:
    """Runs the tower in the dtype and on the device its weights have, by ``forward`` or the tower's own.

    On the CPU units of cost that are independent are dealt out among the ``threads``, if each can have one: then no
    thread waits for the others within an operation.
    """

    beside = 0

    def __init__(
        self,
        tower: Tower,
        forward: Forward | None = None,
        products: AbstractContextManager[Any] | None = None,
        threads: int = 1,
    ) -> None:
        """``products``: what is entered while it runs."""
        self.tower = tower
        self._products = products or nullcontext()
        self._forward: Forward = forward or tower
        self.device = next(tower.parameters()).device
        self._threads = threads if self.device.type == "cpu" and tower.splits else 1
        self._pool = ThreadPoolExecutor(self._threads, initializer=_alone)
        self.at_once = 2 * self._threads if self._threads > 1 else 1  # they wait for the last of them

    @classmethod
    def from_checkpoint(cls, config: CheckpointConfig, settings: VisionSettings) -> TorchRunner:
        """The settings' threads are torch's, which holds for the whole process: on a GPU they copy into pinned memory,
        and spin where they find no core. Kernels are measured if the settings' runner is graph, for what has none."""
        torch.set_num_threads(settings.forward_threads)
        tower = serving_tower(config, settings)
        if settings.runner != "graph":
            return cls(tower, threads=settings.forward_threads)
        fixed = FixedRows()
        with fixed.learning() if settings.deterministic else nullcontext():
            largest = settings.infer_batch_size * tower.batch_unit
            forward = tower.tuned(largest, _choices(settings), _graph_bytes(tower, largest, settings))
        return cls(tower, forward, fixed if settings.deterministic else None)

    def activation_bytes(self, cost: int) -> int:
        return self.tower.activation_bytes(cost)

    def run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        if len(pixels) < self._threads:
            torch.set_num_threads(self._threads)  # this thread's: the pool's have theirs
            return self._run(pixels, wires)
        if self._threads == 1:
            return self._run(pixels, wires)
        return torch.cat([*self._pool.map(self._run, torch.as_tensor(pixels).chunk(self._threads))])

    @torch.inference_mode()
    def _run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        with self._products:
            return self._forward(to_device(pixels, self.device), wires)


def _alone() -> None:
    """Has this thread of the CPU compute by itself."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # torch settles a thread's number when it is first asked for, by what was set last anywhere


def _graph_bytes(tower: Tower, largest: int, settings: VisionSettings) -> float:
    """Of a large recorded forward at most: half of what the stage's share has beside the weights, the ``largest``
    forward and the cache of rows; the rest is for rows on their way out."""
    if not settings.memory_bytes:
        return math.inf
    return (settings.memory_bytes - tower.weight_bytes - tower.activation_bytes(largest) - settings.cache_bytes) / 2


def _choices(settings: VisionSettings) -> MeasuredChoices | None:
    """None where nothing is measured."""
    return None if settings.deterministic else MeasuredChoices(choices_path(), graph_milliseconds)


# A forward of this few tiles is short and may be waited for; beside a step of 8,192 tokens each of its kernels
# would wait for a wave of a long one.
_URGENT_UP_TO = 4


class GraphRunner:
    """Runs a tower on the device and in the dtype its weights have; used by one thread at a time.

    ``forward_for`` a cost gives the forward to record. On the CPU nothing is recorded: a replay computes.
    """

    at_once = 1

    def __init__(self, tower: Tower, sizes: Sequence[int], forward_for: Callable[[int], Forward] | None = None) -> None:
        self.tower = tower
        self._weight = next(tower.parameters())
        self._device = self._weight.device
        self._graphs = GraphPool("vision graphs", sizes, self._compute, self._device, _URGENT_UP_TO)
        urgent = [size for size in self._graphs.sizes if size <= _URGENT_UP_TO]
        larger = self._graphs.sizes[len(urgent) :]
        self.beside = urgent[-1] if urgent and larger else 0
        self._pixels: dict[int, torch.Tensor] = {}
        for together in filter(None, (urgent, larger)):
            buffer = torch.zeros((together[-1], *tower.unit_shape), dtype=torch.uint8, device=self._device)
            self._pixels |= {size: buffer[:size] for size in together}
        self._forwards: dict[int, Forward] = {}
        with torch.inference_mode():
            self._graphs.record(lambda size: self._forwards.update({size: forward_for(size) if forward_for else tower}))

    @classmethod
    def from_checkpoint(cls, config: CheckpointConfig, settings: VisionSettings) -> GraphRunner:
        """Graphs for up to ``infer_batch_size``, with the kernels that are the fastest on this GPU.

        Raises CheckpointError, or ConfigError when the GPU's memory does not hold them.
        """
        largest = settings.infer_batch_size
        choices = _choices(settings)
        try:
            tower = serving_tower(config, settings)
            with FixedRows().learning() if settings.deterministic else nullcontext():
                return cls(tower, bucket_sizes(largest), lambda cost: tower.tuned(cost, choices))
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"the vision tower with forwards of {largest} tiles does not fit the GPU's free memory: lower "
                f"visual_infer_batch_size or gpu_memory ({error})"
            ) from error

    def activation_bytes(self, cost: int) -> int:
        """What a forward allocates: its rows. All else was allocated when the graphs were recorded."""
        rows, width = self.tower.row_shape
        return cost * rows * width * self._weight.itemsize

    @torch.inference_mode()
    def run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        """Returns before the GPU is done. Pixels on the device must be ready on the current stream, and that is the
        stream on which the rows, which are the caller's to keep, become ready.
        """
        largest = self._graphs.sizes[-1]
        parts = [self._forward(pixels[start : start + largest]) for start in range(0, len(pixels), largest)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(self, pixels: np.ndarray | torch.Tensor) -> torch.Tensor:
        source = uploadable(pixels, self._device)
        size = self._graphs.size_for(len(source))
        self._pixels[size][: len(source)].copy_(source, non_blocking=True)
        return self._graphs.replay(size)[: len(source) * self.tower.row_shape[0]].clone()

    def _compute(self, size: int) -> torch.Tensor:
        return self._forwards[size](self._pixels[size])


def bucket_sizes(largest: int) -> list[int]:
    """Costs worth a graph: so close that a filled-up forward wastes less than a third of itself."""
    return sorted({min(size, largest) for size in (1, 2, 4, 6, 8, 12, *range(16, largest + 8, 8))})
