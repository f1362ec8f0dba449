"""Forwards of few patches as CUDA graphs: there the launches of some 300 kernels take longer than the kernels.

A graph is recorded for each of some numbers of patches. A smaller forward is filled up with what the buffers held
before, as pictures of their own whose rows nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from tessera.attention_plan import AttentionPlan
from tessera.cuda_graphs import record
from tessera.vision.kernels.attention import Attend, attention_by
from tessera.vision.kernels.hopper_plans import HopperPlan
from tessera.vision.kernels.tower_kernels import TowerKernels
from tessera.vision.kernels.upload import uploaded
from tessera.vision.kernels.varlen_attention import query_tiles
from tessera.vision.towers.tower import Forward, Wires

#: patches of a forward that is worth a graph: beyond them an H200's kernels take longer than a host's launches
SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096)
_PICTURES = 64  # of a graph's forward: each may end in the middle of a tile of queries


class PatchTower(Protocol):
    """What is asked of a tower: :class:`tessera.vision.towers.qwen2_vl.Qwen2ViT`."""

    merge: int
    head_size: int
    unit_shape: tuple[int, ...]

    def turns(self, wires: Wires, device: torch.device) -> torch.Tensor: ...

    def rows(
        self, pixels: torch.Tensor, turns: torch.Tensor, attend: Attend, kernels: TowerKernels
    ) -> torch.Tensor: ...


class PatchGraphs:
    """A tower's forward; used by one thread at a time.

    ``kernels`` are those of the recorded forwards, whose attention is ours by ``plan``; ``otherwise`` is the forward of
    more patches than the largest of ``sizes``, or of more small pictures. On the CPU a replay computes.
    """

    def __init__(
        self,
        tower: PatchTower,
        device: torch.device,
        sizes: Sequence[int],
        plan: AttentionPlan | HopperPlan,
        kernels: TowerKernels,
        otherwise: Forward,
    ) -> None:
        self._tower, self._plan, self._otherwise, self._sizes = tower, plan, otherwise, sorted(sizes)
        self._group, largest = tower.merge**2, self._sizes[-1]
        self._pixels = torch.zeros(largest // self._group, *tower.unit_shape, dtype=torch.uint8, device=device)
        self._turns = {size: torch.zeros(2, size, tower.head_size // 2, device=device) for size in self._sizes}
        self._tiles = torch.zeros(self._room(largest), 3, dtype=torch.int32, device=device)
        self._rows: dict[int, torch.Tensor] = {}  # in memory that all graphs share

        def prepare(size: int) -> None:
            self._cut([], size)

        def run(size: int) -> None:
            tiles = self._tiles[: self._room(size)]
            attend = partial(attention_by(plan), tiles=tiles, plan=plan)
            self._rows[size] = tower.rows(self._pixels[: size // self._group], self._turns[size], attend, kernels)

        self._replays: dict[int, Callable[[], None]] = record("vision graphs", self._sizes, prepare, run, device)

    def __call__(self, pixels: torch.Tensor, wires: Wires) -> torch.Tensor:
        """Rows that are the caller's to keep."""
        lengths = [height * width for _, height, width in wires]
        patches = sum(lengths)
        size = next((size for size in self._sizes if size >= patches), None)
        if size is None or len(lengths) > _PICTURES:
            return self._otherwise(pixels, wires)
        self._cut(lengths, size)
        self._pixels[: len(pixels)].copy_(pixels)
        self._turns[size][:, :patches].copy_(self._tower.turns(wires, pixels.device))
        self._replays[size]()
        return self._rows[size][: len(pixels)].clone()

    def _room(self, size: int) -> int:
        """Tiles of a forward of ``size`` patches at most."""
        return size // self._plan.rows + _PICTURES + 1

    def _cut(self, lengths: Sequence[int], size: int) -> None:
        """The tiles of pictures of such ``lengths``; what fills them up to ``size`` is cut into pictures of one tile,
        which cost the least, and whose rows are numbers whatever lay in memory."""
        full, rest = divmod(size - sum(lengths), self._plan.rows)
        tiles = query_tiles([*lengths, *[self._plan.rows] * full, *[rest] * bool(rest)], self._plan.rows)
        self._tiles[: len(tiles)].copy_(uploaded(tiles, self._tiles.device))
        self._tiles[len(tiles) : self._room(size)] = 0
