"""Qwen3-VL's tower: Qwen2-VL's with a learned grid of positions, which is interpolated for each picture, and with rows
from within: of each patch group the projector's, and beside them those of some layers.

The rules are those of transformers ``modeling_qwen3_vl.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.tower_attention import Attend
from tessera.kernels.tower_layers import TowerKernels
from tessera.kernels.transfer import to_device
from tessera.models.qwen2_vl.vision import Merger, Qwen2ViT, places_of
from tessera.models.tower import Wires

_TAPS = 4 * (4 + 4)  # bytes of a patch's places in the grid and their shares


class Mergers(Merger):
    """Of the last layer; ``deep``: of others, whose norm is the whole group's."""

    deep: nn.ModuleList

    def __init__(self, size: int, group: int, text_size: int, count: int) -> None:
        super().__init__(size, group, text_size)
        self.deep = nn.ModuleList(Merger(size, group, text_size, whole=True) for _ in range(count))


class Qwen3ViT(Qwen2ViT):
    """As Qwen2ViT; a row [row size] is the projector's values, and then those of each deep layer in their order."""

    patch_bias = True
    epilogue = True  # its layers' GELU is the tanh form, as an epilogue's

    projector: Mergers

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        vision, size = config.vision, config.vision.embed_dim
        self.deep: tuple[int, ...] = vision.deepstack_visual_indexes
        self.projector = Mergers(size, self.merge**2, config.text.hidden_size, len(self.deep))
        self.side = vision.grid_side
        self.positions = nn.Parameter(torch.empty(self.side**2, size))

    def rows(
        self, pixels: torch.Tensor, places: Sequence[torch.Tensor], attends: Sequence[Attend], kernels: TowerKernels
    ) -> torch.Tensor:
        turns, *grid = places
        x, update = self.embed(pixels, *grid), None
        deep: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            x, update = layer(x, update, kernels, turns, attends[0])
            if index in self.deep:
                x, update = x + update, None
                deep.append(self.projector.deep[len(deep)](x, kernels))
        return torch.cat((self.projector(x if update is None else x + update, kernels), *deep), dim=1)

    def places(self, wires: Wires, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Turns, and the places in the grid that each patch lies between with their shares, [patches, 4] each."""
        taps = [taps_of(height, width, self.merge, self.side) for _, height, width in wires]
        return (*super().places(wires, device), *(to_device(torch.cat(each), device) for each in zip(*taps)))

    def embed(self, pixels: torch.Tensor, *grid: torch.Tensor) -> torch.Tensor:
        """Shares of 16 bits would not sum to one: positions are computed in float32."""
        taps, shares = grid
        x = super().embed(pixels)
        positions = functional.embedding_bag(taps, self.positions.float(), mode="sum", per_sample_weights=shares)
        return x.add_(positions.to(x.dtype))

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        """A layer's beside the rows that wait for the others, or all rows twice and the patches; in 16 bits also the
        grid in float32."""
        value, patches = self.positions.itemsize, cost * self.merge**2
        grid = 4 * self.positions.numel() if value < 4 else 0
        waiting = cost * self.projector.linear2.out_features * len(self.deep) * value
        end = (2 * cost * self.row_shape[1] + 3 * patches * self.positions.shape[1]) * value
        return max(super().activation_bytes(cost, scores) + waiting, end) + grid + _TAPS * patches


@lru_cache(maxsize=32)
def taps_of(height: int, width: int, merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the patches of a picture of height x width patches lie in a grid of side x side positions, whose corners
    are the picture's corner patches: the four places around each, int32 [n, 4], and their shares, float32 [n, 4]."""
    most = torch.tensor((height - 1, width - 1)).clamp(min=1)
    at = places_of(height, width, merge) * (side - 1) / most
    low = at.floor()
    taps = torch.stack((low, (low + 1).clamp(max=side - 1))).int()
    shares = torch.stack((1 - (at - low), at - low))
    places = taps[:, None, :, 0] * side + taps[None, :, :, 1]
    products = shares[:, None, :, 0] * shares[None, :, :, 1]
    return places.flatten(0, 1).T.contiguous(), products.flatten(0, 1).T.contiguous()
