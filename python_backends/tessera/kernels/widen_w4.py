"""4-bit weights in the layout of :mod:`tessera.kernels.w4_layout`, widened for a product of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.w4_layout import ZERO_BITS, PackedW4

_WIDEN_ROWS = 64
_ZERO_MASK = tl.constexpr((1 << ZERO_BITS) - 1)


def widen_w4(weights: PackedW4, dtype: torch.dtype) -> torch.Tensor:
    """W [n, k], rounded to ``dtype`` from float32."""
    (n, k), (blocks, _, chunk) = weights.shape, weights.codes.shape
    out = torch.empty((n, k), dtype=dtype, device=weights.codes.device)
    _widen_all[(blocks, triton.cdiv(n, _WIDEN_ROWS))](
        weights.codes, weights.words, out, n, k, weights.group, CHUNK=chunk, ROWS=_WIDEN_ROWS
    )
    return out


@triton.jit
def _widen_all(codes, words, out, n, k, group, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """One program a block of columns of ROWS rows."""
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, at = row < n, tl.arange(0, CHUNK)
    packed = tl.load(codes + (block.to(tl.int64) * n + row)[:, None] * CHUNK + at[None, :], mask=inside[:, None])
    for i in tl.static_range(4):
        column = (block * 4 + i) * CHUNK
        word = tl.load(words + column // group * n + row, mask=inside)
        code = (packed >> (4 * i)).to(tl.int32) & 15
        scale = (word & ~_ZERO_MASK).to(tl.float32, bitcast=True)
        weight = (code - (word & _ZERO_MASK)[:, None]).to(tl.float32) * scale[:, None]
        where = out + row.to(tl.int64)[:, None] * k + column + at[None, :]
        tl.store(where, weight.to(out.dtype.element_ty), mask=inside[:, None])
