"""AWQ: scale up the columns that matter, and clip the weights that do not, each by grid search on the outputs' error.

Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978. A column's scale is folded into what
comes before the layer, so that the product stays the same and nothing is left to do when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera_quantize.rounding import Grid, fit_grid
from tessera_quantize.statistics import InputStatistics, output_error

STEPS = 20  # of either search, as in the paper's code
LEAST_CLIP = 0.5


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
