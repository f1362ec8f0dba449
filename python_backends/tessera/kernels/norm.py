"""The residual addition and the root-mean-square normalisation in one pass: two reads and two writes a value.

The residual addition and the layer normalisation in one pass: two reads and two writes a value.

The normalised rows may be written in e4m3, for a linear layer in FP8: half of one of the writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn

from tessera.kernels import reference
from tessera.kernels.fixed_rows import fixed
from tessera.kernels.fp8 import early_launch, store_row, wait_for_previous
from tessera.kernels.fp8_rows import Fp8Rows, empty_like, rows_or_tensor
from tessera.kernels.operands import DeferredProduct, EarlyProduct, Partials

MAX_SIZE = 8192


def add_rms_norm(
    x: torch.Tensor | DeferredProduct,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: bool = False,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """x and residual [..., size], weight [size], all contiguous, of one dtype -> (normalised [..., size], residual).

    ``residual += x`` happens in place and is rounded to the dtype, as ``residual.add_(x)``; without a residual, x is
    the one returned. Statistics are float32; the normalised value is rounded to the dtype before it meets the weight.
    ``fp8``: the normalised rows leave quantized, as by :func:`tessera.kernels.fp8_rows.quantize_rows` after the
    rounding. A deferred product is finished and rounded first. ValueError for a size over 8192, tensors that are not
    contiguous, or a deferred product without a residual, as the sum would have no place.
    """
    x_scales = scales = bias = None
    parts = 0
    if isinstance(x, EarlyProduct):
        x = x.product()
    if not isinstance(x, torch.Tensor):
        if residual is None:
            raise ValueError("add_rms_norm: a deferred product without a residual")
        if isinstance(x, Partials):
            bias, x = x.bias, x.parts
            parts = len(x)
        else:
            x, x_scales, scales, bias = x
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"add_rms_norm: rows of at most {MAX_SIZE} values, not {size}")
    if not (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        raise ValueError("add_rms_norm: x and residual must be contiguous")
    total = x if residual is None else residual
    rows = empty_like(total, fp8)
    block = triton.next_power_of_2(size)
    if n := total.numel() // size:
        options = {"SPLITS": parts, "BLOCK": block, "num_warps": _warps(n, block, parts), **early_launch(x.device)}
        _add_rms_norm[(n,)](x, x_scales, scales, bias, residual, weight, *rows, size, eps, **options)
    return rows_or_tensor(*rows), total


def _warps(n: int, block: int, parts: int) -> int:
    """Few rows have a multiprocessor each, where fewer warps reduce a row sooner; but more fetch partials sooner
    (measured on an H200). They also add up in another order."""
    values_a_thread = 32 if n <= 128 and not parts and not fixed() else 8
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
    store_row(out, scales, tl.program_id(0), start + column, (normalised * scale).to(dtype), inside)


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
    :func:`tessera.kernels.fp8_rows.quantize_rows` does: values [..., size], scales [..., 1].
    ValueError for a size over 8192 or tensors that are not contiguous.
    """
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"add_layer_norm: rows of at most {MAX_SIZE} values, not {size}")
    if not (x.is_contiguous() and (update is None or update.is_contiguous())):
        raise ValueError("add_layer_norm: x and update must be contiguous")
    normalised = empty_like(x, fp8)
    block = triton.next_power_of_2(size)
    # 16 values a thread: two loads of 16 bytes from each tensor in flight, few enough threads to reduce over quickly.
    warps = min(max(block // 512, 1), 16)
    if rows := x.numel() // size:
        _add_layer_norm[(rows,)](x, update, weight, bias, *normalised, size, eps, BLOCK=block, num_warps=warps)
    return rows_or_tensor(*normalised), x


def add_and_norm(
    x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module, fp8: bool = False
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """:func:`add_layer_norm` or :func:`add_rms_norm`, whichever the norm is, where its rows fit; else the twin."""
    if x.shape[-1] <= MAX_SIZE:
        if isinstance(norm, nn.LayerNorm):
            return add_layer_norm(x, update, norm.weight, norm.bias, norm.eps, fp8)
        if isinstance(norm, nn.RMSNorm) and norm.eps is not None:
            added, stream = (x, None) if update is None else (update, x)
            return add_rms_norm(added, stream, norm.weight, norm.eps, fp8)
    return reference.add_and_norm(x, update, norm)


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
    store_row(out, scales, tl.program_id(0), start + column, normed, inside)
