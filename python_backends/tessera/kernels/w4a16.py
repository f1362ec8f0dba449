"""Linear layers of 4-bit weights for few rows (decode): the packed weights are streamed once and widened on the way.

The product is computed transposed, weights [BLOCK_N, k] times x^T, so that Hopper's tensor cores (wgmma) take the
weights from registers and x from the shared memory: two neighbouring codes become two halves of a register by a shift,
one logical operation that sets the exponent (128 + code in bfloat16, 1024 + code in float16, both exact) and one
subtraction of the zero point, exact too. Scales multiply the float32 sums of a group, so no weight is ever rounded.

The kernel is written in Gluon, Triton's language without its scheduler. One instruction of one thread fetches a block
(TMA), where Triton spends one of each thread on every 16 bytes; the next chunk is widened while the tensor cores still
multiply the last; and the fetches run on from tile to tile. The next kernel's programs start on multiprocessors that
have become free, and fetch their first weights before this kernel has ended (programmatic dependent launch).

Programs share the work evenly, whatever the number of tiles (stream-K). Those that share a tile's k leave float32
partials; the one that arrives last adds them all in the order of k, whichever that is, so that equal inputs give equal
outputs.

For a product of many rows the weights are widened, by a kernel in plain Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.kernels.activation import gated
from tessera.kernels.fixed_rows import fixed
from tessera.kernels.operands import MAX_ROWS
from tessera.kernels.skinny_linear import multiprocessors
from tessera.kernels.w4_layout import ZERO_BITS, PackedW4

_WIDEN_ROWS = 64
_ZERO_MASK = gl.constexpr((1 << ZERO_BITS) - 1)


@dataclass(frozen=True)
class W4Plan:
    """A tile is ``block_n`` rows of the weights, 64, 128 or 256, with ``stages`` blocks of k in the shared memory.

    ``programs`` share all blocks of all tiles evenly: as many as tiles, and each does a whole one; another number, and
    some tiles are begun by one program and ended by others. ``warps`` is 4 for each 64 or 128 rows.
    """

    block_n: int
    programs: int
    warps: int = 4
    stages: int = 4


def padded_rows(m: int) -> int:
    """The rows of x that are computed for m of them: 8, 16, 32 or 64."""
    return max(8, triton.next_power_of_2(m))


@cache
def plan_w4a16(m: int, n: int, blocks: int, sms: int) -> W4Plan:
    """How to multiply m rows by n rows of weights of ``blocks`` blocks of k on ``sms`` multiprocessors.

    A pure function; swept on an H200 (the sweep: 1dbad80, bench_linear.py).
    """
    rows, tiles = padded_rows(m), triton.cdiv(n, 64)
    small = tiles * blocks <= 12 * sms
    # Programs that a multiprocessor holds at a time, and the stages that their shared memory leaves each of them.
    resident, stages = {8: (4, 3), 16: (2, 5) if small else (3, 4), 32: (2, 3), 64: (1, 4)}[rows]
    if rows <= 16 and tiles > resident * sms:  # wide tiles fetch x half as often
        return W4Plan(128, _shares(triton.cdiv(n, 128), blocks, 2 * sms), 4, 3)
    if rows == MAX_ROWS and tiles * blocks > 6 * sms:
        return W4Plan(128, _shares(triton.cdiv(n, 128), blocks, sms), 8, 3)
    return W4Plan(64, _shares(tiles, blocks, resident * sms), 4, stages)


def plan_fixed(m: int, n: int, blocks: int, sms: int) -> W4Plan:
    """One that cuts tiles and shares in one way for any m, so that no row's bits depend on how many there are."""
    rows, block_n = padded_rows(m), 128 if triton.cdiv(n, 64) > 4 * sms else 64
    warps = 8 if rows == MAX_ROWS and block_n == 128 else 4
    return W4Plan(block_n, _shares(triton.cdiv(n, block_n), blocks, 2 * sms), warps, 4 if rows == 16 else 3)


def _shares(tiles: int, blocks: int, slots: int) -> int:
    """Programs: whole splits of a tile where there are slots for all, so that each waits for others once at most."""
    return tiles * max(1, min(slots // tiles, blocks // 2)) if tiles <= slots else slots


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


def _launch(
    x: torch.Tensor, weights: PackedW4, bias: torch.Tensor | None, gate: bool, plan: W4Plan | None
) -> torch.Tensor:
    if len(x) > MAX_ROWS and fixed():
        return torch.cat([_launch(rows, weights, bias, gate, plan) for rows in x.split(MAX_ROWS)])
    (m, k), n = _check(x, weights), weights.shape[0]
    blocks, _, chunk = weights.codes.shape
    plan = plan or (plan_fixed if fixed() else plan_w4a16)(m, n, blocks, multiprocessors(x.device))
    block_m, tiles = padded_rows(m), triton.cdiv(n, plan.block_n)
    if plan.block_n not in (64, 128, 256) or not 1 <= plan.programs <= tiles * blocks:
        raise ValueError(f"w4a16: {plan} for {tiles} tiles of {blocks} blocks")
    out = torch.empty((m, n // 2 if gate else n), dtype=x.dtype, device=x.device)
    partials = None
    if plan.programs != tiles:
        shape = (plan.programs, 2, plan.block_n, block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    # x as [k / chunk, m, chunk]: the four pieces of a block arrive as four operands of the tensor cores.
    pieces = TensorDescriptor(x, [k // chunk, m, chunk], [chunk, k, 1], [4, block_m, chunk], _swizzled(chunk, 3))
    rows = plan.block_n // 2 if gate else plan.block_n
    codes = TensorDescriptor.from_tensor(weights.codes.view(-1, chunk), [rows, chunk], _swizzled(chunk, 2))
    operands = (pieces, codes, weights.words, bias, out, partials, weights.arrivals)
    groups = {"GROUP_BLOCKS": max(1, weights.group // (4 * chunk)), "GROUPS": max(1, 4 * chunk // weights.group)}
    options = {"GATED": gate, "BLOCK_N": plan.block_n, "STAGES": plan.stages, "num_warps": plan.warps}
    _w4a16[(plan.programs,)](*operands, m, n, k, tiles, **groups, **options, launch_pdl=True)
    return out


@gluon.constexpr_function
def _swizzled(chunk: int, rank: int) -> gl.NVMMASharedLayout:
    """How rows of ``chunk`` halves lie in the shared memory, free of bank conflicts."""
    return gl.NVMMASharedLayout(2 * chunk, element_bitwidth=16, rank=rank)


def _check(x: torch.Tensor, weights: PackedW4) -> tuple[int, int]:
    """m and k."""
    m, k = x.shape
    if not 1 <= m <= MAX_ROWS or weights.shape[1] != k:
        raise ValueError(f"w4a16: x [1..{MAX_ROWS}, k] and W [n, k], not {list(x.shape)} and {list(weights.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        raise ValueError(f"w4a16: x contiguous and bfloat16 or float16, not {x.dtype}")
    return m, k


@gluon.constexpr_function
def widen_assembly(chunk: int, bfloat16: bool) -> str:
    """PTX: $0 = two halves, a chunk's codes in the words $1, less the zero points $2, which hold the same offset."""
    exponent, half = ("0x43004300", "bf16x2") if bfloat16 else ("0x64006400", "f16x2")
    shift = f"shr.u32 t, $1, {4 * chunk};" if chunk else "mov.b32 t, $1;"
    return f"{{ .reg .b32 t; {shift} lop3.b32 t, t, 0x000F000F, {exponent}, 0xEA; sub.{half} $0, t, $2; }}"


@gluon.jit
def _widen(words, zero, CHUNK: gl.constexpr, HALF: gl.constexpr):
    """Chunk number CHUNK of int16 words [n, chunk], less zero points int32 [n] -> HALF [n, chunk], exact."""
    BFLOAT16: gl.constexpr = gl.bfloat16 == HALF
    EXPONENT: gl.constexpr = 0x4300 if BFLOAT16 else 0x6400  # the value it stands for has a last place of one
    ASSEMBLY: gl.constexpr = widen_assembly(CHUNK, BFLOAT16)
    half = (zero | EXPONENT).to(gl.int16).to(HALF, bitcast=True)
    half, words = gl.broadcast(gl.expand_dims(half, 1), words)
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words, half], dtype=half.dtype, is_pure=True, pack=2)


@gluon.jit
def _weight_row(row, tile, n, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tile's rows of the weights; those past the end repeat the last: loads without masks, and nothing stored."""
    if GATED:  # a half of gates, then their ups
        HALF: gl.constexpr = BLOCK_N // 2
        row = gl.minimum(tile * HALF + row % HALF, n // 2 - 1) + row // HALF * (n // 2)
    else:
        row = gl.minimum(tile * BLOCK_N + row, n - 1)
    return row


@gluon.jit
def _next(tile, block, blocks):
    """The block after this one, which may be the next tile's first."""
    last = block + 1 == blocks
    return gl.where(last, tile + 1, tile), gl.where(last, 0, block + 1)


@gluon.jit
def _fetch_codes(
    codes, buffers, arrived, tile, block, slot, needed, n,
    BYTES: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Starts to fetch a block of codes; BYTES of codes and x will make the slot complete."""
    complete, buffer = arrived.index(slot), buffers.index(slot)
    mbarrier.expect(complete, BYTES, pred=needed)
    if GATED:
        HALF: gl.constexpr = BLOCK_N // 2
        gate = block * n + tile * HALF
        tma.async_copy_global_to_shared(codes, [gate, 0], complete, buffer.slice(0, HALF), pred=needed)
        tma.async_copy_global_to_shared(codes, [gate + n // 2, 0], complete, buffer.slice(HALF, HALF), pred=needed)
    else:
        tma.async_copy_global_to_shared(codes, [block * n + tile * BLOCK_N, 0], complete, buffer, pred=needed)


@gluon.jit
def _fetch_x(x, buffers, arrived, block, slot, needed):
    tma.async_copy_global_to_shared(x, [4 * block, 0, 0], arrived.index(slot), buffers.index(slot), pred=needed)


@gluon.jit
def _load_words(words, row, block, n, GROUP_BLOCKS: gl.constexpr, GROUPS: gl.constexpr):
    """The words of a block's groups."""
    found = ()
    for group in gl.static_range(GROUPS):
        word = gl.load(words + (block // GROUP_BLOCKS * GROUPS + group) * n + row)
        found = found + (word,)  # type: ignore[assignment]  # noqa: RUF005 (Gluon has no unpacking)
    return found


@gluon.jit
def _multiply(packed, word, pieces, GROUP: gl.constexpr, GROUPS: gl.constexpr, HALF: gl.constexpr, MMA: gl.constexpr):
    """Starts one group's products in a block -> float32 [BLOCK_N, BLOCK_M], to be waited for, without the scale."""
    CHUNKS: gl.constexpr = 4 // GROUPS
    BLOCK_N: gl.constexpr = packed.shape[0]
    BLOCK_M: gl.constexpr = pieces.shape[1]
    dot = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
    for i in gl.static_range(CHUNKS):
        weight = _widen(packed, word & _ZERO_MASK, GROUP * CHUNKS + i, HALF)
        piece = pieces.index(GROUP * CHUNKS + i).permute((1, 0))
        dot = warpgroup_mma(weight, piece, dot, use_acc=i > 0, is_async=True)
    return dot


# m is every batch size there is: one compiled kernel serves all that pad to the same, whatever their tiles.
@gluon.jit(do_not_specialize=["m", "tiles"])
def _w4a16(
    x, codes, words, bias, out, partials, arrivals, m, n, k, tiles,
    GROUP_BLOCKS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program an equal share of all blocks of all tiles; a group is GROUP_BLOCKS blocks, or a block has GROUPS."""
    HALF: gl.constexpr = x.dtype
    BLOCK_M: gl.constexpr = x.block_shape[1]
    CHUNK: gl.constexpr = x.block_shape[2]
    BYTES: gl.constexpr = 2 * CHUNK * (BLOCK_N + 4 * BLOCK_M)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    code_buffers = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, CHUNK], codes.layout)
    x_buffers = gl.allocate_shared_memory(HALF, [STAGES, 4, BLOCK_M, CHUNK], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    blocks = k // (4 * CHUNK)
    units, program, programs = tiles * blocks, gl.program_id(0), gl.num_programs(0)
    begin, end = units * program // programs, units * (program + 1) // programs
    begin_tile = begin // blocks
    tile_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, WEIGHTS))
    # While the kernel before this one ends, whose results are not needed for it: the first weights are fetched.
    gdc_launch_dependents()
    fetch_tile, fetch_block = begin_tile, begin % blocks
    for i in gl.static_range(STAGES - 1):
        needed = begin + i < end
        _fetch_codes(codes, code_buffers, arrived, fetch_tile, fetch_block, i, needed, n, BYTES, GATED, BLOCK_N)
        fetch_tile, fetch_block = _next(fetch_tile, fetch_block, blocks)
    row = _weight_row(tile_row, begin_tile, n, GATED, BLOCK_N)
    next_words = _load_words(words, row, begin % blocks, n, GROUP_BLOCKS, GROUPS)
    gdc_wait()
    for i in gl.static_range(STAGES - 1):
        _fetch_x(x, x_buffers, arrived, (begin + i) % blocks, i, begin + i < end)

    unit, slot, phase = begin, 0, 0
    for tile in range(begin_tile, (end + blocks - 1) // blocks):
        first, last = gl.maximum(begin - tile * blocks, 0), gl.minimum(end - tile * blocks, blocks)
        total = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
        for block in range(first, last):
            block_words = next_words
            next_tile, next_block = _next(tile, block, blocks)
            row = _weight_row(tile_row, next_tile, n, GATED, BLOCK_N)
            next_words = _load_words(words, row, next_block, n, GROUP_BLOCKS, GROUPS)
            mbarrier.wait(arrived.index(slot), phase)
            packed = code_buffers.index(slot).load(WEIGHTS)
            pieces = x_buffers.index(slot)._reinterpret(HALF, [4, BLOCK_M, CHUNK], _swizzled(CHUNK, 2))
            dot = _multiply(packed, block_words[0], pieces, 0, GROUPS, HALF, MMA)
            for group in gl.static_range(1, GROUPS + 1):
                if group < GROUPS:
                    following = _multiply(packed, block_words[group], pieces, group, GROUPS, HALF, MMA)
                    dot = warpgroup_mma_wait(4 // GROUPS, deps=[dot])
                else:
                    dot = warpgroup_mma_wait(0, deps=[dot])
                scale = (block_words[group - 1] & ~_ZERO_MASK).to(gl.float32, bitcast=True)
                total += dot * gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, MMA)), 1)
                if group < GROUPS:
                    dot = following
            gl.thread_barrier()  # nobody reads the slot before this one any more
            free, needed = gl.where(slot == 0, STAGES, slot) - 1, unit + STAGES - 1 < end
            _fetch_codes(codes, code_buffers, arrived, fetch_tile, fetch_block, free, needed, n, BYTES, GATED, BLOCK_N)
            _fetch_x(x, x_buffers, arrived, fetch_block, free, needed)
            fetch_tile, fetch_block = _next(fetch_tile, fetch_block, blocks)
            unit += 1
            slot += 1
            if slot == STAGES:
                slot, phase = 0, phase ^ 1
        complete = True
        if partials is not None:
            complete = last - first == blocks
            if not complete:
                SIZE: gl.constexpr = BLOCK_N * BLOCK_M
                at = partials + gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), 1) * BLOCK_M
                at += gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)), 0)
                # A program leaves two partials at most: of the tile it begins in, and of the one it ends in.
                gl.store(at + (2 * program + (tile != begin_tile).to(gl.int32)) * SIZE, total)
                leader = ((tile * blocks + 1) * programs - 1) // units  # who has the tile's first block, and its last
                closer = ((tile + 1) * blocks * programs - 1) // units
                gl.thread_barrier()  # all of the partial is written before this program counts as arrived
                complete = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == closer - leader
                if complete:
                    gl.store(arrivals + tile, 0)
                    begun = (units * leader // programs) // blocks
                    total = gl.load(at + (2 * leader + (tile != begun).to(gl.int32)) * SIZE, cache_modifier=".cg")
                    for other in range(leader + 1, closer + 1):
                        total += gl.load(at + 2 * other * SIZE, cache_modifier=".cg")
        if complete:
            _store(out, total, bias, tile, m, n, GATED, MMA)


@gluon.jit
def _store(out, total, bias, tile, m, n, GATED: gl.constexpr, MMA: gl.constexpr):
    """total [BLOCK_N, BLOCK_M] -> the tile's columns of out [m, n], or [m, n / 2] after the activation."""
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_M: gl.constexpr = total.shape[1]
    if bias is not None:
        row = _weight_row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), tile, n, GATED, BLOCK_N)
        total += gl.expand_dims(gl.load(bias + row).to(gl.float32), 1)
    value = total.to(out.dtype.element_ty)
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    THREADS: gl.constexpr = min(32, WIDTH // 2)  # along columns, which are neighbours in memory
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 1], [THREADS, 32 // THREADS], [1, gl.num_warps()], [0, 1])
    if GATED:
        halves = gl.allocate_shared_memory(
            value.dtype, [BLOCK_N, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]), value
        )
        value = gated(halves.slice(0, WIDTH).load(LAYOUT), halves.slice(WIDTH, WIDTH).load(LAYOUT))
        n = n // 2
    else:
        value = gl.convert_layout(value, LAYOUT)
    column = tile * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(out + row * n + column, value, mask=(column < n) & (row < m))


def widen_w4(weights: PackedW4, dtype: torch.dtype) -> torch.Tensor:
    """W [n, k], rounded to ``dtype`` from float32."""
    (n, k), (blocks, _, chunk) = weights.shape, weights.codes.shape
    out = torch.empty((n, k), dtype=dtype, device=weights.codes.device)
    _widen_all[(blocks, triton.cdiv(n, _WIDEN_ROWS))](
        weights.codes, weights.words, out, n, k, weights.group, CHUNK=chunk, ROWS=_WIDEN_ROWS
    )
    return out


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
