"""Products in e4m3 for up to 256 rows: as :mod:`tessera.engine.kernels.skinny_linear`, over half the bytes.

The scales of x's and of the weight's rows meet the sums at the end, before a split's partial is written.
"""

from __future__ import annotations

from functools import cache

import torch
import triton

from tessera.engine.kernels.add_partials import add_partials
from tessera.engine.kernels.skinny_linear import (
    SkinnyPlan,
    check_plan,
    multiply,
    multiprocessors,
    padded_rows,
)
from tessera.fp8.rows import E4M3, Fp8Rows

MAX_ROWS = 256
K_MULTIPLE = 128


@cache
def plan_skinny_fp8(m: int, n: int, k: int, sms: int) -> SkinnyPlan:
    """How to multiply x [m, k] by weights [n, k] on ``sms`` multiprocessors; a pure function.

    Two programs a multiprocessor share k where the rows alone make too few. Where the rows make more, three stages
    leave room for all programs at once, so that none begins when others have ended (swept on an H200). Beyond 64 rows
    the bytes from the L2 cache count: tiles as large as one program a multiprocessor holds, and each weight read once;
    only of few columns by 256 rows the tiles are halved, which leaves less to add up or more stages.
    """
    rows = padded_rows(m)
    if rows == 256 and n < sms * 64:
        block_n = 64 if k <= 8192 else 128
        splits = 1 if block_n == 64 else max(1, sms // (2 * triton.cdiv(n, block_n)))
        return SkinnyPlan(block_n, K_MULTIPLE, splits, warps=4 if block_n == 64 else 8, stages=6, block_m=128)
    if rows > 64:
        splits = max(1, min(sms // triton.cdiv(n, 128), k // 512))
        return SkinnyPlan(128, K_MULTIPLE, splits, warps=8, stages=5 if rows == 128 else 4, block_m=rows)
    if rows > 16 and n >= 2 * sms * 128:
        return SkinnyPlan(128 if rows == 64 else 64, K_MULTIPLE, stages=3)
    block_k, stages = (256, 4) if rows == 16 and k % 256 == 0 else (K_MULTIPLE, 5)
    splits = max(1, min(2 * sms // triton.cdiv(n, 64), k // 512))
    return SkinnyPlan(64, block_k, splits, stages=stages)


def skinny_fp8(
    x: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    plan: SkinnyPlan | None = None,
) -> torch.Tensor:
    """As :func:`tessera.fp8.rows.fp8_linear`, for x of 1 to 256 rows and a k that is a multiple of 128.

    ``plan`` replaces :func:`plan_skinny_fp8`'s choice. ValueError for other shapes, dtypes, strides or plans.
    """
    (m, k), n = x.values.shape, len(weight)
    if not 1 <= m <= MAX_ROWS or weight.shape[1] != k or k % K_MULTIPLE:
        raise ValueError(
            f"skinny_fp8: x [1..{MAX_ROWS}, k] and weight [n, k], k a multiple of {K_MULTIPLE}, "
            f"not {list(x.values.shape)} and {list(weight.shape)}"
        )
    if x.values.dtype != E4M3 or weight.dtype != E4M3 or not (x.values.is_contiguous() and weight.is_contiguous()):
        raise ValueError("skinny_fp8: x and weight must be contiguous and of float8_e4m3fn")
    plan = plan or plan_skinny_fp8(m, n, k, multiprocessors(weight.device))
    check_plan(plan, k)
    product = multiply(x.values, weight, x.scales, scales, bias, dtype, plan)
    return product if isinstance(product, torch.Tensor) else add_partials(*product)
