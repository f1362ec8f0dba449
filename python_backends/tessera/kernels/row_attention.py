"""Attention over paged keys and values of which a query's bits depend on nothing but what that query sees: a prompt may
be cut anywhere, read again, or decoded, alone or beside others.

Keys are cut by their positions into segments, which go round among lanes. Each lane is one softmax over its segments'
tiles in their order, and the lanes are added in theirs. A prompt's program does all of that by itself; of a single
query some programs do a few lanes each, and a second kernel adds them. Both have tiles of one size, and so one order
within; a tile of keys that a row does not see changes nothing of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.operands import AttentionPlan, PagedCache
from tessera.kernels.paged_decode import cache_arguments, load_tile

#: keys of a segment, and lanes; powers of two. A segment is whole tiles
SEGMENT, LANES = 256, 16
_WAVES = 3
#: of pieces and of single queries. With 16 rows, as these have, warps would share out a row's keys, and add up its
#: weights in another order, which few bits show: one in a hundred thousand of the output's
PLAN = AttentionPlan(rows=64, tokens=64, warps=4, stages=2)


def lane_programs(sequences: int, kv_heads: int, sms: int) -> int:
    """How many programs share the lanes of one query and key head: a power of two, three for each multiprocessor."""
    wanted = max(1, min(_WAVES * sms // (sequences * kv_heads), LANES))
    return 1 << (wanted.bit_length() - 1)


def row_prefill(
    q: torch.Tensor,
    cache: PagedCache,
    rows: torch.Tensor,
    counts: torch.Tensor,
    contexts: torch.Tensor,
    blocks: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """As :func:`tessera.kernels.varlen_prefill.prefill_attention`; the plan is PLAN where none is given."""
    plan = plan or PLAN
    given = cache_arguments(q, cache, blocks, out, scale)
    if not tiles.is_contiguous():
        raise ValueError("tiles are not contiguous")
    pieces = {"rows": rows, "counts": counts, "contexts": contexts, "tiles": tiles, "partial": None, "sums": None}
    options = {"SEGMENT": SEGMENT, "LANES": LANES, **plan.launch, **early_launch(q.device)}
    _attend[(len(tiles) * cache.keys.shape[2], 1)](**pieces, **given, **options)
    return out


def row_decode(
    q: torch.Tensor,
    cache: PagedCache,
    blocks: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    splits: int,
    out: torch.Tensor,
    plan: AttentionPlan = PLAN,
) -> torch.Tensor:
    """As :func:`tessera.kernels.paged_decode.decode_attention`; ``splits``: :func:`lane_programs`."""
    sequences, heads, head_dim = q.shape
    partial = torch.empty((sequences, heads, LANES, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((2, sequences, heads, LANES), dtype=torch.float32, device=q.device)
    given = cache_arguments(q, cache, blocks, out, scale)
    early = early_launch(q.device)
    steps = {"rows": None, "counts": None, "contexts": context, "tiles": None, "partial": partial, "sums": sums}
    options = {"SEGMENT": SEGMENT, "LANES": LANES, **plan.launch, **early}
    _attend[(sequences * cache.keys.shape[2], splits)](**steps, **given, **options)
    merged = {name: given[name] for name in ("out", "out_row", "HEAD_DIM", "COLUMNS")}
    options = {"HEADS": heads, "SEGMENT": SEGMENT, "LANES": LANES, "num_warps": 1, **early}
    _add_lanes[(heads, sequences)](partial, sums, context, **merged, **options)
    return out


@triton.jit
def _exp2(x, top):
    """2 to the x - top; of nothing, and where nothing has been seen, 0."""
    return tl.exp2(x - tl.where(top == -float("inf"), 0.0, top))


@triton.jit
def _add_lane(top, total, mixed, lane_top, lane_total, lane_mixed):
    """Adds a lane to the sums so far; tops and totals are of rows, and with one more dimension of size 1."""
    new_top = tl.maximum(top, lane_top)
    shrink, share = _exp2(top, new_top), _exp2(lane_top, new_top)
    mixed = tl.fma(lane_mixed, tl.broadcast_to(share, mixed.shape), mixed * shrink)
    return new_top, tl.fma(lane_total, share, total * shrink), mixed


# What changes from step to step is not specialized: another batch must not compile another kernel.
@triton.jit(do_not_specialize=["rows", "counts", "contexts", "blocks", "tiles", "blocks_step", "blocks_column"])
def _attend(
    q, keys, values, key_scales, value_scales, rows, counts, contexts, blocks, tiles, out, partial, sums, scale,
    q_row, cache_block, cache_slot, blocks_step, blocks_column, out_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SEGMENT: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some lanes of one tile of one piece's queries for the query heads of one key head; without ``tiles`` of one query
    a sequence, whose lanes go to ``partial`` and ``sums``."""
    wait_for_previous(EARLY)
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    piece = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    if tiles is None:
        row, queries = piece, 1
        begin = tl.load(contexts + piece).to(tl.int32) - 1
    else:
        tile = piece
        piece = tl.load(tiles + 2 * tile).to(tl.int64)
        first_query = tl.load(tiles + 2 * tile + 1).to(tl.int32)
        count = tl.load(counts + piece).to(tl.int32)
        if first_query >= count:  # a recorded step has room for more tiles than there are
            return
        row = tl.load(rows + piece).to(tl.int64) + first_query
        queries = tl.minimum(QUERIES, count - first_query)
        # The tile's first query stands at position ``begin``; its last is the last to see anything, up to ``end``.
        begin = tl.load(contexts + piece).to(tl.int32) - count + first_query
    end = begin + queries

    at = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    query, head = at // GROUP, at % GROUP
    used = (at < queries * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    first_head = kv_head * GROUP * HEAD_DIM
    q_place = (query * q_row + head * HEAD_DIM)[:, None] + column[None, :]
    asked = tl.load(q + row * q_row + first_head + q_place, mask=used, other=0.0)

    top = tl.full([ROWS, 1], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    lane_top, lane_total, lane_mixed = top, total, mixed

    # This program's segments are number program, program + programs and so on; the last of all may not be full.
    program, programs = tl.program_id(1), tl.num_programs(1)
    segments = tl.cdiv(end, SEGMENT)
    number = tl.cdiv(tl.maximum(segments - program, 0), programs) * (SEGMENT // TOKENS)
    if (segments - 1) % programs == program:
        number -= (segments * SEGMENT - end) // TOKENS
    table = blocks + piece * blocks_column
    # Behind the end is what no query may see, NaN too: there the last position is read again, and weighs 0.
    first, last = program * SEGMENT, tl.maximum(end - 1, 0)
    block = tl.load(table + (tl.minimum(first + token, last) // BLOCK_SIZE) * blocks_step)
    for _ in range(number):
        position = first + token
        slot = tl.minimum(position, last) % BLOCK_SIZE
        key, value = load_tile(
            keys, values, key_scales, value_scales, block.to(tl.int64), slot, cache_block, cache_slot, kv_head,
            asked.dtype, KV_HEADS, HEAD_DIM, COLUMNS, BLOCK_SIZE,
        )  # fmt: skip
        # The lane goes on behind its segment, and behind the lane comes the next of this program's.
        lane = first // SEGMENT % LANES
        segment_ends = ((first + TOKENS) % SEGMENT == 0) | (first + TOKENS >= end)
        again = first // SEGMENT * SEGMENT + LANES * SEGMENT
        lane_ends = segment_ends & (again >= end)
        following = tl.where(lane_ends, (lane + programs) * SEGMENT, again)
        following = tl.where(segment_ends, following, first + TOKENS)
        # Read a tile ahead, the block numbers do not hold up the pipeline of the loads that need them.
        block = tl.load(table + (tl.minimum(following + token, last) // BLOCK_SIZE) * blocks_step)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee")
        if first + TOKENS > begin + 1:
            scores = tl.where(position[None, :] > (begin + query)[:, None], -float("inf"), scores)
        scores *= scale
        new_top = tl.maximum(lane_top, tl.max(scores, 1, keep_dims=True))
        weight = _exp2(scores, new_top)
        shrink = _exp2(lane_top, new_top)
        lane_total = tl.fma(lane_total, shrink, tl.sum(weight, 1, keep_dims=True))
        lane_mixed = tl.dot(weight.to(value.dtype), value, lane_mixed * shrink, input_precision="ieee")
        lane_top = new_top
        if lane_ends:
            if partial is None:
                top, total, mixed = _add_lane(top, total, mixed, lane_top, lane_total, lane_mixed)
            else:
                part = ((piece * KV_HEADS + kv_head) * GROUP + head) * LANES + lane
                heads = tl.num_programs(0).to(tl.int64) * GROUP * LANES
                tl.store(partial + part[:, None] * HEAD_DIM + column[None, :], lane_mixed, mask=used)
                tl.store(sums + part[:, None], lane_top, mask=(at < GROUP)[:, None])
                tl.store(sums + heads + part[:, None], lane_total, mask=(at < GROUP)[:, None])
            lane_top = tl.full([ROWS, 1], -float("inf"), tl.float32)
            lane_total = tl.zeros([ROWS, 1], tl.float32)
            lane_mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
        first = following

    if partial is None:
        out_place = (query * out_row + head * HEAD_DIM)[:, None] + column[None, :]
        tl.store(out + row * out_row + first_head + out_place, (mixed / total).to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["contexts"])
def _add_lanes(
    partial, sums, contexts, out, out_row,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, SEGMENT: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one query."""
    wait_for_previous(EARLY)
    sequence = tl.program_id(1).to(tl.int64)
    part = (sequence * HEADS + tl.program_id(0)) * LANES
    heads = tl.num_programs(1).to(tl.int64) * HEADS * LANES
    column = tl.arange(0, COLUMNS)
    inside = column < HEAD_DIM
    lanes = tl.minimum(tl.cdiv(tl.load(contexts + sequence), SEGMENT), LANES)
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([COLUMNS], tl.float32)
    one = tl.arange(0, 1)
    for lane in tl.static_range(LANES):
        # All are asked for before it is known how many there are; what stands for the others is not taken.
        lane_top, lane_total = tl.load(sums + part + lane + one), tl.load(sums + heads + part + lane + one)
        lane_mixed = tl.load(partial + (part + lane) * HEAD_DIM + column, mask=inside, other=0.0)
        new_top, new_total, new_mixed = _add_lane(top, total, mixed, lane_top, lane_total, lane_mixed)
        there = lane < lanes
        top, total = tl.where(there, new_top, top), tl.where(there, new_total, total)
        mixed = tl.where(there, new_mixed, mixed)
    target = out + sequence * out_row + tl.program_id(0) * HEAD_DIM + column
    tl.store(target, (mixed / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty), mask=inside)
