"""Linear layers of 4-bit weights for few rows (decode): the packed weights are streamed once and widened on the way.

As in :mod:`tessera.engine.kernels.skinny_linear` the product is computed transposed, weights [BLOCK_N, k] times x^T,
so that the tensor cores take the weights from registers: two neighbouring codes become two halves of a register by a
shift, one logical operation that sets the exponent (128 + code in bfloat16, 1024 + code in float16, both exact) and
one subtraction of the zero point, exact too. Scales multiply the float32 sums of a group, so no weight is ever rounded.

A launch and the exchange of partials cost about as much as a small matrix, so the kernel does not wait for the one in
front of it to end before it fetches its first weights (programmatic dependent launch).

Programs share the work evenly, whatever the number of tiles (stream-K). Those that share a tile's k leave float32
partials; the one that arrives last adds them all in the order of k, whoever it is, so that equal inputs give equal
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tessera.engine.kernels.silu_multiply import gated
from tessera.engine.kernels.skinny_linear import multiprocessors
from tessera.engine.kernels.w4_layout import ZERO_BITS, PackedW4

MAX_ROWS = 64
_WIDEN_ROWS = 64
_ZERO_MASK = tl.constexpr((1 << ZERO_BITS) - 1)


@dataclass(frozen=True)
class W4Plan:
    """A tile is ``block_n`` rows of the weights, a power of two, with ``stages`` blocks of k in flight.

    ``programs`` share all blocks of all tiles evenly: as many as tiles, and each does a whole one; another number, and
    some tiles are begun by one program and ended by others.
    """

    block_n: int
    programs: int
    warps: int = 4
    stages: int = 4
    registers: int | None = None  # at most so many a thread, where the compiler would take more


def padded_rows(m: int) -> int:
    """The rows of x that are computed for m of them: 16, 32 or 64."""
    return max(16, triton.next_power_of_2(m))


@cache
def plan_w4a16(m: int, n: int, blocks: int, sms: int) -> W4Plan:
    """How to multiply m rows by n rows of weights of ``blocks`` blocks of k on ``sms`` multiprocessors.

    A pure function; swept on an H200 by loadtest/bench_linear.py.
    """
    rows = padded_rows(m)
    # Of a small matrix few long programs beat many short ones from 32 rows on.
    small = blocks <= 32 and triton.cdiv(n, 128) <= sms
    slots = sms if rows == MAX_ROWS or (rows == 32 and small) else 2 * sms
    block_n = 64 if rows == MAX_ROWS and triton.cdiv(n, 64) * blocks <= 6 * sms else 128
    tiles = triton.cdiv(n, block_n)
    # Whole splits: each program has one tile alone, and waits for others once.
    splits = max(1, min(slots // tiles, blocks // 2))
    programs = tiles * splits if tiles <= slots else slots
    stages = 2 if blocks // splits == 2 else 4 if rows == 32 and small else 3
    return W4Plan(block_n, programs, 8 if rows == MAX_ROWS and block_n == 128 else 4, stages)


def w4a16_linear(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None = None, plan: W4Plan | None = None
) -> torch.Tensor:
    """x [m, k] contiguous, bfloat16 or float16, W [n, k], bias [n] -> x W^T + b [m, n]; sums in float32.

    ``plan`` replaces :func:`plan_w4a16`'s choice. ValueError for m over 64 and other shapes and dtypes.
    """
    return _launch(x, weights, bias, False, plan)


def w4a16_gate_up(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None = None, plan: W4Plan | None = None
) -> torch.Tensor:
    """x [m, k], W [2 * size, k] with the gate's rows first -> silu(gate) * up [m, size].

    As :func:`w4a16_linear` followed by silu_and_multiply, with the same roundings, in one launch.
    """
    return _launch(x, weights, bias, True, plan)


def widen_w4(weights: PackedW4, dtype: torch.dtype) -> torch.Tensor:
    """W [n, k], rounded to ``dtype`` from float32: in front of a product of many rows."""
    (n, k), (blocks, _, chunk) = weights.shape, weights.codes.shape
    out = torch.empty((n, k), dtype=dtype, device=weights.codes.device)
    _widen_all[(blocks, triton.cdiv(n, _WIDEN_ROWS))](
        weights.codes, weights.words, out, n, k, weights.group, CHUNK=chunk, ROWS=_WIDEN_ROWS
    )
    return out


def _launch(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None, gate: bool, plan: W4Plan | None
) -> torch.Tensor:
    (m, k), n = _check(x, weights), weights.shape[0]
    blocks, _, chunk = weights.codes.shape
    plan = plan or plan_w4a16(m, n, blocks, multiprocessors(x.device))
    block_m, tiles = padded_rows(m), triton.cdiv(n, plan.block_n)
    if not 1 <= plan.programs <= tiles * blocks:
        raise ValueError(f"w4a16: {plan} for {tiles} tiles of {blocks} blocks")
    out = torch.empty((m, n // 2 if gate else n), dtype=x.dtype, device=x.device)
    partials, compiled = None, x.device.type == "cuda"
    if plan.programs != tiles:
        shape = (plan.programs, 2, plan.block_n, block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    _w4a16[(plan.programs,)](
        *(x, weights.codes, weights.words, bias, out, partials, weights.arrivals, m, n, k, tiles),
        GROUP_BLOCKS=max(1, weights.group // (4 * chunk)),
        GROUPS=max(1, 4 * chunk // weights.group),
        GATED=gate,
        BLOCK_M=block_m,
        BLOCK_N=plan.block_n,
        CHUNK=chunk,
        STAGES=plan.stages,
        COMPILED=compiled,
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **({"launch_pdl": True} if compiled else {}),
    )
    return out


def _check(x: torch.Tensor, weights: PackedW4) -> tuple[int, int]:
    """m and k."""
    m, k = x.shape
    if not 1 <= m <= MAX_ROWS or weights.shape[1] != k:
        raise ValueError(f"w4a16: x [1..{MAX_ROWS}, k] and W [n, k], not {list(x.shape)} and {list(weights.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        raise ValueError(f"w4a16: x contiguous and bfloat16 or float16, not {x.dtype}")
    return m, k


@triton.constexpr_function
def _widen_assembly(chunk: int, bfloat16: bool) -> str:
    """$0 = two halves, the codes of one chunk in the words $1, less the zero points $2, which hold the same offset."""
    exponent, half = ("0x43004300", "bf16x2") if bfloat16 else ("0x64006400", "f16x2")
    shift = f"shr.u32 t, $1, {4 * chunk};" if chunk else "mov.b32 t, $1;"
    return f"{{ .reg .b32 t; {shift} lop3.b32 t, t, 0x000F000F, {exponent}, 0xEA; sub.{half} $0, t, $2; }}"


@triton.jit
def _widen(words, zero, CHUNK: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Chunk number CHUNK of int16 words [n, chunk], less zero points int32 [n] -> HALF [n, chunk], exact."""
    BFLOAT16: tl.constexpr = tl.bfloat16 == HALF
    EXPONENT: tl.constexpr = 0x4300 if BFLOAT16 else 0x6400  # the value it stands for has a last place of one
    zero = (zero | EXPONENT).to(tl.int16).to(HALF, bitcast=True)
    zero = tl.broadcast_to(zero[:, None], words.shape)
    if COMPILED:
        ASSEMBLY: tl.constexpr = _widen_assembly(CHUNK, BFLOAT16)
        wide = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words, zero], dtype=zero.dtype, is_pure=True, pack=2)
    else:
        wide = ((words >> (4 * CHUNK)) & 15 | EXPONENT).to(tl.int16).to(HALF, bitcast=True) - zero
    return wide


@triton.jit
def _weight_row(tile, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile's rows of the weights; those past the end repeat the last: loads without masks, and nothing stored."""
    row = tl.arange(0, BLOCK_N)
    if GATED:  # gate, up, gate, up, ...
        row = tl.minimum(tile * (BLOCK_N // 2) + row // 2, n // 2 - 1) + row % 2 * (n // 2)
    else:
        row = tl.minimum(tile * BLOCK_N + row, n - 1)
    return row


@triton.jit
def _prefetch(pointers):
    """Lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


# m is every batch size there is: one compiled kernel serves all that pad to the same, whatever their tiles.
@triton.jit(do_not_specialize=["m", "tiles"])
def _w4a16(
    x,
    codes,
    words,
    bias,
    out,
    partials,
    arrivals,
    m,
    n,
    k,
    tiles,
    GROUP_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """One program an equal share of all blocks of all tiles; a group is GROUP_BLOCKS blocks, or a block has GROUPS."""
    HALF: tl.constexpr = x.dtype.element_ty
    blocks = k // (4 * CHUNK)
    units, program, programs = tiles * blocks, tl.program_id(0), tl.num_programs(0)
    begin, end = units * program // programs, units * (program + 1) // programs
    tile_row, x_row, in_chunk = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, CHUNK)
    if COMPILED:
        # While the kernel before this one ends, whose results are not needed for it: the first weights are fetched.
        tl.extra.cuda.gdc_launch_dependents()
        row = _weight_row(begin // blocks, n, GATED, BLOCK_N).to(tl.int64)
        for ahead in tl.static_range(STAGES):
            block = tl.minimum(begin % blocks + ahead, blocks - 1)
            _prefetch(codes + (row + block * n) * CHUNK)
            _prefetch(words + (block // GROUP_BLOCKS * GROUPS * n + row))
        tl.extra.cuda.gdc_wait()
    for tile in range(begin // blocks, (end + blocks - 1) // blocks):
        first, last = tl.maximum(begin - tile * blocks, 0), tl.minimum(end - tile * blocks, blocks)
        weight_row = _weight_row(tile, n, GATED, BLOCK_N)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for block in tl.range(first, last, num_stages=STAGES):
            row_at = weight_row.to(tl.int64) + block * n
            packed = tl.load(codes + row_at[:, None] * CHUNK + in_chunk[None, :])
            x_at = x + x_row[None, :] * k + (block * 4 * CHUNK + in_chunk)[:, None]
            for group in tl.static_range(GROUPS):
                word = tl.load(words + (block // GROUP_BLOCKS * GROUPS + group) * n + weight_row)
                scale = (word & ~_ZERO_MASK).to(tl.float32, bitcast=True)
                dot = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for i in tl.static_range(4 * group // GROUPS, 4 * (group + 1) // GROUPS):
                    weight = _widen(packed, word & _ZERO_MASK, i, HALF, COMPILED)
                    dot = tl.dot(weight, tl.load(x_at + i * CHUNK, mask=x_row[None, :] < m, other=0), dot)
                total += dot * scale[:, None]
        if partials is None or last - first == blocks:
            _store(out, total, bias, weight_row, tile, m, n, GATED, BLOCK_M, BLOCK_N)
        else:
            SIZE: tl.constexpr = BLOCK_N * BLOCK_M
            at = partials + tile_row[:, None] * BLOCK_M + x_row[None, :]
            # A program leaves two partials at most: of the tile it begins in, and of the one it ends in.
            tl.store(at + (2 * program + (tile != begin // blocks).to(tl.int32)) * SIZE, total)
            leader = ((tile * blocks + 1) * programs - 1) // units  # who has the tile's first block, and its last
            closer = ((tile + 1) * blocks * programs - 1) // units
            tl.debug_barrier()  # all of the partial is written before this program counts as arrived
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == closer - leader:
                tl.store(arrivals + tile, 0)
                begun = (units * leader // programs) // blocks
                total = tl.load(at + (2 * leader + (tile != begun).to(tl.int32)) * SIZE, cache_modifier=".cg")
                for other in tl.range(leader + 1, closer + 1, loop_unroll_factor=max(1, 4096 // SIZE)):
                    total += tl.load(at + 2 * other * SIZE, cache_modifier=".cg")
                _store(out, total, bias, weight_row, tile, m, n, GATED, BLOCK_M, BLOCK_N)


@triton.jit
def _store(out, total, bias, weight_row, tile, m, n, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """total [BLOCK_N, BLOCK_M] -> the tile's columns of out [m, n], or [m, n / 2] after the activation."""
    if bias is not None:
        total += tl.load(bias + weight_row).to(tl.float32)[:, None]
    value = total.to(out.dtype.element_ty)
    row = tl.arange(0, BLOCK_M)
    if GATED:
        gate, up = value.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1).split()
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = (column < n // 2)[:, None] & (row < m)[None, :]
        tl.store(out + row[None, :] * (n // 2) + column[:, None], gated(gate, up), mask=inside)
    else:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (column < n)[:, None] & (row < m)[None, :]
        tl.store(out + row[None, :] * n + column[:, None], value, mask=inside)


@triton.jit
def _widen_all(codes, words, out, n, k, group, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """One program a block of columns of ROWS rows."""
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, at = row < n, tl.arange(0, CHUNK)
    packed = tl.load(codes + (block.to(tl.int64) * n + row)[:, None] * CHUNK + at[None, :], mask=inside[:, None])
    for i in tl.static_range(4):
        column = (block * 4 + i) * CHUNK
        word = tl.load(words + column // group * n + row, mask=inside)
        code = (packed >> (4 * i)).to(tl.int32) & 15
        scale = (word & ~_ZERO_MASK).to(tl.float32, bitcast=True)
        weight = (code - (word & _ZERO_MASK)[:, None]).to(tl.float32) * scale[:, None]
        where = out + row.to(tl.int64)[:, None] * k + column + at[None, :]
        tl.store(where, weight.to(out.dtype.element_ty), mask=inside[:, None])
