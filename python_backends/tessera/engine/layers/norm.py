"""Root-mean-square normalisation with the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from tessera.engine.kernels.selection import layer_kernels


class RmsNorm(nn.Module):
    """Adds to the residual stream and normalises it: the two belong together, so that one kernel can do both."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=device))
        self._eps = eps
        self._add_and_normalise = layer_kernels(device.type).add_rms_norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, size] and residual [n, size] or None -> (normalised sum, sum); residual may be overwritten."""
        return self._add_and_normalise(x, residual, self.get_buffer("weight"), self._eps)
