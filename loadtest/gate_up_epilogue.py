"""A candidate, measured by bench_joules.py and used nowhere: silu(gate) * up in the epilogue of the gate-up product.

What it would save is the product's output, 2 x 18,944 values a token, written and read again. A program goes from
tile to tile and keeps both halves of one in registers: two accumulators, whose rows of the weights are fetched apart,
or one, where the weights' rows were interleaved beforehand (gate, up, gate, up, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from bench_kernels import error, poisoned
from energy import Lap, Repeater
from triton.runtime.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera.engine.kernels.selection import layer_kernels
from tessera.engine.kernels.silu_multiply import gated
from tessera.engine.kernels.skinny_linear import multiprocessors

if TYPE_CHECKING:
    from bench_joules import Report

TOLERANCE = 1e-2  # of bfloat16 results, relative, in norm
COPIES = 2  # of weights and activations, taken in turn: each is larger than an H200's L2 cache
QUICK_S = 0.15  # for a first look at each plan
FINALISTS = 2


@dataclass(frozen=True)
class Plan:
    """A tile of ``rows`` x ``columns`` of the result, ``depth`` of k at a time; ``group`` tiles below each other share
    their weights in the L2 cache."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 16
    interleaved: bool = False

    def __str__(self) -> str:
        kind = "interleaved" if self.interleaved else "two sums"
        return f"{self.rows}x2x{self.columns}x{self.depth} w{self.warps} s{self.stages} g{self.group} {kind}"


PLANS = [
    plan
    for kind in (False, True)
    for plan in (
        Plan(interleaved=kind),
        Plan(interleaved=kind, stages=4),
        Plan(interleaved=kind, group=8),
        Plan(256, 64, interleaved=kind),
        Plan(128, 64, warps=4, stages=4, interleaved=kind),
    )
]


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """[2 * size, k], gate's rows first -> the same rows in turn."""
    return weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def gate_up_silu(x: torch.Tensor, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """x [m, k], weight [2 * size, k], gate's rows first or as :func:`interleaved` -> silu(gate) * up [m, size].

    Contiguous, both bfloat16 or both float16; k is a multiple of 8. Rounded as by silu_and_multiply behind F.linear.
    """
    (m, k), size = x.shape, len(weight) // 2
    out = torch.empty((m, size), dtype=x.dtype, device=x.device)
    programs = min(multiprocessors(x.device), triton.cdiv(m, plan.rows) * triton.cdiv(size, plan.columns))
    _gate_up_silu[(programs,)](
        TensorDescriptor.from_tensor(x, [plan.rows, plan.depth]),
        TensorDescriptor.from_tensor(weight, [plan.columns * (1 + plan.interleaved), plan.depth]),
        TensorDescriptor.from_tensor(out, [plan.rows, plan.columns]),
        m, size, k,
        ROWS=plan.rows, COLUMNS=plan.columns, DEPTH=plan.depth, GROUP=plan.group, INTERLEAVED=plan.interleaved,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


@triton.jit
def _gate_up_silu(
    x, weight, out, m, size, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of GROUP rows of them, in a group column by column.

    Flattened, the loops fetch a tile's first blocks while the last one is finished; with two sums that would have
    ptxas wait for each product (C7515).
    """
    tall, wide = tl.cdiv(m, ROWS), tl.cdiv(size, COLUMNS)
    for tile in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=INTERLEAVED):
        first = tile // (GROUP * wide) * GROUP
        height = tl.minimum(tall - first, GROUP)
        row = (first + tile % height) * ROWS
        column = tile % (GROUP * wide) // height * COLUMNS
        if INTERLEAVED:
            both = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
            for depth in range(0, k, DEPTH):
                both = tl.dot(x.load([row, depth]), weight.load([2 * column, depth]).T, both)
            gate, up = both.to(out.dtype).reshape(ROWS, COLUMNS, 2).split()
        else:
            gates = tl.zeros((ROWS, COLUMNS), tl.float32)
            ups = tl.zeros((ROWS, COLUMNS), tl.float32)
            for depth in range(0, k, DEPTH):
                given = x.load([row, depth])
                gates = tl.dot(given, weight.load([column, depth]).T, gates)
                ups = tl.dot(given, weight.load([size + column, depth]).T, ups)
            gate, up = gates.to(out.dtype), ups.to(out.dtype)
        out.store([row, column], gated(gate, up))


def compare(size: int, hidden: int, rows: Sequence[int], repeater: Repeater, report: Report) -> None:
    """Time and joules of a layer's product and activation by the library, and by the fastest of the plans above."""
    device = repeater.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # as triton's interpreter wants it
    weights = [torch.randn(2 * size, hidden, dtype=dtype, device=device) * 0.02 for _ in range(COPIES)]
    silu_and_multiply = layer_kernels(device.type).silu_and_multiply
    for m in rows:
        inputs = [torch.randn(m, hidden, dtype=dtype, device=device) for _ in range(COPIES)]
        library: list[Lap] = [lambda x=x, w=w: silu_and_multiply(F.linear(x, w)) for x, w in zip(inputs, weights)]
        report.title(f"gate_up and silu, {m} rows, a layer")
        costs = {"library": repeater.recorded(library)}
        report.row("cuBLAS, silu_and_multiply", costs["library"])
        found = candidates(inputs, weights, silu_and_multiply(F.linear(inputs[0], weights[0])))
        quick = replace(repeater, seconds=QUICK_S, settle_s=QUICK_S)
        times = {plan: quick.recorded(laps).us_a_call for plan, laps in found.items()}
        for plan, us in times.items():
            print(f"{plan!s:49} {us:10.1f}", flush=True)
        finals = {plan: repeater.recorded(found[plan]) for plan in sorted(times, key=times.__getitem__)[:FINALISTS]}
        for plan, cost in finals.items():
            report.row(str(plan), cost)
        if finals:
            costs["epilogue"] = min(finals.values(), key=lambda cost: cost.joules)
        for way, cost in costs.items():
            report.cost(f"gate_up.m{m}.{way}", cost.of_a_call, "J/layer")


def candidates(
    inputs: list[torch.Tensor], weights: list[torch.Tensor], expected: torch.Tensor
) -> dict[Plan, list[Lap]]:
    """The plans that this machine takes and that are right."""
    by_kind = {False: weights, True: [interleaved(weight) for weight in weights]}

    def error_of(plan: Plan) -> float | str:
        try:
            return error(gate_up_silu(inputs[0], by_kind[plan.interleaved][0], plan), expected)
        except (RuntimeError, ValueError, TritonError) as refusal:  # more shared memory or registers than there are
            return f"refused, {str(refusal)[:80]!r}"

    threads = len(PLANS) if inputs[0].is_cuda else 1  # most of a compilation runs outside Python's lock
    with poisoned(), ThreadPoolExecutor(threads) as pool:
        errors = dict(zip(PLANS, pool.map(error_of, PLANS)))
    found: dict[Plan, list[Lap]] = {}
    for plan, wrong in errors.items():
        if isinstance(wrong, float) and wrong < TOLERANCE:
            pairs = zip(inputs, by_kind[plan.interleaved])
            found[plan] = [partial(gate_up_silu, x, weight, plan) for x, weight in pairs]
        else:
            print(f"{plan}: {wrong if isinstance(wrong, str) else f'WRONG, error {wrong:.1e}'}", flush=True)
    return found
