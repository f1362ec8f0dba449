"""Linear layers and the schemes that decide how they store, load and apply their weights: one file per quantization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from tessera.engine.kernels.selection import layer_kernels
from tessera.errors import CheckpointError

#: copies one stored tensor to where it belongs
Target = Callable[[torch.Tensor], None]


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


class Linear(nn.Module):
    """y = x W^T + b over one or several fused parts.

    ``parts`` maps each part's name to its output features, in the order of the fused output; ``rows`` maps it to its
    range of them. ``skinny_rows``: up to so many rows a product for few rows is the fastest, which only measuring
    tells.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool,
        scheme: LinearScheme,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.has_bias = bias
        self.skinny_rows = 0
        ends = accumulate(parts.values())
        self.rows = {name: slice(end - size, end) for (name, size), end in zip(parts.items(), ends)}
        self.scheme = scheme
        scheme.create(self, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self, x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Of a layer whose two parts are gate and up: silu(gate) * up [n, out_features / 2]."""
        return self.scheme.apply_gated(self, x)

    def targets(self, prefix: str, part: str) -> dict[str, Target]:
        """What fills one part: ``prefix``.weight and whatever else the scheme wants."""
        names = self.scheme.tensor_names(self)
        return {f"{prefix}.{name}": partial(self.scheme.load, self, part, name) for name in names}


#: a module's name -> its scheme
SchemeSelector = Callable[[str], LinearScheme]
