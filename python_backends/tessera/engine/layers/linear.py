"""Linear layers whose storage a quantization scheme decides."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import nn

from tessera.engine.quantization.scheme import LinearScheme


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
