"""PaddleOCR-VL's tower: SigLIP's, at a picture's own size -> rows of the language model.

The rules are those of transformers ``modeling_paddleocr_vl.py``, which takes patches row by row; here they come in
groups, as Qwen2-VL's. Beside the rotary of two axes each patch has a position of a grid.
"""

from typing import Any

import torch
from torch import nn

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.models.qwen2_vl.position_grid import GridViT
from tessera.models.qwen2_vl.vision import Merger


class Projector(Merger):
    """The tower's last norm, then the projector: its norm, and groups through Linear, GELU, Linear."""

    def __init__(self, size: int, group: int, text_size: int, eps: float) -> None:
        super().__init__(size, group, text_size)
        self.norm.eps = 1e-5
        self.final_norm = nn.LayerNorm(size, eps=eps)

    def forward(self, x: Any, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        return super().forward(self.final_norm(x), kernels)


class PaddleOcrViT(GridViT):
    """As GridViT."""

    patch_bias = qkv_apart = True

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        vision, self.frames = config.vision, ()  # its kernels have two dimensions
        for module in self.layers.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = vision.layer_norm_eps
        group, text_size = self.merge**2, config.text.hidden_size
        self.projector = Projector(vision.hidden_size, group, text_size, vision.layer_norm_eps)

    @staticmethod
    def on_grid(places: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
        """The grid's cells cover the picture. So do the authors' code, by which the weights were trained, vLLM and
        transformers 5.3; transformers 5.14 and 5.17 lay the corner cells' centres on those of the corner patches."""
        return (places + 0.5) * side / size - 0.5
