"""Products of rows and 4-bit weights for few rows (decode): the packed weights are streamed once, widened on the way.

The product is computed transposed, weights [BLOCK_N, k] times x^T, so that Hopper's tensor cores (wgmma) take the
weights from registers and x from the shared memory, bfloat16 or float16 (:mod:`tessera.engine.kernels.w4a16`) or e4m3
(:mod:`tessera.engine.kernels.w4a8`). Scales multiply the float32 sums of a group, so no weight is ever rounded.
:mod:`tessera.engine.kernels.w4_operands` says how codes become operands.

The kernel is written in Gluon, Triton's language without its scheduler. One instruction of one thread fetches a block
(TMA), where Triton spends one of each thread on every 16 bytes; the next chunk is widened while the tensor cores still
multiply the last; and the fetches run on from tile to tile. The next kernel's programs start on multiprocessors that
have become free, and fetch their first weights before this kernel has ended (programmatic dependent launch).

Programs share the work evenly, whatever the number of tiles (stream-K). Those that share a tile's k leave float32
partials; the one that arrives last adds them all in the order of k, whoever it is, so that equal inputs give equal
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
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

from tessera.engine.kernels.silu_multiply import gated
from tessera.engine.kernels.w4_layout import ZERO_BITS, PackedW4
from tessera.engine.kernels.w4_operands import SMALLEST, widen

MAX_ROWS = 64  # with more, W4A8 took twice the time of an FP8 copy of the weights
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


def shares(tiles: int, blocks: int, slots: int) -> int:
    """Programs: whole splits of a tile where there are slots for all, so that each waits for others once at most."""
    return tiles * max(1, min(slots // tiles, blocks // 2)) if tiles <= slots else slots


def multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weights: PackedW4,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    gate: bool,
    plan: W4Plan,
) -> torch.Tensor:
    """x [m, k], contiguous, times x_scales [m, 1] if e4m3 -> x W^T + b [m, n] of ``dtype``; sums in float32.

    ``gate``: silu(first half of the columns) * second half instead, [m, n / 2]. ValueError for a plan of other tiles.
    """
    (m, k), n = x.shape, weights.shape[0]
    blocks, _, chunk = weights.codes.shape
    block_m, tiles = padded_rows(m), triton.cdiv(n, plan.block_n)
    if plan.block_n not in (64, 128, 256) or not 1 <= plan.programs <= tiles * blocks:
        raise ValueError(f"w4: {plan} for {tiles} tiles of {blocks} blocks")
    out = torch.empty((m, n // 2 if gate else n), dtype=dtype, device=x.device)
    partials = None
    if plan.programs != tiles:
        shape = (plan.programs, 2, plan.block_n, block_m)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    # x as [k / chunk, m, chunk]: the four pieces of a block arrive as four operands of the tensor cores.
    layout = _swizzled(chunk, 8 * x.itemsize, 3)
    pieces = TensorDescriptor(x, [k // chunk, m, chunk], [chunk, k, 1], [4, block_m, chunk], layout)
    rows = plan.block_n // 2 if gate else plan.block_n
    codes = TensorDescriptor.from_tensor(weights.codes.view(-1, chunk), [rows, chunk], _swizzled(chunk, 16, 2))
    _w4_product[(plan.programs,)](
        *(pieces, x_scales, codes, weights.words, bias, out, partials, weights.arrivals, m, n, k, tiles),
        GROUP_BLOCKS=max(1, weights.group // (4 * chunk)),
        GROUPS=max(1, 4 * chunk // weights.group),
        GATED=gate,
        BLOCK_N=plan.block_n,
        STAGES=plan.stages,
        num_warps=plan.warps,
        launch_pdl=True,
    )
    return out


@gluon.constexpr_function
def _swizzled(chunk: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    """How rows of ``chunk`` elements of so many ``bits`` lie in the shared memory, as the tensor cores want them."""
    return gl.NVMMASharedLayout(chunk * bits // 8, element_bitwidth=bits, rank=rank)


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
def _start(packed, word, pieces, GROUP: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr):
    """Starts one group's products in a block -> float32 [BLOCK_N, BLOCK_M], to be waited for, without the scale.

    In e4m3 x's sums as well, in as many equal rows as an instruction computes.
    """
    DTYPE: gl.constexpr = pieces.dtype
    CHUNKS: gl.constexpr = 4 // GROUPS
    ROWS: gl.constexpr = 16 * gl.num_warps()
    BLOCK_M: gl.constexpr = pieces.shape[1]
    dot = gl.zeros((packed.shape[0], BLOCK_M), gl.float32, MMA)
    if gl.float8e4nv == DTYPE:
        sums = gl.zeros((ROWS, BLOCK_M), gl.float32, MMA)
        ones = gl.full((ROWS, packed.shape[1]), 1, gl.int8, packed.type.layout).to(DTYPE, bitcast=True)
    for i in gl.static_range(CHUNKS):
        weight = widen(packed, word & _ZERO_MASK, GROUP * CHUNKS + i, DTYPE)
        piece = pieces.index(GROUP * CHUNKS + i).permute((1, 0))
        dot = warpgroup_mma(weight, piece, dot, use_acc=i > 0, is_async=True)
        if gl.float8e4nv == DTYPE:
            sums = warpgroup_mma(ones, piece, sums, use_acc=i > 0, is_async=True)
    return (dot, sums) if gl.float8e4nv == DTYPE else (dot,)


@gluon.jit
def _finish(found, word, PENDING: gl.constexpr, MMA: gl.constexpr):
    """Waits until only PENDING chunks are still multiplied -> the group's products [BLOCK_N, BLOCK_M], scaled."""
    scale = (word & ~_ZERO_MASK).to(gl.float32, bitcast=True)
    scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, MMA)), 1)
    if len(found) == 1:
        dot = warpgroup_mma_wait(PENDING, deps=found)
    else:
        dot, sums = warpgroup_mma_wait(2 * PENDING, deps=found)
        if dot.shape[0] != sums.shape[0]:  # twice as many: the same registers once more
            sums = gl.join(sums, sums).permute((2, 0, 1)).reshape(dot.shape)
        less = gl.convert_layout((-(word & _ZERO_MASK)).to(gl.float32), gl.SliceLayout(1, MMA))
        dot += gl.expand_dims(less, 1) * gl.convert_layout(sums, MMA)
    return dot * scale


# m is every batch size there is: one compiled kernel serves all that pad to the same, whatever their tiles.
@gluon.jit(do_not_specialize=["m", "tiles"])
def _w4_product(
    x, x_scales, codes, words, bias, out, partials, arrivals, m, n, k, tiles,
    GROUP_BLOCKS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program an equal share of all blocks of all tiles; a group is GROUP_BLOCKS blocks, or a block has GROUPS."""
    DTYPE: gl.constexpr = x.dtype
    BYTE: gl.constexpr = DTYPE.primitive_bitwidth // 8
    BLOCK_M: gl.constexpr = x.block_shape[1]
    CHUNK: gl.constexpr = x.block_shape[2]
    BYTES: gl.constexpr = CHUNK * (2 * BLOCK_N + 4 * BYTE * BLOCK_M)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 32 // BYTE])
    AHEAD: gl.constexpr = BYTE == 2 or BLOCK_M <= 32  # else a second group's sums do not fit into the registers
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 // BYTE)
    code_buffers = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, CHUNK], codes.layout)
    x_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, 4, BLOCK_M, CHUNK], x.layout)
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
            LAYOUT: gl.constexpr = _swizzled(CHUNK, 8 * BYTE, 2)
            pieces = x_buffers.index(slot)._reinterpret(DTYPE, [4, BLOCK_M, CHUNK], LAYOUT)
            found = _start(packed, block_words[0], pieces, 0, GROUPS, MMA)
            for group in gl.static_range(1, GROUPS + 1):
                if AHEAD and group < GROUPS:
                    following = _start(packed, block_words[group], pieces, group, GROUPS, MMA)
                    total += _finish(found, block_words[group - 1], 4 // GROUPS, MMA)
                    found = following
                else:
                    total += _finish(found, block_words[group - 1], 0, MMA)
                    if group < GROUPS:
                        found = _start(packed, block_words[group], pieces, group, GROUPS, MMA)
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
                at = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), 1) * BLOCK_M
                at += gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)), 0)
                # A program leaves two partials at most: of the tile it begins in, and of the one it ends in.
                gl.store(partials + (2 * program + (tile != begin_tile).to(gl.int32)) * SIZE + at, total)
                leader = ((tile * blocks + 1) * programs - 1) // units  # who has the tile's first block, and its last
                closer = ((tile + 1) * blocks * programs - 1) // units
                gl.thread_barrier()  # all of the partial is written before this program counts as arrived
                complete = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == closer - leader
                if complete:
                    gl.store(arrivals + tile, 0)
                    begun = (units * leader // programs) // blocks
                    theirs = partials + (2 * leader + (tile != begun).to(gl.int32)) * SIZE
                    total = gl.load(theirs + at, cache_modifier=".cg")
                    for other in range(leader + 1, closer + 1):
                        total += gl.load(partials + 2 * other * SIZE + at, cache_modifier=".cg")
        if complete:
            _store(out, total, x_scales, bias, tile, m, n, GATED, MMA)


@gluon.jit
def _store(out, total, x_scales, bias, tile, m, n, GATED: gl.constexpr, MMA: gl.constexpr):
    """total [BLOCK_N, BLOCK_M] -> the tile's columns of out [m, n], or [m, n / 2] after the activation."""
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_M: gl.constexpr = total.shape[1]
    if x_scales is not None:
        scale = gl.load(x_scales + gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)), m - 1))
        total *= gl.expand_dims(scale / SMALLEST, 0)
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
    gl.store(out + (row * n + column), value, mask=(column < n) & (row < m))
