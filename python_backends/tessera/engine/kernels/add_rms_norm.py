"""The residual addition and the root-mean-square normalisation in one pass: two reads and two writes a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.engine.kernels.unfinished import Partials, Unfinished
from tessera.fp8.early_launch import early_launch, wait_for_previous
from tessera.fp8.kernels import inverse_of, largest_of, scale_of
from tessera.fp8.rows import Fp8Rows, empty_rows

MAX_SIZE = 8192


def add_rms_norm(
    x: torch.Tensor | Unfinished,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: bool = False,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """x and residual [n, size], weight [size], all contiguous, of one dtype -> (normalised [n, size], residual).

    ``residual += x`` happens in place and is rounded to the dtype, as ``residual.add_(x)``; without a residual, x is
    the one returned. Statistics are float32; the normalised value is rounded to the dtype before it meets the weight.
    ``fp8``: the normalised rows leave quantized, as by :func:`tessera.fp8.rows.quantize_rows` after the rounding.
    An unfinished product is finished and rounded first. ValueError for a size over 8192, tensors that are not
    contiguous, or an unfinished product without a residual, as the sum would have no place.
    """
    x_scales = scales = bias = None
    parts = 0
    if not isinstance(x, torch.Tensor):
        if residual is None:
            raise ValueError("add_rms_norm: an unfinished product without a residual")
        if isinstance(x, Partials):
            bias, x = x.bias, x.parts
            parts = len(x)
        else:
            x, x_scales, scales, bias = x
    n, size = x.shape[-2:]
    if size > MAX_SIZE:
        raise ValueError(f"add_rms_norm: rows of at most {MAX_SIZE} values, not {size}")
    if not (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        raise ValueError("add_rms_norm: x and residual must be contiguous")
    rows = empty_rows(n, size, x.device) if fp8 else None
    out = torch.empty((n, size), dtype=weight.dtype, device=x.device) if rows is None else rows.values
    block = triton.next_power_of_2(size)
    if n:
        given, made = (x, x_scales, scales, bias), None if rows is None else rows.scales
        options = {"SPLITS": parts, "BLOCK": block, "num_warps": _warps(n, block, parts), **early_launch(x.device)}
        _add_rms_norm[(n,)](*given, residual, weight, out, made, size, eps, **options)
    return out if rows is None else rows, x if residual is None else residual


def _warps(n: int, block: int, parts: int) -> int:
    """Few rows have a multiprocessor each, where fewer warps reduce a row sooner; but more fetch partials sooner
    (measured on an H200)."""
    values_a_thread = 32 if n <= 128 and not parts else 8
    return min(max(block // (32 * values_a_thread), 1), 16)


@triton.jit
def _add_rms_norm(
    x, x_scales, x_column_scales, bias, residual, weight, out, scales, size, eps,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a row; ``out`` is e4m3 where there are ``scales``, x [SPLITS, n, size] where it comes in parts."""
    wait_for_previous(EARLY)
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = weight.dtype.element_ty
    # Asked for before the reduction, so that its way from the cache hides behind the row's.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        columns = tl.load(x_column_scales + column, mask=inside, other=0.0)
        row *= tl.load(x_scales + tl.program_id(0)) * columns
    for part in tl.static_range(1, SPLITS):
        row += tl.load(x + part * tl.num_programs(0) * size + start + column, mask=inside, other=0.0)
    if bias is not None:
        row += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    row = row.to(dtype).to(tl.float32)
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
