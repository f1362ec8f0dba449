"""What a tower of patches is to forwards and to graphs: in which order groups of patches go through it, and which of
them see each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.tower_attention import Attend
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.models.tower import Tower, Wires

# Patches of the large pictures that ways of attention are measured on: 896 pixels wide and high, in patches of 14.
_LARGE = 64**2


@dataclass(frozen=True)
class Reach:
    """Which patches see each other: those of a picture, or of a part of one. ``lengths``: how many these are in some,
    the largest first, to measure ways of attention on. ``least``: beside one part for each picture, there is at most
    one part for every ``least`` patches.
    """

    name: str
    lengths: Sequence[int]
    least: int | None = None


class PatchTower(Tower):
    """uint8 groups of patches [n, merge, merge, side, side, 3] (RGB, 0..255), each picture's in reading order -> their
    rows [n, row size] of the weights' dtype. ``wires``: (1, height, width) of each picture, in patches.

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
        return [[height * width for _, height, width in wires]]

    def squares(self, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> tuple[torch.Tensor, Wires]:
        count, (merge, _, side, _, _) = math.isqrt(self.batch_unit), self.unit_shape
        pictures = draw((count * merge * side,) * 2 + (3,)).unflatten(2, (count, merge, side))
        groups = pictures.unflatten(1, (count, merge, side)).permute(0, 1, 4, 2, 5, 3, 6, 7).flatten(0, 2)
        return groups, [(1, count * merge, count * merge)] * len(pictures)


@lru_cache(maxsize=32)
def places_of(height: int, width: int, merge: int) -> torch.Tensor:
    """Row and column of each patch of a picture of height x width patches, in the order of its groups: int32 [n, 2]."""
    grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    groups = grid.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2)
    return groups.reshape(-1, 2).to(torch.int32)
