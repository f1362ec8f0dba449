"""Quantized weights, and the plainest way to make them: rounding to the nearest (RTN).

Of four bits, in groups; or FP8 (E4M3) with a scale for each output channel, whose inputs are quantized as they come, a
scale for each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tessera.kernels.fp8_rows import E4M3, LARGEST, quantize_rows
from tessera.linear.formats.int4 import ZERO

LARGEST_CODE = 15


class Int4Weight(NamedTuple):
    """W = (codes - zeros) * scales, each scale and zero for a group of neighbouring columns of one row.

    ``codes`` uint8 [out, in], 0..15; ``scales`` [out, groups] of the dtype they are stored in; ``zeros`` uint8
    [out, groups], 0..15, all 8 where the grid is symmetric.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


class Grid(NamedTuple):
    """The sixteen values that a group's weights may take; float32 [out, groups] each, scales as they are stored."""

    scales: torch.Tensor
    zeros: torch.Tensor

    def codes(self, grouped: torch.Tensor) -> torch.Tensor:
        """The nearest codes of ``grouped`` [out, groups, size], float32 of the same shape."""
        steps = grouped / self.scales[..., None] + self.zeros[..., None]
        return steps.round().clamp_(0, LARGEST_CODE)

    def rounded(self, grouped: torch.Tensor) -> torch.Tensor:
        """The nearest values of ``grouped`` [out, groups, size]."""
        return (self.codes(grouped) - self.zeros[..., None]) * self.scales[..., None]


def fit_grid(
    weight: torch.Tensor, group_size: int, symmetric: bool, dtype: torch.dtype, shrink: torch.Tensor | float = 1.0
) -> Grid:
    """The grid from each group's least to its greatest weight, both times ``shrink`` (a number, or [out, groups]).

    ``weight`` float32 [out, in]. Zero is always on the grid. Scales are rounded to ``dtype``, in which they will be
    stored, before anything is rounded to them.
    """
    grouped = weight.unflatten(1, (-1, group_size))
    low, high = grouped.amin(-1).clamp(max=0) * shrink, grouped.amax(-1).clamp(min=0) * shrink
    width = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = (width / LARGEST_CODE).to(dtype).float()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # a group of zeros
    zeros = torch.full_like(scales, ZERO) if symmetric else (-low / scales).round().clamp_(0, LARGEST_CODE)
    return Grid(scales, zeros)


def round_to(grid: Grid, weight: torch.Tensor, dtype: torch.dtype) -> Int4Weight:
    """``weight`` float32 [out, in] rounded to the nearest on its grid, scales of ``dtype``: RTN."""
    codes = grid.codes(weight.unflatten(1, (grid.scales.shape[1], -1))).flatten(1)
    return Int4Weight(codes.to(torch.uint8), grid.scales.to(dtype), grid.zeros.to(torch.uint8))


class Fp8Weight(NamedTuple):
    """W = values * scales. ``values`` float8_e4m3fn [out, in], ``scales`` [out, 1] of the dtype they are stored in."""

    values: torch.Tensor
    scales: torch.Tensor


def to_fp8(weight: torch.Tensor, dtype: torch.dtype) -> Fp8Weight:
    """``weight`` float32 [out, in]: each channel's largest magnitude becomes 448, but for the rounding of its scale.

    Scales are of the checkpoint's ``dtype``: transformers multiplies by them and keeps what comes out.
    """
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return Fp8Weight((weight / scales.float()).clamp(-LARGEST, LARGEST).to(E4M3), scales)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, size] as an FP8 product sees it, of x's dtype."""
    return quantize_rows(x.contiguous()).dequantized().to(x.dtype)
