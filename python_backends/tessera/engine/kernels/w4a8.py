"""Linear layers of 4-bit weights for few rows in e4m3: W4A16's bytes at twice the tensor cores' speed."""

from __future__ import annotations

from functools import cache

import torch
import triton

from tessera.engine.kernels.skinny_linear import multiprocessors
from tessera.engine.kernels.w4_layout import E4M3_CHUNK, PackedW4
from tessera.engine.kernels.w4_product import MAX_ROWS, W4Plan, multiply, padded_rows, shares
from tessera.fp8.rows import E4M3, Fp8Rows


@cache
def plan_w4a8(m: int, n: int, blocks: int, sms: int) -> W4Plan:
    """As :func:`tessera.engine.kernels.w4a16.plan_w4a16`."""
    rows, tiles = padded_rows(m), triton.cdiv(n, 64)
    resident, wide = {8: (4, 3), 16: (3, 2), 32: (2, 2), 64: (2, 0)}[rows]  # programs on a multiprocessor
    if wide and tiles > resident * sms:  # wide tiles fetch x, and add it up, half as often
        return W4Plan(128, shares(triton.cdiv(n, 128), blocks, wide * sms), 4, 3)
    return W4Plan(64, shares(tiles, blocks, resident * sms), 4, 3)


def w4a8_linear(
    x: Fp8Rows, weights: PackedW4, bias: torch.Tensor | None, dtype: torch.dtype, plan: W4Plan | None = None
) -> torch.Tensor:
    """x [m, k] contiguous, W [n, k], bias [n] -> x W^T + b [m, n] of ``dtype``; sums in float32.

    ``plan`` replaces :func:`plan_w4a8`'s choice. ValueError for m over 64, chunks below 32, other shapes and dtypes.
    """
    return _launch(x, weights, bias, dtype, False, plan)


def w4a8_gate_up(
    x: Fp8Rows, weights: PackedW4, bias: torch.Tensor | None, dtype: torch.dtype, plan: W4Plan | None = None
) -> torch.Tensor:
    """x [m, k], W [2 * size, k] with the gate's rows first -> silu(gate) * up [m, size] of ``dtype``.

    As :func:`w4a8_linear` followed by silu_and_multiply, with the same roundings, in one launch.
    """
    return _launch(x, weights, bias, dtype, True, plan)


def _launch(
    x: Fp8Rows, weights: PackedW4, bias: torch.Tensor | None, dtype: torch.dtype, gate: bool, plan: W4Plan | None
) -> torch.Tensor:
    (m, k), (n, columns) = x.values.shape, weights.shape
    blocks, _, chunk = weights.codes.shape
    if not 1 <= m <= MAX_ROWS or columns != k or chunk < E4M3_CHUNK:
        raise ValueError(
            f"w4a8: x [1..{MAX_ROWS}, k] and W [n, k] in chunks of {E4M3_CHUNK} or more, "
            f"not {list(x.values.shape)} and {list(weights.shape)} in chunks of {chunk}"
        )
    if x.values.dtype != E4M3 or not x.values.is_contiguous():
        raise ValueError(f"w4a8: x contiguous and float8_e4m3fn, not {x.values.dtype}")
    plan = plan or plan_w4a8(m, n, blocks, multiprocessors(weights.codes.device))
    return multiply(x.values, x.scales, weights, bias, dtype, gate, plan)
