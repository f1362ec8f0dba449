"""Qwen3-VL's tower: Qwen2-VL's with a grid of positions, and with rows from within: of each patch group the
projector's, and beside them those of some layers.

The rules are those of transformers ``modeling_qwen3_vl.py``.
"""

from collections.abc import Sequence

import torch
from torch import nn

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.tower_attention import Attend
from tessera.kernels.tower_layers import TowerKernels
from tessera.models.qwen2_vl.position_grid import GridViT
from tessera.models.qwen2_vl.vision import Merger


class Mergers(Merger):
    """Of the last layer; ``deep``: of others, whose norm is the whole group's."""

    deep: nn.ModuleList

    def __init__(self, size: int, group: int, text_size: int, count: int) -> None:
        super().__init__(size, group, text_size)
        self.deep = nn.ModuleList(Merger(size, group, text_size, whole=True) for _ in range(count))


class Qwen3ViT(GridViT):
    """As GridViT; a row [row size] is the projector's values, and then those of each deep layer in their order."""

    patch_bias = True
    epilogue = True  # its layers' GELU is the tanh form, as an epilogue's

    projector: Mergers

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        vision = config.vision
        self.deep: tuple[int, ...] = vision.deepstack_visual_indexes
        self.projector = Mergers(vision.embed_dim, self.merge**2, config.text.hidden_size, len(self.deep))

    @staticmethod
    def on_grid(places: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
        """The centres of the grid's corner cells lie on those of the picture's corner patches."""
        return places * (side - 1) / (size - 1).clamp(min=1)

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

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        """A layer's beside the rows that wait for the others, or all rows twice and the patches."""
        value, patches = self.position_embedding.itemsize, cost * self.merge**2
        waiting = cost * self.projector.linear2.out_features * len(self.deep) * value
        end = (2 * cost * self.row_shape[1] + 3 * patches * self.position_embedding.shape[1]) * value
        return max(super().activation_bytes(cost, scores) + waiting, end + self.grid_bytes(cost))
