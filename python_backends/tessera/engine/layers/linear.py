"""Linear layers whose storage a quantization scheme decides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tessera.engine.quantization.scheme import LinearScheme


class Linear(nn.Module):
    """y = x W^T + b over one or several fused parts.

    ``parts`` maps each part's name to its output features, in the order of the fused output.
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
        self._rows: dict[str, slice] = {}
        start = 0
        for name, features in parts.items():
            self._rows[name] = slice(start, start + features)
            start += features
        self.scheme = scheme
        scheme.create(self, dtype, device)

    def rows(self, part: str) -> slice:
        """The part's output features."""
        return self._rows[part]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self, x)
