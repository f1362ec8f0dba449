"""FP8 (E4M3) with a scale for each output channel; inputs are quantized as they come, a scale for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tessera.fp8.rows import quantize_rows, quantize_weight


class Fp8Weight(NamedTuple):
    """W = values * scales. ``values`` float8_e4m3fn [out, in], ``scales`` float32 [out, 1]."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.values.float() * self.scales


def quantize(weight: torch.Tensor) -> Fp8Weight:
    """``weight`` float32 [out, in]: each channel's largest magnitude becomes 448."""
    values, scales = quantize_weight(weight)
    return Fp8Weight(values, scales[:, None])


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, size] as an FP8 product sees it, of x's dtype."""
    return quantize_rows(x.contiguous()).dequantized().to(x.dtype)
