"""PaddleOCR-VL's tower: SigLIP's, at a picture's own size -> rows of the language model.

The rules are those of transformers ``modeling_paddleocr_vl.py``, which takes patches row by row; here they come in
groups, as Qwen2-VL's. Beside the rotary of two axes each patch has a learned position: of a square grid, stretched over
the picture and interpolated between its four neighbours.
"""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import Target, copy_whole
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.kernels.transfer import to_device
from tessera.models.qwen2_vl.vision import Attention, Merger, Qwen2ViT, places_of
from tessera.models.tower import TowerLayer, Wires

_GRID_BYTES = 48  # a patch's place in the grid, its neighbours there and their shares


class Projector(Merger):
    """The tower's last norm, then the projector: its norm, and groups through Linear, GELU, Linear."""

    def __init__(self, size: int, group: int, text_size: int, eps: float) -> None:
        super().__init__(size, group, text_size)
        self.norm.eps = 1e-5
        self.final_norm = nn.LayerNorm(size, eps=eps)

    def forward(self, x: Any, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        return super().forward(self.final_norm(x), kernels)


class PaddleOcrViT(Qwen2ViT):
    """As :class:`Qwen2ViT`."""

    patch_bias = True

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        vision = config.vision
        self.side = vision.image_size // vision.patch_size
        self.position_embedding = nn.Parameter(torch.zeros(self.side**2, vision.hidden_size))
        for module in self.layers.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = vision.layer_norm_eps
        group, text_size = self.merge**2, config.text.hidden_size
        self.projector = Projector(vision.hidden_size, group, text_size, vision.layer_norm_eps)

    def places(self, wires: Wires, device: torch.device) -> tuple[torch.Tensor, ...]:
        grid = [_grid(height, width, self.merge, self.side) for _, height, width in wires]
        return (*super().places(wires, device), to_device(torch.cat(grid), device))

    def embed(self, pixels: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        """``places``: float32 [patches, 2], each patch's row and column in the grid of positions."""
        (grid,), table = places, self.position_embedding
        before = grid.floor()
        share = grid - before
        shares = torch.stack((1 - share, share), dim=1)  # [patches, before and behind, axes]
        taps = torch.stack((before, before + 1), dim=1).clamp_(0, self.side - 1).int()
        index = (taps[:, :, None, 0] * self.side + taps[:, None, :, 1]).flatten(1)
        weights = (shares[:, :, None, 0] * shares[:, None, :, 1]).flatten(1).to(table.dtype)
        positions = functional.embedding_bag(index, table, mode="sum", per_sample_weights=weights)
        return super().embed(pixels).add_(positions)

    def targets(self, stored: Set[str]) -> dict[str, Target]:
        """q, k and v are stored apart."""
        targets = super().targets(stored) | {"patch_embedding.weight": self._fill_kernel}
        for index, layer in enumerate(self.layers):
            attention: Attention = cast(TowerLayer, layer).attention
            for leaf, whole in attention.qkv.named_parameters():
                del targets[f"layers.{index}.attention.qkv.{leaf}"]
                for part, rows in zip("qkv", whole.chunk(3)):
                    targets[f"layers.{index}.attention.{part}_proj.{leaf}"] = partial(attention.fill, rows, 0)
        return targets

    def _fill_kernel(self, stored: torch.Tensor) -> None:
        kernel = torch.empty(self.patch_embedding.out_features, 3, *self.unit_shape[2:4])
        copy_whole(kernel, stored)
        self.patch_embedding.weight.copy_(kernel.permute(0, 2, 3, 1).flatten(1))

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        return super().activation_bytes(cost, scores) + cost * self.merge**2 * _GRID_BYTES


@lru_cache(maxsize=32)
def _grid(height: int, width: int, merge: int, side: int) -> torch.Tensor:
    """Where each patch's centre lies in a square grid of ``side`` whose cells are stretched over the picture, in the
    order of its groups: float32 [patches, 2].

    So do the authors' code, by which the weights were trained, vLLM and transformers 5.3; transformers 5.14 and 5.17
    lay the corner cells' centres on those of the corner patches.
    """
    return (places_of(height, width, merge) + 0.5) * side / torch.tensor([height, width]) - 0.5
