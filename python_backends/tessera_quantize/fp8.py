"""FP8 (E4M3) with a scale for each output channel; inputs are quantized as they come, a scale for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = 448.0


class Fp8Weight(NamedTuple):
    """W = values * scales. ``values`` float8_e4m3fn [out, in], ``scales`` float32 [out, 1]."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.values.float() * self.scales


def quantize(weight: torch.Tensor) -> Fp8Weight:
    """``weight`` float32 [out, in]: each channel's largest magnitude becomes 448. Activations quantize the same way."""
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
    return Fp8Weight((weight / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, size] as an FP8 product would see it, of x's dtype."""
    return quantize(x.float()).dequantized().to(x.dtype)
