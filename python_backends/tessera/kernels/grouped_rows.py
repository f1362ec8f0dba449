"""The second product of experts for many tokens, whose pairs lie one expert after the other: tiles of large blocks.

The tensor memory accelerator (TMA) fetches both operands; rows past an expert's last are the next one's, and written by
nobody. A program goes from tile to tile and fetches a tile's first blocks while the last one is finished. Which expert
has which tile is written down by a launch before: a tile that finds it out, as :mod:`tessera.kernels.experts` has it
for few tokens, adds up over all experts first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.operands import Routing
from tessera.kernels.skinny_linear import multiprocessors


def grouped_rows(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    routing: Routing,
    most: int,
    out: torch.Tensor,
    launch: dict[str, int],
) -> None:
    """x [pairs, k] in the order of ``routing``, weight [experts * n, k], both of 16 bits, or both in e4m3 with their
    rows' scales -> x W^T of each pair's expert times the pair's weight into out [picked, tokens, n].

    ``most``: tiles that there can be. ``launch``: BLOCK_M pairs by BLOCK_N outputs, BLOCK_K inputs at a time, and
    triton's options. Rows of x and weight are whole 16 bytes. The bits are those of
    :func:`tessera.kernels.experts.grouped_down`'s other tiles.
    """
    experts, rows = len(routing.bounds) - 1, launch["BLOCK_M"]
    k, (picked, tokens, n) = x.shape[1], out.shape
    tiles = torch.empty(2 * most + 1, dtype=torch.int32, device=x.device)
    early = early_launch(x.device)
    _number_tiles[(experts,)](
        routing.bounds, tiles, EXPERTS=experts, ALL=triton.next_power_of_2(experts), ROWS=rows, num_warps=1, **early
    )
    described = (
        TensorDescriptor.from_tensor(x, [rows, launch["BLOCK_K"]]),
        TensorDescriptor.from_tensor(weight, [launch["BLOCK_N"], launch["BLOCK_K"]]),
    )
    programs = min(multiprocessors(x.device), most * triton.cdiv(n, launch["BLOCK_N"]))
    _grouped_rows[(programs,)](
        *(*described, x_scales, scales, routing.pairs, routing.bounds, routing.weights, tiles, out, tokens, n, k),
        PICKED=picked,
        **launch,
        **early,
    )


@triton.jit
def _number_tiles(
    bounds, tiles, EXPERTS: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One program an expert: ``tiles`` has their number, then each one's expert and first row."""
    wait_for_previous(EARLY)
    own, expert = tl.program_id(0), tl.arange(0, ALL)
    begin = tl.load(bounds + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(bounds + 1 + expert, mask=expert < EXPERTS, other=0)
    count = (end - begin + ROWS - 1) // ROWS
    before = tl.sum(tl.where(expert < own, count, 0), 0)
    first = tl.load(bounds + own)
    for number in range(tl.cdiv(tl.load(bounds + own + 1) - first, ROWS)):
        at = tiles + 1 + 2 * (before + number)
        tl.store(at, own)
        tl.store(at + 1, first + number * ROWS)
    if own == 0:
        tl.store(tiles, tl.sum(count, 0))


@triton.jit(do_not_specialize=["tokens"])
def _grouped_rows(
    x, weight, x_scales, scales, pairs, bounds, pair_weights, tiles, out, tokens, n, k,
    PICKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Flattened, the loops fetch a tile's first blocks while the last one is finished."""
    wait_for_previous(EARLY)
    wide = tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.load(tiles) * wide, tl.num_programs(0), flatten=True):
        expert = tl.load(tiles + 1 + tile // wide * 2)
        first = tl.load(tiles + 2 + tile // wide * 2)
        start = tile % wide * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for depth in range(0, k, BLOCK_K):
            total = tl.dot(x.load([first, depth]), weight.load([expert * n + start, depth]).T, total)
        stop = tl.load(bounds + 1 + expert)
        row, column = first + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
        if scales is not None:
            of_weights = tl.load(scales + expert * n + column, mask=column < n, other=0.0)
            total *= of_weights[None, :] * tl.load(x_scales + row, mask=row < stop, other=0.0)[:, None]
        pair = tl.load(pairs + row, mask=row < stop, other=0)
        total *= tl.load(pair_weights + pair).to(tl.float32)[:, None]
        place = (pair % PICKED).to(tl.int64) * tokens + pair // PICKED
        inside = (row < stop)[:, None] & (column < n)[None, :]
        tl.store(out + place[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)
