"""What a tower of patches is to forwards and to graphs: in which order groups of patches go through it, and which of
them see each other.

Forwards as CUDA graphs: of few patches the launches of some 300 kernels take longer than the kernels, and of 12,800
they still take as long. A graph is recorded for each of some numbers of patches. A smaller forward is filled up with
what the buffers held before, as pictures of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import AttentionPlan, HopperPlan, query_tiles
from tessera.kernels.tower_attention import Attend, attention_by, room_is_left, with_room
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.kernels.transfer import to_device
from tessera.models.family import units_of
from tessera.models.tower import Forward, Tower, Wires

# Patches of the large pictures that ways of attention are measured on: 896 pixels wide and high, in patches of 14.
_LARGE = 64**2


@dataclass(frozen=True)
class Reach:
    """Which patches see each other: those of a picture, or of a part of one. ``lengths``: how many these are in some,
    the largest first, to measure ways of attention on. ``least``: beside one part for each picture, there is at most
    one part for every ``least`` patches, unless some are left out.
    """

    name: str
    lengths: Sequence[int]
    least: int | None = None


class PatchTower(Tower):
    """uint8 groups of patches [n, merge, merge, side, side, 3] (RGB, 0..255), each picture's in reading order -> their
    rows [n, row size] of the weights' dtype. ``wires``: (1, height, width) of each picture, in patches, and, where
    not all of its groups are given, which are: each keeps its place.

    Attention may reach less far in some layers: then there are more ``reaches``, and the groups are in an ``order`` in
    which what sees each other lies together.
    """

    splits = False

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        side, self.merge = config.vision.patch_size, config.vision.spatial_merge_size
        self.unit_shape, self.row_shape = (self.merge, self.merge, side, side, 3), (1, config.text.row_size)
        self.batch_unit = max(1, 616 // (self.merge * side)) ** 2
        self.reaches = [Reach("pictures", (_LARGE, 100, 1000, 300))]

    def forward(self, pixels: torch.Tensor, wires: Wires = (), kernels: TowerKernels = PLAIN) -> torch.Tensor:
        order = self.order(wires, pixels.device)
        attends = [kernels.attend_within(lengths, pixels.device) for lengths in self.lengths(wires)]
        given = pixels if order is None else pixels[order[0]]
        rows = self.rows(given, self.places(wires, pixels.device), attends, kernels)
        return rows if order is None else rows[order[1]]

    def rows(
        self, pixels: torch.Tensor, places: Sequence[torch.Tensor], attends: Sequence[Attend], kernels: TowerKernels
    ) -> torch.Tensor:
        """:meth:`forward` with what follows from the pictures' sizes: groups and rows in their :meth:`order`,
        :meth:`places`, and attention within the :meth:`lengths` of each reach."""
        raise NotImplementedError

    def places(self, wires: Wires, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What :meth:`rows` takes of where patches stand. Each one's last dimension but one counts patches."""
        raise NotImplementedError

    def order(self, wires: Wires, device: torch.device) -> torch.Tensor | None:
        """int64 [2, groups]: which group comes at each place, and at which place each group's row is; None: as they
        are given."""
        return None

    def lengths(self, wires: Wires) -> list[list[int]]:
        """By reach: how many patches see each other, one after the other."""
        return [[_patches(height, width, self.merge, *kept) for _, height, width, *kept in wires]]

    def squares(self, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> tuple[torch.Tensor, Wires]:
        count, (merge, _, side, _, _) = math.isqrt(self.batch_unit), self.unit_shape
        pictures = draw((count * merge * side,) * 2 + (3,)).unflatten(2, (count, merge, side))
        groups = pictures.unflatten(1, (count, merge, side)).permute(0, 1, 4, 2, 5, 3, 6, 7).flatten(0, 2)
        return groups, [(1, count * merge, count * merge)] * len(pictures)


@lru_cache(maxsize=32)
def places_of(height: int, width: int, merge: int, kept: bytes | None = None) -> torch.Tensor:
    """Row and column of each patch of a picture of height x width patches, in the order of its groups, of all or of
    those that are ``kept``: int32 [n, 2]."""
    units = height * width // merge**2
    groups = np.arange(units) if kept is None else np.flatnonzero(units_of(kept, units))
    corners = merge * np.stack(np.divmod(groups, width // merge), axis=-1)
    places = corners[:, None] + np.indices((merge, merge)).reshape(2, -1).T
    return torch.from_numpy(places.reshape(-1, 2).astype(np.int32))


def _patches(height: int, width: int, merge: int, kept: bytes | None = None) -> int:
    return height * width if kept is None else merge**2 * int.from_bytes(kept, "big").bit_count()


#: patches of a forward whose kernels take less time than their launches
SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096)
#: about as long, or not much longer: while the language model computes, a host is often held up
LARGE_SIZES = (*range(4608, 12801, 1024), 14336, 16384)
_PICTURES = 64  # of a graph's forward: each may end in the middle of a tile of queries


class PatchGraphs:
    """A tower's forward; used by one thread at a time.

    ``kernels`` are those of the recorded forwards, whose attention is ours by ``plans``, one for each of the tower's
    reaches; ``otherwise`` is the forward of more patches than the largest of ``sizes``, or of more small pictures or
    parts of them. ``twins``: there is a second graph of each size, which leaves room for others where that is asked
    for (:func:`~tessera.kernels.tower_attention.leaving_room`). ``beside``: others whose memory these graphs share. On
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
        twins: bool = False,
        beside: PatchGraphs | None = None,
    ) -> None:
        self._tower, self._kernels, self._otherwise = tower, kernels, otherwise
        self._reaches = list(zip(plans, tower.reaches, strict=True))
        self._group, largest = tower.merge**2, max(sizes)
        self._pixels = torch.zeros(largest // self._group, *tower.unit_shape, dtype=torch.uint8, device=device)
        squares = {size: [(1, tower.merge, size // tower.merge)] for size in sizes}
        self._places = {size: tower.places(wires, device) for size, wires in squares.items()}
        weight = next(tower.parameters())
        self._rows = torch.zeros(largest // self._group, tower.row_shape[1], dtype=weight.dtype, device=device)
        rooms = [self._room(plan, reach, largest) for plan, reach in self._reaches]
        self._tiles = [torch.zeros(room, 3, dtype=torch.int32, device=device) for room in rooms]
        prepare = partial(self._cut, [[] for _ in rooms])
        run, shared = partial(self._compute, plans), None if beside is None else beside._graphs
        self._graphs: GraphPool[torch.Tensor] = GraphPool("vision graphs", sizes, run, device, beside=shared)
        self._graphs.record(prepare)
        self._roomy = self._graphs
        if twins and (roomy := [with_room(plan) for plan in plans]) != plans:
            run = partial(self._compute, roomy)
            self._roomy = GraphPool("vision graphs with room", sizes, run, device, beside=self._graphs)
            self._roomy.record(prepare)

    def __call__(self, pixels: torch.Tensor, wires: Wires) -> torch.Tensor:
        """Rows that are the caller's to keep."""
        patches, graphs = len(pixels) * self._group, self._roomy if room_is_left() else self._graphs
        if patches > graphs.sizes[-1]:
            return self._otherwise(pixels, wires)
        size, lengths = graphs.size_for(patches), self._tower.lengths(wires)
        if any(len(each) > self._parts(reach, size) for each, (_, reach) in zip(lengths, self._reaches)):
            return self._otherwise(pixels, wires)
        order = self._tower.order(wires, pixels.device)
        self._cut(lengths, size)
        self._pixels[: len(pixels)].copy_(pixels if order is None else pixels[order[0]])
        for held, given in zip(self._places[size], self._tower.places(wires, pixels.device)):
            held[..., :patches, :].copy_(given)
        rows = graphs.replay(size)[: len(pixels)]
        return rows.clone() if order is None else rows[order[1]]

    def _compute(self, plans: Sequence[AttentionPlan | HopperPlan], size: int) -> torch.Tensor:
        attends = []
        for plan, reach, tiles in zip(plans, self._tower.reaches, self._tiles):
            tiles = tiles[: self._room(plan, reach, size)]
            attends.append(partial(attention_by(plan), tiles=tiles, plan=plan))
        given = self._pixels[: size // self._group]
        return self._rows[: len(given)].copy_(self._tower.rows(given, self._places[size], attends, self._kernels))

    def _room(self, plan: AttentionPlan | HopperPlan, reach: Reach, size: int) -> int:
        """Tiles of a forward of ``size`` patches at most."""
        return size // plan.rows + self._parts(reach, size) + 1

    def _parts(self, reach: Reach, size: int) -> int:
        """How many of them may be parts of less than a tile."""
        return (size // reach.least if reach.least else 0) + _PICTURES

    def _cut(self, lengths: Sequence[Sequence[int]], size: int) -> None:
        """The tiles of pictures of such ``lengths``, by reach; what fills them up to ``size`` is cut into pictures of
        one tile, which cost the least, and whose rows are numbers whatever lay in memory."""
        for (plan, reach), tiles, within in zip(self._reaches, self._tiles, lengths):
            full, rest = divmod(size - sum(within), plan.rows)
            cut = query_tiles([*within, *[plan.rows] * full, *[rest] * bool(rest)], plan.rows)
            tiles[: len(cut)].copy_(to_device(cut, tiles.device))
            tiles[len(cut) : self._room(plan, reach, size)] = 0
