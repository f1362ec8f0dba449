"""Root-mean-square normalisation with the residual stream.

Token embeddings, the rows that pictures put in their place, and the output head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.operands import Unfinished
from tessera.kernels.tuning import layer_kernels


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


class Embedding(nn.Module):
    """``weight`` [vocabulary, hidden]."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty((vocab_size, size), dtype=dtype, device=device))

    def forward(
        self, ids: torch.Tensor, image_index: torch.Tensor | None, image_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """ids int64 [n] -> [n, hidden]; ``image_rows`` [r, hidden] replace the rows ``image_index`` [r]."""
        rows = F.embedding(ids, self.weight)  # type: ignore[arg-type]
        return rows if image_index is None or image_rows is None else rows.index_copy_(0, image_index, image_rows)
