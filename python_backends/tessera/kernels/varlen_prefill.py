"""Packed pieces of prompts over paged keys and values: causal flash attention with grouped heads, in triton.

A program takes one tile of queries of one piece and one key head: the tile's rows are (query, head of the group), so
that a group of 7 heads shares each key read and 18 queries fill 126 of 128 rows.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tessera.kernels.operands import AttentionPlan, PagedCache
from tessera.kernels.paged_decode import cache_arguments, load_tile, weigh


def default_plan(head_dim: int, dtype: torch.dtype) -> AttentionPlan:
    """The plan for an H200 and whole prompts: rows of up to 256 bytes get large tiles, which take the fewest joules."""
    if head_dim * dtype.itemsize > 256:
        return AttentionPlan(rows=64, tokens=32, warps=4, stages=2)
    return AttentionPlan(rows=128, tokens=64, warps=8, stages=3)


def short_plan(head_dim: int, dtype: torch.dtype) -> AttentionPlan:
    """The plan where most pieces are drafts or single tokens, which fill few rows of a tile: 62 drafts and two prompts
    of 340 tokens then take a sixth less joules and 30 % less time on an H200, prompts alone a tenth more joules."""
    whole = default_plan(head_dim, dtype)
    if whole.rows == 64:
        return whole
    return AttentionPlan(rows=64, tokens=64 if head_dim * dtype.itemsize > 128 else 128, warps=4, stages=2)


def prefill_tiles(counts: np.ndarray, contexts: np.ndarray, queries: int) -> np.ndarray:
    """Cuts pieces into tiles of ``queries`` queries: int32 [t, 2] of (piece, first query of the tile in the piece).

    Piece i's queries are the last counts[i] of contexts[i] positions. The tiles that see most come first, so that
    no long one starts when the others are done.
    """
    counts, contexts = np.asarray(counts), np.asarray(contexts)
    number = -(-counts // queries)
    piece = np.repeat(np.arange(len(counts)), number)
    first = (np.arange(len(piece)) - (np.cumsum(number) - number)[piece]) * queries
    order = np.argsort(-((contexts - counts)[piece] + first), kind="stable")
    return np.stack([piece, first], axis=1)[order].astype(np.int32)


def prefill_attention(
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
    """q [n, heads, head_dim], its rows any stride apart -> ``out``, the same shape and dtype.

    ``rows``, ``counts``, ``contexts`` integer [p]: piece i's queries are the packed rows [rows[i], rows[i] + counts[i])
    and stand at the last counts[i] of positions [0, contexts[i]); each sees its own position and those before it.
    ``blocks`` integer [most, p]: block j of piece i is blocks[j, i]. ``tiles`` integer [t, 2], contiguous, t >= 1, is
    :func:`prefill_tiles` with ``rows // group`` of the same plan, or of :func:`default_plan`; tiles behind a piece's
    end do nothing. ``scale`` is positive. Rows of no piece are left as they are.
    ValueError for what :func:`tessera.kernels.paged_decode.check_cache` refuses. FlashAttention-2 (Dao, 2023).
    """
    plan = plan or default_plan(q.shape[-1], q.dtype)
    given = cache_arguments(q, cache, blocks, out, scale)
    if not tiles.is_contiguous():
        raise ValueError("tiles are not contiguous")
    pieces = {"rows": rows, "counts": counts, "contexts": contexts, "tiles": tiles}
    _prefill_kernel[(len(tiles) * cache.keys.shape[2],)](**pieces, **given, **plan.launch)
    return out


# What changes from step to step is not specialized: another batch must not compile another kernel.
@triton.jit(do_not_specialize=["rows", "counts", "contexts", "blocks", "tiles", "blocks_step", "blocks_column"])
def _prefill_kernel(
    q, keys, values, key_scales, value_scales, rows, counts, contexts, blocks, tiles, out, scale,
    q_row, cache_block, cache_slot, blocks_step, blocks_column, out_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One tile of one piece's queries for the query heads of one key head."""
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    piece = tl.load(tiles + 2 * tile).to(tl.int64)
    first_query = tl.load(tiles + 2 * tile + 1).to(tl.int32)
    count = tl.load(counts + piece).to(tl.int32)
    if first_query >= count:  # a recorded step has room for more tiles than there are
        return
    queries = tl.minimum(QUERIES, count - first_query)
    # The tile's first query stands at position ``begin``; its last is the last to see anything, up to ``end``.
    begin = tl.load(contexts + piece).to(tl.int32) - count + first_query
    end = begin + queries

    lane = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (column < HEAD_DIM)[None, :]
    token = tl.arange(0, TOKENS)
    query, head = lane // GROUP, lane % GROUP
    used = (lane < queries * GROUP)[:, None] & inside
    row = tl.load(rows + piece).to(tl.int64) + first_query
    first_head = kv_head * GROUP * HEAD_DIM
    q_place = (query * q_row + head * HEAD_DIM)[:, None] + column[None, :]
    asked = tl.load(q + row * q_row + first_head + q_place, mask=used, other=0.0)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    table = blocks + piece * blocks_column
    # Behind the end is what no query may see, NaN too: there the last position is read again, and weighs 0.
    last = end - 1
    block = tl.load(table + (tl.minimum(token, last) // BLOCK_SIZE) * blocks_step)
    for first in range(0, end, TOKENS):
        position = first + token
        slot = tl.minimum(position, last) % BLOCK_SIZE
        key, value = load_tile(
            keys, values, key_scales, value_scales, block.to(tl.int64), slot, cache_block, cache_slot, kv_head,
            asked.dtype, KV_HEADS, HEAD_DIM, COLUMNS, BLOCK_SIZE,
        )  # fmt: skip
        # Read a tile ahead, the block numbers do not hold up the pipeline of the loads that need them.
        block = tl.load(table + (tl.minimum(position + TOKENS, last) // BLOCK_SIZE) * blocks_step)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee")
        if first + TOKENS > begin + 1:
            scores = tl.where(position[None, :] > (begin + query)[:, None], -float("inf"), scores)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        total, mixed = weigh(scores * scale, value, new_top, top, total, mixed)
        top = new_top

    out_place = (query * out_row + head * HEAD_DIM)[:, None] + column[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * out_row + first_head + out_place, mixed, mask=used)
