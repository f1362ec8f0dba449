"""Linear layers for few rows (decode): the weights are streamed once, and their bytes are the whole cost.

The product is computed transposed, weight tile [BLOCK_N, BLOCK_K] times x^T, so that the long side of the tensor
cores' tile lies along the weights and the 1 to 64 rows of x lie along its short side (in e4m3 up to 256 of them, in
blocks: the programs of one weight tile are neighbours and share it in the L2 cache). Loads are pipelined over
``stages`` tiles; about two programs a multiprocessor with 48 KB each on their way keep an H200's memory busy. Where
the rows of the weights are too few for that, k is split: each program writes a partial, and a second small
kernel adds the partials in a fixed order (so that equal inputs give equal outputs, which atomics would not). Better
still, a norm that comes next adds the partials as it reads them (`operands.py`).

On Hopper these kernels are launched before the one in front of them has ended, and wait for it themselves (programmatic
dependent launch); and they let the next be launched at once: its programs, and those of the short kernels behind it,
come into place as these programs end.

Products in e4m3 take up to 256 rows, over half the bytes.

The scales of x's and of the weight's rows meet the sums at the end, before a split's partial is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tessera.kernels.activation import gated
from tessera.kernels.fp8 import add_partials, early_launch, wait_for_previous
from tessera.kernels.fp8_rows import E4M3, Fp8Rows
from tessera.kernels.operands import FP8_K_MULTIPLE, FP8_MAX_ROWS, K_MULTIPLE, MAX_ROWS, Partials

_STAGES = 4
_STAGE_BYTES = 24 * 1024  # four of them and their like from a second program fit into the shared memory


@dataclass(frozen=True)
class SkinnyPlan:
    """A program multiplies ``block_n`` rows of the weights, ``block_k`` columns at a time, ``stages`` in flight.

    All blocks are powers of two, ``block_k`` divides k; ``splits`` programs share a row block's k. From
    ``block_n`` 64 with 4 ``warps`` on, Hopper's wgmma reads both tiles straight from shared memory. More than
    ``block_m`` rows of x are shared out among programs.
    """

    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = _STAGES
    block_m: int = MAX_ROWS


def padded_rows(m: int) -> int:
    """The rows of x that are computed for m of them by one program: 16, 32, 64 and so on."""
    return max(16, triton.next_power_of_2(m))


@cache
def plan_skinny(m: int, n: int, k: int, sms: int) -> SkinnyPlan:
    """How to multiply x [m, k] by weights [n, k] on ``sms`` multiprocessors; a pure function.

    Wide blocks read x less often (it comes from the L2 cache once a program); splits make up for few blocks until
    the float32 partials, written and read, would come to an eighth of the weights' bytes. 64 rows want one deeply
    pipelined program a multiprocessor (swept on an H200: 1dbad80, bench_kernels.py).
    """
    if padded_rows(m) == MAX_ROWS:
        return _plan_64_rows(n, k, sms)
    rows = padded_rows(m)
    most_splits = max(1, k // (32 * rows))
    for block_n in (64, 32):
        blocks = triton.cdiv(n, block_n)
        block_k = _block_k(block_n, rows, k)
        splits = max(1, min(most_splits, 2 * sms // blocks, k // block_k))
        plan = SkinnyPlan(block_n, block_k, splits)
        if blocks * splits >= 0.8 * sms:
            break
    return plan


@cache
def plan_skinny_gate_up(m: int, size: int, k: int, sms: int) -> SkinnyPlan:
    """The same for the 2 * size rows of gate and up, without splits; ``block_n`` counts rows of both."""
    rows = padded_rows(m)
    if rows == MAX_ROWS and 2 * size >= 2 * sms * 128:
        return SkinnyPlan(128, _divisor(k), warps=8)
    narrow = 2 * size < 2 * sms * 64
    block_n = 32 if narrow else 128 if rows == 64 else 64
    return SkinnyPlan(block_n, _block_k(block_n, rows, k))


def _plan_64_rows(n: int, k: int, sms: int) -> SkinnyPlan:
    if n >= 2 * sms * 128:
        return SkinnyPlan(128, _divisor(k), warps=8)
    splits = max(1, min(sms // triton.cdiv(n, 64), k // (32 * MAX_ROWS)))
    return SkinnyPlan(64, _divisor(k), splits, stages=5)


def _divisor(k: int) -> int:
    """128 columns at a time where they divide k, else 64."""
    return 128 if k % 128 == 0 else K_MULTIPLE


def _block_k(block_n: int, rows: int, k: int) -> int:
    """The most columns, a power of two that divides k, whose tiles of weights and x fit into a stage."""
    block_k = K_MULTIPLE
    while 4 * block_k * (block_n + rows) <= _STAGE_BYTES and k % (2 * block_k) == 0:
        block_k *= 2
    return block_k


def skinny_deferred(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, plan: SkinnyPlan | None = None
) -> torch.Tensor | Partials:
    """x [m, k], weight [n, k], bias [n], contiguous, bfloat16 or float16 -> x W^T + b [m, n]; sums in float32.

    Where k is split, without the addition of the partials and the bias. ``plan`` replaces :func:`plan_skinny`'s
    choice. ValueError for m over 64, a k that is no multiple of 64, and other shapes, dtypes or plans that the kernel
    cannot take.
    """
    (m, k), n = _check(x, weight), len(weight)
    plan = plan or plan_skinny(m, n, k, multiprocessors(x.device))
    check_plan(plan, k)
    return multiply(x, weight, None, None, bias, x.dtype, plan)


def skinny_gate_up(x: torch.Tensor, weight: torch.Tensor, plan: SkinnyPlan | None = None) -> torch.Tensor:
    """x [m, k], weight [2 * size, k] with the gate's rows first -> silu(gate) * up [m, size].

    As a product followed by silu_and_multiply, with the same roundings, in one launch. ``plan`` replaces
    :func:`plan_skinny_gate_up`'s choice and must not split. ValueError as by :func:`skinny_deferred`.
    """
    (m, k), size = _check(x, weight), len(weight) // 2
    plan = plan or plan_skinny_gate_up(m, size, k, multiprocessors(x.device))
    check_plan(plan, k)
    if plan.splits != 1:
        raise ValueError("skinny_gate_up: a plan with splits cannot end in the activation")
    out = torch.empty((m, size), dtype=x.dtype, device=x.device)
    options = {**_options(plan, m), **early_launch(x.device)}
    _gate_up[(triton.cdiv(size, plan.block_n // 2),)](x, weight, out, m, size, k, **options)
    return out


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    plan: SkinnyPlan,
) -> torch.Tensor | Partials:
    """x [m, k] times weight [n, k], each row of both times its scale if it has one, plus bias [n] -> [m, n].

    The partials of a split are float32; those of more than 64 rows, as large as the weights, are of ``dtype``.
    """
    (m, k), n = x.shape, len(weight)
    options = {**_options(plan, m), **early_launch(x.device)}
    grid = (triton.cdiv(m, options["BLOCK_M"]), triton.cdiv(n, plan.block_n), plan.splits)
    if plan.splits == 1:
        out = torch.empty((m, n), dtype=dtype, device=x.device)
        _linear[grid](x, weight, x_scales, scales, bias, out, m, n, k, **options)
        return out
    parts = torch.empty((plan.splits, m, n), dtype=dtype if m > MAX_ROWS else torch.float32, device=x.device)
    _linear[grid](x, weight, x_scales, scales, None, parts, m, n, k, **options)
    return Partials(parts, bias, dtype)


def _check(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """m and k."""
    m, k = x.shape
    if not 1 <= m <= MAX_ROWS or weight.shape[1] != k or k % K_MULTIPLE:
        raise ValueError(
            f"skinny: x [1..{MAX_ROWS}, k] and weight [n, k], k a multiple of {K_MULTIPLE}, "
            f"not {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.dtype.itemsize != 2:
        raise ValueError(f"skinny: x and weight both bfloat16 or both float16, not {x.dtype} and {weight.dtype}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("skinny: x and weight must be contiguous")
    return m, k


def check_plan(plan: SkinnyPlan, k: int) -> None:
    if k % plan.block_k or plan.splits > k // plan.block_k:
        raise ValueError(f"skinny: {plan} does not fit k = {k}: block_k must divide it into at least splits steps")


def _options(plan: SkinnyPlan, m: int) -> dict[str, int]:
    return {
        "BLOCK_M": min(padded_rows(m), plan.block_m),
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


@cache
def multiprocessors(device: torch.device) -> int:
    """How many ``device`` has; the interpreter plans as for an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@triton.jit
def _product(
    x, weight, weight_rows, x_rows, k, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """weight[weight_rows] x[x_rows]^T over the blocks [first, last) of k -> float32 [BLOCK_N, BLOCK_M]."""
    columns = first * BLOCK_K + tl.arange(0, BLOCK_K)
    weight_at = weight + weight_rows.to(tl.int64)[:, None] * k + columns[None, :]
    x_at = x + x_rows[None, :] * k + columns[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(first, last):
        total = tl.dot(tl.load(weight_at), tl.load(x_at), total)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    return total


@triton.jit
def _store(out, total, m, n, row, column):
    """total [columns, rows] -> out [m, n]."""
    inside = (column < n)[:, None] & (row < m)[None, :]
    tl.store(out + row[None, :] * n + column[:, None], total, mask=inside)


# m is every batch size there is: one compiled kernel serves all that pad to the same.
@triton.jit(do_not_specialize=["m"])
def _linear(
    x, weight, x_scales, scales, bias, out, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a block of x's rows, of the weight's and a split of k.

    ``out`` is [m, n], or partials [splits, m, n].
    """
    wait_for_previous(EARLY)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last one: loads without masks, and nothing that is not a number is ever multiplied.
    x_rows, weight_rows = tl.minimum(row, m - 1), tl.minimum(column, n - 1)
    split, splits, steps = tl.program_id(2), tl.num_programs(2), k // BLOCK_K
    first, last = steps * split // splits, steps * (split + 1) // splits
    total = _product(x, weight, weight_rows, x_rows, k, first, last, BLOCK_M, BLOCK_N, BLOCK_K)
    if scales is not None:
        total *= tl.load(scales + weight_rows)[:, None] * tl.load(x_scales + x_rows)[None, :]
    if bias is not None:
        total += tl.load(bias + weight_rows).to(tl.float32)[:, None]
    _store(out + split * m * n, total.to(out.dtype.element_ty), m, n, row, column)


@triton.jit(do_not_specialize=["m"])
def _gate_up(
    x, weight, out, m, size, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program BLOCK_N / 2 gates and their ups, rows of one tile in turn: gate, up, gate, up, ..."""
    wait_for_previous(EARLY)
    HALF: tl.constexpr = BLOCK_N // 2
    start = tl.program_id(0) * HALF
    tile_row = tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(start + tile_row // 2, size - 1) + tile_row % 2 * size
    row = tl.arange(0, BLOCK_M)
    total = _product(x, weight, weight_rows, tl.minimum(row, m - 1), k, 0, k // BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K)
    total = total.to(out.dtype.element_ty)
    gate, up = total.reshape(HALF, 2, BLOCK_M).permute(0, 2, 1).split()
    _store(out, gated(gate, up), m, size, row, start + tl.arange(0, HALF))


@cache
def plan_skinny_fp8(m: int, n: int, k: int, sms: int) -> SkinnyPlan:
    """How to multiply x [m, k] by weights [n, k] on ``sms`` multiprocessors; a pure function.

    Two programs a multiprocessor share k where the rows alone make too few. Where the rows make more, three stages
    leave room for all programs at once, so that none begins when others have ended (swept on an H200). Beyond 64 rows
    the bytes from the L2 cache count: tiles as large as one program a multiprocessor holds, and each weight read once;
    only of few columns by 256 rows the tiles are halved, which leaves less to add up or more stages.
    """
    rows = padded_rows(m)
    if rows == 256 and n < sms * 64:
        block_n = 64 if k <= 8192 else 128
        splits = 1 if block_n == 64 else max(1, sms // (2 * triton.cdiv(n, block_n)))
        return SkinnyPlan(block_n, FP8_K_MULTIPLE, splits, warps=4 if block_n == 64 else 8, stages=6, block_m=128)
    if rows > 64:
        splits = max(1, min(sms // triton.cdiv(n, 128), k // 512))
        return SkinnyPlan(128, FP8_K_MULTIPLE, splits, warps=8, stages=5 if rows == 128 else 4, block_m=rows)
    if rows > 16 and n >= 2 * sms * 128:
        return SkinnyPlan(128 if rows == 64 else 64, FP8_K_MULTIPLE, stages=3)
    block_k, stages = (256, 4) if rows == 16 and k % 256 == 0 else (FP8_K_MULTIPLE, 5)
    splits = max(1, min(2 * sms // triton.cdiv(n, 64), k // 512))
    return SkinnyPlan(64, block_k, splits, stages=stages)


def skinny_fp8(
    x: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    plan: SkinnyPlan | None = None,
) -> torch.Tensor:
    """As :func:`tessera.kernels.fp8_rows.fp8_linear`, for x of 1 to 256 rows and a k that is a multiple of 128.

    ``plan`` replaces :func:`plan_skinny_fp8`'s choice. ValueError for other shapes, dtypes, strides or plans.
    """
    (m, k), n = x.values.shape, len(weight)
    if not 1 <= m <= FP8_MAX_ROWS or weight.shape[1] != k or k % FP8_K_MULTIPLE:
        raise ValueError(
            f"skinny_fp8: x [1..{FP8_MAX_ROWS}, k] and weight [n, k], k a multiple of {FP8_K_MULTIPLE}, "
            f"not {list(x.values.shape)} and {list(weight.shape)}"
        )
    if x.values.dtype != E4M3 or weight.dtype != E4M3 or not (x.values.is_contiguous() and weight.is_contiguous()):
        raise ValueError("skinny_fp8: x and weight must be contiguous and of float8_e4m3fn")
    plan = plan or plan_skinny_fp8(m, n, k, multiprocessors(weight.device))
    check_plan(plan, k)
    product = multiply(x.values, weight, x.scales, scales, bias, dtype, plan)
    return product if isinstance(product, torch.Tensor) else add_partials(*product)
