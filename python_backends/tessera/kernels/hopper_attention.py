"""Attention within pictures of any sizes on a Hopper GPU: the tensor cores multiply while the softmax is computed.

The contract is :func:`~tessera.kernels.varlen_attention.varlen_attention`'s, for 16-bit dtypes. The kernels are
written in Gluon, Triton's language without its scheduler, since the order is what matters: the products of the next
scores and those of the last weights with their values are started together (wgmma), and while the second run, the
softmax of the first is computed (the pipeline within a warpgroup of FlashAttention-3, Shah et al., 2024). Two groups of
warps take turns to start theirs, a third fetches the tiles, and a program takes one tile of queries after the other.

Only the first tile of keys is masked: it takes what the others, all full, leave of the picture.
"""

from __future__ import annotations

import math

import torch
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

from tessera.kernels.operands import HopperPlan
from tessera.kernels.varlen_attention import checked_parts


def hopper_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: torch.Tensor, plan: HopperPlan
) -> torch.Tensor:
    """As varlen_attention, ValueErrors too, for bfloat16 and float16; ``tiles`` of this plan's rows."""
    patches, heads, size = query.shape
    wide, tail = checked_parts(query, key, value)
    out = torch.empty((patches, heads * size), dtype=query.dtype, device=query.device)
    if not patches or not len(tiles):
        return out
    described = [
        _described(rows, count, columns)
        for rows, count in ((query, plan.rows // 2), (key, plan.tokens), (value, plan.tokens))
        for columns in (wide, tail or wide)
    ]
    items = len(tiles) * heads
    _hopper_attention[(min(items, plan.programs),)](
        *described,
        tiles,
        out,
        size**-0.5 * math.log2(math.e),
        heads * size,
        len(tiles),
        items,
        TAIL=tail,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    return out


def _described(rows: torch.Tensor, count: int, columns: int) -> TensorDescriptor:
    patches, heads, size = rows.shape
    layout = swizzled(columns)
    return TensorDescriptor(rows, [patches, heads * size], [rows.stride(0), 1], [count, columns], layout)


@gluon.constexpr_function
def swizzled(columns: int) -> gl.NVMMASharedLayout:
    """How rows of ``columns`` halves lie in the shared memory, free of bank conflicts."""
    return gl.NVMMASharedLayout(min(2 * columns, 128), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _sums_layout(warps: int, columns: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


# What follows passes tuples: a pair of descriptors (of the heads' wide part, and of the tail if there is one), a ring
# (shared memory of both for some tiles, and a barrier each, which completes when the tile has arrived), and a picture
# (the tile's first patch, the picture's first, its end, and the head's first column).


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _ring(pair, TAIL: gl.constexpr, STAGES: gl.constexpr):
    COUNT: gl.constexpr = pair[0].block_shape[0]
    WIDE: gl.constexpr = pair[0].block_shape[1]
    wide = gl.allocate_shared_memory(pair[0].dtype, [STAGES, COUNT, WIDE], pair[0].layout)
    tail = wide
    if TAIL:
        tail = gl.allocate_shared_memory(pair[1].dtype, [STAGES, COUNT, TAIL], pair[1].layout)
    return wide, tail, _barriers(STAGES, 1)


@gluon.jit
def _fetch(pair, ring, slot, place, column, TAIL: gl.constexpr):
    """Starts to fetch a tile into a slot."""
    COUNT: gl.constexpr = pair[0].block_shape[0]
    WIDE: gl.constexpr = pair[0].block_shape[1]
    arrived = ring[2].index(slot)
    mbarrier.expect(arrived, 2 * COUNT * (WIDE + TAIL))
    tma.async_copy_global_to_shared(pair[0], [place, column], arrived, ring[0].index(slot))
    if TAIL:
        tma.async_copy_global_to_shared(pair[1], [place, column + WIDE], arrived, ring[1].index(slot))


@gluon.jit
def _await(ring, tile):
    STAGES: gl.constexpr = ring[0].shape[0]
    mbarrier.wait(ring[2].index(tile % STAGES), (tile // STAGES) & 1)


@gluon.jit
def _start_scores(query, query_tail, keys, slot, TAIL: gl.constexpr, WARPS: gl.constexpr):
    """Starts queries [rows, size] times a slot's keys [tokens, size]: float32 [rows, tokens], to be waited for."""
    TOKENS: gl.constexpr = keys[0].shape[1]
    ROWS: gl.constexpr = query.shape[0]
    scores = gl.zeros((ROWS, TOKENS), gl.float32, _sums_layout(WARPS, TOKENS))
    turned = keys[0].index(slot).permute((1, 0))
    scores = warpgroup_mma(query, turned, scores, use_acc=False, is_async=True)
    if TAIL:
        turned = keys[1].index(slot).permute((1, 0))
        scores = warpgroup_mma(query_tail, turned, scores, is_async=True)
    return scores


@gluon.jit
def _weigh(scores, top, total, scale):
    """One step of the softmax, by powers of two: weights, the new top and total, and what the old ones shrink by."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weight = gl.exp2(scores * scale - gl.expand_dims(new_top, 1))
    shrink = gl.exp2(top - new_top)
    return weight, new_top, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _as_operand(weight, HALF: gl.constexpr, WARPS: gl.constexpr, WIDE: gl.constexpr):
    """The weights as the tensor cores take them from registers: no value moves to another thread."""
    return gl.convert_layout(weight.to(HALF), gl.DotOperandLayout(0, _sums_layout(WARPS, WIDE), 2), assert_trivial=True)


@gluon.jit
def _shrunk(mixed, shrink):
    return mixed * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, mixed.type.layout), True), 1)


@gluon.jit
def _store(out, mixed, total, first, end, column, out_row):
    """mixed / total as rows of the picture that ends at end."""
    row = first + gl.arange(0, mixed.shape[0], gl.SliceLayout(1, mixed.type.layout))
    at = column + gl.arange(0, mixed.shape[1], gl.SliceLayout(0, mixed.type.layout))
    target = out + gl.expand_dims(row.to(gl.int64) * out_row, 1) + gl.expand_dims(at, 0)
    gl.store(target, _shrunk(mixed, 1.0 / total).to(out.dtype.element_ty), mask=gl.expand_dims(row < end, 1))


@gluon.jit
def _first_weights(scores, left, scale):
    """The softmax's first step, of a tile of which only ``left`` tokens count."""
    token = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    scores = gl.where(gl.expand_dims(token < left, 0), scores, -float("inf"))
    top = gl.max(scores, 1) * scale
    weight = gl.exp2(scores * scale - gl.expand_dims(top, 1))
    return weight, top, gl.sum(weight, 1)


@gluon.jit
def _attend(rings, free, turn, picture, target, done, before, TAIL: gl.constexpr, GROUP: gl.constexpr):
    """One group's queries; ``free`` tells the warp that fetches which slots are. ``done`` queries, and ``before`` tiles
    of keys, came before these.

    In flight at a time: this tile's scores, and the last tile's weights times its values.
    """
    asked, keys, values = rings
    out, scale, out_row = target
    TOKENS: gl.constexpr = keys[0].shape[1]
    STAGES: gl.constexpr = keys[0].shape[0]
    ROWS: gl.constexpr = asked[0].shape[1]
    WIDE: gl.constexpr = asked[0].shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = keys[0].dtype
    SPARE: gl.constexpr = TAIL if TAIL else 16  # without a tail nothing comes of what stands for it
    first, begin, end, column = picture
    first += GROUP * ROWS
    number = gl.cdiv(end - begin, TOKENS)
    mixed = gl.zeros((ROWS, WIDE), gl.float32, _sums_layout(WARPS, WIDE))
    mixed_tail = gl.zeros((ROWS, SPARE), gl.float32, _sums_layout(WARPS, SPARE))
    mbarrier.wait(asked[2].index(GROUP), done & 1)
    query, query_tail = asked[0].index(GROUP), asked[1].index(GROUP)
    _await(keys, before)
    scores = warpgroup_mma_wait(0, deps=[_start_scores(query, query_tail, keys, before % STAGES, TAIL, WARPS)])
    weight, top, total = _first_weights(scores, end - begin - (number - 1) * TOKENS, scale)
    weight = _as_operand(weight, HALF, WARPS, WIDE)
    _await(values, before)
    for tile in range(before + 1, before + number):
        slot, slot_before = tile % STAGES, (tile - 1) % STAGES
        _await(keys, tile)
        # All tiles but a query's first; the first group's first turn need not be given.
        mbarrier.wait(turn.index(GROUP), (tile - done + GROUP) & 1)
        started = _start_scores(query, query_tail, keys, slot, TAIL, WARPS)
        mixing = warpgroup_mma(weight, values[0].index(slot_before), mixed, is_async=True)
        if TAIL:
            mixing_tail = warpgroup_mma(weight, values[1].index(slot_before), mixed_tail, is_async=True)
        # All warps have done with the last round, and so with its keys and with the values of the one before.
        gl.thread_barrier()
        mbarrier.arrive(turn.index(1 - GROUP))
        mbarrier.arrive(free[0].index(slot_before))
        mbarrier.arrive(free[1].index((tile + STAGES - 2) % STAGES), pred=tile > before + 1)
        # The second wait takes the weights too and follows a loop (of the wait for values), or the compilers move it to
        # before the softmax.
        if TAIL:
            scores = warpgroup_mma_wait(2, deps=[started])
            following, top, total, shrink = _weigh(scores, top, total, scale)
            _await(values, tile)
            mixed, mixed_tail, following = warpgroup_mma_wait(0, deps=[mixing, mixing_tail, following])
            mixed_tail = _shrunk(mixed_tail, shrink)
        else:
            scores = warpgroup_mma_wait(1, deps=[started])
            following, top, total, shrink = _weigh(scores, top, total, scale)
            _await(values, tile)
            mixed, following = warpgroup_mma_wait(0, deps=[mixing, following])
        mixed = _shrunk(mixed, shrink)
        weight = _as_operand(following, HALF, WARPS, WIDE)

    last = (before + number - 1) % STAGES
    mixing = warpgroup_mma(weight, values[0].index(last), mixed, is_async=True)
    if TAIL:
        mixing_tail = warpgroup_mma(weight, values[1].index(last), mixed_tail, is_async=True)
        mixed, mixed_tail = warpgroup_mma_wait(0, deps=[mixing, mixing_tail])
    else:
        mixed = warpgroup_mma_wait(0, deps=[mixing])
    gl.thread_barrier()
    mbarrier.arrive(free[0].index(last))
    mbarrier.arrive(free[1].index((last + STAGES - 1) % STAGES), pred=number > 1)
    mbarrier.arrive(free[1].index(last))
    mbarrier.arrive(free[2].index(GROUP))
    if TAIL:
        _store(out, mixed_tail, total, first, end, column + WIDE, out_row)
    _store(out, mixed, total, first, end, column, out_row)


@gluon.jit
def _picture(tiles, count, item, size):
    """What an item, a tile of queries and a head, is of; the tiles of a head follow each other."""
    tile = tiles + 3 * (item % count)
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), item // count * size


@gluon.jit
def _attend_all(rings, free, turn, work, target, TAIL: gl.constexpr, GROUP: gl.constexpr):
    """One group's queries of all the program's items."""
    tiles, count, items, size = work
    TOKENS: gl.constexpr = rings[1][0].shape[1]
    done, before = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        picture = _picture(tiles, count, item, size)
        if picture[0] < picture[2]:
            _attend(rings, free, turn, picture, target, done, before, TAIL, GROUP)
            done += 1
            before += gl.cdiv(picture[2] - picture[1], TOKENS)


@gluon.jit
def _fetch_all(rings, free, pairs, work, TAIL: gl.constexpr):
    """Fetches the groups' queries, and tile by tile the keys and values, into slots that both groups have read."""
    asked, keys, values = rings
    query, key, value = pairs
    tiles, count, items, size = work
    STAGES: gl.constexpr = keys[0].shape[0]
    ROWS: gl.constexpr = asked[0].shape[1]
    done, before = 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        first, begin, end, column = _picture(tiles, count, item, size)
        if first < end:
            for group in gl.static_range(2):
                mbarrier.wait(free[2].index(group), done & 1 ^ 1)  # the first time there is nothing to wait for
                _fetch(query, asked, group, first + group * ROWS, column, TAIL)
            number = gl.cdiv(end - begin, key[0].block_shape[0])
            for tile in range(before, before + number):
                slot, phase = tile % STAGES, (tile // STAGES) & 1 ^ 1
                place = gl.maximum(end - (before + number - tile) * key[0].block_shape[0], begin)
                mbarrier.wait(free[0].index(slot), phase)
                _fetch(key, keys, slot, place, column, TAIL)
                mbarrier.wait(free[1].index(slot), phase)
                _fetch(value, values, slot, place, column, TAIL)
            done += 1
            before += number


@gluon.jit(do_not_specialize=["count", "items"])
def _hopper_attention(
    query, query_tail, key, key_tail, value, value_tail, tiles, out, scale, out_row, count, items,
    TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A share of the tiles of queries and the heads."""
    WARPS: gl.constexpr = gl.num_warps()
    size = query.block_shape[1] + TAIL
    pairs = ((query, query_tail), (key, key_tail), (value, value_tail))
    target = (out, scale, out_row)
    rings = (_ring(pairs[0], TAIL, 2), _ring(pairs[1], TAIL, STAGES), _ring(pairs[2], TAIL, STAGES))
    free, turn = (_barriers(STAGES, 2), _barriers(STAGES, 2), _barriers(2, 1)), _barriers(2, 1)
    fence_async_shared()
    gl.thread_barrier()
    work = (tiles, count, items, size)
    gl.warp_specialize(
        [
            (_attend_all, (rings, free, turn, work, target, TAIL, 0)),
            (_attend_all, (rings, free, turn, work, target, TAIL, 1)),
            (_fetch_all, (rings, free, pairs, work, TAIL)),
        ],
        [WARPS, 1],
        [240, 24],
    )
