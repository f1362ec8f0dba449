"""The residual addition and the layer normalisation in one pass: two reads and two writes a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SIZE = 8192


def add_layer_norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and update [..., size], weight and bias [size], all contiguous, of one dtype -> (normalised sum, sum).

    The sum is ``x += update``, in place and rounded to the dtype; without an update it is x, unchanged. Statistics are
    float32 and taken from the rounded sum. ValueError for a size over 8192 or tensors that are not contiguous.
    """
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"add_layer_norm: rows of at most {MAX_SIZE} values, not {size}")
    if not (x.is_contiguous() and (update is None or update.is_contiguous())):
        raise ValueError("add_layer_norm: x and update must be contiguous")
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    # 16 values a thread: two loads of 16 bytes from each tensor in flight, few enough threads to reduce over quickly.
    warps = min(max(block // 512, 1), 16)
    if rows := x.numel() // size:
        _add_layer_norm[(rows,)](x, update, weight, bias, out, size, eps, BLOCK=block, num_warps=warps)
    return out, x


@triton.jit
def _add_layer_norm(x, update, weight, bias, out, size, eps, BLOCK: tl.constexpr):
    """One program a row."""
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = out.dtype.element_ty
    # Asked for before the reductions, so that their way from the cache hides behind the row's.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        row += tl.load(update + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(dtype)
        tl.store(x + start + column, rounded, mask=inside)
        row = rounded.to(tl.float32)
    centred = tl.where(inside, row - tl.sum(row) / size, 0.0)
    variance = tl.sum(centred * centred) / size
    tl.store(out + start + column, (centred * tl.rsqrt(variance + eps) * scale + shift).to(dtype), mask=inside)
