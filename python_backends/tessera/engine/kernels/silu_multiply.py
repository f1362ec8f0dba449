"""The gated activation in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.fp8.early_launch import early_launch, wait_for_previous
from tessera.fp8.kernels import MAX_SIZE, inverse_of, largest_of, rescale, row_blocks, row_warps, scale_of
from tessera.fp8.rows import Fp8Rows, empty_rows

_BLOCK = 2048


#: the scales of x's rows [n, 1] and of a weight's rows [m], both float32
Scales = tuple[torch.Tensor, torch.Tensor]


def silu_and_multiply(gate_up: torch.Tensor, fp8: bool = False, scales: Scales | None = None) -> torch.Tensor | Fp8Rows:
    """[n, 2 * size] contiguous, gate first -> silu(gate) * up [n, size].

    Computed in float32; silu is rounded to the dtype before the product, as torch's ``F.silu(gate).mul_(up)``.
    ``fp8``: the rows leave quantized, as by :func:`tessera.fp8.rows.quantize_rows` after the rounding; then a size
    is at most 32768. ``scales``: gate_up is still without them (:func:`tessera.fp8.rows.fp8_sums`); it is rescaled and
    rounded first, without ``fp8`` in place. ValueError for a larger size or a tensor that is not contiguous.
    """
    if not gate_up.is_contiguous():
        raise ValueError("silu_and_multiply: gate_up must be contiguous")
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    if fp8:
        return _quantized(gate_up, size, scales or (None, None))
    if scales is not None:
        rescale(gate_up, *scales, None)
    out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(size, _BLOCK)
    if n:
        options = {"BLOCK": _BLOCK, "num_warps": 4, **early_launch(gate_up.device)}
        _silu_and_multiply[(n * blocks,)](gate_up, out, size, blocks, **options)
    return out


def _quantized(gate_up: torch.Tensor, size: int, scales: Scales | tuple[None, None]) -> Fp8Rows:
    if size > MAX_SIZE:
        raise ValueError(f"silu_and_multiply: quantized rows of at most {MAX_SIZE} values, not {size}")
    n = len(gate_up)
    rows = empty_rows(n, size, gate_up.device)
    if n:
        options = {**row_blocks(size), "num_warps": row_warps(n, size), **early_launch(gate_up.device)}
        _silu_multiply_quantize[(n,)](gate_up, *scales, *rows, size, **options)
    return rows


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
    values += row * size
    first, second = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    inside = second < size
    head_gate = tl.load(gate_up + first)
    head_up = tl.load(gate_up + size + first)
    tail_gate = tl.load(gate_up + second, mask=inside, other=0.0)
    tail_up = tl.load(gate_up + size + second, mask=inside, other=0.0)
    if x_scales is not None:
        x_scale = tl.load(x_scales + row)
        head_gate = _rescaled(head_gate, x_scale * tl.load(weight_scales + first))
        head_up = _rescaled(head_up, x_scale * tl.load(weight_scales + size + first))
        tail_gate = _rescaled(tail_gate, x_scale * tl.load(weight_scales + second, mask=inside, other=0.0))
        tail_up = _rescaled(tail_up, x_scale * tl.load(weight_scales + size + second, mask=inside, other=0.0))
    head = gated(head_gate, head_up).to(tl.float32)
    tail = gated(tail_gate, tail_up).to(tl.float32)
    scale = scale_of(tl.maximum(largest_of(head), largest_of(tail)))
    inverse = inverse_of(scale)
    tl.store(scales + row, scale)
    tl.store(values + first, (head * inverse).to(values.dtype.element_ty))
    tl.store(values + second, (tail * inverse).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _rescaled(sums, scales):
    return (sums.to(tl.float32) * scales).to(sums.dtype)
