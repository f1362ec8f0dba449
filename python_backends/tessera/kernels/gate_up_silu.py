"""The gate-up product of many rows, which ends in silu(gate) * up: what it gives is never written and read again.

That would be two values of ``size`` a row where one is wanted. A program goes from tile to tile of the result and sums
up its gates and ups together: the tensor memory accelerator (TMA), to which the weights are [2, size, k], fetches the
rows of both as one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera.kernels.activation import gated
from tessera.kernels.operands import GATE_UP_MULTIPLE
from tessera.kernels.skinny_linear import multiprocessors


@dataclass(frozen=True)
class GateUpPlan:
    """A tile of ``rows`` x ``columns`` of the result, ``depth`` of k at a time, ``stages`` of them in flight; ``group``
    tiles below each other share their weights in the L2 cache. The default is the best found on an H200."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 16


def gate_up_silu(x: torch.Tensor, weight: torch.Tensor, plan: GateUpPlan | None = None) -> torch.Tensor:
    """x [m, k], weight [2 * size, k] with the gate's rows first -> silu(gate) * up [m, size]; sums in float32.

    Contiguous, both bfloat16 or both float16; rounded as by F.linear followed by silu_and_multiply. ``plan`` replaces
    the default. ValueError for a k or size that is no multiple of 8, and other shapes, dtypes or addresses that the
    kernel cannot take.
    """
    (m, k), size = x.shape, len(weight) // 2
    _check(x, weight)
    plan = plan or GateUpPlan()
    out = torch.empty((m, size), dtype=x.dtype, device=x.device)
    if m:
        programs = min(multiprocessors(x.device), triton.cdiv(m, plan.rows) * triton.cdiv(size, plan.columns))
        described = (
            TensorDescriptor.from_tensor(x, [plan.rows, plan.depth]),
            TensorDescriptor.from_tensor(weight.view(2, size, k), [2, plan.columns, plan.depth]),
            TensorDescriptor.from_tensor(out, [plan.rows, plan.columns]),
        )
        tiles = {"ROWS": plan.rows, "COLUMNS": plan.columns, "DEPTH": plan.depth, "GROUP": plan.group}
        options = {**tiles, "num_warps": plan.warps, "num_stages": plan.stages}
        _gate_up_silu[(programs,)](*described, m, size, k, **options)
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape[1] != x.shape[1] or x.shape[1] % GATE_UP_MULTIPLE or len(weight) % (2 * GATE_UP_MULTIPLE):
        raise ValueError(
            f"gate_up_silu: x [m, k] and weight [2 * size, k], k and size multiples of {GATE_UP_MULTIPLE}, "
            f"not {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"gate_up_silu: x and weight both bfloat16 or both float16, not {x.dtype} and {weight.dtype}")
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (x, weight)):
        raise ValueError("gate_up_silu: x and weight must be contiguous and begin at a multiple of 16 bytes")


# m is every number of tokens there is: one compiled kernel serves all.
@triton.jit(do_not_specialize=["m"])
def _gate_up_silu(
    x, weight, out, m, size, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of GROUP rows of them, in a group column by column.

    Past the end of a tensor zeros are read and nothing is written. Flattened, the loops fetch a tile's first blocks
    while the last one is finished.
    """
    tall, wide = tl.cdiv(m, ROWS), tl.cdiv(size, COLUMNS)
    for tile in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * wide) * GROUP
        height = tl.minimum(tall - first, GROUP)
        row = (first + tile % height) * ROWS
        column = tile % (GROUP * wide) // height * COLUMNS
        both = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for depth in range(0, k, DEPTH):
            rows = weight.load([0, column, depth]).reshape(2 * COLUMNS, DEPTH)
            both = tl.dot(x.load([row, depth]), rows.T, both)
        gate, up = both.to(out.dtype).reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
        out.store([row, column], gated(gate, up))
