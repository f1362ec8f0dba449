"""GELUs over a matrix product's rows in one pass: quick_gelu in place; any, its rows quantized, so that a value costs a
read of two bytes and a write of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.fp8.kernels import MAX_SIZE, inverse_of, largest_of, scale_of
from tessera.fp8.rows import E4M3, Fp8Rows

_BLOCK = 2048  # of quick_gelu's, 16 values a thread
_TOGETHER = tl.constexpr(8)  # values of 16 bits in one load


def quick_gelu_in_place(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] of any floating dtype -> x * sigmoid(1.702 x), computed in float32, in its place.

    ValueError for a tensor that is not contiguous, or a size that 8 does not divide.
    """
    if not x.is_contiguous() or x.shape[-1] % _TOGETHER.value:
        raise ValueError(f"quick_gelu_in_place: contiguous rows of a multiple of 8 values, not {list(x.shape)}")
    if x.numel():
        blocks, eights = triton.cdiv(x.numel(), _BLOCK), x.numel() // _TOGETHER.value
        _quick_gelu_in_place[(blocks,)](x, eights, BLOCK=_BLOCK, num_warps=4)
    return x


def gelu_rows(x: torch.Tensor, quick: bool = False) -> Fp8Rows:
    """x [..., size], contiguous -> the rows of gelu(x), quantized: values [..., size], scales [..., 1].

    ``quick``: quick_gelu. Else the GELU is the tanh form, with the GPU's own tanh (2**-11 off at most, which is what
    matrix products with such an epilogue take); an exact one takes twice as long. Either is rounded to x's dtype before
    the rows are quantized.
    ValueError for rows of over 32768 values or a tensor that is not contiguous.
    """
    size = x.shape[-1]
    if size > MAX_SIZE or not x.is_contiguous():
        raise ValueError(f"gelu_rows: contiguous rows of at most {MAX_SIZE} values, not {list(x.shape)}")
    rows = Fp8Rows(torch.empty_like(x, dtype=E4M3), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
    block = triton.next_power_of_2(size)
    # 32 values a thread.
    warps = min(max(block // 1024, 1), 16)
    if n := x.numel() // size:
        _gelu_rows[(n,)](x, *rows, size, BLOCK=block, QUICK=quick, HARDWARE_TANH=x.is_cuda, num_warps=warps)
    return rows


@triton.jit
def _quick_gelu(x):
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit(do_not_specialize=["eights"])
def _quick_gelu_in_place(x, eights, BLOCK: tl.constexpr):
    """One program a block; in eights, so that the compiler knows that a load of 16 bytes is inside as a whole."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eights.to(tl.int64) * _TOGETHER
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, _quick_gelu(values).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_rows(x, values, scales, size, BLOCK: tl.constexpr, QUICK: tl.constexpr, HARDWARE_TANH: tl.constexpr):
    """One program a row. Without the hardware's tanh (in the interpreter): (1 + tanh(u)) / 2 is the sigmoid of 2u."""
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    bend = 0.7978845608028654 * (row + 0.044715 * row * row * row)
    if QUICK:
        gelu = _quick_gelu(row)
    elif HARDWARE_TANH:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [bend], tl.float32, is_pure=True, pack=1)
        gelu = 0.5 * row * (1.0 + tanh)
    else:
        gelu = row / (1.0 + tl.exp(-2.0 * bend))
    wide = gelu.to(x.dtype.element_ty).to(tl.float32)
    row_scale = scale_of(largest_of(wide))
    tl.store(values + start + column, (wide * inverse_of(row_scale)).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + tl.program_id(0), row_scale)
