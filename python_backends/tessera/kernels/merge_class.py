"""What the class token is to the other tokens' attention, added to it in one pass, which may quantize the rows too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import store_row
from tessera.kernels.fp8_rows import Fp8Rows, empty_like, rows_or_tensor

MAX_SIZE = 8192


def merge_class(
    first: torch.Tensor,
    others: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fp8: bool = False,
) -> torch.Tensor | Fp8Rows:
    """Attention of all tokens from that of the class token, the first, and that among the others.

    first [tiles, 1, heads, size]: of the class token to all. others [tiles, tokens - 1, heads, size] and sums float32
    [tiles, heads, tokens - 1]: of the others to each other, and the logarithms of their sums of exp(score). query, key
    and value [tiles, tokens, heads, size], a token's heads beside each other -> [tiles, tokens, heads * size], with
    ``fp8`` quantized: values of that shape, scales [tiles, tokens, 1].
    ValueError for rows of over 8192 values or of scattered heads.
    """
    tiles, tokens, heads, size = query.shape
    block = triton.next_power_of_2(heads), triton.next_power_of_2(size)
    if block[0] * block[1] > MAX_SIZE:
        raise ValueError(f"merge_class: rows of at most {MAX_SIZE} values, not {heads} x {size}")
    if any(each.stride()[2:] != (size, 1) for each in (first, others, query, key, value)):
        raise ValueError("merge_class: a token's heads must lie beside each other")
    rows = empty_like(query.new_empty((tiles, tokens, heads * size)), fp8)
    if tiles:
        tensors = (first, others, sums.contiguous(), query, key, value, *rows)
        strides = (first.stride(0), *others.stride()[:2], *query.stride()[:2], key.stride(0), value.stride(0))
        options = {"HEADS": block[0], "SIZE": block[1], "num_warps": min(max(block[0] * block[1] // 512, 1), 16)}
        _merge_class[(tiles * tokens,)](*tensors, tokens, heads, size, *strides, size**-0.5, **options)
    return rows_or_tensor(*rows)


@triton.jit
def _merge_class(
    first, others, sums, query, key, value, out, scales,
    tokens, heads, size,
    first_tile, others_tile, others_token, query_tile, query_token, key_tile, value_tile,
    scale, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    program = tl.program_id(0).to(tl.int64)
    tile, token = program // tokens, program % tokens
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (head < heads) & (column < size)
    at = head * size + column
    if token == 0:
        row = tl.load(first + tile * first_tile + at, mask=inside, other=0.0).to(tl.float32)
    else:
        row = tl.load(others + tile * others_tile + (token - 1) * others_token + at, mask=inside, other=0.0)
        q = tl.load(query + tile * query_tile + token * query_token + at, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(key + tile * key_tile + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(value + tile * value_tile + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(sums + (tile * heads + head) * (tokens - 1) + token - 1, mask=head < heads, other=0.0)
        score = tl.sum(q * k, axis=1, keep_dims=True) * scale
        # The class token's share of the softmax: exp(score) / (exp(score) + exp(total)).
        share = 1.0 / (1.0 + tl.exp(total - score))
        row = row.to(tl.float32)
        row += share * (v - row)
    store_row(out, scales, program, program * heads * size + at, row.to(query.dtype.element_ty), inside)
