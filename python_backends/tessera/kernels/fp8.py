"""Rows quantized to e4m3 by triton, and the steps of it that kernels with another computation in front share.

What finishes a product: the scales of one in e4m3, the sum of the partials of one whose k was split.

Kernels launched before the one in front of them has ended: programmatic dependent launch, on Hopper.

A launch costs a short kernel about as much as its work. One that is launched early has its programs in place when the
kernel in front ends, and waits for it by itself: before it reads what that one wrote, and before it writes anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_SIZE = 32768

# As in fp8_rows.py, which imports this file.
_LARGEST = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(1e-12)
_RESCALE_BLOCK = 1024
_FEW_ROWS = 64


def row_blocks(size: int) -> dict[str, int]:
    """The two blocks, of powers of two, that a program holds a row of ``size`` in: all of HEAD is inside.

    18944 values take 16384 + 4096 places so, and would take 32768 as one block.
    """
    head = max(triton.next_power_of_2(size) // 2, 1)
    return {"HEAD": head, "TAIL": triton.next_power_of_2(max(size - head, 1))}


def row_warps(n: int, size: int) -> int:
    """16 values a thread; wide rows leave room for a second program, unless there are only few of them."""
    warps = max(triton.next_power_of_2(size) // 512, 1)
    return min(warps, 16 if n > 128 else 32)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor) -> None:
    """:func:`tessera.kernels.fp8_rows.quantize_rows`, bit for bit, into ``values`` and ``scales``.

    ValueError for rows of over 32768 values or a strided x.
    """
    n, size = x.shape
    if size > MAX_SIZE or not x.is_contiguous():
        raise ValueError(f"quantize_rows: contiguous rows of at most {MAX_SIZE} values, not {list(x.shape)}")
    if n:
        options = {**row_blocks(size), "num_warps": row_warps(n, size), **early_launch(x.device)}
        _quantize_rows[(n,)](x, scale, values, scales, size, **options)


def rescale(
    sums: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """sums [m, n] contiguous -> sums * x_scales [m, 1] * scales [n] + bias [n], in place."""
    m, n = sums.shape
    if m:
        blocks = triton.cdiv(n, _RESCALE_BLOCK)
        options = {"BLOCK": _RESCALE_BLOCK, "num_warps": 4, **early_launch(sums.device)}
        _rescale[(m * blocks,)](sums, x_scales, scales, bias, n, blocks, **options)
    return sums


def add_partials(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """parts [splits, m, n] contiguous, bias [n] -> their sum plus bias [m, n] of ``dtype``."""
    splits, m, n = parts.shape
    out = torch.empty((m, n), dtype=dtype, device=parts.device)
    block, warps = (256, 2) if m <= _FEW_ROWS else (1024, 4)
    _add_partials[(triton.cdiv(m * n, block),)](
        parts, bias, out, m * n, n, SPLITS=splits, BLOCK=block, num_warps=warps, **early_launch(parts.device)
    )
    return out


@triton.jit
def scale_of(largest):
    """A row's largest magnitude -> its scale. What is no number stays one in the row's values."""
    return tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST_SCALE)


@triton.jit
def inverse_of(scale):
    """What values are multiplied by: one IEEE division a row, so that the twin rounds to the same e4m3 values."""
    return tl.div_rn(1.0, scale)


@triton.jit
def store_row(out, scales, row, at, values, inside):
    """A row's values, rounded to their dtype and zero outside -> ``out`` at ``at``, in e4m3 where there are scales."""
    if scales is None:
        tl.store(out + at, values, mask=inside)
    else:
        wide = values.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(wide)))
        tl.store(scales + row, scale)
        tl.store(out + at, (wide * inverse_of(scale)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_rows(x, scale, values, scales, size, HEAD: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr):
    """One program a row."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head, tail = load_halves(x + row * size, size, HEAD, TAIL)
    store_halves(values, scales, row, size, head.to(tl.float32), tail.to(tl.float32), scale, HEAD, TAIL)


@triton.jit
def load_halves(x, size, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """``size`` values in the two blocks of :func:`row_blocks`, zeros behind their end."""
    second = HEAD + tl.arange(0, TAIL)
    return tl.load(x + tl.arange(0, HEAD)), tl.load(x + second, mask=second < size, other=0.0)


@triton.jit
def store_halves(values, scales, row, size, head, tail, scale, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """A row of float32 values in e4m3, by a given ``scale`` at which they saturate, or by its own."""
    values += row * size
    second = HEAD + tl.arange(0, TAIL)
    used = scale_of(tl.maximum(tl.max(tl.abs(head)), tl.max(tl.abs(tail))))
    if scale is not None:
        used = tl.load(scale)
    inverse = inverse_of(used)
    head *= inverse
    tail *= inverse
    if scale is not None:
        head = tl.clamp(head, -_LARGEST, _LARGEST)
        tail = tl.clamp(tail, -_LARGEST, _LARGEST)
    tl.store(scales + row, used)
    tl.store(values + tl.arange(0, HEAD), head.to(values.dtype.element_ty))
    tl.store(values + second, tail.to(values.dtype.element_ty), mask=second < size)


@triton.jit
def _rescale(sums, x_scales, scales, bias, n, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program a block of a row."""
    wait_for_previous(EARLY)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    value = tl.load(sums + row * n + column, mask=inside).to(tl.float32)
    value *= tl.load(x_scales + row) * tl.load(scales + column, mask=inside)
    if bias is not None:
        value += tl.load(bias + column, mask=inside).to(tl.float32)
    tl.store(sums + row * n + column, value.to(sums.dtype.element_ty), mask=inside)


@triton.jit
def _add_partials(
    partials, bias, out, size, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """partials [SPLITS, size] -> out [size] of rows of n, always in the order of the splits, summed in float32."""
    wait_for_previous(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(partials + at, mask=inside).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * size + at, mask=inside).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + at % n, mask=inside).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel with a parameter EARLY, which waits for the one in front of it where the device can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Lets the next kernel be launched, then waits until all before this one have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
