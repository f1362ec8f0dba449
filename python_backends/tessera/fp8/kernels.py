"""Rows quantized to e4m3 by triton, and the steps of it that kernels with another computation in front share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SIZE = 32768

# As in rows.py, which imports this file.
_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(1e-12)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor) -> None:
    """:func:`tessera.fp8.rows.quantize_rows`, bit for bit, into ``values`` and ``scales``.

    ValueError for rows of over 32768 values or a strided x.
    """
    n, size = x.shape
    if size > MAX_SIZE or not x.is_contiguous():
        raise ValueError(f"quantize_rows: contiguous rows of at most {MAX_SIZE} values, not {list(x.shape)}")
    block = triton.next_power_of_2(size)
    if n:
        warps = min(max(block // 512, 1), 16)
        _quantize_rows[(n,)](x, scale, values, scales, size, BLOCK=block, num_warps=warps)


@triton.jit
def row_scale(row):
    """float32 values of one row -> its scale. What is no number stays one in the row's values."""
    return tl.maximum(tl.div_rn(tl.max(tl.abs(row)), _LARGEST), _SMALLEST_SCALE)


@triton.jit
def quotients(row, divisor):
    """row / divisor, rounded as IEEE division rounds, at the cost of a product and two fused ones (Markstein).

    A quotient off by a bit would now and then round to another e4m3 value than the twin's. Triton's interpreter does
    not fuse, so there a quotient may be off by a bit.
    """
    inverse = tl.div_rn(1.0, divisor)
    nearly = row * inverse
    return tl.fma(tl.fma(-nearly, divisor, row), inverse, nearly)


@triton.jit
def _quantize_rows(x, scale, values, scales, size, BLOCK: tl.constexpr):
    """One program a row."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    row = tl.load(x + at * size + column, mask=inside, other=0.0).to(tl.float32)
    divisor = row_scale(row) if scale is None else tl.load(scale).to(tl.float32)
    # IEEE division: a quotient off by a bit would now and then round to another e4m3 value than the twin's.
    quotient = tl.div_rn(row, divisor)
    if scale is not None:
        quotient = tl.clamp(quotient, -_LARGEST, _LARGEST)
    tl.store(values + at * size + column, quotient.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + at, divisor)
