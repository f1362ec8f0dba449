"""Forwards of few patches as CUDA graphs: there the launches of some 300 kernels take longer than the kernels.

A graph is recorded for each of some numbers of patches. A smaller forward is filled up with what the buffers held
before, as pictures of their own.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import AttentionPlan, HopperPlan, query_tiles
from tessera.kernels.tower_attention import attention_by
from tessera.kernels.tower_layers import TowerKernels
from tessera.kernels.transfer import to_device
from tessera.models.qwen2_vl.patch_tower import PatchTower, Reach
from tessera.models.tower import Forward, Wires

#: patches of a forward that is worth a graph: beyond them an H200's kernels take longer than a host's launches
SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096)
_PICTURES = 64  # of a graph's forward: each may end in the middle of a tile of queries


class PatchGraphs:
    """A tower's forward; used by one thread at a time.

    ``kernels`` are those of the recorded forwards, whose attention is ours by ``plans``, one for each of the tower's
    reaches; ``otherwise`` is the forward of more patches than the largest of ``sizes``, or of more small pictures. On
    the CPU a replay computes.
    """

    def __init__(
        self,
        tower: PatchTower,
        device: torch.device,
        sizes: Sequence[int],
        plans: Sequence[AttentionPlan | HopperPlan],
        kernels: TowerKernels,
        otherwise: Forward,
    ) -> None:
        self._tower, self._kernels, self._otherwise = tower, kernels, otherwise
        self._reaches = list(zip(plans, tower.reaches, strict=True))
        self._graphs = GraphPool("vision graphs", sizes, self._compute, device)
        self._group, largest = tower.merge**2, self._graphs.sizes[-1]
        self._pixels = torch.zeros(largest // self._group, *tower.unit_shape, dtype=torch.uint8, device=device)
        squares = {size: [(1, tower.merge, size // tower.merge)] for size in self._graphs.sizes}
        self._places = {size: tower.places(wires, device) for size, wires in squares.items()}
        rooms = [self._room(plan, reach, largest) for plan, reach in self._reaches]
        self._tiles = [torch.zeros(room, 3, dtype=torch.int32, device=device) for room in rooms]
        self._graphs.record(partial(self._cut, [[] for _ in rooms]))

    def __call__(self, pixels: torch.Tensor, wires: Wires) -> torch.Tensor:
        """Rows that are the caller's to keep."""
        patches = len(pixels) * self._group
        if patches > self._graphs.sizes[-1] or len(wires) > _PICTURES:
            return self._otherwise(pixels, wires)
        size, order = self._graphs.size_for(patches), self._tower.order(wires, pixels.device)
        self._cut(self._tower.lengths(wires), size)
        self._pixels[: len(pixels)].copy_(pixels if order is None else pixels[order[0]])
        for held, given in zip(self._places[size], self._tower.places(wires, pixels.device)):
            held[..., :patches, :].copy_(given)
        rows = self._graphs.replay(size)[: len(pixels)]
        return rows.clone() if order is None else rows[order[1]]

    def _compute(self, size: int) -> torch.Tensor:
        attends = []
        for (plan, reach), tiles in zip(self._reaches, self._tiles):
            tiles = tiles[: self._room(plan, reach, size)]
            attends.append(partial(attention_by(plan), tiles=tiles, plan=plan))
        return self._tower.rows(self._pixels[: size // self._group], self._places[size], attends, self._kernels)

    def _room(self, plan: AttentionPlan | HopperPlan, reach: Reach, size: int) -> int:
        """Tiles of a forward of ``size`` patches at most."""
        return size // plan.rows + (size // reach.least if reach.least else 0) + _PICTURES + 1

    def _cut(self, lengths: Sequence[Sequence[int]], size: int) -> None:
        """The tiles of pictures of such ``lengths``, by reach; what fills them up to ``size`` is cut into pictures of
        one tile, which cost the least, and whose rows are numbers whatever lay in memory."""
        for (plan, reach), tiles, within in zip(self._reaches, self._tiles, lengths):
            full, rest = divmod(size - sum(within), plan.rows)
            cut = query_tiles([*within, *[plan.rows] * full, *[rest] * bool(rest)], plan.rows)
            tiles[: len(cut)].copy_(to_device(cut, tiles.device))
            tiles[len(cut) : self._room(plan, reach, size)] = 0
