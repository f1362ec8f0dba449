"""Root-mean-square normalisation with the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    """Adds to the residual stream and normalises it: the two belong together, so that one kernel can do both."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=device))
        self._eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, size] and residual [n, size] or None -> (normalised sum, sum); residual may be overwritten."""
        residual = x if residual is None else residual.add_(x)
        return self._normalise(residual), residual

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)  # type: ignore[arg-type]
        # As the reference: statistics in float32, rounded before the weight is applied.
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self._eps).to(x.dtype)  # type: ignore[operator]
