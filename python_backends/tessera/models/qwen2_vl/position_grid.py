"""Qwen2-VL's tower with learned positions: a square grid of them is stretched over each picture, and a patch's is
interpolated between the four around it.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.transfer import to_device
from tessera.models.qwen2_vl.patch_tower import places_of
from tessera.models.qwen2_vl.vision import Qwen2ViT
from tessera.models.tower import Wires

_TAPS = 4 * (4 + 4)  # bytes of a patch's places in the grid and their shares


class GridViT(Qwen2ViT):
    """As Qwen2ViT; ``position_embedding`` [side * side, hidden] is the grid, row by row."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        self.side = config.vision.grid_side
        self.position_embedding = nn.Parameter(torch.empty(self.side**2, config.vision.embed_dim))

    @staticmethod
    def on_grid(places: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
        """Patches' rows and columns [n, 2] in a picture of ``size`` (height, width) -> where their centres lie in the
        grid, from 0 to side - 1, float32 [n, 2]; what lies beyond an edge has the edge's position."""
        raise NotImplementedError

    def places(self, wires: Wires, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Turns, and what :func:`taps_of` gives."""
        merge, side = self.merge, self.side
        taps = [taps_of(self.on_grid, height, width, merge, side, *kept) for _, height, width, *kept in wires]
        return (*super().places(wires, device), *(to_device(torch.cat(each), device) for each in zip(*taps)))

    def embed(self, pixels: torch.Tensor, *grid: torch.Tensor) -> torch.Tensor:
        """Positions are summed in float32 and rounded once: shares of 16 bits would not sum to one.

        embedding_bag wants the grid in the dtype of the shares. That copy is small; four rows for each patch, gathered
        before they are summed, would not be.
        """
        taps, shares = grid
        x, table = super().embed(pixels), self.position_embedding.float()
        positions = functional.embedding_bag(taps, table, mode="sum", per_sample_weights=shares)
        return x.add_(positions.to(x.dtype))

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        return super().activation_bytes(cost, scores) + self.grid_bytes(cost)

    def grid_bytes(self, cost: int) -> int:
        """What positions take: places in the grid, their shares, and in 16 bits the grid in float32."""
        table = 4 * self.position_embedding.numel() if self.position_embedding.itemsize < 4 else 0
        return table + cost * self.merge**2 * _TAPS


@lru_cache(maxsize=32)
def taps_of(
    on_grid: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    height: int,
    width: int,
    merge: int,
    side: int,
    kept: bytes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The four places in a grid of side x side that each patch of a picture of height x width patches lies between,
    int32 [n, 4], and their shares, float32 [n, 4]; ``on_grid`` as :meth:`GridViT.on_grid`, ``kept`` as for
    :func:`places_of`."""
    at = on_grid(places_of(height, width, merge, kept), torch.tensor((height, width)), side)
    low = at.floor()
    share = at - low
    shares = torch.stack((1 - share, share), dim=1)  # [patches, before and behind, axes]
    taps = torch.stack((low, low + 1), dim=1).clamp_(0, side - 1).int()
    places = (taps[:, :, None, 0] * side + taps[:, None, :, 1]).flatten(1)
    return places, (shares[:, :, None, 0] * shares[:, None, :, 1]).flatten(1)
