"""FP8 (E4M3) with a scale for each output channel; inputs are quantized as they come, a scale for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tessera.kernels.fp8_rows import E4M3, LARGEST, quantize_rows


class Fp8Weight(NamedTuple):
    """W = values * scales. ``values`` float8_e4m3fn [out, in], ``scales`` [out, 1] of the dtype they are stored in."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.values.float() * self.scales.float()


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> Fp8Weight:
    """``weight`` float32 [out, in]: each channel's largest magnitude becomes 448, but for the rounding of its scale.

    Scales are of the checkpoint's ``dtype``: transformers multiplies by them and keeps what comes out.
    """
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return Fp8Weight((weight / scales.float()).clamp(-LARGEST, LARGEST).to(E4M3), scales)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, size] as an FP8 product sees it, of x's dtype."""
    return quantize_rows(x.contiguous()).dequantized().to(x.dtype)
