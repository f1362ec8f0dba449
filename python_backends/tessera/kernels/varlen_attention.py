"""Attention within pictures of any sizes in one launch: flash attention, unmasked, in triton.

A program takes some queries of one picture and one head. Heads need not be of a power of two: one of 80 values is a
wide part of 64 and a tail of 16, each with products of its own; filled up to 128 it would cost 1.6 times as much. Tiles
of keys and values are fetched by the GPU's own unit for that (TMA) where it has one.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tessera.kernels.operands import AttentionPlan, parts_of

#: those that were the fastest on an H200 for some lengths
PLANS = (AttentionPlan(128, 64, 4, 3), AttentionPlan(128, 128, 8, 2), AttentionPlan(64, 64, 4, 3))


def checked_parts(*rows: torch.Tensor) -> tuple[int, int]:
    """:func:`parts_of` the size of rows [patches, heads, size]. ValueError for heads that do not lie side by side."""
    size = rows[0].shape[2]
    if any(part.stride()[1:] != (size, 1) for part in rows):
        raise ValueError("varlen_attention: a patch's heads must lie beside each other")
    return parts_of(size)


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """query, key, value [patches, heads, size] of one floating dtype, a patch's heads beside each other, patches any
    multiple of 16 bytes apart -> [patches, heads * size], contiguous; every patch sees those of its own picture.

    ``tiles``: int32 [t, 3] on the device, :func:`tessera.kernels.operands.query_tiles` of the pictures'
    lengths and the plan's rows; a tile whose first patch is its picture's end does nothing, and rows of no tile are
    left as the memory was. The scale is 1/sqrt(size).
    What other pictures hold, not-a-numbers too, changes no row of a picture of at least ``plan.tokens`` patches; a
    smaller one's rows are not-a-numbers beside a neighbour's. ValueError for a size that :func:`parts_of` refuses.
    The method is FlashAttention-2 (Dao, 2023).
    """
    patches, heads, size = query.shape
    wide, tail = checked_parts(query, key, value)
    out = torch.empty((patches, heads * size), dtype=query.dtype, device=query.device)
    if not patches or not len(tiles):
        return out
    described = [
        _described(rows, count, columns) if columns else None
        for rows, count in ((query, plan.rows), (key, plan.tokens), (value, plan.tokens))
        for columns in (wide, tail)
    ]
    _varlen_attention[(len(tiles), heads)](
        *described, tiles, out, size**-0.5 * math.log2(math.e), heads * size, WIDE=wide, TAIL=tail, **plan.launch
    )
    return out


def _described(rows: torch.Tensor, count: int, columns: int) -> TensorDescriptor:
    patches, heads, size = rows.shape
    return TensorDescriptor(rows, [patches, heads * size], [rows.stride(0), 1], [count, columns])


@triton.jit
def _varlen_attention(
    query, query_tail, key, key_tail, value, value_tail, tiles, out, scale, out_row,
    WIDE: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One tile of one picture's queries for one head."""
    SIZE: tl.constexpr = WIDE + TAIL
    SPARE: tl.constexpr = TAIL if TAIL else 16  # without a tail nothing comes of what stands for it
    first = tl.load(tiles + 3 * tl.program_id(0))
    begin = tl.load(tiles + 3 * tl.program_id(0) + 1)
    end = tl.load(tiles + 3 * tl.program_id(0) + 2)
    if first >= end:
        return
    column = tl.program_id(1) * SIZE
    asked = query.load([first, column])
    asked_tail = query_tail.load([first, column + WIDE]) if TAIL else asked
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    mixed_tail = tl.zeros([ROWS, SPARE], tl.float32)
    final = tl.maximum(end - TOKENS, begin)
    for start in tl.range(begin, end, TOKENS):
        # The last tile begins early enough to end with the picture, so that no other's values come in.
        place = tl.minimum(start, final)
        scores = tl.dot(asked, key.load([place, column]).T, input_precision="ieee")
        if TAIL:
            scores = tl.dot(asked_tail, key_tail.load([place, column + WIDE]).T, scores, input_precision="ieee")
        token = place + tl.arange(0, TOKENS)
        scores = tl.where(((token >= start) & (token < end))[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top, total = new_top, total * shrink + tl.sum(weight, 1)
        values = value.load([place, column])
        weight = weight.to(values.dtype)
        mixed = tl.dot(weight, values, mixed * shrink[:, None], input_precision="ieee")
        if TAIL:
            tails = value_tail.load([place, column + WIDE])
            mixed_tail = tl.dot(weight, tails, mixed_tail * shrink[:, None], input_precision="ieee")
    row = first + tl.arange(0, ROWS)
    inside = (row < end)[:, None]
    target = out + row.to(tl.int64)[:, None] * out_row + column
    share = 1.0 / total[:, None]
    tl.store(target + tl.arange(0, WIDE)[None, :], (mixed * share).to(out.dtype.element_ty), mask=inside)
    if TAIL:
        target += WIDE
        tl.store(target + tl.arange(0, TAIL)[None, :], (mixed_tail * share).to(out.dtype.element_ty), mask=inside)
