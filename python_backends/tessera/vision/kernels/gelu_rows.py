"""A GELU and the quantization of its rows in one pass: a read of two bytes and a write of one a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.fp8.kernels import MAX_SIZE, inverse_of, largest_of, scale_of
from tessera.fp8.rows import E4M3, Fp8Rows


def gelu_rows(x: torch.Tensor) -> Fp8Rows:
    """x [..., size], contiguous -> the rows of gelu(x), quantized: values [..., size], scales [..., 1].

    The GELU is the tanh form, with the GPU's own tanh (2**-11 off at most, which is what matrix products with such an
    epilogue take), rounded to x's dtype before the rows are quantized. An exact one takes twice as long.
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
        _gelu_rows[(n,)](x, *rows, size, BLOCK=block, HARDWARE_TANH=x.is_cuda, num_warps=warps)
    return rows


@triton.jit
def _gelu_rows(x, values, scales, size, BLOCK: tl.constexpr, HARDWARE_TANH: tl.constexpr):
    """One program a row. Without the hardware's tanh (in the interpreter): (1 + tanh(u)) / 2 is the sigmoid of 2u."""
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    bend = 0.7978845608028654 * (row + 0.044715 * row * row * row)
    if HARDWARE_TANH:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [bend], tl.float32, is_pure=True, pack=1)
        gelu = 0.5 * row * (1.0 + tanh)
    else:
        gelu = row / (1.0 + tl.exp(-2.0 * bend))
    wide = gelu.to(x.dtype.element_ty).to(tl.float32)
    row_scale = scale_of(largest_of(wide))
    tl.store(values + start + column, (wide * inverse_of(row_scale)).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + tl.program_id(0), row_scale)
