"""The residual addition and the root-mean-square normalisation in one pass: two reads and two writes a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.fp8.early_launch import early_launch, wait_for_previous
from tessera.fp8.kernels import inverse_of, largest_of, scale_of
from tessera.fp8.rows import Fp8Rows, empty_rows

MAX_SIZE = 8192


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: bool = False,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """x and residual [n, size], weight [size], all contiguous, of one dtype -> (normalised [n, size], residual).

    ``residual += x`` happens in place and is rounded to the dtype, as ``residual.add_(x)``; without a residual, x is
    the one returned. Statistics are float32; the normalised value is rounded to the dtype before it meets the weight.
    ``fp8``: the normalised rows leave quantized, as by :func:`tessera.fp8.rows.quantize_rows` after the rounding.
    ``scales``: x still lacks those of its rows [n, 1] and columns [size] (:func:`tessera.fp8.rows.fp8_sums`); it is
    rescaled and rounded first. ValueError for a size over 8192, tensors that are not contiguous, or scales without a
    residual, as the sum would have no place.
    """
    n, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"add_rms_norm: rows of at most {MAX_SIZE} values, not {size}")
    if not (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        raise ValueError("add_rms_norm: x and residual must be contiguous")
    if scales is not None and residual is None:
        raise ValueError("add_rms_norm: scales without a residual")
    rows = empty_rows(n, size, x.device) if fp8 else None
    out = torch.empty_like(x) if rows is None else rows.values
    block = triton.next_power_of_2(size)
    if n:
        given, made = scales or (None, None), None if rows is None else rows.scales
        options = {"BLOCK": block, "num_warps": _warps(n, block), **early_launch(x.device)}
        _add_rms_norm[(n,)](x, *given, residual, weight, out, made, size, eps, **options)
    return out if rows is None else rows, x if residual is None else residual


def _warps(n: int, block: int) -> int:
    """Few rows have a multiprocessor each, where fewer warps reduce a row sooner (measured on an H200)."""
    values_a_thread = 32 if n <= 128 else 8
    return min(max(block // (32 * values_a_thread), 1), 16)


@triton.jit
def _add_rms_norm(
    x, x_scales, x_column_scales, residual, weight, out, scales, size, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One program a row; ``out`` is e4m3 where there are ``scales``."""
    wait_for_previous(EARLY)
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = x.dtype.element_ty
    # Asked for before the reduction, so that its way from the cache hides behind the row's.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        columns = tl.load(x_column_scales + column, mask=inside, other=0.0)
        row = (row * (tl.load(x_scales + tl.program_id(0)) * columns)).to(dtype).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(dtype)
        tl.store(residual + start + column, rounded, mask=inside)
        row = rounded.to(tl.float32)
    mean_of_squares = tl.sum(row * row) / size
    normalised = (row * tl.rsqrt(mean_of_squares + eps)).to(dtype).to(tl.float32)
    scaled = (normalised * scale).to(dtype)
    if scales is not None:
        wide = scaled.to(tl.float32)
        row_scale = scale_of(largest_of(wide))
        tl.store(scales + tl.program_id(0), row_scale)
        tl.store(out + start + column, (wide * inverse_of(row_scale)).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + start + column, scaled, mask=inside)
