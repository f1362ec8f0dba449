"""How a linear layer stores, loads and applies its weights. A quantization is one file with one scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tessera.engine.kernels.selection import layer_kernels
from tessera.errors import CheckpointError

if TYPE_CHECKING:
    from tessera.engine.layers.linear import Linear


class LinearScheme(ABC):
    """Owns the tensors of a :class:`Linear`, whose parts (such as q, k and v) are stored fused.

    A part's tensors are named as in the checkpoint after the module's name: "weight", "bias", "scales".
    """

    @abstractmethod
    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Registers the layer's empty tensors."""

    @abstractmethod
    def tensor_names(self, layer: Linear) -> tuple[str, ...]:
        """The tensors that a checkpoint must hold for each part."""

    @abstractmethod
    def load(self, layer: Linear, part: str, name: str, tensor: torch.Tensor) -> None:
        """Copies one tensor of one part in; CheckpointError if its shape is wrong."""

    @abstractmethod
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features]."""

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [n, in_features] -> silu(first half of the outputs) * second half [n, out_features / 2]."""
        return layer_kernels(x.device.type).silu_and_multiply(self.apply(layer, x))

    def finish(self, layer: Linear) -> None:  # noqa: B027 - most schemes need nothing here
        """Called once when everything is loaded, for instance to repack."""


def copy_whole(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fills ``target``; CheckpointError if its shape is another."""
    if tensor.shape != target.shape:
        raise CheckpointError(f"shape {list(tensor.shape)}, expected {list(target.shape)}")
    target.copy_(tensor)


SchemeSelector = Callable[[str], LinearScheme]
