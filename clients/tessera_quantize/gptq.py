"""GPTQ: round column by column, and let the columns still to come make up for each column's error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization", arXiv 2210.17323. Columns are taken in the order of
their inputs' squares, the largest first ("act-order"), but groups stay those of neighbouring columns and their grids
are fixed beforehand: the file needs no g_idx, and no kernel has to gather.
"""

from __future__ import annotations

import torch

from tessera_quantize.rounding import LARGEST_CODE, Grid, Int4Weight
from tessera_quantize.statistics import InputStatistics

BLOCK = 128
DAMPING = 0.01


def quantize(
    weight: torch.Tensor, inputs: InputStatistics, grid: Grid, group_size: int, dtype: torch.dtype
) -> Int4Weight:
    """``weight`` float32 [out, in] on ``grid``, its scales stored in ``dtype``."""
    hessian = inputs.hessian
    order = hessian.diagonal().argsort(descending=True, stable=True)
    inverse = _inverse_factor(hessian[order][:, order])
    remaining = weight[:, order].clone()
    group_of = (order // group_size).tolist()
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
