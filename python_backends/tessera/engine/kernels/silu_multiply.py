"""The gated activation in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, 2 * size] contiguous, gate first -> silu(gate) * up [n, size].

    Computed in float32; silu is rounded to the dtype before the product, as torch's ``F.silu(gate).mul_(up)``.
    ValueError for a tensor that is not contiguous.
    """
    if not gate_up.is_contiguous():
        raise ValueError("silu_and_multiply: gate_up must be contiguous")
    n, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, size), dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(size, _BLOCK)
    if n:
        _silu_and_multiply[(n * blocks,)](gate_up, out, size, blocks, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def gated(gate, up):
    """silu(gate) * up for values of one dtype; skinny_linear.py ends with the same."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_and_multiply(gate_up, out, size, blocks, BLOCK: tl.constexpr):
    """One program a block of a row; neighbours in memory are neighbours in the grid."""
    program = tl.program_id(0)
    # A step of 8192 rows holds 310 million values in each tensor: larger ones pass 2**31.
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside)
    tl.store(out + row * size + column, gated(gate, up), mask=inside)
