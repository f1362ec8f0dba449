"""Linear layers of 4-bit weights for few rows (decode), multiplied in the rows' own dtype."""

from __future__ import annotations

from functools import cache

import torch
import triton

from tessera.engine.kernels.skinny_linear import multiprocessors
from tessera.engine.kernels.w4_layout import PackedW4
from tessera.engine.kernels.w4_product import MAX_ROWS, W4Plan, multiply, padded_rows, shares


@cache
def plan_w4a16(m: int, n: int, blocks: int, sms: int) -> W4Plan:
    """How to multiply m rows by n rows of weights of ``blocks`` blocks of k on ``sms`` multiprocessors.

    A pure function; swept on an H200 by loadtest/bench_linear.py.
    """
    rows, tiles = padded_rows(m), triton.cdiv(n, 64)
    small = tiles * blocks <= 12 * sms
    # Programs that a multiprocessor holds at a time, and the stages that their shared memory leaves each of them.
    resident, stages = {8: (4, 3), 16: (2, 5) if small else (3, 4), 32: (2, 3), 64: (1, 4)}[rows]
    if rows <= 16 and tiles > resident * sms:  # wide tiles fetch x half as often
        return W4Plan(128, shares(triton.cdiv(n, 128), blocks, 2 * sms), 4, 3)
    if rows == MAX_ROWS and tiles * blocks > 6 * sms:
        return W4Plan(128, shares(triton.cdiv(n, 128), blocks, sms), 8, 3)
    return W4Plan(64, shares(tiles, blocks, resident * sms), 4, stages)


def w4a16_linear(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None = None, plan: W4Plan | None = None
) -> torch.Tensor:
    """x [m, k] contiguous, bfloat16 or float16, W [n, k], bias [n] -> x W^T + b [m, n]; sums in float32.

    ``plan`` replaces :func:`plan_w4a16`'s choice. ValueError for m over 64 and other shapes and dtypes.
    """
    return _launch(x, weights, bias, False, plan)


def w4a16_gate_up(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None = None, plan: W4Plan | None = None
) -> torch.Tensor:
    """x [m, k], W [2 * size, k] with the gate's rows first -> silu(gate) * up [m, size].

    As :func:`w4a16_linear` followed by silu_and_multiply, with the same roundings, in one launch.
    """
    return _launch(x, weights, bias, True, plan)


def _launch(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None, gate: bool, plan: W4Plan | None
) -> torch.Tensor:
    (m, k), (n, columns) = x.shape, weights.shape
    if not 1 <= m <= MAX_ROWS or columns != k:
        raise ValueError(f"w4a16: x [1..{MAX_ROWS}, k] and W [n, k], not {list(x.shape)} and {list(weights.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        raise ValueError(f"w4a16: x contiguous and bfloat16 or float16, not {x.dtype}")
    plan = plan or plan_w4a16(m, n, len(weights.codes), multiprocessors(x.device))
    return multiply(x, None, weights, bias, x.dtype, gate, plan)
