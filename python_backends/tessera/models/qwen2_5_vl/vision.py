"""Qwen2.5-VL's tower: Qwen2-VL's, with attention within windows in most layers, RMS norms and gated MLPs.

The rules are those of transformers ``modeling_qwen2_5_vl.py`` and ``vision_utils.py``. Groups of patches go through the
layers window by window: they are put into this order as pixels, where they are the smallest, and their rows back into
reading order. Windows that the picture's edge cuts come last in it, equal ones beside each other, for ways of attention
that take equal lengths together.
"""

from collections.abc import Set
from functools import lru_cache, partial

import torch
from torch import nn

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.weights import Target, copy_whole
from tessera.kernels.fp8_rows import MULTIPLE, Fp8Rows
from tessera.kernels.tower_layers import PLAIN, TowerKernels
from tessera.kernels.transfer import to_device
from tessera.models.family import units_of
from tessera.models.qwen2_vl.patch_tower import Reach
from tessera.models.qwen2_vl.vision import EPS, Qwen2ViT
from tessera.models.tower import Wires

_INDEX = 8  # bytes of a group's place in either order


class GatedMLP(nn.Module):
    """silu(gate) * up, and a linear layer; gate and up are one matrix.

    ``inner`` is filled up to a multiple of 16, which matrix units and FP8 want, with zeros, which add nothing.
    """

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.inner, padded = inner, -(-inner // MULTIPLE) * MULTIPLE
        self.gate_up = nn.Linear(size, 2 * padded)
        self.linear2 = nn.Linear(padded, size)
        for filled in (self.gate_up.weight, self.gate_up.bias, self.linear2.weight):
            nn.init.zeros_(filled)

    def forward(self, x: torch.Tensor | Fp8Rows, kernels: TowerKernels = PLAIN) -> torch.Tensor:
        return self.linear2(kernels.linear_and_gate(x, self.gate_up))

    def parts(self) -> dict[str, torch.Tensor]:
        """What a checkpoint stores, by name, as views."""
        parts = {"linear2.weight": self.linear2.weight[:, : self.inner], "linear2.bias": self.linear2.bias}
        for name, whole in self.gate_up.named_parameters():
            gates, ups = whole.chunk(2)
            parts |= {f"gate_proj.{name}": gates[: self.inner], f"up_proj.{name}": ups[: self.inner]}
        return parts


class Qwen2_5ViT(Qwen2ViT):
    """As Qwen2ViT."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        vision = config.vision
        self.projector.norm = self.norm(vision.hidden_size)
        self.window, self.group = vision.window, self.merge**2
        whole = self.group * self.window**2
        self.reaches.append(Reach("windows", (whole, whole, whole, -(-whole // 2)), least=self.group * self.window))
        self.reach_of_layers = [int(index not in vision.fullatt_block_indexes) for index in range(vision.depth)]

    def norm(self, size: int) -> nn.RMSNorm:
        return nn.RMSNorm(size, EPS)

    def mlp(self, config: CheckpointConfig) -> nn.Module:
        return GatedMLP(config.vision.hidden_size, config.vision.intermediate_size)

    def order(self, wires: Wires, device: torch.device) -> torch.Tensor:
        orders, start = [], 0
        for _, height, width, *kept in wires:
            orders.append(self._windows(height, width, *kept)[0] + start)
            start += orders[-1].shape[1]
        return to_device(torch.cat(orders, dim=1), device)

    def lengths(self, wires: Wires) -> list[list[int]]:
        windows = [count for _, height, width, *kept in wires for count in self._windows(height, width, *kept)[1]]
        return [*super().lengths(wires), windows]

    def grid(self, height: int, width: int, *kept: bytes) -> torch.Tensor:
        places = super().grid(height, width, *kept).unflatten(0, (-1, self.group))
        return places[self._windows(height, width, *kept)[0][0]].flatten(0, 1)

    def _windows(self, height: int, width: int, *kept: bytes) -> tuple[torch.Tensor, list[int]]:
        return _windows(height // self.merge, width // self.merge, self.window, self.group, *kept)

    def activation_bytes(self, cost: int, scores: bool = False) -> int:
        """As Qwen2ViT's; and beside it the pixels in the order of the windows, and that order."""
        order = cost * (self.group * self.patch_embedding.in_features + 2 * _INDEX)
        return super().activation_bytes(cost, scores) + order

    def targets(self, stored: Set[str]) -> dict[str, Target]:
        targets = {name: target for name, target in super().targets(stored).items() if ".mlp." not in name}
        for name, module in self.named_modules():
            if isinstance(module, GatedMLP):
                targets |= {f"{name}.{part}": partial(copy_whole, tensor) for part, tensor in module.parts().items()}
        return targets


@lru_cache(maxsize=32)
def _windows(
    down: int, across: int, side: int, group: int, kept: bytes | None = None
) -> tuple[torch.Tensor, list[int]]:
    """A picture of down x across groups of ``group`` patches, of which some may be ``kept`` alone, in windows of up to
    ``side`` x ``side``, the larger ones first: the order of its groups as Qwen2ViT.order has it, and how many patches
    each window has."""
    row, column = torch.meshgrid(torch.arange(down) // side, torch.arange(across) // side, indexing="ij")
    window = (row * -(-across // side) + column).flatten()
    if kept is not None:
        window = window[torch.from_numpy(units_of(kept, len(window)))]
    counts = window.bincount()
    larger_first = counts.argsort(descending=True, stable=True)
    order = larger_first.argsort()[window].argsort(stable=True)
    return torch.stack((order, order.argsort())), (counts[larger_first][: int((counts > 0).sum())] * group).tolist()
