"""AWQ and GPTQ, and what both need to know of a linear layer's inputs, however many rows of them there were.

AWQ scales up the columns that matter, and clips the weights that do not, each by grid search on the outputs' error
(Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978). A column's scale is folded into what comes
before the layer, so that the product stays the same and nothing is left to do when it runs.

GPTQ rounds column by column, and lets the columns still to come make up for each column's error (Frantar et al., "GPTQ:
Accurate Post-Training Quantization", arXiv 2210.17323). Columns are taken in the order of their inputs' squares, the
largest first ("act-order"), but groups stay those of neighbouring columns and their grids are fixed beforehand: the
file needs no g_idx, and no kernel has to gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera_quantize.rounding import LARGEST_CODE, Grid, Int4Weight, fit_grid

STEPS = 20  # of either of AWQ's searches, as in the paper's code
LEAST_CLIP = 0.5
BLOCK = 128  # columns
DAMPING = 0.01


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
    weights: Sequence[torch.Tensor],
    inputs: InputStatistics,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
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
