"""The methods, each a way from a linear layer's weight to a smaller one: RTN, AWQ, GPTQ and FP8.

RTN rounds to the nearest of four bits, in groups. FP8 (E4M3) has a scale for each output channel, and its inputs are
quantized as they come, a scale for each row.

AWQ scales up the columns that matter, and clips the weights that do not, each by grid search on the outputs' error
(Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978). A column's scale is folded into what comes
before the layer, so that the product stays the same and nothing is left to do when it runs.

GPTQ rounds column by column, and lets the columns still to come make up for each column's error (Frantar et al., "GPTQ:
Accurate Post-Training Quantization", arXiv 2210.17323). Columns are taken in the order of their inputs' squares, the
largest first ("act-order"), but groups stay those of neighbouring columns and their grids are fixed beforehand: the
file needs no g_idx, and no kernel has to gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tessera.kernels.fp8_rows import E4M3, LARGEST, quantize_rows
from tessera.linear.formats.int4 import ZERO

METHODS = ("awq", "gptq", "rtn", "fp8")
LARGEST_CODE = 15
STEPS = 20  # of either of AWQ's searches, as in the paper's code
LEAST_CLIP = 0.5
BLOCK = 128  # columns
DAMPING = 0.01


@dataclass(frozen=True)
class Recipe:
    """``symmetric``: no zeros, the grid's middle is 0. ``pictures``: calibrated on pictures, not on words alone."""

    method: str
    group_size: int = 128
    symmetric: bool = False
    pictures: bool = True


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


class InputStatistics:
    """Of the inputs x of one linear layer, gathered from rows [n, in_features].

    An error D of the weight changes the outputs by x D^T, whose mean square over the rows is trace(D H D^T) for
    H = mean(x^T x): so GPTQ's Hessian is all that AWQ's search and every error of the report need as well.
    """

    def __init__(self, in_features: int, device: torch.device) -> None:
        self._weight = torch.zeros((), dtype=torch.float32, device=device)
        self._squares = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self._magnitudes = torch.zeros(in_features, dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        """x [n, in_features] of any floating dtype, ``weights`` float32 [n]: how much each row counts."""
        wide = x.detach().float()
        weighted = wide * weights[:, None]
        self._weight += weights.sum()
        self._squares.addmm_(weighted.T, wide)
        self._magnitudes += weighted.abs().sum(0)

    @property
    def hessian(self) -> torch.Tensor:
        """mean(x^T x), float32 [in_features, in_features]."""
        return self._squares / self._weight

    @property
    def magnitudes(self) -> torch.Tensor:
        """mean(|x|) of each column, float32 [in_features]."""
        return self._magnitudes / self._weight


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """The mean square that a ``difference`` [out, in] of the weight makes in the outputs, summed over them."""
    return float(((difference @ hessian) * difference).sum())


def search_scales(
    weights: Sequence[torch.Tensor], inputs: InputStatistics, group_size: int, symmetric: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Scales float32 [in] for the columns of ``weights`` (float32 [out, in] each), which share their inputs.

    Of magnitude ** power for power 0, 0.05, ... 0.95, those with the least error of all outputs together; power 0
    scales nothing.
    """
    magnitudes, hessian = inputs.magnitudes.clamp(min=1e-4), inputs.hessian
    best, least = torch.ones_like(magnitudes), float("inf")
    for step in range(STEPS):
        scales = magnitudes ** (step / STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for weight in weights:
            scaled = weight * scales
            grid = fit_grid(scaled, group_size, symmetric, dtype)
            rounded = grid.rounded(scaled.unflatten(1, (-1, group_size))).flatten(1)
            error += output_error(rounded / scales - weight, hessian)
        if error < least:
            best, least = scales, error
    return best


def clipped_grid(
    weight: torch.Tensor, inputs: InputStatistics, group_size: int, symmetric: bool, dtype: torch.dtype
) -> Grid:
    """The grid whose ends are drawn in, group by group, as far as it lessens the error of the group's own output."""
    grouped = weight.unflatten(1, (-1, group_size))
    count = grouped.shape[1]
    blocks = inputs.hessian.unflatten(0, (count, group_size)).unflatten(2, (count, group_size))
    diagonal = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, size, size]
    shrink = torch.ones(grouped.shape[:2], dtype=weight.dtype, device=weight.device)
    least = torch.full_like(shrink, float("inf"))
    for step in range(round(STEPS * (1 - LEAST_CLIP))):
        ratio = 1 - step / STEPS
        difference = fit_grid(weight, group_size, symmetric, dtype, ratio).rounded(grouped) - grouped
        moved = torch.einsum("ngi,gij->ngj", difference, diagonal)
        error = (moved * difference).sum(-1)
        better = error < least
        shrink, least = torch.where(better, ratio, shrink), torch.where(better, error, least)
    return fit_grid(weight, group_size, symmetric, dtype, shrink)


def gptq(weight: torch.Tensor, inputs: InputStatistics, grid: Grid, dtype: torch.dtype) -> Int4Weight:
    """``weight`` float32 [out, in] on ``grid``, its scales stored in ``dtype``."""
    hessian = inputs.hessian
    order = hessian.diagonal().argsort(descending=True, stable=True)
    inverse = _inverse_factor(hessian[order][:, order])
    remaining = weight[:, order].clone()
    group_of = (order // (weight.shape[1] // grid.scales.shape[1])).tolist()
    codes = torch.empty_like(remaining)
    for start in range(0, weight.shape[1], BLOCK):
        stop = min(start + BLOCK, weight.shape[1])
        errors = torch.empty_like(remaining[:, start:stop])
        for column in range(start, stop):
            scale, zero = grid.scales[:, group_of[column]], grid.zeros[:, group_of[column]]
            value = remaining[:, column]
            code = (value / scale + zero).round().clamp_(0, LARGEST_CODE)
            error = (value - (code - zero) * scale) / inverse[column, column]
            codes[:, column] = code
            remaining[:, column:stop] -= error[:, None] * inverse[column, column:stop]
            errors[:, column - start] = error
        remaining[:, stop:] -= errors @ inverse[start:stop, stop:]
    unordered = torch.empty_like(codes)
    unordered[:, order] = codes
    return Int4Weight(unordered.to(torch.uint8), grid.scales.to(dtype), grid.zeros.to(torch.uint8))


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32; columns that no input reached count as
    independent of all others."""
    wide = hessian.double()
    diagonal = wide.diagonal()
    diagonal += torch.where(diagonal == 0, 1.0, 0.0)
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    return torch.linalg.cholesky(inverse, upper=True).float()
