"""One query a sequence over paged keys and values: split-K flash decoding with grouped heads, in triton."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tessera.kernels.fp8 import early_launch, wait_for_previous
from tessera.kernels.operands import AttentionPlan, PagedCache

MAX_SPLITS = 32
_WAVES = 3
# tl.dot wants 16 rows: the heads of a group are padded to that many.
_ROWS = 16


DEFAULT_PLAN = AttentionPlan(_ROWS, tokens=64, warps=2, stages=3)
#: where the first tile is fetched early, it is most often a program's only one
SETTLED_PLAN = AttentionPlan(_ROWS, tokens=128, warps=4, stages=1)
# Of scores: what is lower weighs nothing. Not infinite, so that splits without a position have a difference, too.
_LOWEST = tl.constexpr(-1e38)


def choose_splits(sequences: int, kv_heads: int, most_tokens: int, sms: int) -> int:
    """Into how many programs the context of one sequence and key head is split: a power of two up to 32.

    At most three programs for each of the ``sms`` multiprocessors, and no more splits than the longest context,
    ``most_tokens``, has tiles, rounded up.
    """
    wanted = max(1, min(_WAVES * sms // (sequences * kv_heads), MAX_SPLITS))
    tiles = triton.cdiv(most_tokens, DEFAULT_PLAN.tokens)
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(tiles))


def check_cache(q: torch.Tensor, cache: PagedCache, out: torch.Tensor) -> None:
    """ValueError unless q and out [.., heads, head_dim] and the cache fit.

    The attention kernels want: head_dim a multiple of 16, block_size a power of two >= 16, 1..16 query heads a key
    head, one dtype, keys and values laid out alike, and the last two dimensions of all of them contiguous. A cache of
    another dtype has contiguous scales [num_blocks, block_size, kv_heads], both or none.
    """
    keys, values, *scales = cache
    block_size, kv_heads, head_dim = keys.shape[1:]
    heads = q.shape[-2]
    if q.shape[-1] != head_dim or head_dim < 16 or head_dim % 16:
        raise ValueError(f"head_dim: {q.shape[-1]} of q, {head_dim} of the cache; want one multiple of 16")
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size {block_size} is no power of two >= 16")
    if heads % kv_heads or not 1 <= heads // kv_heads <= _ROWS:
        raise ValueError(f"{heads} heads over {kv_heads} key heads; want 1..{_ROWS} each, all alike")
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError("keys and values differ in shape or strides")
    if q.shape != out.shape:
        raise ValueError(f"q is {tuple(q.shape)}, out {tuple(out.shape)}")
    given = [each for each in scales if each is not None]
    if any(each.shape != keys.shape[:3] or not each.is_contiguous() for each in given) or len(given) == 1:
        raise ValueError(f"scales are {[tuple(each.shape) for each in given]}; the cache is {tuple(keys.shape)}")
    if q.dtype != out.dtype or keys.dtype != values.dtype or (keys.dtype != q.dtype and not given):
        raise ValueError(f"one dtype is wanted: q {q.dtype}, keys {keys.dtype}, values {values.dtype}, out {out.dtype}")
    for name, x in (("q", q), ("keys", keys), ("out", out)):
        if x.stride()[-2:] != (head_dim, 1):
            raise ValueError(f"the last two dimensions of {name} are not contiguous")


def cache_arguments(
    q: torch.Tensor, cache: PagedCache, blocks: torch.Tensor, out: torch.Tensor, scale: float
) -> dict[str, Any]:
    """What the attention kernels are told of queries and a cache. ValueError for what :func:`check_cache` refuses."""
    check_cache(q, cache, out)
    heads, head_dim = q.shape[-2:]
    keys = cache.keys
    block_size, kv_heads = keys.shape[1:3]
    return {
        "q": q,
        **cache._asdict(),
        "blocks": blocks,
        "out": out,
        "scale": scale * math.log2(math.e),
        "q_row": q.stride(0),
        "cache_block": keys.stride(0),
        "cache_slot": keys.stride(1),
        "blocks_step": blocks.stride(0),
        "blocks_column": blocks.stride(1),
        "out_row": out.stride(0),
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "COLUMNS": triton.next_power_of_2(head_dim),
    }


def decode_attention(
    q: torch.Tensor,
    cache: PagedCache,
    blocks: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    splits: int,
    out: torch.Tensor,
    plan: AttentionPlan | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """q [s, heads, head_dim], its rows any stride apart -> ``out``, the same shape and dtype.

    ``blocks`` integer [most, s], most >= 1: block j of sequence i is blocks[j, i]; ``context`` integer [s]: query i
    sees positions [0, context[i]), and where that is 0 its row is 0 and the cache is not read. ``splits`` is a power of
    two up to 32, see :func:`choose_splits`. The plan's rows are 16: the heads of a group are padded to that many.
    ``settled``: the kernels that are still running write no position but the last of each; then programs fetch their
    first keys and values before they wait, and one program more has the last.
    Nothing is read back and the grid depends on the shapes alone, so a call can be captured in a CUDA graph.
    ValueError for what :func:`check_cache` refuses. The method is flash decoding (Dao et al., 2023).
    """
    sequences, heads, head_dim = q.shape
    if not 1 <= splits <= MAX_SPLITS or splits & (splits - 1):
        raise ValueError(f"splits {splits} is no power of two up to {MAX_SPLITS}")
    plan = plan or (SETTLED_PLAN if settled else DEFAULT_PLAN)
    partial, weights, parts = None, None, splits + settled
    if parts > 1:
        partial = torch.empty((sequences, heads, parts, head_dim), dtype=torch.float32, device=q.device)
        weights = torch.empty((sequences, heads, parts), dtype=torch.float32, device=q.device)
    given = cache_arguments(q, cache, blocks, out, scale)
    given |= {"context": context, "partial": partial, "weights": weights, "SETTLED": int(settled)}
    _decode_kernel[(cache.keys.shape[2], sequences, parts)](
        **given, SPLITS=splits, **plan.launch, **early_launch(q.device)
    )
    if parts > 1:
        merged = {name: given[name] for name in ("out", "out_row", "HEAD_DIM", "COLUMNS")}
        options = {"HEADS": heads, "SPLITS": splits, "TOKENS": plan.tokens, "SETTLED": int(settled), "num_warps": 1}
        _merge_kernel[(heads, sequences)](partial, weights, context, **merged, **options, **early_launch(q.device))
    return out


# What changes from step to step is not specialized: another batch size must not compile another kernel.
@triton.jit(do_not_specialize=["blocks", "context", "blocks_step", "blocks_column"])
def _decode_kernel(
    q, keys, values, key_scales, value_scales, blocks, context, out, partial, weights, scale,
    q_row, cache_block, cache_slot, blocks_step, blocks_column, out_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, SETTLED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's context for the query heads of one key head; the last position is one by itself where
    all others are settled, and can be read before this waits."""
    PARTS: tl.constexpr = SPLITS + SETTLED
    if EARLY:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(context + sequence).to(tl.int32)
    shared, share = _shares(length, SPLITS, TOKENS, SETTLED)
    start = split * share
    end = tl.minimum(start + share, shared)
    if split == SPLITS:
        start, end = shared, length
    elif SETTLED and start >= end:  # makes room for programs of the next kernel
        return
    if EARLY and (not SETTLED or split == SPLITS):
        gdc_wait()

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    inside = (column < HEAD_DIM)[None, :]
    used = (row < GROUP)[:, None] & inside
    head = kv_head * GROUP + row
    table = blocks + sequence * blocks_column
    # Behind the context anything may lie, NaN too: there the last position is read again, and weighs 0.
    last = tl.maximum(end - 1, 0)
    block = tl.load(table + (tl.minimum(start + token, last) // BLOCK_SIZE) * blocks_step)
    if SETTLED:
        position = start + token
        key, value = load_tile(
            keys, values, key_scales, value_scales, block.to(tl.int64), tl.minimum(position, last) % BLOCK_SIZE,
            cache_block, cache_slot, kv_head, q.dtype.element_ty, KV_HEADS, HEAD_DIM, COLUMNS, BLOCK_SIZE,
        )  # fmt: skip
        if EARLY:
            gdc_wait()
    query = tl.load(q + sequence * q_row + head[:, None] * HEAD_DIM + column[None, :], mask=used, other=0.0)
    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SETTLED:
        if start < end:
            scores = _scores(query, key, position, end, scale)
            new_top = tl.maximum(top, tl.max(scores, 1))
            total, mixed = weigh(scores, value, new_top, top, total, mixed)
            top = new_top
        start += TOKENS
        block = tl.load(table + (tl.minimum(start + token, last) // BLOCK_SIZE) * blocks_step)
    for first in range(start, end, TOKENS):
        position = first + token
        slot = tl.minimum(position, last) % BLOCK_SIZE
        key, value = load_tile(
            keys, values, key_scales, value_scales, block.to(tl.int64), slot, cache_block, cache_slot, kv_head,
            query.dtype, KV_HEADS, HEAD_DIM, COLUMNS, BLOCK_SIZE,
        )  # fmt: skip
        # Read a tile ahead, the block numbers do not hold up the pipeline of the loads that need them.
        block = tl.load(table + (tl.minimum(position + TOKENS, last) // BLOCK_SIZE) * blocks_step)
        scores = _scores(query, key, position, end, scale)
        new_top = tl.maximum(top, tl.max(scores, 1))
        total, mixed = weigh(scores, value, new_top, top, total, mixed)
        top = new_top

    # An empty split leaves zeros, and the least of weights.
    total = tl.where(total > 0, total, 1.0)
    mixed = mixed / total[:, None]
    if PARTS == 1:
        target = out + sequence * out_row + head[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=used)
    else:
        part = (sequence * (KV_HEADS * GROUP) + head) * PARTS + split
        tl.store(partial + part[:, None] * HEAD_DIM + column[None, :], mixed, mask=used)
        tl.store(weights + part, top + tl.log2(total), mask=row < GROUP)


@triton.jit
def _shares(length, SPLITS: tl.constexpr, TOKENS: tl.constexpr, SETTLED: tl.constexpr):
    """How many positions the splits share, and how many each has, whole tiles; the last ones may have none."""
    shared = tl.maximum(length - SETTLED, 0)
    return shared, tl.cdiv(tl.cdiv(shared, SPLITS), TOKENS) * TOKENS


@triton.jit
def _scores(query, key, position, end, scale):
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    return tl.where(position[None, :] < end, scores, -float("inf"))


@triton.jit
def load_tile(
    keys, values, key_scales, value_scales, block, slot, cache_block, cache_slot, kv_head,
    dtype: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The keys and the values of one key head in slots of blocks."""
    column = tl.arange(0, COLUMNS)[None, :]
    place = (block * cache_block + slot * cache_slot + kv_head * HEAD_DIM)[:, None] + column
    heads = (block * BLOCK_SIZE + slot) * KV_HEADS + kv_head
    key = _load_rows(keys + place, column < HEAD_DIM, HEAD_DIM == COLUMNS, key_scales, heads, dtype)
    value = _load_rows(values + place, column < HEAD_DIM, HEAD_DIM == COLUMNS, value_scales, heads, dtype)
    return key, value


@triton.jit
def _load_rows(pointers, inside, WHOLE: tl.constexpr, scales, heads, dtype: tl.constexpr):
    """Rows of keys or values; where a head is no power of two (``WHOLE`` is false), zeros behind its end.

    Those of a cache in e4m3 are multiplied by ``scales`` at their numbers among all ``heads``, and of ``dtype`` then.
    """
    rows = tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)
    if scales is not None:
        rows = (rows.to(tl.float32) * tl.load(scales + heads)[:, None]).to(dtype)
    return rows


@triton.jit
def weigh(scores, value, new_top, top, total, mixed):
    """Adds a tile of values, weighted by the exponentials of its scores, to the sums so far, which ``top`` scaled."""
    weight = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    return total, tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["context"])
def _merge_kernel(
    partial, weights, context, out, out_row,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
    SETTLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of one head's splits, weighted by the sums of their exponentials (log2 in ``weights``)."""
    wait_for_previous(EARLY)
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    PARTS: tl.constexpr = SPLITS + SETTLED
    split = tl.arange(0, triton.next_power_of_2(PARTS))
    written = split < PARTS
    if SETTLED:
        shared, share = _shares(tl.load(context + sequence).to(tl.int32), SPLITS, TOKENS, SETTLED)
        written = (split * share < shared) & (split < SPLITS) | (split == SPLITS)
    part = (sequence * HEADS + head) * PARTS + split
    column = tl.arange(0, COLUMNS)
    inside = column < HEAD_DIM
    logs = tl.load(weights + part, mask=written, other=-float("inf"))
    here = written[:, None] & inside[None, :]
    mixed = tl.load(partial + part[:, None] * HEAD_DIM + column[None, :], mask=here, other=0.0)
    weight = tl.exp2(logs - tl.max(logs, 0))
    merged = tl.sum(mixed * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + sequence * out_row + head * HEAD_DIM + column, merged.to(out.dtype.element_ty), mask=inside)
