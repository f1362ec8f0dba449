"""Linear layers of which a row's bits depend on nothing but that row: not on how many there are, nor on its place.

The tensor cores add up products in the order of k, and nobody splits k. So tiles may be as the number of rows wants
them: whatever their size, each value is the same chain of additions. That this holds, between mma and wgmma and with x
or the weights as the first operand too, is shown by tests on a GPU, not by a manual.

Up to 32 rows the kernel for few rows (:mod:`tessera.kernels.skinny_linear`) is as fast without splits as with. For more
the tensor memory accelerator (TMA) fetches both operands, and gives zeros for rows past the end without reading any.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.fp8_rows import MULTIPLE, Fp8Rows
from tessera.kernels.operands import K_MULTIPLE
from tessera.kernels.skinny_linear import SkinnyPlan, multiply, multiprocessors


@dataclass(frozen=True)
class RowPlan:
    """A tile of ``rows`` x ``columns`` of the result, ``depth`` bytes of k at a time, ``stages`` of them in flight;
    ``group`` tiles below each other share their weights in the L2 cache."""

    rows: int = 128
    columns: int = 256
    depth: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 16


#: tiles, and how long one takes beside another (measured on an H200, with 18944 inputs)
_TILES = (
    (RowPlan(), 0.9),
    (RowPlan(64, 256, 128, 4, 4), 0.48),
    (RowPlan(64, 128, 256, 4, 4), 0.3),
    (RowPlan(64, 64, 256, 4, 6), 0.21),
    (RowPlan(64, 32, 256, 4, 8), 0.17),
)
_FEW = 32


@cache
def plan_rows(m: int, n: int, sms: int) -> RowPlan:
    """How to multiply ``m`` rows by ``n`` of weights on ``sms`` multiprocessors; a pure function."""
    return min(_TILES, key=lambda tile: -(-_tiles(tile[0], m, n) // sms) * tile[1])[0]


@cache
def plan_few(m: int, k: int) -> SkinnyPlan | None:
    """The same for few rows where k allows it; nobody shares k, however few the programs are."""
    if m > _FEW or k % K_MULTIPLE:
        return None
    block_k, stages = (256, 5) if m <= 16 else (128, 6)
    return SkinnyPlan(64, min(block_k, k & -k), stages=stages)


def _tiles(plan: RowPlan, m: int, n: int) -> int:
    return triton.cdiv(m, plan.rows) * triton.cdiv(n, plan.columns)


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k], weight [n, k], bias [n], all bfloat16 or all float16 -> x W^T + b [..., n]; sums in float32.

    Where n or k is no multiple of 16 the operands are filled up at each call. ValueError for other dtypes.
    """
    n, k = weight.shape
    rows, missing = x.reshape(-1, k), -n % MULTIPLE
    if k % MULTIPLE:
        rows, weight = F.pad(rows, (0, -k % MULTIPLE)), F.pad(weight, (0, -k % MULTIPLE))
    if missing:
        weight, bias = F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))
    product = row_product(rows.contiguous(), weight, None, bias, x.dtype)
    return (product[:, :n].contiguous() if missing else product).view(*x.shape[:-1], n)


def row_product(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    plan: RowPlan | None = None,
) -> torch.Tensor:
    """x [m, k], weight [n, k], bias [n], contiguous, n and k multiples of 16 -> x W^T + b [m, n] of ``dtype``.

    x and weight are both bfloat16, or both float16, or in e4m3, with ``scales`` float32 [n]: both rows' scales multiply
    the float32 sum. ``plan`` replaces what :func:`plan_few` or :func:`plan_rows` chooses. ValueError for other shapes,
    dtypes or strides.
    """
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    (m, k), n = values.shape, len(weight)
    if weight.shape[1] != k or k % MULTIPLE or n % MULTIPLE or not (values.is_contiguous() and weight.is_contiguous()):
        raise ValueError(
            f"row_product: contiguous x [m, k] and weight [n, k], n and k multiples of {MULTIPLE}, "
            f"not {list(values.shape)} and {list(weight.shape)}"
        )
    if values.dtype != weight.dtype or weight.itemsize > 2 or isinstance(x, Fp8Rows) != (scales is not None):
        raise ValueError(f"row_product: x and weight of 16 bits, or in e4m3, not {values.dtype} and {weight.dtype}")
    few = None if plan else plan_few(m, k)
    if m and few is not None:
        product = multiply(values, weight, x_scales, scales, bias, dtype, few)
        assert isinstance(product, torch.Tensor)
        return product
    plan = plan or plan_rows(m, n, multiprocessors(weight.device))
    out = torch.empty((m, n), dtype=dtype, device=weight.device)
    if m:
        depth = plan.depth // weight.itemsize
        described = (
            TensorDescriptor.from_tensor(values, [plan.rows, depth]),
            TensorDescriptor.from_tensor(weight, [plan.columns, depth]),
            TensorDescriptor.from_tensor(out, [plan.rows, plan.columns]),
        )
        tile = {"ROWS": plan.rows, "COLUMNS": plan.columns, "DEPTH": depth, "GROUP": plan.group}
        options = {**tile, "num_warps": plan.warps, "num_stages": plan.stages, **early_launch(weight.device)}
        programs = min(_tiles(plan, m, n), multiprocessors(weight.device))
        _row_product[(programs,)](*described, x_scales, scales, bias, m, n, k, **options)
    return out


# m is every number of tokens there is: one compiled kernel serves all.
@triton.jit(do_not_specialize=["m"])
def _row_product(
    x, weight, out, x_scales, scales, bias, m, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of GROUP rows of them, in a group column by column.

    Past the end of a tensor zeros are read and nothing is written. Flattened, the loops fetch a tile's first blocks
    while the last one is finished.
    """
    wait_for_previous(EARLY)
    tall, wide = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    for tile in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * wide) * GROUP
        height = tl.minimum(tall - first, GROUP)
        row = (first + tile % height) * ROWS
        column = tile % (GROUP * wide) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, k, DEPTH):
            total = tl.dot(x.load([row, depth]), weight.load([column, depth]).T, total)
        at = column + tl.arange(0, COLUMNS)
        shift = tl.zeros((COLUMNS,), tl.float32)
        if bias is not None:
            shift = tl.load(bias + at, mask=at < n, other=0.0).to(tl.float32)
        if scales is not None:
            rows = row + tl.arange(0, ROWS)
            share = tl.load(x_scales + rows, mask=rows < m, other=0.0)[:, None]
            share = share * tl.load(scales + at, mask=at < n, other=0.0)[None, :]
            # Said, not left to the compiler, which might do so for one size of tile and not for another.
            total = tl.fma(total, share, tl.broadcast_to(shift[None, :], (ROWS, COLUMNS)))
        elif bias is not None:
            total += shift[None, :]
        out.store([row, column], total.to(out.dtype))
