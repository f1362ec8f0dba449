"""The residual addition and the layer normalisation in one pass: two reads and two writes a value.

The normalised rows may be written in e4m3, for a linear layer in FP8: half of one of the writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.fp8.kernels import inverse_of, largest_of, scale_of
from tessera.fp8.rows import E4M3, Fp8Rows

MAX_SIZE = 8192


def add_layer_norm(
    x: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    fp8: bool = False,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """x and update [..., size], weight and bias [size], all contiguous, of one dtype -> (normalised sum, sum).

    The sum is ``x += update``, in place and rounded to the dtype; without an update it is x, unchanged. Statistics are
    float32 and taken from the rounded sum. With ``fp8`` the normalised rows, rounded to the dtype, are quantized as
    :func:`tessera.fp8.rows.quantize_rows` does: values [..., size], scales [..., 1].
    ValueError for a size over 8192 or tensors that are not contiguous.
    """
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"add_layer_norm: rows of at most {MAX_SIZE} values, not {size}")
    if not (x.is_contiguous() and (update is None or update.is_contiguous())):
        raise ValueError("add_layer_norm: x and update must be contiguous")
    out = torch.empty_like(x, dtype=E4M3 if fp8 else x.dtype)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if fp8 else None
    block = triton.next_power_of_2(size)
    # 16 values a thread: two loads of 16 bytes from each tensor in flight, few enough threads to reduce over quickly.
    warps = min(max(block // 512, 1), 16)
    if rows := x.numel() // size:
        _add_layer_norm[(rows,)](x, update, weight, bias, out, scales, size, eps, BLOCK=block, num_warps=warps)
    return out if scales is None else Fp8Rows(out, scales), x


@triton.jit
def _add_layer_norm(x, update, weight, bias, out, scales, size, eps, BLOCK: tl.constexpr):
    """One program a row."""
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = x.dtype.element_ty
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
    normed = (centred * tl.rsqrt(variance + eps) * scale + shift).to(dtype)
    if scales is None:
        tl.store(out + start + column, normed, mask=inside)
    else:  # beyond the row's end are zeros, which no maximum sees
        wide = normed.to(tl.float32)
        row_scale = scale_of(largest_of(wide))
        tl.store(out + start + column, (wide * inverse_of(row_scale)).to(out.dtype.element_ty), mask=inside)
        tl.store(scales + tl.program_id(0), row_scale)
