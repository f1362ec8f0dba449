"""Linear layers for up to 16 rows of small models, which fetch their weights before they wait for the kernel in front.

Nobody writes weights, so a program fetches its own while the kernels before it still run: all of k for a few rows of
the weights, in registers, and all programs of a layer find room beside those of the layer before. What is left behind
the wait is short: x comes from the L2 cache, is multiplied, and the warps' slices of k are added up. That pays where
a step is bound by its chain of kernels, not by memory. So the norm is computed by the product that reads its rows, and
the residual is added by the one that writes them, which saves two more kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.kernels.activation import gated
from tessera.kernels.fp8 import early_launch
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.operands import (
    EARLY_ROWS,
    EARLY_WARPS,
    EarlyProduct,
    NormedRows,
    Operand,
    PagedCache,
    plan_early,
    rows_of,
)

_NO_ROTATION = dict.fromkeys(("cos", "sin", "slots", "keys", "values"))
_NO_HEADS = {"HEADS": 0, "KV_HEADS": 1, "HALF": 1}


def early_linear(
    x: Operand,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k], weight [n, k], bias [n], residual [m, n], contiguous, of one 16-bit dtype -> x W^T + b [m, n], or the
    residual with that added in place, each rounded; sums in float32.

    Rows that are still to be normalised are multiplied by the norm's weight, rounded, and divided by their root mean
    square at the end. ValueError for more than 16 rows, and for shapes that :func:`plan_early` has no plan for.
    """
    out = torch.empty((rows_of(x), len(weight)), dtype=weight.dtype, device=weight.device)
    return _multiply(x, weight, bias, residual, out if residual is None else residual, False)


def early_gate_up(x: Operand, weight: torch.Tensor) -> torch.Tensor:
    """x [m, k], weight [2 * size, k], the gate's rows first -> silu(gate) * up [m, size]; as :func:`early_linear`."""
    out = torch.empty((rows_of(x), len(weight) // 2), dtype=weight.dtype, device=weight.device)
    return _multiply(x, weight, None, None, out, True)


def early_rotate(
    product: EarlyProduct, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: PagedCache, heads: int
) -> torch.Tensor:
    """The product of q, k and v [m, (heads + 2 * kv_heads) * d], rotated and stored as by
    :func:`tessera.kernels.rotary.rotate_and_store`, into a cache of its dtype."""
    x, weight, bias = product
    out = torch.empty((product.rows, len(weight)), dtype=weight.dtype, device=weight.device)
    _, _, kv_heads, size = cache.keys.shape
    rotation = dict(cos=cos, sin=sin, slots=slots, keys=cache.keys, values=cache.values)
    return _multiply(
        x, weight, bias, None, out, False, rotation, {"HEADS": heads, "KV_HEADS": kv_heads, "HALF": size // 2}
    )


def _multiply(
    x: Operand,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    rotation: Mapping[str, torch.Tensor | None] = _NO_ROTATION,
    heads: Mapping[str, int] = _NO_HEADS,
) -> torch.Tensor:
    assert not isinstance(x, Fp8Rows)
    rows, norm, eps = x if isinstance(x, NormedRows) else (x, None, 0.0)
    (m, k), n = rows.shape, len(weight)
    plan = plan_early(n, k, gated)
    if plan is None or not 1 <= m <= EARLY_ROWS or weight.shape[1] != k:
        raise ValueError(f"early_linear: x {list(rows.shape)} and weight {list(weight.shape)} do not fit")
    size = 2 * heads["HALF"]
    columns = min(plan.columns, size & -size) if heads["HEADS"] else plan.columns  # of one head
    given = [each for each in (rows, norm, weight, bias, residual, rotation["keys"]) if each is not None]
    if weight.itemsize != 2 or any(each.dtype != weight.dtype or not each.is_contiguous() for each in given):
        raise ValueError("early_linear: contiguous operands of one dtype of 16 bits")
    tile = {"K": k, "BLOCK_K": plan.block_k, "SLICES": EARLY_WARPS, "COLUMNS": columns, "GATED": gated, **heads}
    options = {**tile, "num_warps": EARLY_WARPS, **early_launch(weight.device)}
    _early_product[(n // columns,)](
        rows, norm, weight, bias, residual, **rotation, out=out, m=m, n=n, eps=eps, **options
    )
    return out


@triton.jit
def arranged(values, SLICES: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    """[8, SLICES, PART / 32, ROWS / 8, 32] of rows of SLICES * PART values -> [SLICES, ROWS, PART].

    The values of each 32 change places, for both operands of a product alike, so that what a thread fetches as 16 bytes
    is what the tensor core wants of it: nothing passes through the shared memory.
    """
    values = values.reshape(8, SLICES, PART // 32, ROWS // 8, 4, 2, 2, 2)
    return values.permute(1, 3, 0, 2, 5, 6, 4, 7).reshape(SLICES, ROWS, PART)


@triton.jit(do_not_specialize=["m"])
def _early_product(
    x, norm, weight, bias, residual, cos, sin, slots, keys, values, out, m, n, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program COLUMNS of the result, or half of them and what belongs to these: the ups of gates, the second halves
    of heads that are rotated. Each warp has a slice of k."""
    if EARLY:
        gdc_launch_dependents()
    PART: tl.constexpr = BLOCK_K // SLICES
    PAIRS: tl.constexpr = COLUMNS // 2
    start = tl.program_id(0) * COLUMNS
    head, inside = start // (2 * HALF), start % (2 * HALF) // 2
    if GATED:
        first, apart = start // 2, n // 2
    else:
        first, apart = head * (2 * HALF) + inside, HALF
    eight = tl.arange(0, 8)[:, None, None, None, None]
    at = (tl.arange(0, SLICES) * PART)[None, :, None, None, None] + tl.arange(0, 32)[None, None, None, None, :]
    at += (tl.arange(0, PART // 32) * 32)[None, None, :, None, None]
    w_row = (tl.arange(0, COLUMNS // 8) * 8)[None, None, None, :, None] + eight
    if GATED or HEADS > 0:  # in turn: gate, up, gate, up, ...
        w_row = first + w_row // 2 + w_row % 2 * apart
    else:
        w_row += start
    w_at = weight + w_row * K + at
    x_row = (tl.arange(0, 2) * 8)[None, None, None, :, None] + eight
    x_at = x + x_row * K + at
    weights = ()
    scales = ()
    for step in tl.static_range(K // BLOCK_K):
        weights += (arranged(tl.load(w_at + step * BLOCK_K), SLICES, PART, COLUMNS),)  # type: ignore[assignment]
        if norm is not None:
            scales += (arranged(tl.load(norm + step * BLOCK_K + at + 0 * x_row), SLICES, PART, 16),)  # type: ignore[assignment]
    row = tl.arange(0, 16)
    used = (row < m)[:, None]
    pair = tl.arange(0, PAIRS)
    column = start + tl.arange(0, COLUMNS)
    if HEADS > 0:
        column = first + tl.arange(0, COLUMNS) // 2 + tl.arange(0, COLUMNS) % 2 * HALF
        angle = row[:, None] * HALF + inside + pair[None, :]
        cosine = tl.load(cos + angle, mask=used, other=0.0)
        sine = tl.load(sin + angle, mask=used, other=0.0)
        slot = tl.load(slots + row, mask=row < m, other=-1)[:, None]
    if bias is not None:
        shift = tl.load(bias + column).to(tl.float32)
    if EARLY:
        gdc_wait()
    if residual is not None:
        old = tl.load(residual + row[:, None] * n + column[None, :], mask=used, other=0.0).to(tl.float32)
    total = tl.zeros((SLICES, 16, COLUMNS), tl.float32)
    squares = tl.zeros((SLICES, 16), tl.float32)
    diagonal = (row[:, None] == row[None, :])[None, :, :]
    for step in tl.static_range(K // BLOCK_K):
        rows = arranged(tl.load(x_at + step * BLOCK_K, mask=x_row < m, other=0.0), SLICES, PART, 16)
        if norm is not None:  # sums of squares by the tensor core, which saves every warp 150 instructions
            squares += tl.sum(tl.where(diagonal, tl.dot(rows, rows.trans(0, 2, 1)), 0.0), 2)
            rows = rows * scales[step]
        total = tl.dot(rows, weights[step].trans(0, 2, 1), total)
    sums = tl.sum(total, 0)
    if norm is not None:
        sums *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
    if bias is not None:
        sums += shift[None, :]
    sums = sums.to(out.dtype.element_ty)
    if GATED:
        gate, up = sums.reshape(16, PAIRS, 2).split()
        tl.store(out + row[:, None] * (n // 2) + (first + pair)[None, :], gated(gate, up), mask=used)
    elif HEADS > 0:
        one, two = sums.reshape(16, PAIRS, 2).split()
        if head < HEADS + KV_HEADS:
            wide, other = one.to(tl.float32), two.to(tl.float32)
            one = (wide * cosine - other * sine).to(out.dtype.element_ty)
            two = (other * cosine + wide * sine).to(out.dtype.element_ty)
        at = row[:, None] * n + (first + pair)[None, :]
        tl.store(out + at, one, mask=used)
        tl.store(out + at + HALF, two, mask=used)
        if head >= HEADS:
            stored = slot * (KV_HEADS * 2 * HALF) + (head - HEADS) % KV_HEADS * (2 * HALF) + (inside + pair)[None, :]
            cache = keys if head < HEADS + KV_HEADS else values
            tl.store(cache + stored, one, mask=slot >= 0)
            tl.store(cache + stored + HALF, two, mask=slot >= 0)
    else:
        if residual is not None:
            sums = (sums.to(tl.float32) + old).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * n + column[None, :], sums, mask=used)
