"""The gated activation in one pass.

GELUs over a matrix product's rows in one pass: quick_gelu in place; any, its rows quantized, so that a value costs a
read of two bytes and a write of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import (
    MAX_SIZE,
    early_launch,
    load_halves,
    rescale,
    row_blocks,
    row_warps,
    store_halves,
    store_row,
    wait_for_previous,
)
from tessera.kernels.fp8_rows import Fp8Rows, empty_rows

_BLOCK = 2048


#: the scales of x's rows [n, 1] and of a weight's rows [m], both float32
Scales = tuple[torch.Tensor, torch.Tensor]


def silu_and_multiply(gate_up: torch.Tensor, fp8: bool = False, scales: Scales | None = None) -> torch.Tensor | Fp8Rows:
    """[n, 2 * size] contiguous, gate first -> silu(gate) * up [n, size].

    Computed in float32; silu is rounded to the dtype before the product, as torch's ``F.silu(gate).mul_(up)``.
    ``fp8``: the rows leave quantized, as by :func:`tessera.kernels.fp8_rows.quantize_rows` after the rounding; then a
    size is at most 32768. ``scales``: gate_up is still without them (:func:`tessera.kernels.fp8_rows.fp8_sums`); it is
    rescaled and rounded first, without ``fp8`` in place. ValueError for a larger size or a tensor that is not
    contiguous.
    """
    if not gate_up.is_contiguous():
        raise ValueError("silu_and_multiply: gate_up must be contiguous")
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    early = early_launch(gate_up.device)
    if fp8:
        if size > MAX_SIZE:
            raise ValueError(f"silu_and_multiply: quantized rows of at most {MAX_SIZE} values, not {size}")
        rows = empty_rows((n, size), gate_up.device)
        if n:
            options = {**row_blocks(size), "num_warps": row_warps(n, size), **early}
            _silu_multiply_quantize[(n,)](gate_up, *(scales or (None, None)), *rows, size, **options)
        return rows
    if scales is not None:
        rescale(gate_up, *scales, None)
    out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(size, _BLOCK)
    if n:
        _silu_and_multiply[(n * blocks,)](gate_up, out, size, blocks, BLOCK=_BLOCK, num_warps=4, **early)
    return out


@triton.jit
def gated(gate, up):
    """silu(gate) * up for values of one dtype; skinny_linear.py ends with the same."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_and_multiply(gate_up, out, size, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program a block of a row; neighbours in memory are neighbours in the grid."""
    wait_for_previous(EARLY)
    program = tl.program_id(0)
    # A step of 8192 rows holds 310 million values in each tensor: larger ones pass 2**31.
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside)
    tl.store(out + row * size + column, gated(gate, up), mask=inside)


@triton.jit
def _silu_multiply_quantize(
    gate_up, x_scales, weight_scales, values, scales, size,
    HEAD: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a row, which it keeps in registers until the scale is known."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * 2 * size
    head_gate, tail_gate = load_halves(gate_up, size, HEAD, TAIL)
    head_up, tail_up = load_halves(gate_up + size, size, HEAD, TAIL)
    if x_scales is not None:
        x_scale = tl.load(x_scales + row)
        head_scales, tail_scales = load_halves(weight_scales, size, HEAD, TAIL)
        head_gate = _rescaled(head_gate, x_scale * head_scales)
        tail_gate = _rescaled(tail_gate, x_scale * tail_scales)
        head_scales, tail_scales = load_halves(weight_scales + size, size, HEAD, TAIL)
        head_up = _rescaled(head_up, x_scale * head_scales)
        tail_up = _rescaled(tail_up, x_scale * tail_scales)
    head = gated(head_gate, head_up).to(tl.float32)
    tail = gated(tail_gate, tail_up).to(tl.float32)
    store_halves(values, scales, row, size, head, tail, None, HEAD, TAIL)


@triton.jit
def _rescaled(sums, scales):
    return (sums.to(tl.float32) * scales).to(sums.dtype)


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
    rows = empty_rows(x.shape, x.device)
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
    store_row(values, scales, tl.program_id(0), start + column, gelu.to(x.dtype.element_ty), inside)
