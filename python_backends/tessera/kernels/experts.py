"""The feed-forward of experts: which of them see which tokens, and their products, grouped by expert.

A token's experts are found in one launch, and the pairs of token and expert are put in the order of the experts in a
second. Each product is one launch over tiles of rows that have one expert; how many tiles there are is known on the
device alone, so the grid is the most that there can be, and programs without a tile end at once: a CUDA graph holds
for any routing. Each program finds its tile from the experts' bounds.

As in :mod:`tessera.kernels.skinny_linear` products are computed transposed: for few rows the weights' bytes are the
whole cost, and only those of experts that see a token are read. The second product gives each pair's rows times its
weight as parts of a sum (:class:`Partials`), which the next norm adds in the order of a token's experts. No atomics, so
equal inputs give equal outputs.

Weights may be of 16 bits, in e4m3 with a scale a row (as the rows that they meet), or of 4 bits in the layout of
:mod:`tessera.kernels.w4_layout`, of which codes less zeros are multiplied and sums scaled, so that W is never rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tessera.kernels.activation import gated
from tessera.kernels.fixed_rows import fixed
from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.grouped_rows import grouped_rows
from tessera.kernels.operands import MAX_ROWS, Partials, Routing, StoredWeights
from tessera.kernels.w4_layout import ZERO_BITS, PackedW4
from tessera.kernels.w4a16 import widen_assembly

_MOST_PAIRS = 4096  # that a program orders at a time
_HOPPER = 227 << 10  # bytes of shared memory that a program may have
_LARGE_STAGES = 3  # of tiles that are finished while the next one's blocks are fetched
_ZERO_MASK = tl.constexpr((1 << ZERO_BITS) - 1)


@dataclass(frozen=True)
class GroupedPlan:
    """Tiles of ``rows`` pairs by ``columns`` outputs, ``depth`` inputs at a time; powers of two."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4

    @property
    def launch(self) -> dict[str, int]:
        """What triton's launch takes of it."""
        tile = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth}
        return {**tile, "num_warps": self.warps, "num_stages": self.stages}


@cache
def plan_grouped(
    pairs: int, experts: int, k: int, size: int, packed: bool = False, shared_memory: int = _HOPPER
) -> GroupedPlan:
    """How to multiply ``pairs`` rows of ``k`` values of ``size`` bytes by as many experts, in 4 bits if ``packed``, in
    ``shared_memory`` bytes; a pure function, swept on an H200 (docs/gpu.md).

    Tiles hold twice an expert's share, so that few experts need two and read their weights again.
    """
    rows = min(max(16, triton.next_power_of_2(2 * pairs // experts)), 64 if packed else 128)
    depth = 256 if rows == 16 and k * size > 1024 and not packed else 128
    depth = min(k & -k, depth // size)  # the former: the largest power of two that divides k
    if packed:  # a block has four chunks of x; there are two sums, so that more rows would spill
        columns, warps, stages = 128, 8, 4 if rows == 16 else 3
        held = (columns + 4 * rows) * 128
    else:
        columns, warps, stages = (256, 8, 4) if rows == 128 else (128, 4, 3)
        held = (columns + rows) * depth * size
    return GroupedPlan(rows, columns, depth, warps, min(stages, max(1, shared_memory // held)))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return _HOPPER
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def route(logits: torch.Tensor, picked: int, normalize: bool) -> Routing:
    """As :func:`tessera.kernels.reference.route`; ``logits`` contiguous, else ValueError."""
    if not logits.is_contiguous() or not 1 <= picked <= logits.shape[1]:
        raise ValueError(f"route: contiguous logits [tokens, experts] and 1 to experts picked, not {picked}")
    (tokens, experts), block = logits.shape, triton.next_power_of_2(logits.shape[1])
    ids = torch.empty(tokens * picked, dtype=torch.int32, device=logits.device)
    routing = Routing(torch.empty_like(ids), ids.new_empty(experts + 1), logits.new_empty((tokens, picked)))
    early = early_launch(logits.device)
    if tokens:
        shape = {"PICKED": picked, "PLACES": triton.next_power_of_2(picked), "BLOCK": block, "NORMALIZE": normalize}
        _route[(tokens,)](logits, ids, routing.weights, experts, **shape, num_warps=1, **early)
    at_a_time = min(max(32, triton.next_power_of_2(len(ids))), _MOST_PAIRS)
    warps = min(max(at_a_time // 256, 1), 8)
    _arrange[(experts,)](ids, routing.pairs, routing.bounds, len(ids), BLOCK=at_a_time, num_warps=warps, **early)
    return routing


def grouped_gate_up(
    x: torch.Tensor | Fp8Rows, weights: StoredWeights, routing: Routing, plan: GroupedPlan | None = None
) -> torch.Tensor:
    """As :func:`tessera.kernels.reference.grouped_gate_up`, in one launch. ``plan`` replaces :func:`plan_grouped`'s.

    ValueError for shapes, dtypes or strides that the kernel cannot take.
    """
    return _multiply(x, weights, routing, plan, gate=True)


def grouped_down(
    x: torch.Tensor | Fp8Rows, weights: StoredWeights, routing: Routing, plan: GroupedPlan | None = None
) -> Partials:
    """As :func:`tessera.kernels.reference.grouped_down`, and :func:`grouped_gate_up`."""
    return Partials(_multiply(x, weights, routing, plan, gate=False), None, routing.weights.dtype)


def _multiply(
    x: torch.Tensor | Fp8Rows, weights: StoredWeights, routing: Routing, plan: GroupedPlan | None, gate: bool
) -> torch.Tensor:
    """[pairs, size] if ``gate``, else parts [picked, tokens, n]."""
    pairs, experts = len(routing.pairs), len(routing.bounds) - 1
    (tokens, picked), dtype = routing.weights.shape, routing.weights.dtype
    values, x_scales = x if isinstance(x, Fp8Rows) else (x, None)
    scales: torch.Tensor | None
    if isinstance(weights, PackedW4):
        (rows, k), stored, scales, wanted = weights.shape, weights.codes, weights.words, dtype
        chunk, group = stored.shape[2], weights.group
    else:
        stored, scales = weights if isinstance(weights, Fp8Rows) else (weights, None)
        (rows, k), wanted, chunk, group = stored.shape, stored.dtype, 0, 1
    plan = plan or plan_grouped(pairs, experts, k, values.itemsize, chunk > 0, _shared_memory(values.device))
    if values.shape[1] != k or rows % experts or (not chunk and (k % plan.depth or plan.depth * values.itemsize < 32)):
        raise ValueError(
            f"experts: rows of k values and weights [{experts} * n, k], k a multiple of 32 bytes, "
            f"not {list(values.shape)} and {[rows, k]}"
        )
    if values.dtype != wanted or isinstance(x, Fp8Rows) != isinstance(weights, Fp8Rows):
        raise ValueError(f"experts: x and weights of one form, not {values.dtype} and {stored.dtype}")
    if not (values.is_contiguous() and stored.is_contiguous()):
        raise ValueError("experts: x and weights must be contiguous")
    n, columns = rows // experts, plan.columns
    if gate:
        n, columns = n // 2, columns // 2
    out = torch.empty(
        (pairs, n) if gate else (picked, tokens, n),
        dtype=dtype if gate or tokens > MAX_ROWS or fixed() else torch.float32,
        device=values.device,
    )
    touched = min(pairs, experts)  # each has one tile, and one more for every ``plan.rows`` further pairs
    tiles = touched + (pairs - touched) // plan.rows
    if not gate and tokens and _large(plan, values, chunk):
        launch = plan.launch | {"num_stages": _LARGE_STAGES}
        grouped_rows(values, x_scales, stored, scales, routing, tiles, out, launch)
        return out
    weighted = None if gate else routing.weights, out, None if gate else tokens
    if tokens:
        _grouped[triton.cdiv(n, columns), tiles](
            *(values, x_scales, stored, scales, routing.pairs, routing.bounds, *weighted, n, k, rows),
            *(picked, experts, chunk, group, values.is_cuda, gate),
            **plan.launch,
            **early_launch(values.device),
        )
    return out


def _large(plan: GroupedPlan, x: torch.Tensor, chunk: int) -> bool:
    """Whether a product of x, a row a pair, is :mod:`tessera.kernels.grouped_rows`'s, which wants TMA and the shared
    memory of a Hopper GPU: later ones may have less."""
    hopper = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] == 9
    return plan.rows >= 128 and x.itemsize <= 2 and not chunk and hopper


@triton.jit
def _route(
    logits, ids, weights, experts,
    PICKED: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, NORMALIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    score = tl.load(logits + row * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    left = tl.exp(score - tl.max(score, 0))
    left = tl.where(expert < experts, left / tl.sum(left, 0), -1.0)
    found, likely = tl.zeros((PLACES,), tl.int32), tl.zeros((PLACES,), tl.float32)
    for number in tl.static_range(PICKED):
        best = tl.max(left, 0)
        # Of what is not a number none is the best: any expert will do, as long as there is one.
        first = tl.min(tl.where(left == best, expert, experts - 1), 0)
        found = tl.where(place == number, first, found)
        likely = tl.where(place == number, best, likely)
        left = tl.where(expert == first, -1.0, left)
    if NORMALIZE:
        likely /= tl.sum(likely, 0)
    tl.store(ids + row * PICKED + place, found, mask=place < PICKED)
    tl.store(weights + row * PICKED + place, likely.to(weights.dtype.element_ty), mask=place < PICKED)


@triton.jit(do_not_specialize=["count"])
def _arrange(ids, pairs, bounds, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program an expert: counts the pairs of those before it, then writes its own."""
    wait_for_previous(EARLY)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        theirs = tl.load(ids + start + at, mask=start + at < count, other=expert)
        before += (theirs < expert).to(tl.int32)
    begin = tl.sum(before, 0)
    tl.store(bounds + expert, begin)
    for start in range(0, count, BLOCK):
        own = (tl.load(ids + start + at, mask=start + at < count, other=-1) == expert).to(tl.int32)
        place = tl.cumsum(own, 0) - own
        tl.store(pairs + begin + place, start + at, mask=own != 0)
        begin += tl.sum(own, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(bounds + expert + 1, begin)


@triton.jit
def _tile(bounds, EXPERTS: tl.constexpr, ALL: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's expert, its first row and the end of the expert's; no rows where there is no tile for it."""
    expert, tile = tl.arange(0, ALL), tl.program_id(1)
    begin = tl.load(bounds + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(bounds + 1 + expert, mask=expert < EXPERTS, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    mine = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(expert < mine, tiles, 0), 0)
    first = tl.sum(tl.where(expert == mine, begin, 0), 0) + (tile - before) * BLOCK_M
    return mine, first, tl.sum(tl.where(expert == mine, end, 0), 0)


@triton.jit
def _widen(codes, zeros, NIBBLE: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr):
    """A nibble of int16 codes [n, chunk] less zero points int32 [n] -> HALF [n, chunk], exact; two in two instructions
    and a shift by ``PTX``, which an interpreter has not."""
    if not PTX:
        return ((codes >> 4 * NIBBLE & 15).to(tl.int32) - zeros[:, None]).to(HALF)
    BFLOAT16: tl.constexpr = tl.bfloat16 == HALF
    EXPONENT: tl.constexpr = 0x4300 if BFLOAT16 else 0x6400  # the value it stands for has a last place of one
    half = (zeros | EXPONENT).to(tl.int16).to(HALF, bitcast=True)
    half, codes = tl.broadcast(half[:, None], codes)
    assembly: tl.constexpr = widen_assembly(NIBBLE, BFLOAT16)
    return tl.inline_asm_elementwise(assembly, "=r,r,r", [codes, half], dtype=half.dtype, is_pure=True, pack=2)


@triton.jit(do_not_specialize=["tokens"])
def _grouped(
    x, x_scales, weight, scales, pairs, bounds, pair_weights, out, tokens, n, k, all_rows,
    PICKED: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr,
    GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a tile of pairs by BLOCK_N rows of weights: W x^T -> float32 [BLOCK_N, BLOCK_M], then the end.

    ``GATE``: of BLOCK_N / 2 gates and their ups in turn (gate, up, gate, ...); x has a row a token, ``out`` is
    [pairs, n]. Else x has a row a pair, and ``out`` is [PICKED, tokens, n].
    """
    wait_for_previous(EARLY)
    expert, first, stop = _tile(bounds, EXPERTS, triton.next_power_of_2(EXPERTS), BLOCK_M)
    if first >= stop:
        return
    # Rows past the expert's repeat its last one, and columns past the end the last column: loads without masks.
    if GATE:
        HALF: tl.constexpr = BLOCK_N // 2
        start = tl.program_id(0) * HALF
        tile_row = tl.arange(0, BLOCK_N)
        weight_rows = expert * 2 * n + tl.minimum(start + tile_row // 2, n - 1) + tile_row % 2 * n
        row, column = first + tl.arange(0, BLOCK_M), start + tl.arange(0, HALF)
        x_rows = tl.load(pairs + tl.minimum(row, stop - 1)) // PICKED
    else:
        row, column = first + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows, weight_rows = tl.minimum(row, stop - 1), expert * n + tl.minimum(column, n - 1)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    x_at, weight_rows = x + x_rows.to(tl.int64)[None, :] * k, weight_rows.to(tl.int64)
    if CHUNK:
        depth = tl.arange(0, CHUNK)
        x_at += depth[:, None]
        weight_at = weight + weight_rows[:, None] * CHUNK + depth[None, :]
        for block in range(k // (4 * CHUNK)):
            codes = tl.load(weight_at)
            for part in tl.static_range(4):
                words = tl.load(scales + (block * 4 + part) * CHUNK // GROUP * all_rows.to(tl.int64) + weight_rows)
                values = _widen(codes, words & _ZERO_MASK, part, x.dtype.element_ty, PTX)
                sums = tl.dot(values, tl.load(x_at + part * CHUNK), input_precision="ieee")
                total += (words & ~_ZERO_MASK).to(tl.float32, bitcast=True)[:, None] * sums
            weight_at += all_rows.to(tl.int64) * CHUNK
            x_at += 4 * CHUNK
    else:
        depth = tl.arange(0, BLOCK_K)
        x_at += depth[:, None]
        weight_at = weight + weight_rows[:, None] * k + depth[None, :]
        for _ in range(k // BLOCK_K):
            total = tl.dot(tl.load(weight_at), tl.load(x_at), total, input_precision="ieee")
            weight_at += BLOCK_K
            x_at += BLOCK_K
        if scales is not None:
            total *= tl.load(scales + weight_rows)[:, None] * tl.load(x_scales + x_rows)[None, :]
    if GATE:
        gate, up = total.to(out.dtype.element_ty).reshape(HALF, 2, BLOCK_M).permute(0, 2, 1).split()
        inside = (column < n)[:, None] & (row < stop)[None, :]
        tl.store(out + row.to(tl.int64)[None, :] * n + column[:, None], gated(gate, up), mask=inside)
    else:
        pair = tl.load(pairs + x_rows)
        total *= tl.load(pair_weights + pair).to(tl.float32)[None, :]
        place = (pair % PICKED).to(tl.int64) * tokens + pair // PICKED
        inside = (column < n)[:, None] & (row < stop)[None, :]
        tl.store(out + place[None, :] * n + column[:, None], total.to(out.dtype.element_ty), mask=inside)
