"""Root-mean-square normalisation with the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from tessera.engine.kernels.selection import layer_kernels
from tessera.engine.kernels.unfinished import Unfinished
from tessera.fp8.rows import Fp8Rows


class RmsNorm(nn.Module):
    """Adds to the residual stream and normalises it: the two belong together, so that one kernel can do both."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=device))
        self._eps = eps
        self._add_and_normalise = layer_kernels(device.type).add_rms_norm

    def forward(
        self, x: torch.Tensor | Unfinished, residual: torch.Tensor | None, fp8: bool = False
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
        """x [n, size] and residual [n, size] or None -> (normalised sum, sum); residual may be overwritten.

        ``fp8``: the normalised sum is quantized, a row at a time.
        """
        return self._add_and_normalise(x, residual, self.get_buffer("weight"), self._eps, fp8)
